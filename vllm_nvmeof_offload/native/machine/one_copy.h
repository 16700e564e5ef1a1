// SPDX-License-Identifier: Apache-2.0
// A set of ranks with equal bytes keeps one copy of each chunk (the key `one_copy`), in one rank's
// staging; the other ranks copy it from there. `SetMemory` is the memory through which the ranks
// coordinate, and `SetMember` is one rank of the set.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "common/op.h"
#include "machine/task.h"

namespace nvmeof {

// ---- the memory of a set ----------------------------------------------------------------
// All members map this memory, which has one part per member. Only the member itself writes its
// part, except that readers release its announcements. A part contains:
//
//     progress       a count of the member's steps, so that the others notice when it hangs
//     fill words     for each cache slot, the name and the state of its last fill
//     announcements  for each stream slot, the load's row that it holds, and a bit for each member
//                    that has not released it; then announcements of failed reads
//
// Each word is atomic. A writer makes its bytes visible before the word that names them (release);
// a reader reads the word first (acquire). The memory is initially zero.

enum class FillState : uint8_t { EMPTY, FILLING, HELD, FAILED };

// A row of a load that all members receive. `generation` distinguishes it from other servers' rows.
struct RowOf {
  uint64_t op = 0;
  uint32_t row = 0;
  uint64_t generation = 0;
  bool operator==(const RowOf&) const = default;
};

struct SetShape {
  size_t members = 1;  // at most 64
  size_t cache_slots = 0;
  size_t stream_slots = 1;
};

class SetMemory {
 public:
  // The number of failed reads that a member can announce at a time.
  static constexpr size_t kNotices = 64;
  static constexpr uint64_t kLeft = UINT64_MAX;

  static size_t bytes(const SetShape& shape);
  // memory: `bytes(shape)` bytes, 64-byte aligned.
  SetMemory(void* memory, const SetShape& shape);

  const SetShape& shape() const { return shape_; }

  // -- progress. `kLeft` means that the member has left.
  uint64_t progress(size_t member) const { return load(part(member)); }
  void count_progress(size_t member);
  void leave(size_t member) { store(part(member), kLeft); }

  // -- fill words. `fill` also returns EMPTY if the word has a different name.
  void set_fill(size_t member, size_t slot, FillState state, uint64_t name);
  FillState fill(size_t member, size_t slot, uint64_t name) const;

  // -- announcements, stream slots first.
  size_t announcements() const { return shape_.stream_slots + kNotices; }
  // readers: a bit per member. All must have released the previous announcement at this position.
  void announce(size_t member, size_t at, RowOf row, Outcome code, uint64_t readers);
  uint64_t readers(size_t member, size_t at) const { return load(announcement(member, at)); }
  struct Announced {
    RowOf row;
    Outcome code = Outcome::OK;
  };
  // Return an announcement. The calling reader must not have released it yet.
  Announced announced(size_t member, size_t at) const;
  void release(size_t member, size_t at, size_t reader);

 private:
  static size_t part_words(const SetShape& shape);
  static uint64_t load(const uint64_t* word) {
    return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
  }
  static void store(uint64_t* word, uint64_t value) {
    std::atomic_ref(*word).store(value, std::memory_order_release);
  }
  uint64_t* part(size_t member) const;
  uint64_t* fill_word(size_t member, size_t slot) const;
  uint64_t* announcement(size_t member, size_t at) const;

  const SetShape shape_;
  const size_t part_words_;
  uint64_t* const words_;
};

// ---- a member ---------------------------------------------------------------------------
// A rank as a member of its set. The machine uses this class only for rows that name one member.
//
// The member that a row names, its holder, processes the row. The others do nothing for a store or
// write. For a read into a cache slot, they wait for the fill word of the holder's slot; before a
// read through a stream slot, they await the holder's announcement. The row is announced once, with
// its slot or as failed. Each other member releases the announcement once, even if it has given up
// on the row.
//
// A wait has no deadline, because the holder may have much to read first. Instead, tasks fail with
// DEADLINE when the holder has left, or has made no progress for the time limit of a read.

struct SetOptions {
  void* memory = nullptr;  // null if this rank is in no set
  size_t members = 1;
  size_t member = 0;                // this rank's number
  std::vector<uint64_t> addresses;  // where this process maps each member's cache slot 0
  // By group: how many consecutive members hold equal bytes; 1 if no two do. Must divide `members`.
  std::vector<uint8_t> set_sizes;
};

struct SetEvent {
  enum class Kind : uint8_t {
    HELD,      // the holder's slot contains this row's chunk
    FAILED,    // the holder's fill or read failed
    DEADLINE,  // the holder has left or is making no progress
    RETURNED,  // all other members have released this rank's stream slot
    OVERDUE,   // some members have not released the slot within a read's time limit
  };
  Task* task;
  Kind kind;
};

class SetMember {
 public:
  SetMember(const SetOptions& options, const SetShape& shape, int64_t patience_ns);

  bool shares(uint8_t group) const { return options_.set_sizes[group] > 1; }
  // Return the rank of member `member`, as in a place or cache slot, in this rank's set for the
  // group.
  uint8_t holder(uint8_t group, uint32_t member) const;
  bool holds(const Task& task) const { return task.holder == options_.member; }
  uint64_t address(const Task& task, size_t slot_bytes) const;

  // Record a row that fills its holder's cache slot. All ranks record these rows in the same order.
  void give_fill(const Task& task) { last_fill(task) = static_cast<uint32_t>(task.job->op); }

  // -- as a holder
  void count_progress() { memory_.count_progress(options_.member); }
  void set_fill(const Task& task, FillState state);
  // Announce that the task's stream slot holds the chunk, so that the others may copy it.
  void lend(Task& task);
  void announce_failure(Task& task, Outcome code);
  // Return whether others still use the task's stream slot. A `RETURNED` event then follows.
  bool is_lent(const Task& task) const;
  void await_return(Task& task, int64_t now_ns);

  // -- as a reader
  void wait(Task& task, int64_t now_ns);
  void give_up(Task& task);
  void release(Task& task);

  // Read the other members' words and fill `events`. Returns whether there are events.
  bool poll(int64_t now_ns);
  std::vector<SetEvent> events;
  bool awaits() const;
  bool idle() const;
  int64_t next_deadline_ns() const;
  // Block until there is an event, one of the files is readable, or `time_ns` has passed.
  void sleep(const std::vector<int>& fds, int64_t now_ns, int64_t time_ns);
  void leave() { memory_.leave(options_.member); }

 private:
  struct RowHash {
    size_t operator()(const RowOf& row) const {
      return std::hash<uint64_t>()(row.op * 0x9E3779B97F4A7C15u + row.row);
    }
  };
  struct Loan {
    Task* task;
    int64_t overdue_ns;
    bool overdue = false;
  };
  struct Failure {
    RowOf row;
    Outcome code;
    uint64_t readers;
  };
  struct Holder {
    std::vector<Task*> fills;
    std::unordered_map<RowOf, Task*, RowHash> reads;
    std::unordered_set<RowOf, RowHash> given_up;  // cancelled rows that are not announced yet
    uint64_t progress = 0;
    int64_t since_ns = 0;  // when this progress was first seen
    bool stalled = false;
    size_t waiting() const { return fills.size() + reads.size(); }
    bool watched() const { return waiting() || !given_up.empty(); }
  };

  static RowOf row_of(const Task& task) {
    return {task.job->op, task.index, task.content.generation};
  }
  uint64_t other_members(const Task& task) const;
  uint32_t& last_fill(const Task& task) {
    return fills_[task.holder * memory_.shape().cache_slots + static_cast<size_t>(task.cache)];
  }
  bool is_out(size_t at);
  void watch(size_t member, int64_t now_ns);
  void look_at_loans(int64_t now_ns);
  void announce_failures();
  void look_at_fills(size_t member);
  void look_at_reads(size_t member);
  void look_at_progress(size_t member, int64_t now_ns);
  void fail_all(size_t member);

  const SetOptions options_;
  const int64_t patience_ns_;
  SetMemory memory_;
  std::vector<Holder> holders_;  // by member
  std::vector<uint32_t> fills_;  // the low bits of the last fill's op, by member and cache slot
  std::vector<Loan> loans_;
  std::deque<Failure> failures_;  // waiting to be announced
};

}  // namespace nvmeof
