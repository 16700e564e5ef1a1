// SPDX-License-Identifier: Apache-2.0
// Rings: reads and writes of one target's slabs, submitted in batches and completed in any order,
// by io_uring (`uring.cpp`) or by threads (`thread_ring.cpp`).
#pragma once

#include <liburing.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "lanes/types.h"

namespace nvmeof {

inline constexpr std::chrono::nanoseconds kNoWait{0};
inline constexpr auto kForever = std::chrono::nanoseconds::max();

// Any thread may construct a ring; the thread that calls `enable` makes all other calls.
class Ring {
 public:
  Ring() = default;
  virtual ~Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Start using the ring. Throws RingError if the kernel created the ring but forbids its use.
  virtual void enable() {}
  // Optimize for this slab, which most later operations use.
  virtual void use(int /*slab_fd*/) {}
  // Prepare a read or write of a slab. Its completion returns `tag`, which must not be null.
  virtual void prepare(bool read, int slab_fd, std::byte* at, size_t bytes, uint64_t offset,
                       void* tag) = 0;
  // Abandon an operation. It still completes when the kernel has finished with it.
  virtual void abandon(void* /*tag*/) {}
  // Request a single completion, with a null tag, when `wake_fd` becomes readable.
  virtual void arm(int wake_fd) = 0;
  // Submit the prepared operations, and wait at most this long for a completion. Returns -errno on
  // error, or -ETIME on timeout.
  virtual int enter(std::chrono::nanoseconds limit) = 0;
  // Call `each(tag, result)` for each available completion. result: the bytes moved, or -errno.
  virtual void reap(const std::function<void(void*, int)>& each) = 0;
};

// A kernel error during set-up. step: a literal such as "io_uring_queue_init".
struct RingError : std::system_error {
  RingError(int number, const char* refused)
      : std::system_error(number, std::generic_category(), refused), step(refused) {}
  const char* step;
};

class Uring final : public Ring {
 public:
  // share_with: the descriptor of a ring that is not enabled yet and whose registered memory this
  // ring shares, so that pages are pinned and charged only once; or -1 for none. Throws RingError.
  Uring(unsigned depth, std::span<std::byte> memory, int slab_fd, size_t slot_bytes,
        bool registered, int share_with = -1);
  ~Uring() override;

  int fd() const { return ring_.ring_fd; }
  void enable() override;
  // Register this slab instead of the previous one, so that operations on it become cheaper.
  void use(int slab_fd) override;
  void prepare(bool read, int slab_fd, std::byte* at, size_t bytes, uint64_t offset,
               void* tag) override;
  void arm(int wake_fd) override;
  int enter(std::chrono::nanoseconds limit) override;
  void reap(const std::function<void(void*, int)>& each) override;

 private:
  void init(unsigned entries, bool disabled);
  void register_memory(int share_with);
  io_uring_sqe* next_sqe();
  int region_of(const std::byte* at, size_t bytes) const;

  io_uring ring_{};
  const std::span<std::byte> memory_;
  int slab_fd_;          // the registered slab, if any
  size_t region_bytes_;  // the size of registered pieces, a multiple of the slot size; 0 if none
  bool files_registered_ = false;
  bool enabled_ = false;
  uint64_t wake_buffer_ = 0;
};

// A ring for processes that may not use io_uring: `pread` and `pwrite` on a few threads. If an
// abandoned call hangs, a spare thread takes over. All threads start at construction, because the
// process might later be at its thread limit.
class ThreadRing final : public Ring {
 public:
  // threads: the maximum number of concurrent calls, at least 2; one is reserved for reads. Throws
  // std::system_error if no thread or descriptor can be created.
  ThreadRing(size_t threads, const std::vector<int>& cpus);
  // No call may still be in progress.
  ~ThreadRing() override;

  void prepare(bool read, int slab_fd, std::byte* at, size_t bytes, uint64_t offset,
               void* tag) override;
  void abandon(void* tag) override;
  void arm(int wake_fd) override { wake_fd_ = wake_fd; }
  int enter(std::chrono::nanoseconds limit) override;
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
  bool signalled_ = false;  // `done_fd_` has been set since `done_` was last taken
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace nvmeof
