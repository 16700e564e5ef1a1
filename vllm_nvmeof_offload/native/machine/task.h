// SPDX-License-Identifier: Apache-2.0
// Jobs (one per command), tasks (one per chunk of a job), and the fair queue in which tasks wait.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/op.h"
#include "lanes/lanes.h"

namespace nvmeof {

enum class Step : uint8_t {
  GATE,    // waits for its turn at its cache slot
  STREAM,  // waits for a stream slot
  MEMBER,  // waits for another member of the set
  IO,      // queued for, or in, the I/O engine
  LAND,    // read by a peer; being copied into its cache slot
  COPY,    // queued for, or in, the copy engine
  ZOMBIE,  // decided, but the kernel still uses its buffer
  DONE,
};

struct Job;
class FairQueue;

// The content of a slot, as gates compare it. A hash of the key suffices, because different chunks
// of this server also have different generations.
struct SlotContent {
  uint64_t key_hash = 0;
  uint64_t generation = 0;
  bool operator==(const SlotContent&) const = default;
};

struct Task {
  Job* job = nullptr;
  uint32_t index = 0;
  int32_t stream = -1;  // the stream slot, -1 if none, or kLands
  SlotContent content;
  int32_t cache = -1;  // the cache slot, or -1 if the task uses a stream slot
  // For a row that another rank in the set processes: the task's index among those that wait for
  // that rank's fills or, without a cache slot, the index of the announcement that names the slot
  // to copy from.
  int32_t at_holder = -1;
  Place place = kNoPlace;  // the place on `target`, or `kNoPlace` if there is no I/O
  uint8_t target = 0;
  uint8_t group = 0;
  // The rank that processes the row, or `kEveryMember` if each rank has its own part.
  uint8_t holder = kEveryMember;
  Step step = Step::GATE;
  Urgency urgency = Urgency::DEMAND;
  bool hung = false;  // the kernel holds its stream slot past the deadline
  bool cancelled = false;
  bool holds_buffer = false;     // decided, but the kernel still holds its cache slot
  bool reported : 1 = false;     // whether its outcome was reported
  bool announced : 1 = false;    // whether its read through a stream slot was announced to the set
  bool header_only : 1 = false;  // in a load: the read checks the header, the copy the payload
  bool is_proven : 1 = true;     // false if a copy must verify the payload against `payload_crc`
  bool fills = false;            // the gate of `cache` counts this task as the filler
  bool reads = false;            // the gate of `cache` counts this task as a reader
  uint8_t retries_left = 1;
  uint8_t peer = 0;    // kAtNoPeer, kCameHome, or 1 + the number of the peer that reads it
  uint16_t owner = 0;  // the engine that the place belongs to, or 0 for ours
  // The payload's CRC, computed by the fill of the cache slot or read from the header; else -1.
  int64_t payload_crc = -1;
  int64_t deadline_ns = 0;  // set when a lane first gets the task; 0 before
  uint64_t token = 0;       // the token of its last operation in a lane; 0 if none
  uint64_t charged_to = 0;  // the job to whose share of the reads it counts
  Task* before = nullptr;   // the neighbours in the queue where it waits
  Task* behind = nullptr;
  int64_t sequence = 0;
  FairQueue* waits_in = nullptr;

  // A value of `stream`: the chunk is read into its cache slot, but counts as using a stream slot.
  static constexpr int32_t kLands = -2;

  static constexpr uint8_t kAtNoPeer = 0;    // the task was not given to a peer
  static constexpr uint8_t kCameHome = 255;  // a peer failed, so no other peer is tried
  bool is_at_peer() const { return peer != kAtNoPeer && peer != kCameHome; }
  bool came_home() const { return peer == kCameHome; }
  size_t peer_number() const { return peer - size_t{1}; }
  std::string_view key() const;
};
static_assert(sizeof(Task) == 128, "two cache lines");

// A command. Each row is reported once, after its outcome is decided.
struct Job {
  uint64_t op = 0;
  OpKind kind = OpKind::STORE;
  std::vector<Task> tasks;
  std::string keys;
  size_t key_bytes = 0;
  std::vector<uint32_t> clients;  // by row, in a write; empty if unknown
  int64_t started_ns = 0;
  int64_t ended_ns = 0;  // when the last of the rows to report was decided
  size_t undecided = 0;
  size_t unreported = 0;
  size_t unreleased = 0;  // decided rows whose cache slots the kernel still holds
  size_t alive = 0;       // tasks that are not done
  uint64_t copied_bytes = 0;
  size_t superblocks_left = 0;   // in a reset: targets without an outcome
  bool listed = false;           // whether the job is in `Machine::news_`
  std::vector<uint64_t> served;  // in reads for peers: the peer's token, by row
  uint64_t fence = 0;            // in a store or load, as in `Machine::begin`
  uint64_t peers = UINT64_MAX;   // in a load: a bit for each peer that may read for it
  // The pieces of a store or load; see `Pieces` in machine.h.
  std::vector<uint64_t> pieces;
  std::vector<uint32_t> first_piece;
  std::vector<uint8_t> code;  // by row
  std::vector<int16_t> error;
  std::vector<uint32_t> crcs;     // by row, in a store whose rows the set compares; else empty
  std::vector<uint32_t> decided;  // rows to report
  std::vector<uint32_t> late;     // rows released after they were reported
  std::vector<uint32_t> failed;

  double seconds() const { return static_cast<double>(ended_ns - started_ns) / 1e9; }
  bool serves() const { return !served.empty(); }
  bool lets_help(size_t peer) const { return peers >> peer & 1; }
  bool moves_blocks() const { return kind == OpKind::STORE || kind == OpKind::LOAD; }
};

inline std::string_view Task::key() const {
  return std::string_view(job->keys).substr(index * job->key_bytes, job->key_bytes);
}

// Shares a limited number of places in flight fairly among jobs. The job with the fewest places
// goes first; among equals, the job whose first task has waited longest. A job's tasks keep their
// order. Only each job's first task is examined, so the cost does not depend on the number of a
// job's tasks.
class FairQueue {
 public:
  // The job to which a task's place is charged, fixed while the task waits or has a place.
  enum class Share : uint8_t { NONE, JOB, CHARGED };  // NONE: first in, first out

  explicit FairQueue(Share share) : share_(share) {}

  size_t size() const { return count_; }
  size_t held() const { return held_; }
  // Queue a task after its job's other tasks or, if `front`, as if it had waited the longest of
  // all.
  void push(Task& task, bool front = false);
  bool remove(Task& task);
  Task* peek();
  Task* take();
  void give_back(Task& task);
  // Remove all waiting tasks, longest wait first, without giving them places.
  std::vector<Task*> take_all();
  // Remove the retries whose deadlines have passed, and lower `next_ns` to the earliest deadline of
  // the remaining retries. Retries precede the other tasks of their jobs.
  std::vector<Task*> take_past(int64_t now_ns, int64_t& next_ns);

 private:
  struct Line {
    Task* first = nullptr;
    Task* last = nullptr;
    size_t held = 0;
  };
  struct Position {
    size_t held;
    int64_t sequence;
    uint64_t job;
    bool operator>(const Position& other) const {
      return held != other.held ? held > other.held : sequence > other.sequence;
    }
  };

  uint64_t share_of(const Task& task) const;
  void link(Line& line, Task& task, bool front);
  void unlink(Line& line, Task& task);
  void moved(uint64_t job, Line& line);

  const Share share_;
  size_t count_ = 0;
  size_t held_ = 0;
  int64_t sequence_ = 0;
  std::unordered_map<uint64_t, Line> lines_;
  std::vector<Position> heap_;  // each waiting job's current position, and outdated positions
};

}  // namespace nvmeof
