// SPDX-License-Identifier: Apache-2.0
// An io_uring with registered files and buffers.
#pragma once

#include <liburing.h>

#include "lanes/ring.h"
#include "lanes/types.h"

namespace nvmeof {

// A kernel error during set-up. step: a literal such as "io_uring_queue_init".
struct RingError : std::system_error {
  RingError(int number, const char* refused)
      : std::system_error(number, std::generic_category(), refused), step(refused) {}
  const char* step;
};

class Uring final : public Ring {
 public:
  // share_with: the descriptor of a ring, not enabled yet, whose registered memory this ring
  // shares, so that the same pages are pinned and charged only once; or -1. Throws RingError.
  Uring(unsigned depth, Memory memory, int slab_fd, size_t slot_bytes, bool registered,
        int share_with = -1);
  ~Uring() override;

  int fd() const { return ring_.ring_fd; }
  void enable() override;
  // Register this slab instead of the previous one, which the kernel releases once unused. Any slab
  // can be read and written, but the registered one is the cheapest.
  void use(int slab_fd) override;
  void prepare(bool read, int slab_fd, std::byte* at, size_t bytes, uint64_t offset,
               void* tag) override;
  void arm(int wake_fd) override;
  int enter(bool wait) override;
  int enter_for(std::chrono::nanoseconds limit) override;
  void reap(const std::function<void(void*, int)>& each) override;

 private:
  void init(unsigned entries, bool disabled);
  void register_memory(int share_with);
  io_uring_sqe* next_sqe();
  int region_of(const std::byte* at, size_t bytes) const;

  io_uring ring_{};
  Memory memory_;
  int slab_fd_;          // the registered slab, if any
  size_t region_bytes_;  // registered pieces end on slot boundaries; 0 if none are
  bool files_registered_ = false;
  bool enabled_ = false;
  uint64_t wake_buffer_ = 0;
};

}  // namespace nvmeof
