// SPDX-License-Identifier: Apache-2.0
#include "lanes/ring.h"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace nvmeof {
namespace {

// The kernel's size limit for a registered buffer.
constexpr size_t kRegionBytesMax = size_t{1} << 30;

// New in Linux 6.12, and unknown to liburing 2.3.
constexpr unsigned kRegisterCloneBuffers = 30;
struct CloneBuffers {
  uint32_t source_fd, flags, source_offset, offset, count, pad[3];
};

}  // namespace

Uring::Uring(unsigned depth, std::span<std::byte> memory, int slab_fd, size_t slot_bytes,
             bool registered, int share_with)
    : memory_(memory), slab_fd_(slab_fd), region_bytes_(0) {
  unsigned entries = 16;
  // Room for reads, writes and the wake-up. Chunks with many pieces may make `next_sqe` submit.
  while (entries < 2 * depth + 8) entries *= 2;
  init(entries, true);
  try {
    const int rc = io_uring_register_files(&ring_, &slab_fd_, 1);
    files_registered_ = rc == 0;
    if (!registered) {
      if (files_registered_) return;
      // A kernel that cannot register anything cannot enable a disabled ring, either.
      io_uring_queue_exit(&ring_);
      init(entries, false);
      return;
    }
    if (rc < 0) throw RingError(-rc, "io_uring_register_files");
    if (slot_bytes > kRegionBytesMax) throw RingError(EFBIG, "io_uring_register_buffers");
    region_bytes_ = kRegionBytesMax / slot_bytes * slot_bytes;
    register_memory(share_with);
  } catch (...) {
    io_uring_queue_exit(&ring_);
    throw;
  }
}

Uring::~Uring() { io_uring_queue_exit(&ring_); }

void Uring::init(unsigned entries, bool disabled) {
  io_uring_params params{};
  // The ring stays disabled until its thread enables it, and then completes without interrupts.
  if (disabled)
    params.flags =
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED;
  int rc = io_uring_queue_init_params(entries, &ring_, &params);
  if (rc == -EINVAL && disabled) {  // before Linux 6.1
    params = {};
    params.flags = IORING_SETUP_R_DISABLED;
    rc = io_uring_queue_init_params(entries, &ring_, &params);
  }
  if (rc < 0) throw RingError(-rc, "io_uring_queue_init");
  enabled_ = !disabled;
}

void Uring::register_memory(int share_with) {
  std::vector<iovec> regions;
  for (size_t begin = 0; begin < memory_.size(); begin += region_bytes_)
    regions.push_back({&memory_[begin], std::min(region_bytes_, memory_.size() - begin)});
  if (share_with >= 0) {
    CloneBuffers clone{};
    clone.source_fd = static_cast<uint32_t>(share_with);
    if (syscall(__NR_io_uring_register, ring_.ring_fd, kRegisterCloneBuffers, &clone, 1) == 0)
      return;
  }
  const int rc =
      io_uring_register_buffers(&ring_, regions.data(), static_cast<unsigned>(regions.size()));
  if (rc < 0) throw RingError(-rc, "io_uring_register_buffers");
}

io_uring_sqe* Uring::next_sqe() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  while (sqe == nullptr) {
    io_uring_submit(&ring_);
    sqe = io_uring_get_sqe(&ring_);
  }
  return sqe;
}

int Uring::region_of(const std::byte* at, size_t bytes) const {
  if (region_bytes_ == 0) return -1;
  const auto begin = static_cast<size_t>(at - memory_.data());
  const size_t region = begin / region_bytes_;
  return (begin + bytes - 1) / region_bytes_ == region ? static_cast<int>(region) : -1;
}

void Uring::use(int slab_fd) {
  if (slab_fd == slab_fd_ || !files_registered_) return;
  // Prepared operations refer to the registered file by index: let the kernel resolve them first.
  enter(kNoWait);
  if (io_uring_sq_ready(&ring_) > 0) return;  // try again at the next call
  if (io_uring_register_files_update(&ring_, 0, &slab_fd, 1) == 1) slab_fd_ = slab_fd;
}

void Uring::prepare(bool read, int slab_fd, std::byte* at, size_t bytes, uint64_t offset,
                    void* tag) {
  io_uring_sqe* sqe = next_sqe();
  const bool fixed = files_registered_ && slab_fd == slab_fd_ && slab_fd >= 0;
  const int fd = fixed ? 0 : slab_fd;
  const int region = region_of(at, bytes);
  const auto length = static_cast<unsigned>(bytes);
  if (region < 0) {
    io_uring_prep_rw(read ? IORING_OP_READ : IORING_OP_WRITE, sqe, fd, at, length, offset);
  } else {
    const auto operation = read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
    io_uring_prep_rw(operation, sqe, fd, at, length, offset);
    sqe->buf_index = static_cast<uint16_t>(region);
  }
  if (fixed) sqe->flags |= IOSQE_FIXED_FILE;
  io_uring_sqe_set_data(sqe, tag);
}

void Uring::enable() {
  // liburing 2.3 declares io_uring_enable_rings but does not export it.
  if (!enabled_ &&
      syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0) != 0)
    throw RingError(errno, "io_uring_enable_rings");
  enabled_ = true;
  io_uring_sqe* sqe = next_sqe();
  io_uring_prep_nop(sqe);
  io_uring_sqe_set_data(sqe, nullptr);
  int rc;
  do rc = enter(kForever);
  while (rc == -EINTR);
  if (rc < 0) throw RingError(-rc, "io_uring_enter");
  reap([](void*, int) {});
}

void Uring::arm(int wake_fd) {
  io_uring_sqe* sqe = next_sqe();
  io_uring_prep_read(sqe, wake_fd, &wake_buffer_, sizeof wake_buffer_, 0);
  io_uring_sqe_set_data(sqe, nullptr);
}

int Uring::enter(std::chrono::nanoseconds limit) {
  if (limit == kNoWait) return io_uring_submit_and_get_events(&ring_);
  if (limit == kForever) return io_uring_submit_and_wait(&ring_, 1);
  __kernel_timespec most{0, limit.count()};
  io_uring_cqe* cqe = nullptr;
  return io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &most, nullptr);
}

void Uring::reap(const std::function<void(void*, int)>& each) {
  io_uring_cqe* cqe;
  unsigned head;
  unsigned count = 0;
  io_uring_for_each_cqe(&ring_, head, cqe) {
    ++count;
    if (cqe->user_data == LIBURING_UDATA_TIMEOUT) continue;  // from `enter`, before Linux 5.11
    each(io_uring_cqe_get_data(cqe), cqe->res);
  }
  io_uring_cq_advance(&ring_, count);
}

}  // namespace nvmeof
