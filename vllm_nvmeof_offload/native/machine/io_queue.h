// SPDX-License-Identifier: Apache-2.0
// Queues in front of the lanes: order, bounds, one retry, and what each target's health is
// judged by.
//
// A write whose payload has no checksum yet gets it first, ahead of its turn: a device that has
// ended all that it had must not wait for checksums.
//
// Reads go before writes; among reads those that a load waits for go first, then urgent fetches,
// then what peers ask for, then other fetches. Each target has bounds of its own, on operations and
// on bytes, so that a slow one cannot take what the others need; while a target reads, few bytes
// are written there.
//
// A deadline runs from the first hand-over, and a retry keeps it. At the deadline the outcome is
// DEADLINE, by this clock, whether the lane answers or not; the release follows when it comes.
// Operations for a target that is not usable fail at once with DEADLINE. So do those that wait for
// a target of which the lane has taken nothing of their kind for the time of a deadline.
//
// A reset has one operation per target, which writes the target's superblock. It starts when no
// write of that target is waited for, and the target's later writes wait for its outcome; other
// targets go on. Every read and write has the stamp of its hand-over. From the begin of a reset a
// target's stamp has an epoch that no superblock names, until the target is known to have the
// superblock: by an OK, however late, or because it was attached again, which brings it along.
//
// A peer's lane has its credits for room, and takes what the machine has chosen for it at once. Its
// try ends at half of what is left of the read's deadline. A peer's failure says nothing but that
// the read is to be made here: it is no outcome of the target, and no retry.
#pragma once

#include <algorithm>
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
#include "machine/task.h"

namespace nvmeof {

struct IoOptions {
  size_t targets = 1;
  size_t reads_max = 1;   // of one target with the engine
  size_t writes_max = 1;  // likewise
  int64_t read_deadline_ns = 0;
  int64_t write_deadline_ns = 0;
  size_t header_bytes = 0;          // of a slot, in front of its payload
  size_t slot_bytes = 0;            // from one slot to the next
  std::vector<size_t> group_bytes;  // payloads, by group
  uint64_t cache_address = 0;       // of cache slot 0
  uint64_t stream_address = 0;      // of stream slot 0
  size_t saturating_reads = 1;
  size_t saturating_writes = 1;
  std::vector<bool> retryable;  // by errno
  // Of one target with the engine, without operations past their deadline: a path that hangs must
  // not stop the others. One operation of each kind may always go.
  size_t read_bytes_max = SIZE_MAX;
  size_t write_bytes_max = SIZE_MAX;               // at most, see `TargetQueue::writes_at`
  size_t write_bytes_beside_reads_max = SIZE_MAX;  // while reads wait or run there
  Stamp stamp;                                     // of every target, until a reset
  double serve_share = 1;  // of a target's reads and their bytes, for those of peers at most
  size_t serve_bytes_max = SIZE_MAX;  // likewise; half of it while loads read there
  size_t peers = 0;                   // lanes behind those of the targets
};

// An event of a task. code RELEASED: the late release of one whose outcome came before.
struct IoEvent {
  Task* task;  // of a peer's late release: perhaps gone
  Outcome code;
  int error = 0;
  bool released = true;
  int64_t ended_ns = 0;      // 0: not known
  uint64_t peers_token = 0;  // 0: it was at a target
};

// What the health of a target follows from: counts since the last look, and outcomes in their
// order, without successes behind a success of the same direction.
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

// Operations, bytes and seconds of one direction, since the last look.
struct TransferCounts {
  uint64_t operations = 0, bytes = 0;
  double seconds = 0;
};

// Tasks for one target. A task holds a place from the hand-over to its outcome, or until its lane
// knows that the device is done with it.
class TargetQueue {
 public:
  explicit TargetQueue(const IoOptions& options) : options_(options) { writes_at(0); }

  FairQueue& queue(Urgency urgency) { return queues_[static_cast<size_t>(urgency)]; }
  // Whether one more of this urgency and size may be with the engine. Fetches hold at most half of
  // the places of reads and of their bytes, and peers' reads their share, so that a load always
  // finds some.
  bool has_room(Urgency urgency, size_t bytes, int64_t now_ns) const;
  // Give the next task of this urgency a place, and take it back at its outcome.
  void take(Urgency urgency, size_t bytes, int64_t now_ns);
  void give_back(Task& task, Urgency urgency, size_t bytes, int64_t now_ns);
  size_t waiting(bool is_write) const;
  size_t read_bytes_held() const;
  // The target's rate, in bytes per second; 0: not known. A fast device needs more bytes ahead of
  // it to be kept busy, and a read that comes then waits behind them no longer than on a slow one.
  void writes_at(double rate);
  // The engine has taken something of this kind.
  void progressed(bool is_write) { stalled_since_ns_[is_write].reset(); }
  // Take out what waits if the engine has taken nothing of this kind for `patience_ns`. While the
  // engine accepts nothing, new tasks are offered once and then fail too; otherwise a load larger
  // than what may wait here at a time would fail one batch at a time.
  std::vector<Task*> take_stalled(int64_t now_ns, int64_t patience_ns, bool is_write);
  // When `take_stalled` may take something next; INT64_MAX: never.
  int64_t stalls_at_ns(int64_t patience_ns, bool is_write) const;

 private:
  bool has_serve_room(size_t bytes, int64_t now_ns) const;
  bool has_loaded(int64_t now_ns) const;
  size_t held(Urgency urgency) const { return queues_[static_cast<size_t>(urgency)].held(); }
  size_t bytes_held(Urgency urgency) const { return bytes_held_[static_cast<size_t>(urgency)]; }

  const IoOptions& options_;
  size_t write_bytes_max_;            // as of the last known rate
  std::optional<int64_t> loaded_ns_;  // when a read that a load waits for last began or ended here
  std::array<size_t, kUrgencies> bytes_held_{};
  std::array<FairQueue, kUrgencies> queues_{
      FairQueue(FairQueue::Share::CHARGED), FairQueue(FairQueue::Share::NONE),
      FairQueue(FairQueue::Share::NONE), FairQueue(FairQueue::Share::NONE),
      FairQueue(FairQueue::Share::NONE)};
  // Since when the engine has taken nothing of this kind while something waited here.
  std::array<std::optional<int64_t>, 2> stalled_since_ns_;
};

// What is known of a peer.
struct PeerState {
  bool usable = false;
  size_t reads_max = 0;       // that it has of ours at a time; its credits
  double bytes_per_s = 0;     // of its storage or of the way here, the lower one; 0: not known
  uint64_t queued_bytes = 0;  // there, before ours
  uint64_t lost = 0;          // how often its session was lost, or it stalled
};

// The lane of a peer. What it has failed at counts until its release.
struct PeerLane {
  PeerState state;
  size_t reads = 0, bytes = 0;  // that it has of ours
  size_t awaited = 0;           // reads whose outcome is waited for

  bool has_room() const {
    return state.usable && (reads < state.reads_max || mutant("credits_are_ignored"));
  }
  // Whether it may be waited for: it takes a read now, or ends one that is waited for anyhow.
  bool is_awaited() const { return state.usable && (awaited || has_room()); }
  uint64_t queued_bytes() const { return state.queued_bytes + bytes; }
  // Of one more read of so many bytes. rate: of a peer of which none is known.
  LaneEstimate estimate(size_t more, double rate) const {
    const double known = state.bytes_per_s;
    const auto left = static_cast<double>(queued_bytes() + more);
    return {left / (known > 0 ? known : rate), has_room()};
  }
};

// What the lanes have, or whose buffers the kernel has. A token names a place in a table, so that
// none is looked up by hash or allocated per operation, and a count, so that it names no other.
class Flights {
 public:
  struct One {
    uint64_t token = 0;
    Task* task = nullptr;              // null: the place is free
    Urgency urgency = Urgency::WRITE;  // of the queue in which it holds a place until its outcome
    bool is_reset = false;
    bool late = false;  // past its deadline, or given up, and not released
    uint32_t attachment = 0;
    int64_t began_ns = 0;
    bool landed = false;             // the device is done with it: it holds no place any more
    uint8_t peer = Task::kAtNoPeer;  // as `Task::peer`
    size_t peer_bytes = 0;           // what it counts there, even if its task is gone
    bool is_write() const { return is_reset || urgency == Urgency::WRITE; }
  };

  size_t size() const { return places_.size() - free_.size(); }
  // Returns the token that it gets, which is not 0.
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
  // Null: it has ended.
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
  // A superblock that the engine is to write.
  struct Offer {
    Task* task = nullptr;
    uint64_t token = 0;
  };

  // peer_lanes: of all peers; null if there are none.
  IoQueue(const IoOptions& options, NativeLanes& lanes, NativeLanes* peer_lanes, int64_t now_ns);

  // One with a deadline, of which a peer has used up a part, goes before those that have none. What
  // peers ask for has deadlines from its beginning, and goes in the order in which it came.
  void enqueue(Task& task);
  // A load waits for this fetch, which therefore goes with the load's reads, on their share. One
  // that the engine has stays as it is there; its retry, if any, is promoted.
  void promote(Task& task, uint64_t load);
  // True: it was still queued and is gone. Otherwise its completion will come.
  bool cancel(Task& task);
  // Reads of this owner wait from now on for its files, for the time of a read's deadline, and so
  // does `asked`, unless it is null: the op that asks for them. Reads of an owner that was never
  // named wait too.
  void await_files(uint16_t owner, Task* asked);
  // error: an errno; 0: the lanes have the owner's files. Otherwise its reads fail with ENOENT, as
  // after `detach`, until its files are awaited again. False: nothing waits for them any more.
  bool attached(uint16_t owner, int error);
  void detach(uint16_t owner) { set_files(owner, Files::NONE, Outcome::IO_ERROR, ENOENT); }
  // With the lanes, of this owner on this target.
  size_t foreign_reads(uint16_t owner, size_t target) const;
  // The peer that the task names reads it into its stream slot; its lane has room.
  void give_to_peer(Task& task);
  // The task of this token, which a peer has, does without it.
  void abandon(uint64_t token);
  // What peers were given goes to them.
  void start_peers() {
    if (peer_lanes_) peer_lanes_->start();
  }
  // Every queued write, for a reset that voids them.
  std::vector<Task*> take_queued_writes();

  void set_target(size_t target, bool usable, uint32_t attachment);
  // A reset's operations follow. stamp: of a target that has its superblock; unnamed: of any other.
  void begin_reset(uint64_t op, const Stamp& stamp, const Stamp& unnamed);

  // A lane has ended something.
  void ended(const LaneEnd& end);
  // ahead_ns: of the machine's clock before CLOCK_MONOTONIC.
  void poll_lanes(int64_t ahead_ns);
  // What is past its deadline gets its outcome.
  void expire();

  // One round of the hand-over, in this order.
  void set_time(int64_t now_ns) { now_ns_ = now_ns; }
  int64_t now_ns() const { return now_ns_; }
  void offer_reads();
  void offer_writes();
  void fail_stalled();
  // The engine writes the superblocks that are `offered`, whatever the room of its lanes.
  void offer_resets();
  // When something gets DEADLINE if nothing happens until then; INT64_MAX: never.
  int64_t next_deadline_ns();

  std::vector<Offer> offered;
  std::vector<IoEvent> events;
  std::vector<HealthCounts> health_counts;
  std::vector<HealthOutcome> health_outcomes;
  std::vector<HealthOutcome> unwritten;  // superblocks that failed or are late; for people
  std::vector<PeerLane> peers;
  TransferCounts reads, writes;

  // The rates that changed by more than a tenth: (target, write, read), in bytes per second. At
  // most once per period.
  struct Rate {
    size_t target;
    double write, read;
  };
  std::vector<Rate> take_rates();
  // In bytes per second; 0: not known.
  double read_rate(size_t target);
  size_t targets() const { return targets_.size(); }
  // Since the begin, of all kinds.
  uint64_t bytes_read(size_t target) const { return targets_[target].read_bytes; }
  // What a load's next read of this target waits for: reads that run, and loads and urgent fetches
  // that wait, as if each were as large as a slot.
  uint64_t bytes_before(size_t target);
  // What waits there for peers.
  uint64_t bytes_to_serve(size_t target);

  bool busy() const;
  const Stamp& stamp(size_t target) const { return targets_[target].stamp; }
  size_t waiting(Urgency urgency);
  // Of targets.
  size_t reads_in_flight() const {
    return in_flight_.size() - writes_in_flight_ - peers_in_flight_;
  }
  size_t writes_in_flight() const { return writes_in_flight_; }
  size_t peers_in_flight() const { return peers_in_flight_; }
  // Of its stream slot, if it has one, or else of its cache slot.
  uint64_t address(const Task& task) const;
  // A read or write as a lane gets it now.
  LaneOp describe(const Task& task, uint64_t token) const;
  uint64_t cache_address(const Task& task) const;
  size_t payload_bytes(const Task& task) const { return options_.group_bytes[task.group]; }
  // What a read or write of the task's slot moves: its header and payload, in whole pages.
  size_t transfer_bytes(const Task& task) const {
    constexpr size_t kPage = 4096;
    return options_.header_bytes + (payload_bytes(task) + kPage - 1) / kPage * kPage;
  }

 private:
  struct Target {
    bool usable = true;
    uint32_t attachment = 0;
    bool succeeded[2] = {false, false};  // by is_write: the last outcome that was noted
    Stamp stamp;                         // of what is handed over now
    std::deque<Task*> resets;            // not handed over
    bool resetting = false;              // the outcome of one is waited for
    size_t writes_running = 0;           // not past their deadline
    uint64_t read_bytes = 0;
  };

  // Another engine's on our targets.
  enum class Files : uint8_t { AWAITED, HERE, NONE };
  struct Owner {
    Files files = Files::AWAITED;
    int64_t deadline_ns = INT64_MAX;  // while they are awaited
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
  void unreleased(Flights::One& one, const LaneEnd& end);
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
  int64_t rates_folded_ns_ = 0;  // between these looks, by `read_rate`
  size_t first_ = 0;             // the target that is asked first: each in its turn
  size_t room_ = 0;              // what the lane still takes of the kind that is offered
  std::unordered_map<uint16_t, Owner> owners_;
  FairQueue awaiting_{FairQueue::Share::NONE};          // owners' files
  std::unordered_map<uint32_t, size_t> foreign_reads_;  // by owner and target
  Flights in_flight_;
  size_t writes_in_flight_ = 0, peers_in_flight_ = 0;
  // By is_write, and of peers: (deadline, token) of what was handed over, the earliest first. What
  // has ended is dropped at the front.
  std::array<std::deque<std::pair<int64_t, uint64_t>>, 3> deadlines_;
  int64_t retry_deadline_ns_ = INT64_MAX;  // no retry, nor what waits for files, has an earlier one
  uint64_t newest_reset_ = 0;              // op
  Stamp named_;                            // of a target that has the newest reset's superblock
  std::vector<LaneEnd> ends_;
  std::unordered_set<Task*> summing_;  // writes whose checksums the lanes make
  std::vector<Summed> sums_;
  std::vector<uint64_t> landed_;
};

}  // namespace nvmeof
