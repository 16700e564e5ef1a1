// SPDX-License-Identifier: Apache-2.0
// The foreign table: what other engines (owners) have in their pools. The follower, a process of
// its own, is its only writer; the engine's process reads it where it lies, without locks. A row
// has no state, no users and no policy: it is a hint, and the slot proves itself when it is read.
//
// The memory is an anonymous file (memfd) that both processes map:
//
//     0         u64 magic · u64 area · u64 version asked for · u64 time of the last scan · u64 rows
//               · u64 version for which all counts that the owners have
//     4 KiB     states of owners 1, 2, …, 64 bytes each
//     768 KiB   u64 hints written so far
//     772 KiB   a ring of 4,096 hints of 32 bytes: u64 place · u64 generation · u32 count · u32
//               zero · u64 sequence: the hint's number from 1 on, and 0 while the others change
//     1 MiB …   areas of buckets, of which `area` names the newest
//
// A bucket is a fingerprint of the key (0: empty), a place and a generation, 64 bits each: open
// addressing with linear probing. Several owners may have the same key, in a bucket each. A reader
// beside a change may miss a key, or find a place and a generation that do not belong together; the
// first costs a hit, the second is STALE at the read.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "lanes/lanes.h"
#include "tiers/place.h"

namespace nvmeof {

// DEAD: complete, and no process holds the owner's directory. Its chunks can still be read.
enum class OwnerState : uint32_t { NONE, SCANNING, COMPLETE, DEAD };

// One line of the cache.
struct OwnerRecord {
  uint64_t version = 0;  // the version asked for when its rows were last begun anew
  std::array<uint8_t, kTagBytes> tag{};
  std::array<uint8_t, 16> pool_uuid{};  // of its first rank
  uint32_t engine_index = 0;            // K of its directories engine-K
  OwnerState state = OwnerState::NONE;
  uint64_t rows = 0;  // for people
  bool is_readable() const { return state == OwnerState::COMPLETE || state == OwnerState::DEAD; }
};

struct ForeignRow {
  Place place = kNoPlace;  // with its owner; kNoPlace: none
  uint64_t generation = 0;
  bool operator==(const ForeignRow&) const = default;
};

// Another engine has borrowed a chunk so often.
struct Hint {
  Place place = kNoPlace;  // in the regions of the engine whose chunk it is, without an owner
  uint64_t generation = 0;
  uint32_t count = 0;
  bool operator==(const Hint&) const = default;
};

inline constexpr uint32_t kOwnersMax = 8191;  // numbered from 1
inline constexpr size_t kHintsKept = 4096;

// What of an owner's chunks is to be offered: what is written from now on, or all.
enum class Since { NOW, EVER };

// Never 0.
uint64_t fingerprint_of(std::string_view key);

// Both sides' view of the file.
class ForeignTable {
 public:
  ForeignTable(const ForeignTable&) = delete;
  ForeignTable& operator=(const ForeignTable&) = delete;
  ~ForeignTable();

  OwnerRecord owner(uint32_t number) const;
  uint64_t rows() const { return word(kRowsAt).load(std::memory_order_relaxed); }
  bool empty() const { return rows() == 0; }
  // CLOCK_MONOTONIC; 0: none yet.
  int64_t scanned_ns() const {
    return static_cast<int64_t>(word(kScannedAt).load(std::memory_order_relaxed));
  }
  // How often a log was written over, or damaged, before it was read: since the table was made.
  uint64_t log_overruns() const { return word(kOverrunsAt).load(std::memory_order_relaxed); }
  uint64_t version_asked() const { return word(kAskedAt).load(std::memory_order_acquire); }
  // Asked for with `Since::EVER`; 0: none was yet.
  uint64_t version_of_all() const { return word(kOfAllAt).load(std::memory_order_acquire); }

 protected:
  static constexpr size_t kAreaAt = 8, kAskedAt = 16, kScannedAt = 24, kRowsAt = 32, kOfAllAt = 40,
                          kOverrunsAt = 48;
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
  std::atomic_ref<uint64_t> hints_written() const;
  uint64_t* hint_words(uint64_t number) const;  // of the hint with this number, from 0 on
  Area area() const;
  static uint64_t bytes_of(uint64_t name) { return sizeof(Bucket) << (name & 0xff); }

  std::byte* memory_;
  const int fd_;  // a duplicate
};

// The engine's side. It writes nothing but the version that it asks for.
class ForeignReader : public ForeignTable {
 public:
  explicit ForeignReader(int fd) : ForeignTable(fd, false) {}

  // The key's rows, one after another, until `take(row)` returns true. Returns whether one did.
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
  // Rows that the follower knows now are void: it begins every owner anew, with what is written
  // from then on or with all that it has, and gives the owner's record the version returned.
  uint64_t ask_anew(Since since = Since::NOW);
  // The oldest hints that were not taken, at most `max`; those that were overwritten are left out.
  std::vector<Hint> take_hints(size_t max);

 private:
  uint64_t hints_taken_ = 0;
};

// The follower's side. Its threads change rows while they hold `lock()`.
class ForeignWriter : public ForeignTable {
 public:
  // fd: an empty memfd, or one whose writer has ended: the table is then empty again, but the
  // owners' records and the version asked for stay. rows: room for so many at first.
  ForeignWriter(int fd, size_t rows);

  [[nodiscard]] std::unique_lock<std::mutex> lock() { return std::unique_lock(changes_); }
  void set_owner(uint32_t number, const OwnerRecord& record);
  void put(uint64_t fingerprint, ForeignRow row);
  // Remove the row with this key, place and generation. False: there is none.
  bool remove(uint64_t fingerprint, ForeignRow row);
  void put_hint(const Hint& hint);
  void warm(uint64_t fingerprint) const;
  void log_overran() { word(kOverrunsAt).fetch_add(1, std::memory_order_relaxed); }
  void scanned(int64_t now_ns) {
    word(kScannedAt).store(static_cast<uint64_t>(now_ns), std::memory_order_relaxed);
  }

 private:
  void insert(Area into, Bucket bucket);
  void grow(size_t rows);
  Area make_area(size_t rows, uint64_t& name);
  // Make this area the newest.
  void publish(uint64_t name);

  std::mutex changes_;
  uint64_t end_;              // of the areas that were made
  uint64_t size_ = 0;         // of the file
  uint64_t name_ = 0;         // as in the header: offset in pages << 8 | log2 of the buckets
  uint64_t name_before_ = 0;  // a look-up that has begun may still be there
};

}  // namespace nvmeof
