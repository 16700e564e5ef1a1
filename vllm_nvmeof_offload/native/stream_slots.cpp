// SPDX-License-Identifier: Apache-2.0
#include "stream_slots.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace nvmeof {

StreamSlots::StreamSlots(size_t slots, size_t targets)
    : slots_(slots),
      share_(std::max<size_t>(1, slots / targets)),
      free_(slots),
      queues_(targets, FairQueue(FairQueue::Share::JOB)),
      hung_(targets) {
  std::iota(free_.begin(), free_.end(), 0);
}

size_t StreamSlots::waiting() const {
  size_t count = 0;
  for (const FairQueue& queue : queues_) count += queue.size();
  return count;
}

size_t StreamSlots::lane_of(const Task& task) const {
  if (mutant("stream_slots_are_charged_to_the_lane_of_a_job")) return task.job->tasks[0].target;
  return task.target;
}

void StreamSlots::withdraw(Task& task) {
  require(queues_[lane_of(task)].remove(task), "a task waits for no stream slot");
}

void StreamSlots::hand_out(std::vector<Task*>& served) {
  size_t passed_over = 0;
  while (!free_.empty() && passed_over < queues_.size()) {
    FairQueue& queue = queues_[next_];
    next_ = (next_ + 1) % queues_.size();
    Task* const task = queue.held() < share_ ? queue.take() : nullptr;
    passed_over = task ? 0 : passed_over + 1;
    if (!task) continue;
    task->stream = free_.front();
    free_.pop_front();
    served.push_back(task);
  }
}

void StreamSlots::give_back(Task& task) {
  const int32_t slot = std::exchange(task.stream, -1);
  require(slot >= 0, "a stream slot is given back twice");
  if (mutant("stream_slots_are_not_released")) return;
  free_.push_back(slot);
  queues_[lane_of(task)].give_back(task);
  if (std::exchange(task.hung, false)) {
    --hung_[lane_of(task)];
    --hung_in_all_;
  }
}

void StreamSlots::mark_hung(Task& task) {
  if (mutant("hung_stream_slots_block_loads")) return;
  require(task.stream >= 0, "a task has no stream slot");
  task.hung = true;
  ++hung_[lane_of(task)];
  ++hung_in_all_;
}

std::vector<Task*> StreamSlots::take_unservable() {
  std::vector<Task*> tasks;
  const bool everything = hung_in_all_ == slots_;
  for (size_t target = 0; target < queues_.size(); ++target) {
    const bool its_share =
        hung_[target] == share_ && !mutant("hung_share_of_a_target_blocks_its_loads");
    if (queues_[target].size() == 0 || !(everything || its_share)) continue;
    for (Task* task : queues_[target].take_all()) tasks.push_back(task);
  }
  return tasks;
}

}  // namespace nvmeof
