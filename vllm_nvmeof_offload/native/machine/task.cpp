// SPDX-License-Identifier: Apache-2.0
#include "machine/task.h"

#include <algorithm>

namespace nvmeof {
namespace {
// The heap may hold this many outdated entries, plus one per job.
constexpr size_t kOutdatedMax = 64;
}  // namespace

uint64_t FairQueue::share_of(const Task& task) const {
  switch (share_) {
    case Share::JOB:
      return task.job->op;
    case Share::CHARGED:
      return task.charged_to;
    default:
      return 0;
  }
}

void FairQueue::push(Task& task, bool front) {
  require(task.waits_in == nullptr, "a task waits in two queues");
  const uint64_t job = share_of(task);
  Line& line = lines_[job];
  ++sequence_;
  task.sequence = front ? -sequence_ : sequence_;
  const bool was_empty = line.first == nullptr;
  link(line, task, front);
  if (front || was_empty) moved(job, line);
}

void FairQueue::link(Line& line, Task& task, bool front) {
  task.waits_in = this;
  ++count_;
  task.before = front ? nullptr : line.last;
  task.behind = front ? line.first : nullptr;
  (task.before ? task.before->behind : line.first) = &task;
  (task.behind ? task.behind->before : line.last) = &task;
}

void FairQueue::unlink(Line& line, Task& task) {
  (task.before ? task.before->behind : line.first) = task.behind;
  (task.behind ? task.behind->before : line.last) = task.before;
  task.before = task.behind = nullptr;
  task.waits_in = nullptr;
  --count_;
}

bool FairQueue::remove(Task& task) {
  if (task.waits_in != this) return false;
  const uint64_t job = share_of(task);
  Line& line = lines_.at(job);
  unlink(line, task);
  moved(job, line);
  return true;
}

Task* FairQueue::peek() {
  while (!heap_.empty()) {
    const Position& top = heap_.front();
    const auto found = lines_.find(top.job);
    if (found != lines_.end() && found->second.first) {
      const Line& line = found->second;
      if (line.held == top.held && line.first->sequence == top.sequence) return line.first;
    }
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    heap_.pop_back();
  }
  return nullptr;
}

Task* FairQueue::take() {
  Task* const task = peek();
  if (task == nullptr) return nullptr;
  const uint64_t job = share_of(*task);
  Line& line = lines_.at(job);
  unlink(line, *task);
  ++line.held;
  ++held_;
  moved(job, line);
  return task;
}

void FairQueue::give_back(Task& task) {
  if (mutant("room_at_a_target_is_not_released")) return;
  const uint64_t job = share_of(task);
  Line& line = lines_.at(job);
  require(line.held > 0, "a place is given back twice");
  --line.held;
  --held_;
  moved(job, line);
}

std::vector<Task*> FairQueue::take_all() {
  std::vector<Task*> all;
  for (auto& [job, line] : lines_)
    while (line.first) {
      all.push_back(line.first);
      unlink(line, *line.first);
    }
  std::erase_if(lines_, [](const auto& item) { return item.second.held == 0; });
  heap_.clear();
  std::ranges::sort(all, {}, &Task::sequence);
  return all;
}

std::vector<Task*> FairQueue::take_past(int64_t now_ns, int64_t& next_ns) {
  std::vector<Task*> past;
  for (const auto& [job, line] : lines_)
    for (Task* task = line.first; task && task->deadline_ns; task = task->behind) {
      if (task->deadline_ns <= now_ns)
        past.push_back(task);
      else
        next_ns = std::min(next_ns, task->deadline_ns);
    }
  std::ranges::sort(past, {}, &Task::sequence);
  for (Task* task : past) remove(*task);
  return past;
}

// Push the job's current position onto the heap; forget a job with neither tasks nor places.
void FairQueue::moved(uint64_t job, Line& line) {
  if (line.first) {
    heap_.push_back({line.held, line.first->sequence, job});
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  } else if (line.held == 0) {
    lines_.erase(job);
  }
  if (heap_.size() <= 2 * lines_.size() + kOutdatedMax) return;
  heap_.clear();
  for (const auto& [number, one] : lines_)
    if (one.first) heap_.push_back({one.held, one.first->sequence, number});
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
}

}  // namespace nvmeof
