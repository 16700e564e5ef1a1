// SPDX-License-Identifier: Apache-2.0
// A fixed number of slots through which loads of any size pass.
//
// Each target and each usable peer may hold at most its share of the slots, so that a hanging one
// cannot take the slots of the others. A target's share is divided fairly among jobs. A task that
// waits for its target may instead get a slot from a peer's share. Tasks that a peer failed to read
// precede all others. A chunk that is bound for a cache slot and that a peer may read also waits
// here, until it gets a stream slot or its target has room for one more chunk. Its lane is thus
// chosen as late as possible.
#pragma once

#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "machine/task.h"

namespace nvmeof {

class StreamSlots {
 public:
  StreamSlots(size_t slots, size_t targets, size_t peers);

  size_t used() const { return slots_ - free_.size(); }
  size_t waiting() const;
  bool idle() const { return used() == 0 && waiting() == 0; }

  void wait(Task& task);
  void withdraw(Task& task);
  // Free the task's slot, which no engine uses any longer.
  void give_back(Task& task);
  // Record that the kernel holds the task's slot past the task's deadline, perhaps forever.
  void mark_hung(Task& task);
  // Remove the tasks that are stuck because the kernel may never return the slots that they need.
  std::vector<Task*> take_unservable();

  // -- for the machine's choice of a lane for each chunk
  void set_usable_peers(size_t peers) { usable_peers_ = peers; }
  size_t usable_peers() const { return usable_peers_; }
  size_t waiting(size_t target) const;
  size_t targets() const { return queues_.size(); }
  size_t turn() { return std::exchange(next_, (next_ + 1) % queues_.size()); }
  // Return this target's next task that was never given to a peer, or null.
  Task* peek(size_t target) { return queues_[target].peek(); }
  bool target_has_room(const Task& task) const;
  bool peer_has_room(size_t peer) const;
  // Give a slot to the next task that a peer failed to read. Returns null if no task can get one.
  Task* take_returned(size_t target);
  // Give the task from `peek` a slot from its peer's share or, without a peer, from its target's; a
  // target's read into a cache slot needs none.
  void take(Task& task);
  // Stop counting a task that its target has read directly into a cache slot, or will not read.
  void leave(Task& task);
  // Leave the task's slot to the peer until `release`. The task continues without a slot.
  void abandon(Task& task);
  // Free the slot that a peer held under this token. Returns false if there is none.
  bool release(uint64_t token);
  // Remove the tasks that a peer failed to read and that are past their deadline.
  std::vector<Task*> take_past(int64_t now_ns);
  int64_t next_deadline_ns() const { return next_ns_; }  // a lower bound on those deadlines

 private:
  // Return the target to which the task's slot is charged unless a peer reads it.
  size_t target_of(const Task& task) const;
  size_t lane_of(const Task& task) const;
  FairQueue& queue_of(const Task& task);
  size_t share() const;
  size_t held(size_t target) const;
  bool has_share(size_t target) const { return held(target) < share(); }
  void give_slot(Task& task);

  const size_t slots_;
  size_t usable_peers_ = 0;
  std::deque<int32_t> free_;
  std::vector<FairQueue> queues_, returned_;
  std::vector<size_t> at_peers_;  // slots that peers hold for each target's tasks
  std::vector<size_t> peer_held_;
  std::unordered_map<uint64_t, std::pair<size_t, int32_t>> abandoned_;  // peer and slot, by token
  std::vector<size_t> hung_;                                            // by lane, targets first
  size_t peers_held_ = 0;
  size_t hung_in_all_ = 0;
  size_t next_ = 0;  // the target asked next, so that each gets its turn even with few slots
  int64_t next_ns_ = INT64_MAX;
};

}  // namespace nvmeof
