// SPDX-License-Identifier: Apache-2.0
// The queues in front of the lanes. They enforce order, bounds, and the single retry, and collect
// the data for judging each target's health.
//
// Reads precede writes. Among reads, the order is: loads, urgent fetches, reads for peers, other
// fetches. Bounds apply per target, so that a slow target cannot starve others. While a target is
// being read, fewer bytes may be in flight for writes. A write's checksum is computed before its
// turn comes.
//
// An operation's time limit starts when a lane first gets it; a retry does not extend it. At the
// deadline the outcome is DEADLINE, whether or not the lane responds; the release may follow later.
// Operations for an unusable target fail at once. Waiting operations also fail if the lane has
// accepted none of their kind for the length of their time limit.
//
// A reset writes a target's superblock when no earlier write to the target is awaited; later writes
// wait for the reset's outcome. Reads and writes use the stamp that their target has when they are
// handed over. From the start of a reset until the target is known to have the superblock (after an
// OK, however late, or a reattachment, which writes it), the target's stamp has an epoch that no
// superblock names.
//
// A peer's lane has room for one read per credit. A peer must finish a read within half of the time
// left until the read's deadline. If the peer fails, this server reads the chunk. That failure
// counts neither against the target nor as a retry.
#pragma once

#include <array>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/meters.h"
#include "common/op.h"
#include "lanes/lanes.h"
#include "machine/target_queue.h"
#include "machine/task.h"

namespace nvmeof {

struct IoOptions {
  size_t targets = 1;
  size_t reads_max = 1;   // maximum number of reads from one target in the engine
  size_t writes_max = 1;  // maximum number of writes to one target in the engine
  int64_t read_deadline_ns = 0;
  int64_t write_deadline_ns = 0;
  size_t header_bytes = 0;          // the size of a slot's header, before the payload
  size_t slot_bytes = 0;            // the distance from one slot to the next
  std::vector<size_t> group_bytes;  // the size of a payload, by group
  uint64_t cache_address = 0;       // the address of cache slot 0
  uint64_t stream_address = 0;      // the address of stream slot 0
  size_t saturating_reads = 1;
  size_t saturating_writes = 1;
  std::vector<bool> retryable;  // whether a retry may help, by errno
  // Bounds per target. Operations past their deadlines do not count, so that a hanging path cannot
  // stop the others. One operation of each kind may always start.
  size_t read_bytes_max = SIZE_MAX;
  size_t write_bytes_max = SIZE_MAX;               // an upper limit; see `TargetQueue::writes_at`
  size_t write_bytes_beside_reads_max = SIZE_MAX;  // while reads from the target wait or run
  Stamp stamp;                                     // the stamp of every target, until a reset
  double serve_share = 1;             // maximum share of a target's reads and bytes used for peers
  size_t serve_bytes_max = SIZE_MAX;  // for reads for peers; half that while loads also read
  size_t peers = 0;                   // the number of peer lanes, which follow the targets'
};

// The outcome of a task's operation or, if RELEASED, the release that follows an earlier outcome.
struct IoEvent {
  Task* task;  // after a peer's late release, the task may no longer exist
  Outcome code;
  int error = 0;
  bool released = true;
  int64_t ended_ns = 0;      // 0 if unknown
  uint64_t peers_token = 0;  // the token of a peer's read, or 0 for an operation on a target
};

// The data for judging a target's health: counts since the last report, and outcomes in order,
// omitting each success that follows another success in the same direction.
struct HealthCounts {
  uint32_t target, attachment;
  size_t began = 0, late = 0, released = 0, released_late = 0;
};
struct HealthOutcome {
  uint32_t target, attachment;
  bool is_write;
  Outcome code;
  int error;
  Place place;
};

struct TransferCounts {
  uint64_t operations = 0, bytes = 0;
  double seconds = 0;
};

struct PeerState {
  bool usable = false;
  size_t reads_max = 0;       // credits: how many of our reads it accepts at a time
  double bytes_per_s = 0;     // the lower of its storage and network rates; 0 if unknown
  uint64_t queued_bytes = 0;  // queued at the peer ahead of our reads
  uint64_t lost = 0;          // how often its session has been lost or has stalled
};

// A peer's lane. A failed read still counts until it is released.
struct PeerLane {
  PeerState state;
  size_t reads = 0, bytes = 0;  // our reads at the peer, and their bytes
  size_t awaited = 0;           // reads that have no outcome yet

  bool has_room() const {
    return state.usable && (reads < state.reads_max || mutant("credits_are_ignored"));
  }
  // Return whether the peer has room, or will have room after one of its reads.
  bool is_awaited() const { return state.usable && (awaited || has_room()); }
  uint64_t queued_bytes() const { return state.queued_bytes + bytes; }
  // Estimate when one more read, of `more` bytes, would end. rate: used if the peer's rate is
  // unknown.
  LaneEstimate estimate(size_t more, double rate) const {
    const double known = state.bytes_per_s;
    const auto left = static_cast<double>(queued_bytes() + more);
    return {left / (known > 0 ? known : rate), has_room()};
  }
};

// The operations in lanes, including those with an outcome whose buffer the kernel still holds. A
// token consists of a table index, which avoids hashing, and a count, which makes the token unique.
class Flights {
 public:
  struct One {
    uint64_t token = 0;
    Task* task = nullptr;              // null if this entry is free
    Urgency urgency = Urgency::WRITE;  // the queue whose bounds count it until its outcome
    bool is_reset = false;
    bool late = false;  // past its deadline or abandoned, but not released
    uint32_t attachment = 0;
    int64_t began_ns = 0;
    bool landed = false;             // the device has completed it, so no bound counts it
    uint8_t peer = Task::kAtNoPeer;  // as `Task::peer`
    size_t peer_bytes = 0;           // its bytes at the peer, valid even after its task has ended
    bool is_write() const { return is_reset || urgency == Urgency::WRITE; }
  };

  size_t size() const { return places_.size() - free_.size(); }
  // Add an operation and return its token, which is never 0.
  uint64_t add(One one) {
    if (free_.empty()) {
      free_.push_back(places_.size());
      places_.emplace_back();
    }
    const size_t place = free_.back();
    free_.pop_back();
    one.token = ++count_ << kPlaceBits | place;
    places_[place] = one;
    return one.token;
  }
  One* find(uint64_t token) {
    const size_t place = token & ((1 << kPlaceBits) - 1);
    if (place >= places_.size()) return nullptr;
    One& one = places_[place];
    return one.task && one.token == token ? &one : nullptr;
  }
  One take(One& one) {
    const One taken = one;
    free_.push_back(static_cast<size_t>(&one - places_.data()));
    one.task = nullptr;
    return taken;
  }

 private:
  static constexpr unsigned kPlaceBits = 24;
  std::vector<One> places_;
  std::vector<size_t> free_;
  uint64_t count_ = 0;
};

class IoQueue {
 public:
  IoQueue(const IoOptions& options, NativeLanes& lanes, NativeLanes* peer_lanes, int64_t now_ns);

  // Queue a task: at the front if it already has a deadline, because a peer has then used up part
  // of its time. Reads for peers have deadlines too, but keep their order.
  void enqueue(Task& task);
  // Move a fetch to the queue of reads for loads, and charge it to the load that waits for it. If a
  // lane already has the fetch, only its retry is promoted.
  void promote(Task& task, uint64_t load);
  // Cancel a task. Returns true if it was still queued; otherwise its completion will follow.
  bool cancel(Task& task);
  // Make reads from this engine wait for its files, for at most a read's time limit. Reads before
  // the first call also wait. asked: the task of the op that requests the files, or null.
  void await_files(uint16_t owner, Task* asked);
  // Record that the lanes have the engine's files or, if `error` is an errno, could not get them;
  // reads then fail with ENOENT until the next `await_files`. Returns false if nothing awaits the
  // files.
  bool attached(uint16_t owner, int error);
  void detach(uint16_t owner) { set_files(owner, Files::NONE, Outcome::IO_ERROR, ENOENT); }
  size_t foreign_reads(uint16_t owner, size_t target) const;
  // Let the task's peer read the chunk into the task's stream slot. The peer's lane must have room.
  void give_to_peer(Task& task);
  void abandon(uint64_t token);
  void start_peers() {
    if (peer_lanes_) peer_lanes_->start();
  }
  std::vector<Task*> take_queued_writes();

  void set_target(size_t target, bool usable, uint32_t attachment);
  // Announce a reset. A target uses `unnamed` until it has the superblock, and `stamp` afterwards.
  void begin_reset(uint64_t op, const Stamp& stamp, const Stamp& unnamed);

  void ended(const LaneEnd& end);
  // ahead_ns: how far the machine's clock is ahead of CLOCK_MONOTONIC.
  void poll_lanes(int64_t ahead_ns);
  void expire();

  // -- the calls in one round of hand-overs, in this order
  void set_time(int64_t now_ns) { now_ns_ = now_ns; }
  int64_t now_ns() const { return now_ns_; }
  void offer_reads();
  void offer_writes();
  void fail_stalled();
  // Return the tasks of the superblocks to write, regardless of the lanes' room.
  std::vector<const Task*> offer_resets();
  // Return the time at which the next operation will get DEADLINE unless it has ended by then, or
  // INT64_MAX.
  int64_t next_deadline_ns();

  std::vector<IoEvent> events;
  std::vector<HealthCounts> health_counts;
  std::vector<HealthOutcome> health_outcomes;
  std::vector<HealthOutcome> unwritten;  // superblocks that failed or are late, to be logged
  std::vector<PeerLane> peers;
  TransferCounts reads, writes;

  // Return the rates, in bytes per second, that changed by more than a tenth since they were last
  // returned.
  struct Rate {
    size_t target;
    double write, read;
  };
  std::vector<Rate> take_rates();
  // Return the target's read rate in bytes per second, or 0 if unknown.
  double read_rate(size_t target);
  size_t targets() const { return targets_.size(); }
  uint64_t bytes_read(size_t target) const { return targets_[target].read_bytes; }
  // Return the bytes queued ahead of a load's next read from this target: those of running reads,
  // plus a whole slot per waiting load or urgent fetch.
  uint64_t bytes_before(size_t target);
  // Return the bytes of waiting reads for peers, counted as whole slots.
  uint64_t bytes_to_serve(size_t target);

  bool busy() const;
  size_t waiting(Urgency urgency);
  size_t reads_in_flight() const {
    return in_flight_.size() - writes_in_flight_ - peers_in_flight_;
  }
  size_t writes_in_flight() const { return writes_in_flight_; }
  size_t peers_in_flight() const { return peers_in_flight_; }
  // Return the address of the task's stream slot if it has one, or else of its cache slot.
  uint64_t address(const Task& task) const;
  LaneOp describe(const Task& task, uint64_t token) const;
  uint64_t cache_address(const Task& task) const;
  size_t payload_bytes(const Task& task) const { return options_.group_bytes[task.group]; }
  // Return the bytes that a read or write of the task's slot transfers, in whole pages.
  size_t transfer_bytes(const Task& task) const {
    return options_.header_bytes + whole_pages(payload_bytes(task));
  }

 private:
  struct Target {
    bool usable = true;
    uint32_t attachment = 0;
    bool succeeded[2] = {false, false};  // whether the last recorded outcome was good, by is_write
    Stamp stamp;                         // the stamp of operations handed over now
    std::deque<Task*> resets;            // resets not handed over yet
    bool resetting = false;              // a superblock is handed over but has no outcome yet
    size_t writes_running = 0;           // writes that are not past their deadline
    uint64_t read_bytes = 0;
  };

  enum class Files : uint8_t { AWAITED, HERE, NONE };
  struct Owner {
    Files files = Files::AWAITED;
    int64_t deadline_ns = INT64_MAX;  // the end of the wait, while `files` is AWAITED
  };

  TargetQueue& queue_of(const Task& task) { return queues_[task.target]; }
  Files files_of(uint16_t owner) const;
  void set_files(uint16_t owner, Files files, Outcome code, int error);
  void await_files(Task& task);
  void expire_awaiting();
  bool sums_first(Task& task);
  void queue_summed();
  void free_landed();
  bool stop_summing(Task& task);
  void offer(Urgency urgency);
  bool offer_one(size_t target, Urgency urgency);
  void hand_over(Task& task, Urgency urgency);
  void watch(uint64_t token, int64_t deadline_ns, size_t kind);
  std::optional<Outcome> refusal(const Task& task) const;
  bool reset_may_start(const Target& target) const;
  bool write_may_start(const Target& target) const;
  void superblock_decided(const Flights::One& one, const LaneEnd& end);
  int64_t patience_ns(bool is_write) const {
    return is_write ? options_.write_deadline_ns : options_.read_deadline_ns;
  }
  void count_outcome(const Flights::One& one, const LaneEnd& end);
  void note_outcome(const Flights::One& one, const LaneEnd& end);
  bool retries(const Flights::One& one, const LaneEnd& end);
  void expire_retries();
  void give_up(uint64_t token);
  void unreleased(Flights::One& found, const LaneEnd& end);
  void peer_ended(const Flights::One& one, const LaneEnd& end);
  NativeLanes& lanes_of(bool at_peer) { return at_peer ? *peer_lanes_ : lanes_; }
  HealthCounts& health_of(size_t target, uint32_t attachment);

  const IoOptions options_;
  NativeLanes& lanes_;
  NativeLanes* const peer_lanes_;
  int64_t now_ns_;
  std::vector<TargetQueue> queues_;
  std::vector<Target> targets_;
  std::vector<Meter> write_meters_, read_meters_;
  std::vector<std::pair<double, double>> reported_;
  int64_t rates_taken_ns_;
  int64_t rates_folded_ns_ = 0;  // when `read_rate` last folded the meters
  size_t first_ = 0;             // the target whose tasks are offered first in this round
  size_t room_ = 0;              // operations of the current kind that the lane still accepts
  std::unordered_map<uint16_t, Owner> owners_;
  FairQueue awaiting_{FairQueue::Share::NONE};          // tasks that wait for an engine's files
  std::unordered_map<uint32_t, size_t> foreign_reads_;  // by owner and target
  Flights in_flight_;
  size_t writes_in_flight_ = 0, peers_in_flight_ = 0;
  // (deadline, token) of operations in lanes, earliest first: reads, writes, and reads by peers.
  std::array<std::deque<std::pair<int64_t, uint64_t>>, 3> deadlines_;
  int64_t retry_deadline_ns_ = INT64_MAX;  // the earliest deadline of retries and awaited files
  uint64_t newest_reset_ = 0;              // the op of the newest reset
  Stamp named_;                            // the stamp of a target that has the newest superblock
  std::vector<LaneEnd> ends_;
  std::unordered_set<Task*> summing_;  // writes whose checksums the lanes are computing
  std::vector<Summed> sums_;
  std::vector<uint64_t> landed_;
};

}  // namespace nvmeof
