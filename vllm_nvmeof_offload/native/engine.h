// SPDX-License-Identifier: Apache-2.0
// The I/O core: one ring a target, a timer for deadlines, completions behind an eventfd.
// `io/uring.py` is its face to Python; nothing in here knows Python.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "target_ring.h"

namespace nvmeof {

struct EngineSetup {
  std::vector<Target> targets;
  PoolId pool;
  Limits limits;
  Memory memory;
  bool registered = true;
  size_t queue_max = 4096;
  std::vector<int> cpus;  // where threads may run; empty: where the caller may
  std::shared_ptr<StartGate> gate;
};

// One caller thread. Times are nanoseconds on CLOCK_MONOTONIC.
class Engine {
 public:
  // Throws RingError, or std::system_error where not even an eventfd is to be had.
  explicit Engine(const EngineSetup& setup);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // False: as much as may wait is waiting. Nothing starts before `kick`.
  bool submit(const Request& request);
  void kick();
  void cancel(uint64_t token);
  // What is submitted from now on goes to these files; what was submitted before stays with those
  // of its time, which must be open until it is released.
  void replace_target(size_t index, Target target);
  void lift(uint64_t barrier, Stamp stamp);
  // What has happened since the last call, what is past its deadline at `now_ns` included.
  std::vector<Completion> poll(int64_t now_ns);
  int fd() const { return completions_->fd(); }
  // Cancel what has not started and wait for the rest. False: the kernel still has some of it,
  // and threads, descriptors and memory must be left to it.
  bool close(std::chrono::nanoseconds timeout);
  std::vector<Figures> figures() const;

 private:
  struct Timer;

  const size_t queue_max_;
  std::shared_ptr<CompletionQueue> completions_;
  std::vector<std::shared_ptr<TargetRing>> targets_;
  std::shared_ptr<Timer> timer_;
  std::thread timer_thread_;
};

}  // namespace nvmeof
