// SPDX-License-Identifier: Apache-2.0
// A thread that makes the checksums of payloads ahead of their writes. A device that has ended all
// that it had must not wait for checksums before it gets more.
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
  // completions: readable, too, while there is something to `take`. cpus: as in `EngineSetup`.
  Checksums(std::shared_ptr<CompletionQueue> completions, std::vector<int> cpus);
  ~Checksums() { stop(); }

  // Nothing may change the payload before `take` has returned its CRC, or `forget` has returned.
  void add(uint64_t number, const std::byte* payload, size_t bytes);
  // Drop it. Waits for a checksum that is being made: less than a millisecond per 8 MiB.
  void forget(uint64_t number);
  // Append those that were made since the last call, in the order of `add`.
  void take(std::vector<Summed>& summed);
  // End the thread; what was added is dropped.
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
  uint64_t now_ = 0;  // the one that is being made; 0: none
  std::vector<Summed> made_;
  bool stopping_ = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace nvmeof
