// SPDX-License-Identifier: Apache-2.0
// The I/O core: one ring per target, a timer for deadlines, completions behind an eventfd. It knows
// no Python; `bindings.cpp` and `io/uring.py` do.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "target_ring.h"

namespace nvmeof {

// One caller thread. Times are nanoseconds on CLOCK_MONOTONIC.
class Engine : public NativeLanes {
 public:
  // Throws RingError, or std::system_error if no eventfd can be created.
  explicit Engine(const EngineSetup& setup);
  ~Engine() override;

  // False: the queue is full. Nothing starts before `kick`.
  bool submit(const Request& request);
  void kick();
  void cancel(uint64_t token);
  // Use these files for what is submitted from now on. Earlier operations keep the files of their
  // submission, which must stay open until they are released.
  void replace_target(size_t index, Target target);
  void lift(uint64_t barrier, Stamp stamp);
  // Completions since the last call, including what is past its deadline at `now_ns`.
  std::vector<Completion> poll(int64_t now_ns);
  int fd() const { return completions_->fd(); }
  // As lanes of the worker's machine.
  bool take(const LaneOp& op) override;
  void start() override { kick(); }
  void cancel_one(uint64_t token) override { cancel(token); }
  void ended(int64_t now_ns, std::vector<LaneEnd>& ends) override;
  // Cancel what has not started and wait for the rest. False: the kernel still has some of it;
  // then threads, descriptors and memory must stay.
  bool close(std::chrono::nanoseconds timeout);

 private:
  struct Timer;

  const size_t queue_max_;
  std::shared_ptr<CompletionQueue> completions_;
  std::vector<std::shared_ptr<TargetRing>> targets_;
  std::shared_ptr<Timer> timer_;
  std::thread timer_thread_;
};

}  // namespace nvmeof
