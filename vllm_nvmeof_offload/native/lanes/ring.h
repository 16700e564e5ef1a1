// SPDX-License-Identifier: Apache-2.0
// Reads and writes of one target's slabs, submitted in batches and completed in any order, by
// io_uring (`uring.h`) or by threads (`thread_ring.h`).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace nvmeof {

// A ring. Any thread may construct it; the thread that calls `enable` makes all other calls.
class Ring {
 public:
  Ring() = default;
  virtual ~Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Throws RingError if the kernel created the ring but forbids its use.
  virtual void enable() {}
  // Optimize for this slab: most operations prepared from now on use it.
  virtual void use(int /*slab_fd*/) {}
  // Prepare a read or write of a slab. Its completion returns `tag`, which must not be null.
  virtual void prepare(bool read, int slab_fd, std::byte* at, size_t bytes, uint64_t offset,
                       void* tag) = 0;
  // Give up an operation. It still completes, as soon as the kernel has finished with it.
  virtual void abandon(void* /*tag*/) {}
  // Complete once, with a null tag, when `wake_fd` becomes readable.
  virtual void arm(int wake_fd) = 0;
  // Submit what is prepared; if `wait`, await one completion. On error returns a negative errno.
  virtual int enter(bool wait) = 0;
  // As `enter(true)`, but wait at most `limit`; return -ETIME if it has passed.
  virtual int enter_for(std::chrono::nanoseconds limit) = 0;
  // Call `each(tag, result)` for every completion that has arrived. result: the number of bytes, or
  // -errno.
  virtual void reap(const std::function<void(void*, int)>& each) = 0;
};

}  // namespace nvmeof
