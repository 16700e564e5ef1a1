// SPDX-License-Identifier: Apache-2.0
// The index: one row per chunk, and the table from keys to rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "common/columns.h"
#include "common/op.h"

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

// Return the state after `event`. Throws BrokenRule if the table has none.
State after(State state, Event event);

// Return whether a load may name the cache slot in this state, even if only to wait for its fill.
inline bool in_cache(State state) {
  return state != State::POOLED && state != State::ABSENT && state != State::DOOMED;
}

using Row = uint32_t;
inline constexpr Row kNoRow = UINT32_MAX;

// Return a hash extended by one word.
inline uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15;
  return hash ^ hash >> 32;
}

inline void prefetch(const void* address) { __builtin_prefetch(address); }

// The fields of an entry. The key follows; a key of up to 36 bytes is in the same cache line.
struct Entry {
  uint64_t generation;
  Place place;
  int32_t cache;
  uint32_t hash;  // the hash of the key
  State state;
  uint8_t group;
  uint8_t flags;
  uint8_t loads;  // loads that have begun, modulo 256

  static constexpr uint8_t kBorrowed = 1;  // the generation is another engine's
  static constexpr uint8_t kDeduped = 2;   // do not write while another engine has the chunk
  static constexpr uint8_t kCredited = 4;  // within `touch`: the ended request has been counted
};

class Index {
 public:
  // Every key has `key_bytes` bytes. There are at most `rows` entries at a time.
  Index(Row rows, size_t key_bytes);
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  size_t size() const { return size_; }
  size_t key_bytes() const { return key_bytes_; }
  Row capacity() const { return capacity_; }
  // Return the first row that has never had an entry.
  Row end() const { return next_; }
  Entry& operator[](Row row) { return *reinterpret_cast<Entry*>(at(row)); }
  const Entry& operator[](Row row) const {
    return *reinterpret_cast<const Entry*>(const_cast<Index*>(this)->at(row));
  }
  const char* key(Row row) const { return const_cast<Index*>(this)->at(row) + kKeyAt; }
  Row find(const char* key) const { return find(key, hash(key)); }
  // Find the rows of many keys. A block of keys takes little longer than a single key. rows: the
  // probable rows, such as an earlier result: checking one takes a quarter of the time of a search.
  void find(std::span<const char* const> keys, std::vector<Row>& rows) const;
  // Add a row, without slots and in state ABSENT, for a key that has none.
  Row add(const char* key, uint64_t generation);
  void remove(Row row);
  // Return whether the row is still the entry of this generation.
  bool holds(Row row, uint64_t generation) const {
    const Entry& entry = (*this)[row];
    const bool same = entry.generation == generation || mutant("doom_ignores_the_generation");
    return entry.state != State::ABSENT && same;
  }
  void clear();

  // `warm` prefetches the bucket that `find` and `add` read first for this key, or this row.
  // `warm_bucket` prefetches the bucket that `remove` reads first for this row, which must already
  // have been prefetched.
  void warm(const char* key) const { warm_bucket_of(hash(key)); }
  void warm(Row row) const { prefetch(&(*this)[row]); }
  void warm_bucket(Row row) const { warm_bucket_of((*this)[row].hash); }
  // Prefetch for a key with this hash, in two steps: first the bucket where `find` begins, and then
  // the key's row.
  uint32_t hash(const char* key) const;
  void warm_bucket_of(uint32_t hash) const { prefetch(&buckets_[hash & mask_]); }
  void warm_found(uint32_t hash) const;

 private:
  static constexpr size_t kKeyAt = 28;
  static_assert(kKeyAt > offsetof(Entry, loads));

  char* at(Row row) { return rows_.data() + size_t{row} * row_bytes_; }
  bool is_key(Row row, const char* key) const;
  size_t known(std::span<const char* const> keys, std::span<const Row> rows) const;
  Row find(const char* key, uint32_t hash) const;
  size_t bucket_of(Row row) const;

  size_t key_bytes_, row_bytes_;
  Row capacity_;
  HugeColumn<char> rows_;
  std::vector<Row> free_;  // free rows that had an entry before
  Row next_ = 0;
  // Open addressing with linear probing. A bucket is 0 if empty; else its high half is a key's
  // hash, and its low half the key's row + 1. Memory latency dominates look-ups, and a library's
  // map cannot prefetch for many keys at once.
  HugeColumn<uint64_t> buckets_;
  size_t mask_;
  size_t size_ = 0;
};

}  // namespace nvmeof
