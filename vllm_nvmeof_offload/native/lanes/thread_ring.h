// SPDX-License-Identifier: Apache-2.0
// A ring for processes that may not use io_uring: `pread` and `pwrite` on a few threads. An
// abandoned call that hangs counts as lost, and a spare thread takes over, so that other calls are
// not blocked. All threads start at construction, because the process might later be at its thread
// limit.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "lanes/ring.h"

namespace nvmeof {

class ThreadRing final : public Ring {
 public:
  // threads: the maximum number of concurrent calls, at least 2. One of them is reserved for reads,
  // and one write may always run. cpus: see `EngineSetup`. Throws std::system_error if no thread or
  // descriptor can be created.
  ThreadRing(size_t threads, const std::vector<int>& cpus);
  // No call may be running.
  ~ThreadRing() override;

  void prepare(bool read, int slab_fd, std::byte* at, size_t bytes, uint64_t offset,
               void* tag) override;
  void abandon(void* tag) override;
  void arm(int wake_fd) override { wake_fd_ = wake_fd; }
  int enter(bool wait) override;
  int enter_for(std::chrono::nanoseconds limit) override;
  void reap(const std::function<void(void*, int)>& each) override;

 private:
  struct Call {
    bool read = true;
    int slab_fd = -1;
    std::byte* at = nullptr;
    size_t bytes = 0;
    uint64_t offset = 0;
    void* tag = nullptr;
    bool lost = false;
  };
  void run();
  void stop();
  bool take(Call& call);
  void complete(void* tag, int result);
  int enter_until(const timespec* limit);

  const size_t threads_max_;
  const int done_fd_;
  int wake_fd_ = -1;    // -1 while not armed
  bool woken_ = false;  // `wake_fd_` was readable in the last `enter`
  std::vector<Call> prepared_;

  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<Call> reads_, writes_;  // not started
  std::vector<Call*> running_;       // the call of each busy thread
  std::vector<std::pair<void*, int>> done_;
  bool told_ = false;  // `done_fd_` has been set since `done_` was last taken
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace nvmeof
