// SPDX-License-Identifier: Apache-2.0
// Jobs (one command each) and tasks (one chunk each) of the worker's machine, and the fair queue in
// which tasks wait.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/op.h"
#include "lanes/lanes.h"
#include "tiers/place.h"

namespace nvmeof {

// The part of its way that a task has reached.
enum class Step : uint8_t {
  GATE,    // waits for its turn at its cache slot
  STREAM,  // waits for a stream slot
  MEMBER,  // waits for another member of the set
  IO,      // queued for, or in, the I/O engine
  LAND,    // a peer has brought it; it is copied into its cache slot
  COPY,    // queued for, or in, the copy engine
  ZOMBIE,  // decided; the kernel still has its buffer
  DONE,
};

struct Job;
class FairQueue;

// The content of a slot, as gates compare it. A key is compared by its hash: both sides are ours,
// and a slot whose bytes are another chunk's differs in the generation too.
struct SlotContent {
  uint64_t key_hash = 0;
  uint64_t generation = 0;
  bool operator==(const SlotContent&) const = default;
};

struct Task {
  Job* job = nullptr;
  uint32_t index = 0;
  int32_t stream = -1;  // -1: none; or as below
  SlotContent content;
  int32_t cache = -1;  // -1: through a stream slot
  // Of a row that another member of the set has. Through a cache slot: its number among those that
  // wait for that member's fills. Through a stream slot: the announcement that it copies from.
  int32_t at_holder = -1;
  Place place = kNoPlace;  // `kNoPlace`: no I/O; otherwise it is on `target`
  uint8_t target = 0;
  uint8_t group = 0;
  // The one member of the set whose slots the row names; `kEveryMember`: each rank has its part.
  uint8_t holder = kEveryMember;
  Step step = Step::GATE;
  Urgency urgency = Urgency::DEMAND;
  bool hung = false;  // the kernel holds its stream slot past the deadline
  bool cancelled = false;
  bool holds_buffer = false;     // it is decided, and the kernel still has its cache slot
  bool reported : 1 = false;     // its outcome is
  bool announced : 1 = false;    // of a read through a stream slot, to the other members of the set
  bool header_only : 1 = false;  // of a load: its read checks the header, and its copy the payload
  bool is_proven : 1 = true;     // its payload is checked; false: it must have `payload_crc`
  bool fills = false;            // the gate of `cache` counts it as its filler,
  bool reads = false;            // or as a reader
  uint8_t retries_left = 1;
  uint8_t peer = 0;    // 1 + the peer that reads it; or one of the two below
  uint16_t owner = 0;  // whose region the place is in; 0: ours
  // Of what it reads from its cache slot, if the fill made it; or what its read has found named.
  int64_t payload_crc = -1;
  int64_t deadline_ns = 0;  // fixed when a lane first has it; 0: none had
  uint64_t token = 0;       // with a lane; 0: never
  uint64_t charged_to = 0;  // number of the job on whose share of the reads it goes
  Task* before = nullptr;   // in the queue where it waits
  Task* behind = nullptr;
  int64_t sequence = 0;
  FairQueue* waits_in = nullptr;

  // It is read into its cache slot, and needs no stream slot, but counts as if it had one.
  static constexpr int32_t kLands = -2;

  static constexpr uint8_t kAtNoPeer = 0;    // it was at none, and
  static constexpr uint8_t kCameHome = 255;  // one has failed: it goes to no other
  bool is_at_peer() const { return peer != kAtNoPeer && peer != kCameHome; }
  bool came_home() const { return peer == kCameHome; }
  size_t peer_number() const { return peer - size_t{1}; }
  std::string_view key() const;
};
static_assert(sizeof(Task) == 128, "two cache lines");

// One command. Its rows are reported once they are decided, each of them once.
struct Job {
  uint64_t op = 0;
  OpKind kind = OpKind::STORE;
  std::vector<Task> tasks;
  std::string keys;
  size_t key_bytes = 0;
  int64_t started_ns = 0;
  int64_t ended_ns = 0;  // when the last of the rows to report was decided
  size_t undecided = 0;
  size_t unreported = 0;
  size_t unreleased = 0;  // rows whose cache slots the kernel still has, and that were decided
  size_t alive = 0;       // tasks that are not done
  uint64_t copied_bytes = 0;
  size_t superblocks_left = 0;   // of a reset: lanes on which it has no outcome
  bool listed = false;           // it has rows to report
  std::vector<uint64_t> served;  // of what is read for peers: their tokens, by row
  uint64_t fence = 0;            // of a store or load, as in `Machine::begin`
  uint64_t peers = UINT64_MAX;   // of a load: that may read for it, a bit for each
  // Pieces of a store or load: (KV cache address, offset in the payload, bytes), and by row the
  // first of its pieces.
  std::vector<uint64_t> pieces;
  std::vector<uint32_t> first_piece;
  std::vector<uint8_t> code;  // by row
  std::vector<int16_t> error;
  std::vector<uint32_t> crcs;     // by row, of a store that is compared within the set; or empty
  std::vector<uint32_t> decided;  // rows to report
  std::vector<uint32_t> late;     // rows released after they were reported
  std::vector<uint32_t> failed;

  // From the command to the last outcome in the next report.
  double seconds() const { return static_cast<double>(ended_ns - started_ns) / 1e9; }
  bool serves() const { return !served.empty(); }
  bool lets_help(size_t peer) const { return peers >> peer & 1; }
  bool moves_blocks() const { return kind == OpKind::STORE || kind == OpKind::LOAD; }
};

inline std::string_view Task::key() const {
  return std::string_view(job->keys).substr(index * job->key_bytes, job->key_bytes);
}

// Shares a limited number of places fairly between jobs with many waiting tasks.
//
// The job that holds the fewest places goes first; among equals, the job whose first task has
// waited longest. Within a job the order is kept. Only the first task of each job is looked at, so
// that one job of ten thousand tasks costs as much as ten thousand jobs of one task.
class FairQueue {
 public:
  // The job on which a task counts here. It must not change while the task waits or has a place.
  enum class Share : uint8_t { NONE, JOB, CHARGED };  // NONE: first come, first served

  explicit FairQueue(Share share) : share_(share) {}

  size_t size() const { return count_; }
  size_t held() const { return held_; }
  // Behind its job's others; `front`: as if it had waited longest of all.
  void push(Task& task, bool front = false);
  // False: it does not wait here.
  bool remove(Task& task);
  Task* peek();
  // Give the next task a place.
  Task* take();
  void give_back(Task& task);
  // Take out everything that waits, the longest waiting first; no places are given.
  std::vector<Task*> take_all();
  // Take out the retries whose deadline has passed; they are the first of their jobs. next_ns:
  // becomes the earliest deadline of the others, if that is earlier.
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
  std::vector<Position> heap_;  // each job that waits has an entry of its present position
};

}  // namespace nvmeof
