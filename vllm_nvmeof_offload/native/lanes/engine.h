// SPDX-License-Identifier: Apache-2.0
// The I/O core: one ring per target, with completions signalled by an eventfd. It does not use
// Python, which is left to `bindings/` and `io/engine.py`.
#pragma once

#include <memory>
#include <vector>

#include "lanes/checksums.h"
#include "lanes/target_ring.h"

namespace nvmeof {

// The engine for all targets. A single thread makes all calls.
class Engine : public NativeLanes {
 public:
  // Throws RingError, or std::system_error if no eventfd can be created.
  explicit Engine(const EngineSetup& setup);
  ~Engine() override { close({}); }

  LaneRoom room() const override;
  void kick();
  // Cancel an operation: see `NativeLanes::cancel_one`.
  bool cancel(uint64_t token);
  // Use these files for later operations. Earlier operations keep using the previous files, which
  // must stay open until those operations have ended.
  void replace_target(size_t index, Target target);
  // Allow reads of another engine's region on one of our targets; see `TargetRing::attach`.
  void attach(uint16_t owner, size_t target, const ForeignSlab& files);
  void detach(uint16_t owner, size_t target);
  // Append a record to the target's log.
  void note(size_t target, const LogRecord& record) { targets_.at(target)->note(record); }
  // Return the completions since the last call.
  std::vector<LaneEnd> poll() { return completions_->take(); }
  int fd() const { return completions_->fd(); }
  // The interface used by the worker's machine:
  void take(const LaneOp& op) override;
  void start() override { kick(); }
  bool cancel_one(uint64_t token) override { return cancel(token); }
  bool sum(uint64_t number, uint64_t address, size_t bytes) override;
  void forget(uint64_t number) override { checksums_.forget(number); }
  void summed(std::vector<Summed>& sums) override { checksums_.take(sums); }
  void ended(std::vector<LaneEnd>& ends) override { ends = poll(); }
  void landed(std::vector<uint64_t>& tokens) override { tokens = completions_->take_landed(); }
  // Cancel operations that have not started and wait for the others. Returns false if the kernel
  // still has some after `timeout`: threads, descriptors and memory must then be kept.
  bool close(std::chrono::nanoseconds timeout);

 private:
  const size_t operations_max_;
  std::shared_ptr<CompletionQueue> completions_;
  Checksums checksums_;
  std::vector<std::shared_ptr<TargetRing>> targets_;
};

}  // namespace nvmeof
