// SPDX-License-Identifier: Apache-2.0
// The foreign table lists the chunks in other engines' pools. Only the follower, a separate
// process, writes its rows; the engine's process reads them in place, without locks. A row is only
// a hint: its slot is verified when read.
//
// The memory is a memfd that both processes map:
//
//     0         u64 magic · u64 area · u64 requested version · u64 time of the last scan · u64 rows
//               · u64 last version requested for all of the owners' chunks
//     4 KiB     states of owners 1, 2, …, 64 bytes each
//     1 MiB …   areas of buckets; `area` names the newest
//
// A bucket consists of a key's fingerprint (0 if empty), a place and a generation, 64 bits each.
// The table uses open addressing with linear probing. Each owner of a key has its own bucket.
// During a change, a reader may miss a key, which costs a hit, or find a place and a generation
// that do not belong together, which makes the read STALE.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>

#include "common/op.h"
#include "lanes/lanes.h"

namespace nvmeof {

// DEAD: like COMPLETE, but no process holds the owner's directory. Its chunks can still be read.
enum class OwnerState : uint32_t { NONE, SCANNING, COMPLETE, DEAD };

// An owner's record, which fills one cache line.
struct OwnerRecord {
  uint64_t version = 0;  // the version requested when its rows were last rebuilt
  std::array<uint8_t, kTagBytes> tag{};
  std::array<uint8_t, 16> pool_uuid{};  // the pool uuid of its first rank
  uint32_t engine_index = 0;            // the K in its directory names, engine-K
  OwnerState state = OwnerState::NONE;
  uint64_t rows = 0;  // only for display
  bool is_readable() const { return state == OwnerState::COMPLETE || state == OwnerState::DEAD; }
};

struct ForeignRow {
  Place place = kNoPlace;  // includes the owner; kNoPlace if there is no row
  uint64_t generation = 0;
  bool operator==(const ForeignRow&) const = default;
};

inline constexpr uint32_t kOwnersMax = 8191;  // numbered from 1

// The chunks to offer after a new version is requested: only those written later, or all.
enum class Since { NOW, EVER };

// Return the key's fingerprint, which is never 0.
uint64_t fingerprint_of(std::string_view key);

class ForeignTable {
 public:
  ForeignTable(const ForeignTable&) = delete;
  ForeignTable& operator=(const ForeignTable&) = delete;
  ~ForeignTable();

  OwnerRecord owner(uint32_t number) const;
  uint64_t rows() const { return word(kRowsAt).load(std::memory_order_relaxed); }
  bool empty() const { return rows() == 0; }
  // Return when the last scan ended, in CLOCK_MONOTONIC time, or 0 if none has.
  int64_t scanned_ns() const {
    return static_cast<int64_t>(word(kScannedAt).load(std::memory_order_relaxed));
  }
  uint64_t version_asked() const { return word(kAskedAt).load(std::memory_order_acquire); }
  // Return the last version that was requested with `Since::EVER`, or 0.
  uint64_t version_of_all() const { return word(kOfAllAt).load(std::memory_order_acquire); }

 protected:
  static constexpr size_t kAreaAt = 8, kAskedAt = 16, kScannedAt = 24, kRowsAt = 32, kOfAllAt = 40;
  struct Bucket {
    uint64_t fingerprint, place, generation;
  };
  struct Area {
    Bucket* buckets;
    uint64_t mask;
  };

  ForeignTable(int fd, bool writes);

  static std::atomic_ref<uint64_t> shared(uint64_t& value) { return std::atomic_ref(value); }
  std::atomic_ref<uint64_t> word(size_t at) const {
    return shared(*reinterpret_cast<uint64_t*>(memory_ + at));
  }
  uint64_t* owner_words(uint32_t number) const;
  Area area() const;
  static uint64_t bytes_of(uint64_t name) { return sizeof(Bucket) << (name & 0xff); }

  std::byte* memory_;
  const int fd_;  // a duplicate
};

// The engine's side. The engine writes no fields but the two requested versions.
class ForeignReader : public ForeignTable {
 public:
  explicit ForeignReader(int fd) : ForeignTable(fd, false) {}

  // Pass the key's rows to `take(row)` until it returns true. Returns whether it did.
  template <typename Take>
  bool find(std::string_view key, Take take) const {
    const uint64_t wanted = fingerprint_of(key);
    const Area now = area();
    for (uint64_t at = wanted & now.mask, seen = 0; seen <= now.mask;
         at = (at + 1) & now.mask, ++seen) {
      Bucket& bucket = now.buckets[at];
      const uint64_t found = shared(bucket.fingerprint).load(std::memory_order_acquire);
      if (found == 0) return false;
      if (found != wanted) continue;
      const ForeignRow row{static_cast<Place>(shared(bucket.place).load(std::memory_order_relaxed)),
                           shared(bucket.generation).load(std::memory_order_relaxed)};
      std::atomic_thread_fence(std::memory_order_acquire);
      if (shared(bucket.fingerprint).load(std::memory_order_relaxed) == wanted && take(row))
        return true;
    }
    return false;
  }
  void warm(std::string_view key) const;
  // Void all rows that the follower knows now. The follower then rebuilds each owner's rows, from
  // all chunks or only those written later, and puts the returned version into the owner's record.
  uint64_t ask_anew(Since since = Since::NOW);
};

// The follower's side. Its threads change rows only while they hold `lock()`.
class ForeignWriter : public ForeignTable {
 public:
  // fd: an empty memfd, or that of an earlier writer, whose rows are dropped. rows: the initial
  // capacity.
  ForeignWriter(int fd, size_t rows);

  [[nodiscard]] std::unique_lock<std::mutex> lock() { return std::unique_lock(changes_); }
  void set_owner(uint32_t number, const OwnerRecord& record);
  void put(uint64_t fingerprint, ForeignRow row);
  // Remove the row with this key, place and generation. Returns false if there is none.
  bool remove(uint64_t wanted, ForeignRow row);
  void warm(uint64_t fingerprint) const;
  void scanned(int64_t now_ns) {
    word(kScannedAt).store(static_cast<uint64_t>(now_ns), std::memory_order_relaxed);
  }

 private:
  void insert(Area into, Bucket bucket);
  void grow(size_t rows);
  Area make_area(size_t rows, uint64_t& name);
  void publish(uint64_t name);

  std::mutex changes_;
  uint64_t end_;              // the end of the areas made so far
  uint64_t size_ = 0;         // the size of the file
  uint64_t name_ = 0;         // as in the header: offset in pages << 8 | log2 of the buckets
  uint64_t name_before_ = 0;  // the previous area, where look-ups may still be running
};

}  // namespace nvmeof
