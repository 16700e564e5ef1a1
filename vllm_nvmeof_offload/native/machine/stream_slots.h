// SPDX-License-Identifier: Apache-2.0
// A bounded number of slots through which loads of any size pass.
//
// Each target, and each peer that is usable, may hold at most its share of the slots, so that those
// that hang cannot take the slots of the others. Within a target jobs share fairly. What waits for
// a target's slot may be given one of a peer's instead, and what came back from a peer waits before
// all that was at none. A load's chunk that lands in a cache slot waits here, too, if a peer may
// bring it: to have a slot for the pull, or to be read by its target, which takes it when it has
// room for one more chunk, and not before, so that the lane is chosen as late as for the others.
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
  // The task's slot, which no engine has any more, is free.
  void give_back(Task& task);
  // The kernel holds the task's slot past its deadline, perhaps for ever.
  void mark_hung(Task& task);
  // Take out the tasks that could only get slots that the kernel may never return.
  std::vector<Task*> take_unservable();

  // -- as the machine chooses a lane for each chunk
  void set_usable_peers(size_t peers) { usable_peers_ = peers; }
  size_t usable_peers() const { return usable_peers_; }
  size_t waiting(size_t target) const;
  size_t targets() const { return queues_.size(); }
  // The target whose turn it is.
  size_t turn() { return std::exchange(next_, (next_ + 1) % queues_.size()); }
  // The next task of this target that was at no peer yet. Null: none waits.
  Task* peek(size_t target) { return queues_[target].peek(); }
  bool target_has_room(const Task& task) const;
  bool peer_has_room(size_t peer) const;
  // The next task that came back from a peer, with a slot; null: none, or there is no room.
  Task* take_returned(size_t target);
  // Give the task of `peek` a slot, on the share of the target or of the peer that it names.
  void take(Task& task);
  // The target has read the task into its cache slot, or does not any more. Otherwise no effect.
  void leave(Task& task);
  // The peer goes on with the task's slot until `release`, and the task does without it.
  void abandon(Task& task);
  // A peer is done with this token. False: its task still has the slot.
  bool release(uint64_t token);
  // Take out what came back and is past its deadline.
  std::vector<Task*> take_past(int64_t now_ns);
  int64_t next_deadline_ns() const { return next_ns_; }  // no task's is earlier

 private:
  // The target that reads for the task, on whose share its slot counts unless a peer reads.
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
  std::vector<size_t> at_peers_;  // by target: slots of its queue's that peers hold
  std::vector<size_t> peer_held_;
  std::unordered_map<uint64_t, std::pair<size_t, int32_t>> abandoned_;  // peer and slot, by token
  std::vector<size_t> hung_;                                            // by lane: targets first
  size_t peers_held_ = 0;
  size_t hung_in_all_ = 0;
  size_t next_ = 0;  // the target that is asked first: with few slots, each in its turn
  int64_t next_ns_ = INT64_MAX;
};

}  // namespace nvmeof
