// SPDX-License-Identifier: Apache-2.0
#include "machine/gates.h"

#include <algorithm>

namespace nvmeof {

void SlotGates::count_reader(int32_t slot, int change) {
  readers_[slot] += static_cast<uint32_t>(change);
  readers_in_all_ += static_cast<size_t>(change);
}

void SlotGates::ask(Task& task, Grants& grants) {
  const int32_t slot = task.cache;
  require(slot >= 0 && static_cast<size_t>(slot) < held_.size(), "a cache slot is out of range");
  if (task.fills) given_[slot] = task.content;
  require(given_[slot] == task.content, "a slot is read, but no such fill was queued");
  const auto found = gates_.find(slot);
  if (found == gates_.end() && !task.fills) {  // the usual load: nothing fills the slot
    const bool stale = held_[slot] != task.content && !mutant("gates_accept_stale");
    if (!stale) count_reader(slot, 1);
    task.payload_crc = stale ? -1 : crcs_[slot];
    grants.push_back({&task, stale});
    return;
  }
  Gate& gate = found == gates_.end() ? gates_[slot] : found->second;
  gate.queue.push_back(&task);
  grant(slot, gate, grants);
}

std::vector<Task*> SlotGates::fillers(int32_t slot) const {
  std::vector<Task*> fillers;
  const auto found = gates_.find(slot);
  if (found == gates_.end()) return fillers;
  if (found->second.filler) fillers.push_back(found->second.filler);
  for (Task* task : found->second.queue)
    if (task->fills) fillers.push_back(task);
  return fillers;
}

bool SlotGates::withdraw(Task& task, Grants& grants) {
  const auto found = gates_.find(task.cache);
  if (found == gates_.end()) return false;
  auto& queue = found->second.queue;
  const auto at = std::find(queue.begin(), queue.end(), &task);
  if (at == queue.end()) return false;
  queue.erase(at);
  grant(task.cache, found->second, grants);
  return true;
}

bool SlotGates::awaited(int32_t slot) const {
  const auto found = gates_.find(slot);
  if (found == gates_.end()) return false;
  const Gate& gate = found->second;
  return std::any_of(gate.queue.begin(), gate.queue.end(), [&](const Task* task) {
    return !task->fills && task->content == gate.filling;
  });
}

void SlotGates::filled(int32_t slot, bool ok, Grants& grants, int64_t crc) {
  Gate& gate = gates_.at(slot);
  require(gate.filler != nullptr, "a fill ends before it begins");
  const bool holds = ok && !gate.abandoned;
  held_[slot] = holds ? gate.filling : SlotContent{};
  crcs_[slot] = holds ? crc : -1;
  gate.filler = nullptr;
  gate.abandoned = false;
  grant(slot, gate, grants);
}

void SlotGates::abandon(int32_t slot, Grants& grants) {
  if (mutant("hung_fill_blocks_its_readers")) return;
  Gate& gate = gates_.at(slot);
  require(gate.filler != nullptr, "a fill that has not begun is abandoned");
  gate.abandoned = true;
  grant(slot, gate, grants);
}

void SlotGates::filled_and_read(int32_t slot, Grants& grants) {
  count_reader(slot, 1);
  filled(slot, true, grants);
}

void SlotGates::read(int32_t slot, Grants& grants) {
  require(readers_[slot] > 0, "a read ends twice");
  count_reader(slot, -1);
  const auto found = gates_.find(slot);
  if (found != gates_.end()) grant(slot, found->second, grants);
}

// Grant all tasks that may run now. Erase the gate if nothing fills the slot and no task waits.
void SlotGates::grant(int32_t slot, Gate& gate, Grants& grants) {
  const bool any_order = mutant("gates_ignore_order");
  size_t granted = 0;
  for (; granted < gate.queue.size(); ++granted) {
    Task& task = *gate.queue[granted];
    if (!any_order) {
      if (gate.filler && !gate.abandoned) break;
      if (task.fills && (gate.filler || readers_[slot])) break;
    }
    bool stale = false;
    if (task.fills) {
      held_[slot] = {};
      crcs_[slot] = -1;
      gate.filling = task.content;
      gate.filler = &task;
    } else {
      stale = held_[slot] != task.content && !any_order && !mutant("gates_accept_stale");
      if (!stale) count_reader(slot, 1);
      task.payload_crc = stale ? -1 : crcs_[slot];
    }
    grants.push_back({&task, stale});
  }
  gate.queue.erase(gate.queue.begin(), gate.queue.begin() + static_cast<ptrdiff_t>(granted));
  if (!gate.filler && gate.queue.empty()) gates_.erase(slot);
}

}  // namespace nvmeof
