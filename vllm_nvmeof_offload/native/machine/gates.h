// SPDX-License-Identifier: Apache-2.0
// One gate per cache slot. Operations on one slot run in the order in which they were given.
//
// A fill (a store's copy, a read into the slot) excludes everything else; reads of the slot (a
// load's copy, a write to the pool) share it. A read names the content that it expects: on a slot
// that holds anything else it is STALE and touches nothing, because a CRC made from such a slot
// would sign wrong bytes. Every call appends the grants that follow from it, in order.
#pragma once

#include <unordered_map>
#include <vector>

#include "machine/task.h"

namespace nvmeof {

// This task may use its slot; `stale`: the slot does not hold what the task expects.
struct Grant {
  Task* task;
  bool stale;
};
using Grants = std::vector<Grant>;

class SlotGates {
 public:
  explicit SlotGates(size_t slots)
      : held_(slots), given_(slots), crcs_(slots, -1), readers_(slots) {}

  // Queue `task`, which fills the slot if `task.fills`. A stale grant holds nothing and is not
  // given back. A read must name what the last fill before it was to bring: the caller never names
  // a slot before its fill.
  void ask(Task& task, Grants& grants);
  // Tasks that fill the slot now or will before the next that asks, in order.
  std::vector<Task*> fillers(int32_t slot) const;
  // False: it is not waiting there (any more).
  bool withdraw(Task& task, Grants& grants);
  // Whether a task waits to read what is being filled in.
  bool awaited(int32_t slot) const;
  // End the fill, whose buffer is released; a failed one leaves the slot empty. crc: of the
  // payload, if the fill made one; the readers of what the slot holds get it (`Task::payload_crc`).
  void filled(int32_t slot, bool ok, Grants& grants, int64_t crc = -1);
  // Give up a failed fill whose buffer the kernel holds, perhaps for ever. Its readers become stale
  // at once; `filled` still has to follow.
  void abandon(int32_t slot, Grants& grants);
  // End the fill; its task goes on as a reader.
  void filled_and_read(int32_t slot, Grants& grants);
  // End one read, whose buffer is released.
  void read(int32_t slot, Grants& grants);
  bool idle() const { return gates_.empty() && readers_in_all_ == 0; }

 private:
  // A slot that is being filled, or for which tasks wait.
  struct Gate {
    Task* filler = nullptr;
    SlotContent filling;
    bool abandoned = false;  // the fill has failed, and its buffer is not released yet
    std::vector<Task*> queue;
  };

  void grant(int32_t slot, Gate& gate, Grants& grants);
  void count_reader(int32_t slot, int change);

  // By slot. An empty slot has generation and hash 0, which no chunk has.
  std::vector<SlotContent> held_;
  std::vector<SlotContent> given_;  // of the last fill that asked
  std::vector<int64_t> crcs_;
  std::vector<uint32_t> readers_;
  size_t readers_in_all_ = 0;
  std::unordered_map<int32_t, Gate> gates_;
};

}  // namespace nvmeof
