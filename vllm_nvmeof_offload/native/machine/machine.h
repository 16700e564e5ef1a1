// SPDX-License-Identifier: Apache-2.0
// The worker's state machine: one rank's transfers between KV cache, staging and pool. It has no
// thread and no clock of its own, and it calls no Python. Commands come in, `run` moves everything
// that can move, and copies to make, operations to hand over, reports and finished jobs come out.
//
// The steps of a chunk, by kind of job:
//
//     store   gate(fill) → copy → cache slot
//     load    gate(read) → copy                         from a cache slot
//             stream slot → read → copy                 from the pool
//             gate(fill) → read → copy                  from the pool, landing in a cache slot
//             gate(fill) → stream slot → pull → land → copy    likewise, brought by a peer
//     write   gate(read) → write → table entry
//     fetch   gate(fill) → read
//
// Where the copy engine makes checksums (`MachineOptions::copies_check`), a load's read of a whole
// chunk of ours or another engine's region checks the header alone, and the copy the payload: the
// chunk is OK only if the CRC of what has arrived is the one that its header names. Until then its
// slot is not proven, and nobody else gets it: a stream slot is the load's own, and a cache slot
// stays with its filler. If others wait for it when the load is cancelled, it is read again.
//
// A row of a load that names neither slot nor place is STALE: its chunk went after the look-up. So
// is a row of a store without pieces whose group has bytes, because a part of its chunk is missing;
// it empties its slot.
// Chunks do not wait for each other: while some of a job are read, others are copied.
//
// A row may name the slots of one member of a set of ranks with equal bytes (set_member.h). That
// rank, the holder, takes the steps above, and the others
//
//     store, write   nothing
//     fetch          holder's fill
//     load           holder's fill or read → copy from the holder's slot
//
// A load's read from the pool may go to a peer instead, which is one more lane (io_queue.h): it is
// chosen as the chunk gets its stream slot, by the rule of lanes.h. Whatever a peer says or
// fails to say, the chunk goes home once, with the deadline and the retry that it had; if a pull
// may still write into its slot, it takes another one. What lands in a cache slot is pulled into a
// stream slot, too, and copied once it is proven: no pull can then write into a cache slot, however
// late, and a chunk whose peer fails is read into its cache slot at once.
//
// In return this rank reads for peers, from its own targets into serve slots, which lie behind the
// stream slots. These reads go behind those that a load here waits for, are in no report, and end
// once nothing touches their slots any more.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "machine/gates.h"
#include "machine/io_queue.h"
#include "machine/peer_judge.h"
#include "machine/set_member.h"
#include "machine/stream_slots.h"
#include "machine/task.h"

namespace nvmeof {

struct MachineOptions {
  IoOptions io;
  size_t cache_slots = 0;
  size_t stream_slots = 1;
  uint64_t pool_slots = 0;  // 0: not checked
  SetOptions set;
  size_t serve_slots = 0;
  size_t peer_chunks_min = 0;  // a load of fewer chunks goes to no peer
  bool copies_check = false;   // the copies of loads check payloads
};

// The columns of a command; `protocol.ChunkBatch`.
struct Columns {
  std::string_view keys;
  std::span<const uint64_t> generations;
  std::span<const int32_t> cache;
  std::span<const int64_t> places;
  std::span<const uint8_t> groups;
};

// Pieces of a store or load: `rows` has three numbers per piece, (KV cache address, offset in the
// payload, bytes); by row of the batch, `first` has the first of its pieces, and their end.
struct Pieces {
  std::span<const uint64_t> rows;
  std::span<const uint32_t> first;
};

// Chunks that are ready to be copied in one direction: all whose fences have passed, or all behind
// one that has not. `pieces` has staging addresses for offsets.
struct CopyBatch {
  uint64_t number = 0;
  uint64_t fence = 0;  // of all of them, as in `begin`; 0: theirs have passed
  bool is_store = false;
  bool checks = false;  // a load of which `copied` must have every chunk's CRC
  uint64_t bytes = 0;
  std::vector<uint64_t> pieces;
  // Of a store, or where it checks, by chunk: its number of pieces, and where its payload is.
  std::vector<uint32_t> counts;
  std::vector<uint64_t> payloads;
  std::vector<uint64_t> sizes;  // bytes of each payload
  // By chunk: whether `copied` must have its CRC, because the members of the set compare it. Empty:
  // this rank is in no set.
  std::vector<uint8_t> sampled;
};

// Chunks that peers have brought, to be copied into their cache slots: (address of the cache slot,
// of the stream slot, bytes) of each.
struct LandingBatch {
  uint64_t number = 0;
  std::vector<uint64_t> rows;
};

// Some rows of one op, as `protocol.OpReport`; an empty column is an absent one.
struct RowReport {
  // All rows of the op are OK and released, and none has a CRC.
  bool whole() const { return all_rows && codes.empty() && released.empty() && crcs.empty(); }

  uint64_t op = 0;
  bool all_rows = false;  // `indexes` is absent
  std::vector<uint32_t> indexes;
  std::vector<uint8_t> codes;
  std::vector<int16_t> errors;
  std::vector<uint8_t> released;
  double seconds = 0;
  std::vector<uint32_t> crcs;  // of the rows that are OK and were sampled
};

// A store or load that no DMA works on any more.
struct Finished {
  uint64_t op = 0;
  std::vector<uint32_t> failed;  // rows
  std::vector<uint8_t> codes;    // of these rows
  std::vector<int16_t> errors;
  uint64_t copied_bytes = 0;
  double seconds = 0;
};

class Machine {
 public:
  // peer_lanes: of all peers; null if there are none.
  Machine(const MachineOptions& options, NativeLanes& lanes, int64_t now_ns,
          NativeLanes* peer_lanes = nullptr);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // -- commands. A broken rule throws. fence: what the copies of a store or load come after. Fences
  // are numbered in the order in which they pass; 0: nothing.
  void begin(uint64_t op, OpKind kind, Urgency urgency, const Columns& columns,
             const Pieces& pieces, uint64_t fence = 0);
  // Queued writes are cancelled, and each target's superblock is written, as `IoQueue` says. The op
  // has one row. It is OK with the first superblock that is written, which voids at a start what
  // lies on any target; it fails if none can be, with the outcome of the last.
  void reset(uint64_t op, const Stamp& stamp, const Stamp& unnamed);
  // Stop what has not started; what DMA works on goes on. The reports still come. rows: of the op;
  // null: all. Stores, resets and attaches go on, because other ops depend on them.
  void cancel(uint64_t op, const std::vector<uint32_t>* rows);
  // Reads of this owner wait for its files (`IoQueue::await_files`). The op has one row, which is
  // decided by `IoQueue::attached`, within the deadline of a read.
  void attach(uint64_t op, uint16_t owner);

  // -- progress. `copied` ends a batch of `take_copies`; `run` takes in what the lanes have ended.
  // crcs: by chunk, the CRC of the payload, of a load as it has arrived; -1: not known; empty: none
  // is.
  void copied(uint64_t number, Outcome code, int error, std::span<const int64_t> crcs = {});
  // The chunks of a batch of copies.
  size_t copying(uint64_t number) const {
    const auto found = copying_.find(number);
    return found == copying_.end() ? 0 : found->second.size();
  }
  bool run();  // false: nothing more can move now
  // At most so many tasks move in the next turn, and so many rows are to copy and to report.
  size_t to_move();
  size_t to_copy() const;
  size_t to_report() const;
  // passed: the newest fence that has passed, and with it those before it.
  std::vector<CopyBatch> take_copies(uint64_t passed);
  std::vector<RowReport> take_reports();
  std::vector<Finished> take_finished() { return std::exchange(finished_, {}); }

  bool idle() const {
    return jobs_.empty() && gates_.idle() && !io.busy() && streams_.idle() &&
           (!set_ || set_->idle()) && served_.empty();
  }
  // As `IoQueue::next_deadline_ns`, also of what waits for other members or peers.
  int64_t next_deadline_ns();
  // What this rank is to the others of its set; null: it is in none.
  SetMember* set() { return set_ ? &*set_ : nullptr; }

  // -- peers
  void set_peer(size_t peer, const PeerState& state);
  // Whether it is to get nothing for now (peer_judge.h).
  bool peer_rests(size_t peer) const { return judge_.rests(peer, io.now_ns()); }
  // Of a load that has just begun: only these peers may read for it, a bit for each.
  void let_help(uint64_t op, uint64_t peers);
  // Chunks to copy; no rows: there are none. `landed` ends a batch.
  LandingBatch take_landings();
  void landed(uint64_t number);
  // What a read waits for, by lane: bytes, and seconds (0: not known).
  std::vector<std::pair<uint64_t, double>> read_queues();

  // -- what we read for peers. A row of the columns goes into the serve slot that `cache` names,
  // which nothing else uses until the row's end; `tokens` and `within_s` have a number for each. A
  // reset ends what has not started, and makes what has CANCELLED.
  void serve(std::span<const uint64_t> tokens, const Columns& columns,
             std::span<const double> within_s);
  // They are not wanted any more; their ends still come.
  void end_serving(std::span<const uint64_t> tokens);
  struct Served {
    uint64_t token;
    Outcome code;
    int error;
  };
  // Those whose slots nothing touches any more, each once.
  std::vector<Served> take_served() { return std::exchange(served_, {}); }
  // What all our targets have to read before they read what a peer asks for now, in bytes, and how
  // many of these they read in a second; 0: not known.
  std::pair<uint64_t, double> serve_levels();

  size_t streams_used() const { return streams_.used(); }
  size_t streams_waiting() const { return streams_.waiting(); }
  std::vector<uint64_t> written_bytes;  // by target

  IoQueue io;

 private:
  Job& open(uint64_t op, OpKind kind);
  void add_tasks(Job& job, Urgency urgency, const Columns& columns);
  void start(Task& task);
  void promote_fetches(const Task& load);
  bool is_elsewhere(const Task& task) const {
    return task.holder != kEveryMember && !set_->holds(task);
  }
  void name_holder(Task& task, int32_t cache, int64_t place);
  void start_elsewhere(Task& task);
  bool take_set_events();
  void set_event(const SetEvent& event);
  void note_fill(const Task& task, FillState state);
  bool is_shared_read(const Task& task) const;
  bool is_sampled(const Task& task) const;
  void keep_crc(const Task& task, int64_t crc);
  uint64_t payload_address(const Task& task) const;
  void follow(Grants& grants);
  void follow_one(const Grant& grant);
  bool lacks_blocks(const Task& task) const;
  void decide(Task& task, Outcome code, int error = 0, bool released = true, int64_t ended_ns = 0);
  void finish(Job& job);
  void hold_buffer(Task& task);
  bool read_for_others(const Task& task) const;
  void mark_hung(Task& task);
  void released_late(Task& task, bool filled);
  void leave_slot(Task& task, bool filled = false, int64_t crc = -1);
  void hand_out_stream_slots();
  bool choose_next();
  int choose(const Task& task);
  bool may_go_to_peer(const Task& task) const;
  void give_to_peer(Task& task, size_t peer);
  void peer_event(const IoEvent& event);
  void leave_to_peer(Task& task);
  void go_home(Task& task);
  void go_to_lane(Task& task);
  void read_here(Task& task);
  void land(Task& task);
  void place_row(Task& task, int64_t place);
  void serve_event(const IoEvent& event);
  void answer(const Task& task, Outcome code, int error);
  void forget_served(Task& task);
  void stop_serving(Task& task);
  void io_event(const IoEvent& event);
  void superblock_event(const IoEvent& event);
  void read_ended(Task& task);
  bool is_whole(const Task& task) const;
  bool read_again(Task& task);
  Outcome checked(const Task& task, int64_t crc) const;
  void cancel_task(Task& task);
  void ready_to_copy(Task& task);
  void batch(const std::vector<Task*>& tasks, uint64_t passed, std::vector<CopyBatch>& batches);
  CopyBatch& batch_for(const Job& job, bool checks, uint64_t passed,
                       std::vector<CopyBatch>& batches);
  void add_copies(const std::vector<Task*>& tasks, CopyBatch& batch);
  void list(Job& job);
  void report_rows(Job& job, std::vector<RowReport>& reports);
  void forget_if_over(uint64_t op);

  const MachineOptions options_;
  SlotGates gates_;
  StreamSlots streams_;
  std::optional<SetMember> set_;
  std::unordered_map<uint64_t, Task*> serving_;  // by the peers' token
  std::vector<Served> served_;
  uint64_t serve_jobs_ = 0;
  PeerJudge judge_;
  std::vector<LaneEstimate> estimates_;  // of the peers, for one choice
  std::map<uint64_t, std::unique_ptr<Job>> jobs_;
  std::map<uint64_t, std::vector<Task*>> to_copy_;  // by op
  std::unordered_map<uint64_t, std::vector<Task*>> copying_;
  std::vector<Task*> to_land_;
  std::unordered_map<uint64_t, std::vector<Task*>> landing_;
  uint64_t next_batch_ = 1;
  std::vector<uint64_t> news_;  // ops with rows to report
  std::vector<Finished> finished_;
};

}  // namespace nvmeof
