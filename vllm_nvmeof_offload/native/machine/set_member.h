// SPDX-License-Identifier: Apache-2.0
// A rank as one of the members of its set: what it waits for from the others, and what it lends
// them. The machine asks it about rows with a member; rows of every member never come here.
//
// A row is worked on by its holder, the member that it names. The others do nothing for a store or
// write. For a fetch or landing they wait for the fill word of the holder's cache slot, and for a
// read through a stream slot for the holder's announcement. Each row of such a read is announced
// once, with its slot or as failed, and released once by each of the others; one that has given up
// its row releases the announcement when it comes.
//
// A wait has no time of its own, because the holder may have much to read before: what waits for a
// member fails with DEADLINE once that member has moved nothing for the time of a read's deadline,
// as what waits for a lane does. A holder whose reads hang fails them at their deadline.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "machine/set_memory.h"
#include "machine/task.h"

namespace nvmeof {

struct SetOptions {
  void* memory = nullptr;  // null: this rank is in no set
  size_t members = 1;
  size_t member = 0;                // this rank
  std::vector<uint64_t> addresses;  // by member: of its cache slot 0, as this process maps it
  // By group: how many consecutive members have equal bytes; each divides `members`. 1: none.
  std::vector<uint8_t> set_sizes;
};

// What has happened to a task.
struct SetEvent {
  enum class Kind : uint8_t {
    HELD,      // a holder's slot has the chunk of this row
    FAILED,    // the holder's fill or read has failed
    DEADLINE,  // the holder moves nothing
    RETURNED,  // all have released this holder's stream slot
    OVERDUE,   // not all have, for a deadline's time
  };
  Task* task;
  Kind kind;
};

class SetMember {
 public:
  SetMember(const SetOptions& options, const SetShape& shape, int64_t patience_ns);

  // Whether ranks have equal bytes of this group.
  bool shares(uint8_t group) const { return options_.set_sizes[group] > 1; }
  // The holder of what `member` of a place or cache slot of the group names.
  uint8_t holder(uint8_t group, uint32_t member) const;
  bool holds(const Task& task) const { return task.holder == options_.member; }
  // Of a holder's slot, which the task copies from.
  uint64_t address(const Task& task, size_t slot_bytes) const;

  // The row fills the cache slot of its holder; every rank is given all that do, in this order.
  void give_fill(const Task& task) { last_fill(task) = static_cast<uint32_t>(task.job->op); }

  // -- as a holder
  void count_progress() { memory_.count_progress(options_.member); }
  void set_fill(const Task& task, FillState state);
  // The task's stream slot has the chunk: the others may copy it.
  void lend(Task& task);
  // The others will get nothing of this row through a stream slot.
  void announce_failure(Task& task, Outcome code);
  // Whether others still use the task's stream slot. `events` says when they do not any more.
  bool is_lent(const Task& task) const;
  void await_return(Task& task, int64_t now_ns);

  // -- as a reader
  void wait(Task& task, int64_t now_ns);
  void give_up(Task& task);
  // It has copied from a holder's stream slot.
  void release(Task& task);

  // Look at the words of the others. False: nothing has happened, and `events` is empty.
  bool poll(int64_t now_ns);
  std::vector<SetEvent> events;
  // Whether something may happen soon.
  bool awaits() const;
  bool idle() const;
  size_t waiting() const;
  int64_t next_deadline_ns() const;
  // Block until something has happened, one of the files is readable, or the time is over.
  void sleep(const std::vector<int>& fds, int64_t now_ns, int64_t time_ns);
  // The others need not wait for this member any more: it moves nothing.
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
  // What this rank waits for from one member.
  struct Holder {
    std::vector<Task*> fills;
    std::unordered_map<RowOf, Task*, RowHash> reads;
    std::unordered_set<RowOf, RowHash> given_up;  // rows whose announcements are still to come
    uint64_t progress = 0;
    int64_t since_ns = 0;  // when the progress was first seen
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
  std::vector<uint32_t> fills_;  // by member and cache slot: the op of the last fill, its low bits
  std::vector<Loan> loans_;
  std::deque<Failure> failures_;  // to be announced when there is room
};

}  // namespace nvmeof
