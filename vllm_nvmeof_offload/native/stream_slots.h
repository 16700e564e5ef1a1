// SPDX-License-Identifier: Apache-2.0
// A bounded number of slots through which loads of any size pass.
//
// Each target may hold at most its share of the slots, so that targets that hang cannot take those
// of the others. Within a target jobs share fairly.
#pragma once

#include <deque>
#include <vector>

#include "task.h"

namespace nvmeof {

class StreamSlots {
 public:
  StreamSlots(size_t slots, size_t targets);

  size_t used() const { return slots_ - free_.size(); }
  size_t waiting() const;
  bool idle() const { return used() == 0 && waiting() == 0; }

  void wait(Task& task) { queues_[lane_of(task)].push(task); }
  void withdraw(Task& task);
  // Give out free slots, one per target at a time, to tasks that it appends to `served`.
  void hand_out(std::vector<Task*>& served);
  // The task's slot, which no engine has any more, is free.
  void give_back(Task& task);
  // The kernel holds the task's slot past its deadline, perhaps for ever.
  void mark_hung(Task& task);
  // Take out the tasks that could only get slots that the kernel may never return.
  std::vector<Task*> take_unservable();

 private:
  // The lane that reads for the task, on whose share its slot counts.
  size_t lane_of(const Task& task) const;

  const size_t slots_, share_;
  std::deque<int32_t> free_;
  std::vector<FairQueue> queues_;
  std::vector<size_t> hung_;
  size_t hung_in_all_ = 0;
  size_t next_ = 0;  // the target that is asked first: with few slots, each in its turn
};

}  // namespace nvmeof
