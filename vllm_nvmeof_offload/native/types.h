// SPDX-License-Identifier: Apache-2.0
// The core's requests and completions, which mirror the contract in `io/base.py`; the queue on
// which completions reach the caller; the on-disk form of a slot; the gate of the contract tests.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <system_error>
#include <unordered_set>
#include <utility>
#include <vector>

namespace nvmeof {

inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kHeaderBytes = kPageBytes;
inline constexpr size_t kKeyBytesMax = 46;
inline constexpr size_t kEntryBytes = 64;
inline constexpr size_t kUuidBytes = 16;
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC

inline int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

inline int make_eventfd(int flags) {
  const int fd = eventfd(0, EFD_CLOEXEC | flags);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  return fd;
}

// `protocol.Urgency`: the most urgent first. All but kWrite are reads.
enum class Urgency : uint8_t { kDemand, kUrgent, kPrefetch, kWrite };
inline constexpr size_t kUrgencies = 4;

enum class Code : uint8_t {
  kOk,
  kIoError,
  kChecksumMismatch,
  kStale,
  kDeadline,
  kCancelled,
  kReleased,  // no outcome: the late release of an operation whose outcome came before
};

struct Completion {
  uint64_t token;
  Code code;
  int error;  // where code is kIoError: errno, positive; 0: no bytes were moved, and no errno given
  bool released;
  int64_t ended_ns = 0;  // CLOCK_MONOTONIC; set where it is queued for the caller
};

struct Identity {
  std::array<uint8_t, kKeyBytesMax> key{};
  uint8_t key_bytes = 0;
  uint64_t generation = 0;
};

// One rank's pool over all its targets.
struct PoolId {
  std::array<uint8_t, kUuidBytes> uuid{};
  uint16_t rank = 0;
};

// The pool and slot that a header names; see `pool/format.py`.
struct SlotPlace {
  PoolId pool;
  uint32_t pool_slot = 0;
};

// The epoch and flag that a write carries; see `pool/format.py`.
struct Stamp {
  uint32_t epoch = 0;
  bool adoptable = false;
};

struct Request {
  uint64_t token = 0;
  Urgency urgency = Urgency::kDemand;
  uint64_t pool_slot = 0;
  std::byte* address = nullptr;  // header page and payload, slot_bytes long
  Identity identity;
  int64_t deadline_ns = kNever;
  Stamp stamp;
  // 0: may start. Otherwise the write waits until this barrier, a reset, is lifted.
  uint64_t barrier = 0;

  bool is_read() const { return urgency != Urgency::kWrite; }
};

// Bounds of one target's ring; `io/base.py` has their defaults. `bytes_in_flight` counts what the
// kernel works on and is not overdue: a path that hangs must not stop the others. One piece of
// each kind may always run.
struct Limits {
  size_t slot_bytes = 0;
  size_t payload_bytes = 0;
  size_t split_bytes = 0;
  unsigned depth = 0;  // pieces in flight, reads and writes each
  size_t read_bytes_in_flight_max = 0;
  size_t write_bytes_in_flight_max = 0;
  size_t write_bytes_beside_reads_max = 0;
};

// Descriptors; -1: none, and what is submitted fails with EBADF.
struct Target {
  int slab_fd = -1;
  int table_fd = -1;
};

// All staging, for registration: the kernel then need not pin its pages at each operation.
struct Memory {
  std::byte* base = nullptr;
  size_t bytes = 0;
};

// The on-disk form of a pool slot and of its table entry; `pool/format.py` defines it,
// and a test compares the two implementations.

uint32_t crc32c(const void* data, size_t bytes);

// Fill the header page in front of a complete payload.
void seal(std::byte* slot, const Identity& identity, size_t payload_bytes, Stamp stamp,
          const SlotPlace& place);

// kOk, kStale (an intact header of another identity, length or place) or kChecksumMismatch.
Code verify(const std::byte* slot, const Identity& identity, size_t payload_bytes,
            const SlotPlace& place);

std::array<std::byte, kEntryBytes> encode_entry(uint64_t pool_slot, const Identity& identity,
                                                Stamp stamp);

// The CRC that table entry `entry` (64 bytes) of `pool_slot` must carry.
uint32_t entry_crc(const std::byte* entry, uint64_t pool_slot);

// Completions for the caller, and the eventfd that is readable while there are some.
class CompletionQueue {
 public:
  CompletionQueue() : fd_(make_eventfd(EFD_NONBLOCK)) {}
  ~CompletionQueue() { close(fd_); }

  int fd() const { return fd_; }
  void push(Completion completion) {
    completion.ended_ns = now_ns();
    std::lock_guard lock(mutex_);
    if (waiting_.empty()) eventfd_write(fd_, 1);
    waiting_.push_back(completion);
  }
  // Returns all of them, oldest first; the eventfd is readable again only for later ones.
  std::vector<Completion> take() {
    std::lock_guard lock(mutex_);
    eventfd_t ignored;
    eventfd_read(fd_, &ignored);  // even if nothing waits: others may have set it
    return std::exchange(waiting_, {});
  }

 private:
  int fd_;
  std::mutex mutex_;
  std::vector<Completion> waiting_;
};

// Only for the contract tests: operations on pool slots that are shut start, and then stay where a
// kernel that hangs would keep them. A server's engine has no gate.
class StartGate {
 public:
  void shut(const std::vector<uint64_t>& pool_slots) {
    std::lock_guard lock(mutex_);
    shut_ = {pool_slots.begin(), pool_slots.end()};
  }
  // Note the start of an operation.
  void started(uint64_t pool_slot) {
    std::lock_guard lock(mutex_);
    started_.push_back(pool_slot);
  }
  bool open(uint64_t pool_slot) {
    std::lock_guard lock(mutex_);
    return !shut_.contains(pool_slot);
  }
  std::vector<uint64_t> starts() {
    std::lock_guard lock(mutex_);
    return started_;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<uint64_t> shut_;
  std::vector<uint64_t> started_;
};

}  // namespace nvmeof
