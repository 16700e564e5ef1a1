// SPDX-License-Identifier: Apache-2.0
// Reads and writes of one target's slabs by io_uring (`uring.h`) or by threads (`thread_ring.h`).
// They are submitted in batches and complete in any order.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace nvmeof {

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
  // Abandon an operation. It still completes, once the kernel has finished with it.
  virtual void abandon(void* /*tag*/) {}
  // Request one completion, with a null tag, for when `wake_fd` becomes readable.
  virtual void arm(int wake_fd) = 0;
  // Submit the prepared operations; if `wait`, wait for one completion. Returns -errno on error.
  virtual int enter(bool wait) = 0;
  // Like `enter(true)`, but wait for at most `limit`. Returns -ETIME on timeout.
  virtual int enter_for(std::chrono::nanoseconds limit) = 0;
  // Call `each(tag, result)` for each available completion. result: the bytes moved, or -errno.
  virtual void reap(const std::function<void(void*, int)>& each) = 0;
};

}  // namespace nvmeof
