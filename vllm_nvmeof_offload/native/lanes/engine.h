// SPDX-License-Identifier: Apache-2.0
// The I/O core: one ring per target, completions behind an eventfd. It knows no Python;
// `bindings.cpp` and `io/native.py` do.
#pragma once

#include <memory>
#include <vector>

#include "lanes/checksums.h"
#include "lanes/target_ring.h"

namespace nvmeof {

// One caller thread.
class Engine : public NativeLanes {
 public:
  // Throws RingError, or std::system_error if no eventfd can be created.
  explicit Engine(const EngineSetup& setup);
  ~Engine() override { close({}); }

  LaneRoom room() const override;
  void kick();
  // True: it had not started and is gone. False: it runs on, without a table entry.
  bool cancel(uint64_t token);
  // Use these files for what is submitted from now on. Earlier operations keep the files of their
  // submission, which must stay open until they have ended.
  void replace_target(size_t index, Target target);
  // Read another engine's region on a target of ours; see `TargetRing::attach`.
  void attach(uint16_t owner, size_t target, const ForeignSlab& files);
  void detach(uint16_t owner, size_t target);
  // Append a record to the target's log.
  void note(size_t target, const LogRecord& record) { targets_.at(target)->note(record); }
  // Completions since the last call.
  std::vector<LaneEnd> poll() { return completions_->take(); }
  int fd() const { return completions_->fd(); }
  // As lanes of the worker's machine.
  void take(const LaneOp& op) override;
  void start() override { kick(); }
  bool cancel_one(uint64_t token) override { return cancel(token); }
  bool sum(uint64_t number, uint64_t address, size_t bytes) override;
  void forget(uint64_t number) override { checksums_.forget(number); }
  void summed(std::vector<Summed>& sums) override { checksums_.take(sums); }
  void ended(std::vector<LaneEnd>& ends) override { ends = poll(); }
  void landed(std::vector<uint64_t>& tokens) override { tokens = completions_->take_landed(); }
  // Cancel what has not started and wait for the rest. False: the kernel still has some of it;
  // then threads, descriptors and memory must stay.
  bool close(std::chrono::nanoseconds timeout);

 private:
  const size_t operations_max_;
  std::shared_ptr<CompletionQueue> completions_;
  Checksums checksums_;
  std::vector<std::shared_ptr<TargetRing>> targets_;
};

}  // namespace nvmeof
