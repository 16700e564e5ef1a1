// SPDX-License-Identifier: Apache-2.0
// What the I/O core is told and what it answers. Mirrors `io/base.py`, which is the contract.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <system_error>
#include <vector>

namespace nvmeof {

inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kHeaderBytes = kPageBytes;
inline constexpr size_t kKeyBytesMax = 46;
inline constexpr size_t kEntryBytes = 64;
inline constexpr size_t kUuidBytes = 16;
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

enum class Kind : uint8_t { kRead, kWrite };

// The most urgent first.
enum class Class : uint8_t { kReadDemand, kReadPrefetch, kWriteBehind };
inline constexpr size_t kClasses = 3;

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

// Where a slot belongs; see `pool/layout.py`.
struct SlotPlace {
  PoolId pool;
  uint32_t pool_slot = 0;
};

// What a write is marked with; see `pool/layout.py`.
struct Stamp {
  uint32_t epoch = 0;
  bool adoptable = false;
};

struct Request {
  uint64_t token = 0;
  Kind kind = Kind::kRead;
  Class io_class = Class::kReadDemand;
  uint64_t pool_slot = 0;
  std::byte* address = nullptr;  // header page and payload, slot_bytes long
  Identity identity;
  int64_t deadline_ns = kNever;
  Stamp stamp;
  // 0: may start. Else the write waits until this barrier, a reset, is lifted.
  uint64_t barrier = 0;
};

// Bounds of one target's ring. `bytes_in_flight` counts what the kernel works on and is not
// overdue: a path that hangs must not stop the others. One piece of a kind may always run.
struct Limits {
  size_t slot_bytes = 0;
  size_t payload_bytes = 0;
  size_t split_bytes = 1 << 20;
  unsigned depth = 64;  // pieces in flight, reads and writes each
  size_t read_bytes_in_flight_max = 64 << 20;
  size_t write_bytes_in_flight_max = 32 << 20;
  size_t write_bytes_beside_reads_max = 512 << 10;
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

struct Figures {
  uint64_t reads = 0, writes = 0;              // slots that ended with kOk
  uint64_t read_bytes = 0, written_bytes = 0;  // of those
  uint64_t short_transfers = 0;                // requeued remainders
  uint64_t enters = 0;                         // io_uring_enter calls
  uint64_t queued = 0, in_flight = 0;          // now: operations, pieces
};

}  // namespace nvmeof
