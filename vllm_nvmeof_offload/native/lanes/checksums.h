// SPDX-License-Identifier: Apache-2.0
// A thread that computes payload checksums ahead of writes, so that a device that has finished its
// writes does not wait for checksums before it gets more.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lanes/lanes.h"
#include "lanes/types.h"

namespace nvmeof {

class Checksums {
 public:
  // `completions` is also signalled when checksums can be taken. cpus: see `EngineSetup`.
  Checksums(std::shared_ptr<CompletionQueue> completions, std::vector<int> cpus);
  ~Checksums() { stop(); }

  // Queue a payload, which must not change until `take` returns its CRC or `forget` returns.
  void add(uint64_t number, const std::byte* payload, size_t bytes);
  // Drop a payload. Waits if its checksum is being computed: less than 1 ms per 8 MiB.
  void forget(uint64_t number);
  // Append the checksums computed since the last call, in the order of `add`.
  void take(std::vector<Summed>& summed);
  // Stop the thread and drop all queued payloads.
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

}  // namespace nvmeof
