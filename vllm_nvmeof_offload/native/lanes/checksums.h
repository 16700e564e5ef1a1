// SPDX-License-Identifier: Apache-2.0
// A thread that computes the checksums of payloads ahead of their writes, so that a device that has
// completed all its writes does not wait for checksums before it gets more.
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
  // `completions` is also signalled when there is something to `take`. cpus: see `EngineSetup`.
  Checksums(std::shared_ptr<CompletionQueue> completions, std::vector<int> cpus);
  ~Checksums() { stop(); }

  // The payload must not change before `take` has returned its CRC or `forget` has returned.
  void add(uint64_t number, const std::byte* payload, size_t bytes);
  // Drop a payload. If its checksum is being computed, wait: less than a millisecond per 8 MiB.
  void forget(uint64_t number);
  // Append the checksums computed since the last call, in the order of `add`.
  void take(std::vector<Summed>& summed);
  // End the thread and drop the payloads that are still queued.
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
