// SPDX-License-Identifier: Apache-2.0
// The I/O core, without Python: one ring per target, and an eventfd that signals completions.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lanes/lanes.h"
#include "lanes/target_ring.h"
#include "lanes/types.h"

namespace nvmeof {

// A thread that computes checksums ahead of writes, so that no idle device waits for them.
class Checksums {
 public:
  // `completions` is also signalled when checksums can be taken. cpus: see `EngineSetup`.
  Checksums(std::shared_ptr<CompletionQueue> completions, std::vector<int> cpus);
  ~Checksums() { stop(); }

  // Queue a payload, which must not change until `take` returns its CRC or `forget` returns.
  void add(uint64_t number, const std::byte* payload, size_t bytes);
  // Drop a payload. If its checksum is being computed, wait for that: less than 1 ms per 8 MiB.
  void forget(uint64_t number);
  // Append the checksums computed since the last call, in the order of `add`.
  void take(std::vector<Summed>& summed);
  void stop();

 private:
  struct Payload {
    uint64_t number = 0;
    const std::byte* address = nullptr;
    size_t bytes = 0;
  };

  void run();

  const std::shared_ptr<CompletionQueue> completions_;
  const std::vector<int> cpus_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Payload> waiting_;
  uint64_t now_ = 0;  // number of the payload being summed, or 0
  std::vector<Summed> made_;
  bool stopping_ = false;
  std::thread thread_;  // declared last, because the thread uses the other members
};

// The engine for all targets. Not thread-safe: a single thread must make all calls.
class Engine : public NativeLanes {
 public:
  // Throws RingError, or std::system_error if no eventfd can be created.
  explicit Engine(const EngineSetup& setup);
  ~Engine() override { close({}); }

  LaneRoom room() const override;
  TargetRing& target(size_t index) { return *targets_.at(index); }
  std::vector<LaneEnd> poll() { return completions_->take(); }
  int fd() const { return completions_->fd(); }
  // -- NativeLanes
  void take(const LaneOp& op) override;
  void start() override;
  bool cancel_one(uint64_t token) override;
  bool sum(uint64_t number, uint64_t address, size_t bytes) override;
  void forget(uint64_t number) override { checksums_.forget(number); }
  void summed(std::vector<Summed>& sums) override { checksums_.take(sums); }
  void ended(std::vector<LaneEnd>& ends) override { ends = poll(); }
  void landed(std::vector<uint64_t>& tokens) override { tokens = completions_->take_landed(); }
  // Cancel operations that have not started and wait for the others. Returns false on timeout: the
  // threads, descriptors, and memory must then be kept.
  bool close(std::chrono::nanoseconds timeout);

 private:
  const size_t operations_max_;
  std::shared_ptr<CompletionQueue> completions_;
  Checksums checksums_;
  std::vector<std::shared_ptr<TargetRing>> targets_;
};

}  // namespace nvmeof
