// SPDX-License-Identifier: Apache-2.0
// The gates of the cache slots. Operations on one slot run in the order in which they were queued.
// A fill (a store's copy, or a read into the slot) is exclusive; reads of the slot (a load's copy,
// or a write to the pool) share it. A read states the content that it expects. If the slot holds
// anything else, the read is STALE and does not access the slot: a write, for example, would store
// wrong bytes with a valid CRC. Calls that take `grants` append the resulting grants, in order.
#pragma once

#include <unordered_map>
#include <vector>

#include "machine/task.h"

namespace nvmeof {

// stale: the slot does not hold the content that the task expects, so the task must not use it.
struct Grant {
  Task* task;
  bool stale;
};
using Grants = std::vector<Grant>;

class SlotGates {
 public:
  explicit SlotGates(size_t slots)
      : held_(slots), given_(slots), crcs_(slots, -1), readers_(slots) {}

  // Queue a task, which fills the slot if `task.fills` and reads it otherwise. A read must expect
  // the content of the last fill queued before it. After a stale grant, do not call `read`.
  void ask(Task& task, Grants& grants);
  std::vector<Task*> fillers(int32_t slot) const;
  bool withdraw(Task& task, Grants& grants);
  // Return whether a task is waiting to read the content of the fill in progress.
  bool awaited(int32_t slot) const;
  // End the fill and release its buffer. A failed fill leaves the slot empty. crc: the payload's
  // CRC if the fill computed it, or -1. Later readers get it as `Task::payload_crc`.
  void filled(int32_t slot, bool ok, Grants& grants, int64_t crc = -1);
  // Give up a failed fill whose buffer the kernel still holds. Its readers become stale; `filled`
  // must follow.
  void abandon(int32_t slot, Grants& grants);
  void filled_and_read(int32_t slot, Grants& grants);
  void read(int32_t slot, Grants& grants);
  bool idle() const { return gates_.empty() && readers_in_all_ == 0; }

 private:
  // A slot that is being filled, or for which tasks are waiting.
  struct Gate {
    Task* filler = nullptr;
    SlotContent filling;
    bool abandoned = false;  // the fill failed, but its buffer is not released yet
    std::vector<Task*> queue;
  };

  void grant(int32_t slot, Gate& gate, Grants& grants);
  void count_reader(int32_t slot, int change);

  // The content of each slot. An empty slot's hash and generation are 0, unlike any chunk's.
  std::vector<SlotContent> held_;
  std::vector<SlotContent> given_;  // the content of the last fill queued, by slot
  std::vector<int64_t> crcs_;
  std::vector<uint32_t> readers_;
  size_t readers_in_all_ = 0;
  std::unordered_map<int32_t, Gate> gates_;
};

}  // namespace nvmeof
