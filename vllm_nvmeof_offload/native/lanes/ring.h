// SPDX-License-Identifier: Apache-2.0
// Reads and writes of one target's slabs, submitted in batches and completed in any order: by
// io_uring (`uring.h`) or by threads (`thread_ring.h`).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace nvmeof {

// Any thread may construct it; the thread that calls `enable` makes all other calls.
class Ring {
 public:
  Ring() = default;
  virtual ~Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Throws RingError where the kernel gives a ring and then forbids its use.
  virtual void enable() {}
  // Most of what is prepared from now on is of this slab.
  virtual void use(int /*slab_fd*/) {}
  // One read or write of a slab; `tag` comes back in its completion and is not null.
  virtual void prepare(bool read, int slab_fd, std::byte* at, size_t bytes, uint64_t offset,
                       void* tag) = 0;
  // Nobody waits for this any more. It completes as soon as the kernel does not have it.
  virtual void abandon(void* /*tag*/) {}
  // `wake_fd` becoming readable completes with a null tag, once.
  virtual void arm(int wake_fd) = 0;
  // Hand over what is prepared; `wait`: for one completion. Returns a negative errno.
  virtual int enter(bool wait) = 0;
  // The same, but wait no longer than this; -ETIME then.
  virtual int enter_for(std::chrono::nanoseconds limit) = 0;
  // Call `each(tag, result)` for every completion that has arrived; result: as of a system call,
  // with -errno.
  virtual void reap(const std::function<void(void*, int)>& each) = 0;
};

}  // namespace nvmeof
