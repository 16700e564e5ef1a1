// SPDX-License-Identifier: Apache-2.0
// The index: one row per chunk, and the table from a key to its row. It knows nothing
// of slots that are free, of eviction, or of operations; `tiers.h` does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "common/huge_pages.h"
#include "common/op.h"
#include "tiers/place.h"

namespace nvmeof {

enum class State : uint8_t {
  ABSENT,
  STORING,
  CACHED,
  WRITING,
  BOTH,
  POOLED,
  FETCHING,
  BORROWING,
  DOOMED,
};

enum class Event : uint8_t {
  STORE_BEGIN,
  ADOPT,
  COPIED,
  WRITE_BEGIN,
  WRITTEN,
  WRITE_FAILED,
  EVICT_CACHE,
  EVICT_POOL,
  CACHE_LOST,
  FETCH_BEGIN,
  BORROW_BEGIN,
  FETCHED,
  FETCH_CANCELLED,
  DOOM,
};
inline constexpr size_t kStates = 9, kEvents = 14;

// The state after `event`; throws BrokenRule where the table has none.
State after(State state, Event event);

// Whether a load may name the cache slot of an entry in this state, if only to wait for its fill.
inline bool in_cache(State state) {
  return state != State::POOLED && state != State::ABSENT && state != State::DOOMED;
}

using Row = uint32_t;
inline constexpr Row kNoRow = UINT32_MAX;

inline void prefetch(const void* address) { __builtin_prefetch(address); }

// What a look-up and all that follows from it read of an entry, in one line of the cache with keys
// of up to 36 bytes; the key follows.
struct Entry {
  uint64_t generation;
  Place place;
  int32_t cache;
  uint32_t hash;  // of the key
  State state;
  uint8_t group;
  uint8_t flags;
  uint8_t loads;  // that have begun, modulo 256

  static constexpr uint8_t kBorrowed = 1;  // the generation is another engine's
  static constexpr uint8_t kDeduped = 2;   // not to be written while another engine has the chunk
};

class Index {
 public:
  // Every key has `key_bytes`; at most `rows` entries at a time.
  Index(Row rows, size_t key_bytes);
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  size_t size() const { return size_; }
  size_t key_bytes() const { return key_bytes_; }
  // Rows from here on never had an entry.
  Row end() const { return next_; }
  Entry& operator[](Row row) { return *reinterpret_cast<Entry*>(at(row)); }
  const Entry& operator[](Row row) const {
    return *reinterpret_cast<const Entry*>(const_cast<Index*>(this)->at(row));
  }
  const char* key(Row row) const { return const_cast<Index*>(this)->at(row) + kKeyAt; }
  // kNoRow: the key has no entry.
  Row find(const char* key) const { return find(key, hash(key)); }
  // The rows of many keys, at little more than one key's latency for each block of them.
  void find(std::span<const char* const> keys, std::vector<Row>& rows) const;
  // A new row for a key that has none, without slots, ABSENT.
  Row add(const char* key, uint64_t generation);
  // The row's key misses from now on, and the row may be given to another key.
  void remove(Row row);
  // Whether the row still is the entry of this generation.
  bool holds(Row row, uint64_t generation) const {
    const Entry& entry = (*this)[row];
    const bool same = entry.generation == generation || mutant("doom_ignores_the_generation");
    return entry.state != State::ABSENT && same;
  }
  void clear();

  // Fetch the memory that will be read first: by `find` and `add` of this key, by whoever reads
  // this row, by `remove` of this row, which was fetched.
  void warm(const char* key) const { warm_bucket_of(hash(key)); }
  void warm(Row row) const { prefetch(&(*this)[row]); }
  void warm_bucket(Row row) const { warm_bucket_of((*this)[row].hash); }
  // The same for a key of this hash, step by step: where `find` begins, and then the key's row.
  uint32_t hash(const char* key) const;
  void warm_bucket_of(uint32_t hash) const { prefetch(&buckets_[hash & mask_]); }
  void warm_found(uint32_t hash) const;

 private:
  static constexpr size_t kKeyAt = 28;
  static_assert(kKeyAt > offsetof(Entry, loads));

  char* at(Row row) { return rows_.data() + size_t{row} * row_bytes_; }
  bool is_key(Row row, const char* key) const;
  Row find(const char* key, uint32_t hash) const;
  size_t bucket_of(Row row) const;  // where the table has it

  size_t key_bytes_, row_bytes_;
  Row capacity_;
  HugeColumn<char> rows_;
  std::vector<Row> free_;  // rows that were used before
  Row next_ = 0;
  // Open addressing with linear probing: a key's hash above its row + 1; 0: empty. The standard
  // library's map, and tsl::robin_map, give no way to fetch the memory of many keys at once, and
  // memory's latency is most of a look-up among millions.
  HugeColumn<uint64_t> buckets_;
  size_t mask_;
  size_t size_ = 0;
};

}  // namespace nvmeof
