// SPDX-License-Identifier: Apache-2.0
#include "machine/stream_slots.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace nvmeof {

StreamSlots::StreamSlots(size_t slots, size_t targets, size_t peers)
    : slots_(slots),
      free_(slots),
      queues_(targets, FairQueue(FairQueue::Share::JOB)),
      returned_(targets, FairQueue(FairQueue::Share::JOB)),
      at_peers_(targets),
      peer_held_(peers),
      hung_(targets + peers) {
  std::iota(free_.begin(), free_.end(), 0);
}

size_t StreamSlots::waiting() const {
  size_t count = 0;
  for (size_t target = 0; target < queues_.size(); ++target) count += waiting(target);
  return count;
}

size_t StreamSlots::waiting(size_t target) const {
  return queues_[target].size() + returned_[target].size();
}

size_t StreamSlots::target_of(const Task& task) const {
  if (mutant("stream_slots_are_charged_to_the_lane_of_a_job")) return task.job->tasks[0].target;
  return task.target;
}

size_t StreamSlots::lane_of(const Task& task) const {
  return task.is_at_peer() ? queues_.size() + task.peer_number() : target_of(task);
}

FairQueue& StreamSlots::queue_of(const Task& task) {
  return (task.came_home() ? returned_ : queues_)[target_of(task)];
}

// Unusable peers leave their shares to the targets.
size_t StreamSlots::share() const {
  return std::max<size_t>(1, slots_ / (queues_.size() + usable_peers_));
}

size_t StreamSlots::held(size_t target) const {
  return queues_[target].held() - at_peers_[target] + returned_[target].held();
}

void StreamSlots::wait(Task& task) {
  if (task.came_home()) next_ns_ = std::min(next_ns_, task.deadline_ns);
  queue_of(task).push(task);
}

void StreamSlots::withdraw(Task& task) {
  require(queue_of(task).remove(task), "a task does not wait for a stream slot");
}

void StreamSlots::give_slot(Task& task) {
  task.stream = free_.front();
  free_.pop_front();
}

bool StreamSlots::target_has_room(const Task& task) const {
  return (task.fills || !free_.empty()) && has_share(target_of(task));
}

// All peers together must leave the targets their shares.
bool StreamSlots::peer_has_room(size_t peer) const {
  const size_t of_targets = std::min(slots_, queues_.size() * share());
  return !free_.empty() && peer_held_[peer] < share() && peers_held_ < slots_ - of_targets;
}

Task* StreamSlots::take_returned(size_t target) {
  if (free_.empty() || !has_share(target)) return nullptr;
  Task* const task = returned_[target].take();
  if (task) give_slot(*task);
  return task;
}

void StreamSlots::take(Task& task) {
  require(queue_of(task).take() == &task, "it is another task's turn");
  if (task.fills && !task.is_at_peer()) {
    task.stream = Task::kLands;
    return;
  }
  give_slot(task);
  if (!task.is_at_peer()) return;
  ++at_peers_[target_of(task)];
  ++peer_held_[task.peer_number()];
  ++peers_held_;
}

void StreamSlots::give_back(Task& task) {
  const int32_t slot = std::exchange(task.stream, -1);
  require(slot >= 0, "a stream slot is given back twice");
  if (mutant("stream_slots_are_not_released")) return;
  free_.push_back(slot);
  queue_of(task).give_back(task);
  if (task.is_at_peer()) {
    --at_peers_[target_of(task)];
    --peer_held_[task.peer_number()];
    --peers_held_;
  }
  if (std::exchange(task.hung, false)) {
    --hung_[lane_of(task)];
    --hung_in_all_;
  }
}

void StreamSlots::leave(Task& task) {
  if (task.stream != Task::kLands) return;
  task.stream = -1;
  if (mutant("what_lands_stays_on_the_targets_share")) return;
  queue_of(task).give_back(task);
}

void StreamSlots::abandon(Task& task) {
  require(task.stream >= 0 && task.is_at_peer(), "a task has no slot at a peer");
  if (!task.hung) mark_hung(task);
  task.hung = false;
  queue_of(task).give_back(task);
  --at_peers_[target_of(task)];
  const int32_t slot = std::exchange(task.stream, -1);
  if (mutant("a_zombies_buffer_is_reused")) free_.push_front(slot);
  abandoned_[task.token] = {task.peer_number(), slot};
}

bool StreamSlots::release(uint64_t token) {
  const auto found = abandoned_.find(token);
  if (found == abandoned_.end()) return false;
  const auto [peer, slot] = found->second;
  abandoned_.erase(found);
  if (!mutant("a_zombies_buffer_is_reused")) free_.push_back(slot);
  --peer_held_[peer];
  --peers_held_;
  --hung_[queues_.size() + peer];
  --hung_in_all_;
  return true;
}

std::vector<Task*> StreamSlots::take_past(int64_t now_ns) {
  std::vector<Task*> past;
  if (next_ns_ > now_ns) return past;
  next_ns_ = INT64_MAX;
  for (FairQueue& queue : returned_)
    for (Task* task : queue.take_past(now_ns, next_ns_)) past.push_back(task);
  return past;
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
        hung_[target] >= share() && !mutant("hung_share_of_a_target_blocks_its_loads");
    if (waiting(target) == 0 || !(everything || its_share)) continue;
    for (Task* task : queues_[target].take_all()) tasks.push_back(task);
    for (Task* task : returned_[target].take_all()) tasks.push_back(task);
  }
  return tasks;
}

}  // namespace nvmeof
