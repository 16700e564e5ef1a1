// SPDX-License-Identifier: Apache-2.0
// Types shared by rings: files, permits, and the queue that delivers completions to the caller;
// also the on-disk format of a slot, and the gate for the contract tests.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <optional>
#include <span>
#include <system_error>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lanes/lanes.h"
#include "lanes/log.h"

namespace nvmeof {

inline constexpr size_t kHeaderBytes = kPageBytes;
inline constexpr size_t kUuidBytes = 16;

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC

inline int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

// Return CLOCK_BOOTTIME, which includes suspended time. `pool/lease.py` also uses it for permits.
inline uint64_t boot_ns() {
  timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

inline int make_eventfd(int flags) {
  const int fd = eventfd(0, EFD_CLOEXEC | flags);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  return fd;
}

inline uint32_t group_id_of(const Identity& identity) {
  return group_id_of({reinterpret_cast<const char*>(identity.key.data()), identity.key_bytes});
}

// The part of a target that one rank writes.
struct Region {
  std::array<uint8_t, kUuidBytes> uuid{};
  uint16_t rank = 0;
  bool operator==(const Region&) const = default;
};

// The region and slot that a header names; see `pool/format.py`.
struct SlotPlace {
  Region region;
  uint32_t slot = 0;
  // Recorded but never compared: whether only this rank holds the chunk, and the chunk's client.
  bool single_copy = false;
  uint32_t client = 0;
};

// The limits of one target's ring; the defaults are in `io/base.py`.
struct Limits {
  size_t slot_bytes = 0;  // the distance between slots, in staging and in a slab
  size_t split_bytes = 0;
  unsigned depth = 0;                        // maximum number of reads in flight, and of writes
  size_t read_bytes_started_max = SIZE_MAX;  // started but not completed; one may always start
};

// The descriptors of a target. A descriptor of -1 is absent: operations on it fail with EBADF.
struct Target {
  int slab_fd = -1;
  int table_fd = -1;
  int log_fd = -1;
};

struct ForeignSlab {
  int fd = -1;  // as in `Target`
  Region region;
};

// The write permit of a region with a lease: the time, on the clock of `boot_ns`, until which
// writes may start. The lease's keeper advances it in shared memory, or sets it to 0 if the lease
// is lost.
class Permit {
 public:
  // word: null if the region has no lease and may be written at any time.
  explicit Permit(const uint64_t* word = nullptr) : word_(word) {}
  bool open() const { return word_ == nullptr || boot_ns() < until(); }
  bool lost() const { return word_ != nullptr && until() == 0; }
  // Return whether the region has a lease, so that other hosts may read it.
  bool leased() const { return word_ != nullptr; }

 private:
  uint64_t until() const { return __atomic_load_n(word_, __ATOMIC_ACQUIRE); }
  const uint64_t* word_;
};

// The on-disk format of a pool slot and of its table entry, as defined in `pool/format.py`.

uint32_t crc32c(const void* data, size_t bytes);

struct CrcVariant {
  const char* name;
  uint32_t (*crc)(const void*, size_t);
};
std::span<const CrcVariant> crc_variants();

// Make `crc32c` use the fastest variant for this machine, and return its name. memory: uncached
// memory, of which at most 16 MiB is read; this takes 1 to 2 ms.
const char* choose_crc(std::span<const std::byte> memory);

// Return a part's share of a message's CRC; the XOR of all shares is that CRC. crc: the part's own
// CRC. bytes_after: the bytes of the message after the part.
uint32_t crc_share(uint32_t crc, size_t bytes_after);

// Return the CRC of a message from its parts, in order. words: 32 words per part, whose XOR is the
// part's CRC without the inversions. sizes: the number of bytes in each part.
uint32_t join_crcs(const uint32_t* words, const uint64_t* sizes, size_t parts);

// Copy like `memcpy`, and extend `crc`, the CRC of the preceding bytes, while the copied bytes are
// still in the CPU cache.
uint32_t copy_crc32c(void* to, const void* from, size_t bytes, uint32_t crc);

// Like `copy_crc32c`, but compute the CRC from the bytes that arrived at `to`.
uint32_t copy_crc32c_at_target(void* to, const void* from, size_t bytes, uint32_t crc);

// Write the header page of a slot whose payload is complete and has this CRC. kind: a
// `groups.GroupKind`.
void seal(std::byte* slot, const Identity& identity, size_t payload_bytes, uint32_t payload_crc,
          const Stamp& stamp, const SlotPlace& place, uint8_t kind);

using Tag = std::array<uint8_t, kTagBytes>;

struct SlotHeader {
  Identity identity;
  SlotPlace place;
  size_t payload_bytes = 0;
  uint32_t payload_crc = 0;
  Stamp stamp;
};
// Return the header, or nothing if the page is not an intact header of this format.
std::optional<SlotHeader> parse_header(const std::byte* slot);

// The result of checking a header. code: OK, STALE (an intact header with a different identity,
// length, place or tag) or CHECKSUM_MISMATCH. payload_crc: the payload's CRC, if `code` is OK.
struct HeaderProof {
  Outcome code = Outcome::CHECKSUM_MISMATCH;
  uint32_t payload_crc = 0;
};
HeaderProof prove_header(const std::byte* slot, const Identity& identity, size_t payload_bytes,
                         const SlotPlace& place, const Tag& tag);

// Check a whole slot. Returns the code of its header, or CHECKSUM_MISMATCH if the payload is wrong
// or extends beyond the slot's `bytes`, which must include a header.
Outcome verify(const std::byte* slot, size_t bytes, const Identity& identity, size_t payload_bytes,
               const SlotPlace& place, const Tag& tag);

// Return the table entry of a slot. The CRC covers the slot's number in the region. If the key has
// more than `kClientAt` bytes, the client is not recorded.
inline constexpr size_t kClientAt = kKeyBytesMax - sizeof(uint32_t);
TableEntry encode_entry(const SlotPlace& place, const Identity& identity, uint32_t epoch);

LogRecord put_record(uint32_t slot, const Identity& identity, uint32_t epoch, bool single_copy);

// Completions for the caller, with an eventfd that is readable while some are waiting.
class CompletionQueue {
 public:
  CompletionQueue() : fd_(make_eventfd(EFD_NONBLOCK)) {}
  ~CompletionQueue() { close(fd_); }

  int fd() const { return fd_; }
  // Add a completion. If `more_follow`, do not wake the caller, because `notify` follows soon.
  void push(LaneEnd end, bool more_follow = false) {
    end.ended_ns = now_ns();
    std::lock_guard lock(mutex_);
    waiting_.push_back(end);
    if (!more_follow) wake_once();
  }
  // Wake the caller for completions, unless `more_follow` and the oldest is very recent.
  void notify(bool more_follow) {
    std::lock_guard lock(mutex_);
    if (signalled_ || waiting_.empty()) return;
    if (!more_follow || now_ns() - waiting_.front().ended_ns >= kQuietNsMax) wake_once();
  }
  void wake() { eventfd_write(fd_, 1); }
  // Report operations that the device has completed; their completions follow later.
  void landed(const std::vector<uint64_t>& tokens) {
    std::lock_guard lock(mutex_);
    wake_once();
    landed_.insert(landed_.end(), tokens.begin(), tokens.end());
  }
  std::vector<uint64_t> take_landed() {
    std::lock_guard lock(mutex_);
    return std::exchange(landed_, {});
  }
  // Return all completions, oldest first. The eventfd becomes readable again only for later ones.
  std::vector<LaneEnd> take() {
    std::lock_guard lock(mutex_);
    eventfd_t ignored;
    eventfd_read(fd_, &ignored);  // even if nothing is waiting: `wake` may have set it
    signalled_ = false;
    return std::exchange(waiting_, {});
  }

 private:
  // The time needed to check about 6 MiB. A caller that drives many reads can wait that long.
  static constexpr int64_t kQuietNsMax = 250'000;

  void wake_once() {
    if (!std::exchange(signalled_, true)) wake();
  }

  int fd_;
  std::mutex mutex_;
  bool signalled_ = false;  // the caller has been woken since the last `take`
  std::vector<LaneEnd> waiting_;
  std::vector<uint64_t> landed_;
};

// A gate for the contract tests. It holds back started operations on shut places, as if they hung.
class StartGate {
 public:
  void shut(const std::vector<Place>& places) {
    std::lock_guard lock(mutex_);
    shut_ = {places.begin(), places.end()};
  }
  void started(Place place) {
    std::lock_guard lock(mutex_);
    started_.push_back(place);
  }
  bool open(Place place) {
    std::lock_guard lock(mutex_);
    return !shut_.contains(place);
  }
  std::vector<Place> starts() {
    std::lock_guard lock(mutex_);
    return started_;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<Place> shut_;
  std::vector<Place> started_;
};

}  // namespace nvmeof
