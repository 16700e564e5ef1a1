// SPDX-License-Identifier: Apache-2.0
// The queues in front of one target: order by urgency, and bounds on operations and bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/op.h"
#include "machine/task.h"

namespace nvmeof {

struct IoOptions;

// A task counts against the bounds from its hand-over until its outcome, or until the device has
// completed it if that is earlier.
class TargetQueue {
 public:
  explicit TargetQueue(const IoOptions& options) : options_(options) { writes_at(0); }

  FairQueue& queue(Urgency urgency) { return queues_[static_cast<size_t>(urgency)]; }
  // Return whether one more task of this urgency and size may start. Fetches may use at most half
  // of the room for reads, and reads for peers at most `serve_share`, so that loads find room.
  bool has_room(Urgency urgency, size_t bytes, int64_t now_ns) const;
  void take(Urgency urgency, size_t bytes, int64_t now_ns);
  void give_back(Task& task, Urgency urgency, size_t bytes, int64_t now_ns);
  size_t waiting(bool is_write) const;
  size_t read_bytes_held() const;
  // Adapt the bound on writes to the target's write rate: bytes per second, or 0 if unknown. A fast
  // device needs more queued bytes to stay busy, but takes no longer to write them.
  void writes_at(double rate);
  void progressed(bool is_write) { stalled_since_ns_[is_write].reset(); }
  // Remove all waiting tasks of this kind if the engine has accepted none for `patience_ns`. Until
  // it accepts one, each new task is offered once and then fails too, so that loads fail as a
  // whole.
  std::vector<Task*> take_stalled(int64_t now_ns, int64_t patience_ns, bool is_write);
  // Return when `take_stalled` may next return tasks, or INT64_MAX for never.
  int64_t stalls_at_ns(int64_t patience_ns, bool is_write) const;

 private:
  bool has_serve_room(size_t bytes, int64_t now_ns) const;
  bool has_loaded(int64_t now_ns) const;
  size_t held(Urgency urgency) const { return queues_[static_cast<size_t>(urgency)].held(); }
  size_t bytes_held(Urgency urgency) const { return bytes_held_[static_cast<size_t>(urgency)]; }

  const IoOptions& options_;
  size_t write_bytes_max_;            // derived from the last known rate
  std::optional<int64_t> loaded_ns_;  // the time when a load's read last began or ended here
  std::array<size_t, kUrgencies> bytes_held_{};
  std::array<FairQueue, kUrgencies> queues_{
      FairQueue(FairQueue::Share::CHARGED), FairQueue(FairQueue::Share::NONE),
      FairQueue(FairQueue::Share::NONE), FairQueue(FairQueue::Share::NONE),
      FairQueue(FairQueue::Share::NONE)};
  // By is_write: the time when tasks of this kind began to wait, if the engine has accepted none
  // since.
  std::array<std::optional<int64_t>, 2> stalled_since_ns_;
};

}  // namespace nvmeof
