// SPDX-License-Identifier: Apache-2.0
// The worker's state machine for one rank's transfers between the KV cache, staging, and the pool.
// It has no thread or clock and calls no Python. `run` advances every chunk that can advance. The
// caller then collects copies, operations, reports and finished jobs.
//
// The steps that a chunk takes, by kind of job:
//
//     store   gate(fill) → copy → cache slot
//     load    gate(read) → copy                         from a cache slot
//             stream slot → read → copy                 from the pool
//             gate(fill) → read → copy                  from the pool, through a cache slot
//             gate(fill) → stream slot → pull → land → copy    the same, but read by a peer
//     write   gate(read) → write → table entry
//     fetch   gate(fill) → read
//
// If the copy engine computes checksums (`MachineOptions::copies_check`), the read of a whole chunk
// for a load checks only the header. The copy then checks the payload: the chunk is OK only if the
// CRC of the copied bytes matches the header. Until then, no other task may use the slot. If the
// load is cancelled while other tasks wait for its cache slot, the chunk is read again and its
// payload checked.
//
// A load's row that names neither a slot nor a place is STALE: its chunk was evicted after the
// look-up. If a store's row has no pieces although its group has bytes, part of the chunk is
// missing: the row is STALE, and its slot is emptied. The chunks of a job do not wait for each
// other.
//
// A row may name one member of a set of ranks with equal bytes (one_copy.h). That rank, the holder,
// performs the steps above. The other ranks do the following instead:
//
//     store, write   nothing
//     fetch          wait for the holder's fill
//     load           wait for the holder's fill or read → copy from the holder's slot
//
// A peer may read a load's chunk from the pool instead: each peer is one more lane (io_queue.h).
// `choose_lane` (lanes.h) chooses the lane when the chunk gets its stream slot. If the peer fails
// in any way, this server reads the chunk itself, within the original deadline and with the usual
// retry. It uses a different stream slot if the peer may still write into the first one. A chunk
// bound for a cache slot is pulled into a stream slot, verified, and then copied, so that
// no late pull can write into a cache slot.
//
// Conversely, this rank reads chunks for peers, from its own targets into serve slots, which follow
// the stream slots in memory. These reads yield to this rank's loads, appear in no report, and end
// only when nothing uses their slots.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "machine/gates.h"
#include "machine/io_queue.h"
#include "machine/one_copy.h"
#include "machine/peer_judge.h"
#include "machine/stream_slots.h"
#include "machine/task.h"

namespace nvmeof {

struct MachineOptions {
  IoOptions io;
  size_t cache_slots = 0;
  size_t stream_slots = 1;
  uint64_t pool_slots = 0;  // 0 to skip checking places
  SetOptions set;
  size_t serve_slots = 0;
  size_t peer_chunks_min = 0;  // a load with fewer chunks uses no peer
  bool copies_check = false;   // whether copies for loads check payloads
};

// The columns of a command, as in `protocol.ChunkBatch`.
struct Columns {
  std::string_view keys;
  std::span<const uint64_t> generations;
  std::span<const int32_t> cache;
  std::span<const int64_t> places;
  std::span<const uint8_t> groups;
  std::span<const uint32_t> clients;  // in a write, as in `LaneOp`; empty if unknown
};

// The pieces of a store or load. rows: per piece, the KV cache address, offset in the payload, and
// size. first: the index of each row's first piece, followed by the number of pieces.
struct Pieces {
  std::span<const uint64_t> rows;
  std::span<const uint32_t> first;
};

// Chunks to copy in one direction: all chunks whose fences have passed, or all that wait for the
// same fence. pieces: as `Pieces::rows`, with staging addresses instead of offsets.
struct CopyBatch {
  uint64_t number = 0;
  uint64_t fence = 0;  // the fence that all chunks wait for, or 0 if their fences have passed
  bool is_store = false;
  bool checks = false;  // whether this is a load for which `copied` needs every chunk's CRC
  uint64_t bytes = 0;
  std::vector<uint64_t> pieces;
  // Each chunk's number of pieces and payload address, in a store or if `checks`.
  std::vector<uint32_t> counts;
  std::vector<uint64_t> payloads;
  std::vector<uint64_t> sizes;  // bytes of each payload
  // Whether `copied` needs each chunk's CRC; empty if nothing is checked or compared.
  std::vector<uint8_t> sampled;
};

// Chunks that peers have read, to be copied into their cache slots. rows: per chunk, the address of
// its cache slot, that of its stream slot, and its size.
struct LandingBatch {
  uint64_t number = 0;
  std::vector<uint64_t> rows;
};

// A report on rows of a single op; see `protocol.OpReport`. An empty column counts as absent.
struct RowReport {
  // Return whether all rows of the op are OK and released, and none has a CRC.
  bool whole() const { return all_rows && codes.empty() && released.empty() && crcs.empty(); }

  uint64_t op = 0;
  bool all_rows = false;  // `indexes` is absent
  std::vector<uint32_t> indexes;
  std::vector<uint8_t> codes;
  std::vector<int16_t> errors;
  std::vector<uint8_t> released;
  double seconds = 0;
  std::vector<uint32_t> crcs;  // CRCs of the sampled rows that are OK
};

// A store or load whose DMA has finished.
struct Finished {
  uint64_t op = 0;
  std::vector<uint32_t> failed;  // the rows that failed
  std::vector<uint8_t> codes;    // the codes of the failed rows
  std::vector<int16_t> errors;
  uint64_t copied_bytes = 0;
  double seconds = 0;
};

class Machine {
 public:
  // peer_lanes: the lanes of all peers, or null if there are no peers.
  Machine(const MachineOptions& options, NativeLanes& lanes, int64_t now_ns,
          NativeLanes* peer_lanes = nullptr);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // -- commands. They throw BrokenRule on a programming error. fence: the fence that the copies for
  // a store or load wait for, or 0. Fences are numbered in the order in which they pass.
  void begin(uint64_t op, OpKind kind, Urgency urgency, const Columns& columns,
             const Pieces& pieces, uint64_t fence = 0);
  // Cancel queued writes and write each target's superblock; see `IoQueue::begin_reset`. The op's
  // row is OK as soon as one superblock is written, because the next start then voids the chunks on
  // all targets. If none can be written, the row fails with the last outcome.
  void reset(uint64_t op, const Stamp& stamp, const Stamp& unnamed);
  // Cancel these rows of an op, or all if `rows` is null. They are still reported, and running DMA
  // continues. Stores, resets and attaches are never cancelled, because other ops need them.
  void cancel(uint64_t op, const std::vector<uint32_t>* rows);
  // Make reads from engine `owner` wait for its files (`IoQueue::await_files`). The op's row is
  // decided by `IoQueue::attached`, or fails after the time limit for a read.
  void attach(uint64_t op, uint16_t owner);

  // -- progress. crcs: the CRC of each chunk's payload (in a load, of the bytes that arrived), or
  // -1 if unknown; empty if all are unknown.
  void copied(uint64_t number, Outcome code, int error, std::span<const int64_t> crcs = {});
  size_t copying(uint64_t number) const {
    const auto found = copying_.find(number);
    return found == copying_.end() ? 0 : found->second.size();
  }
  bool run();  // returns false if nothing more can advance now
  // The next three return upper bounds: on the number of tasks that the next `run` may advance, of
  // chunks to copy, and of rows to report.
  size_t to_move();
  size_t to_copy() const;
  size_t to_report() const;
  // passed: the newest fence that has passed; all earlier ones have passed too.
  std::vector<CopyBatch> take_copies(uint64_t passed);
  std::vector<RowReport> take_reports();
  std::vector<Finished> take_finished() { return std::exchange(finished_, {}); }

  bool idle() const {
    return jobs_.empty() && gates_.idle() && !io.busy() && streams_.idle() &&
           (!set_ || set_->idle()) && served_.empty();
  }
  // Like `IoQueue::next_deadline_ns`, but includes tasks waiting for stream slots or other ranks.
  int64_t next_deadline_ns();
  SetMember* set() { return set_ ? &*set_ : nullptr; }

  // -- peers
  void set_peer(size_t peer, const PeerState& state);
  bool peer_rests(size_t peer) const { return judge_.rests(peer, io.now_ns()); }
  // Let only these peers (one bit each) read for this load, which has just begun.
  void let_help(uint64_t op, uint64_t peers);
  // Return the chunks to copy into cache slots, if any. `landed` ends the batch.
  LandingBatch take_landings();
  void landed(uint64_t number);
  // Return the work ahead of a new read, by lane: bytes, and seconds (0 if unknown).
  std::vector<std::pair<uint64_t, double>> read_queues();

  // -- reads for peers, by token and with time limits. Nothing else may use a row's serve slot,
  // which its `cache` names, until the row ends. A reset cancels these reads; those that have
  // started end later.
  void serve(std::span<const uint64_t> tokens, const Columns& columns,
             std::span<const double> within_s);
  // Cancel the reads with these tokens. `take_served` still returns each of them.
  void end_serving(std::span<const uint64_t> tokens);
  struct Served {
    uint64_t token;
    Outcome code;
    int error;
  };
  // Return each read for a peer once, after it has released its slot.
  std::vector<Served> take_served() { return std::exchange(served_, {}); }
  // Return how many bytes will be read before the next read for a peer, and our read rate in
  // bytes per second.
  std::pair<uint64_t, double> serve_levels();

  size_t streams_used() const { return streams_.used(); }
  size_t streams_waiting() const { return streams_.waiting(); }
  std::vector<uint64_t> written_bytes;  // by target

  IoQueue io;

 private:
  Job& open(uint64_t op, OpKind kind, size_t tasks, size_t rows);
  void name_rows(Job& job, Urgency urgency, const Columns& columns);
  void take_slots(Task& task, int32_t cache, Place place);
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
  std::unordered_map<uint64_t, Task*> serving_;  // reads for peers, by the peer's token
  std::vector<Served> served_;
  uint64_t serve_jobs_ = 0;
  PeerJudge judge_;
  std::vector<LaneEstimate> estimates_;  // the peers' estimates in `choose`
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
