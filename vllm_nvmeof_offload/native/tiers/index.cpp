// SPDX-License-Identifier: Apache-2.0
#include "tiers/index.h"

#include <algorithm>
#include <array>
#include <bit>

namespace nvmeof {

namespace {

constexpr State kBroken{0xff};
using Table = std::array<std::array<State, kEvents>, kStates>;

constexpr Table make_table() {
  Table table{};
  for (auto& row : table) row.fill(kBroken);
#define STEP(state, event, next) \
  table[static_cast<size_t>(State::state)][static_cast<size_t>(Event::event)] = State::next;
#include "common/transitions.def"
#undef STEP
  return table;
}

constexpr Table kTable = make_table();

constexpr const char* kStateNames[] = {"ABSENT", "STORING",  "CACHED",    "WRITING", "BOTH",
                                       "POOLED", "FETCHING", "BORROWING", "DOOMED"};
constexpr const char* kEventNames[] = {
    "STORE_BEGIN",  "ADOPT",       "COPIED",          "WRITE_BEGIN", "WRITTEN",
    "WRITE_FAILED", "EVICT_CACHE", "EVICT_POOL",      "CACHE_LOST",  "FETCH_BEGIN",
    "BORROW_BEGIN", "FETCHED",     "FETCH_CANCELLED", "DOOM"};

// The number of keys looked up together: about as many as a core has memory loads in flight.
constexpr size_t kBlock = 16;
constexpr size_t kLine = 64, kAlign = 16;

uint32_t hash_of(uint64_t bucket) { return static_cast<uint32_t>(bucket >> 32); }
Row row_of(uint64_t bucket) { return static_cast<Row>(bucket) - 1; }

uint64_t word_at(const char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

}  // namespace

State after(State state, Event event) {
  const State next = kTable[static_cast<size_t>(state)][static_cast<size_t>(event)];
  if (next == kBroken)
    throw BrokenRule(std::string(kEventNames[static_cast<size_t>(event)]) + " on " +
                     kStateNames[static_cast<size_t>(state)]);
  return next;
}

Index::Index(Row rows, size_t key_bytes)
    : key_bytes_(key_bytes),
      // One cache line per row if the key fits; longer keys take no more than they need.
      row_bytes_(std::max(kLine, (kKeyAt + key_bytes + kAlign - 1) / kAlign * kAlign)),
      capacity_(rows),
      rows_(size_t{rows} * row_bytes_),
      // At most two thirds full, and never resized, because resizing would delay requests.
      buckets_(std::bit_ceil(size_t{rows} * 3 / 2 + 1)),
      mask_(buckets_.size() - 1) {}

// Mix the whole key, eight bytes at a time. The last eight may overlap the previous ones.
uint32_t Index::hash(const char* key) const {
  uint64_t mixed = key_bytes_;
  if (key_bytes_ < sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, key, key_bytes_);
    return static_cast<uint32_t>(mix(mixed, word));
  }
  for (size_t at = 0; at + sizeof(uint64_t) <= key_bytes_; at += sizeof(uint64_t))
    mixed = mix(mixed, word_at(key + at));
  if (key_bytes_ % sizeof(uint64_t) != 0)
    mixed = mix(mixed, word_at(key + key_bytes_ - sizeof(uint64_t)));
  return static_cast<uint32_t>(mixed);
}

bool Index::is_key(Row row, const char* key) const {
  const char* const own = this->key(row);
  if (key_bytes_ < sizeof(uint64_t)) return std::memcmp(own, key, key_bytes_) == 0;
  for (size_t at = 0; at + sizeof(uint64_t) <= key_bytes_; at += sizeof(uint64_t))
    if (word_at(own + at) != word_at(key + at)) return false;
  const size_t last = key_bytes_ - sizeof(uint64_t);
  return word_at(own + last) == word_at(key + last);
}

Row Index::find(const char* key, uint32_t hash) const {
  for (size_t at = hash & mask_; buckets_[at] != 0; at = (at + 1) & mask_)
    if (hash_of(buckets_[at]) == hash && is_key(row_of(buckets_[at]), key))
      return row_of(buckets_[at]);
  return kNoRow;
}

void Index::warm_found(uint32_t hash) const {
  for (size_t at = hash & mask_; buckets_[at] != 0; at = (at + 1) & mask_)
    if (hash_of(buckets_[at]) == hash) {
      warm(row_of(buckets_[at]));
      return;
    }
}

// Return the number of leading keys whose rows are in `rows` already.
size_t Index::known(std::span<const char* const> keys, std::span<const Row> rows) const {
  const size_t count = std::min(keys.size(), rows.size());
  size_t at = 0;
  for (; at < count && rows[at] != kNoRow; ++at) {
    if (at + kBlock < count && rows[at + kBlock] != kNoRow) warm(rows[at + kBlock]);
    if ((*this)[rows[at]].state == State::ABSENT || !is_key(rows[at], keys[at])) break;
  }
  return at;
}

void Index::find(std::span<const char* const> keys, std::vector<Row>& rows) const {
  size_t first = known(keys, rows);
  rows.resize(keys.size());
  std::array<uint32_t, kBlock> hashes;
  for (; first < keys.size(); first += kBlock) {
    const size_t count = std::min(kBlock, keys.size() - first);
    for (size_t k = 0; k < count; ++k) {
      hashes[k] = hash(keys[first + k]);
      warm_bucket_of(hashes[k]);
    }
    for (size_t k = 0; k < count; ++k) warm_found(hashes[k]);
    for (size_t k = 0; k < count; ++k) rows[first + k] = find(keys[first + k], hashes[k]);
  }
}

Row Index::add(const char* key, uint64_t generation) {
  require(!free_.empty() || next_ < capacity_, "there are more entries than slots");
  const uint32_t hash = this->hash(key);
  require(find(key, hash) == kNoRow, "a key already has an entry");
  Row row = next_;
  if (free_.empty()) {
    ++next_;
  } else {
    row = free_.back();
    free_.pop_back();
  }
  (*this)[row] = {generation, kNoPlace, kNoSlot, hash, State::ABSENT, 0, 0, 0};
  std::memcpy(at(row) + kKeyAt, key, key_bytes_);
  size_t at = hash & mask_;
  while (buckets_[at] != 0) at = (at + 1) & mask_;
  buckets_[at] = uint64_t{hash} << 32 | (row + 1);
  ++size_;
  return row;
}

size_t Index::bucket_of(Row row) const {
  size_t at = (*this)[row].hash & mask_;
  while (buckets_[at] != 0 && row_of(buckets_[at]) != row) at = (at + 1) & mask_;
  require(buckets_[at] != 0, "a row has no entry");
  return at;
}

void Index::remove(Row row) {
  size_t hole = bucket_of(row);
  // Move up buckets that a look-up would not find beyond the hole.
  for (size_t at = (hole + 1) & mask_; buckets_[at] != 0; at = (at + 1) & mask_) {
    const size_t home = hash_of(buckets_[at]) & mask_;
    if (((at - home) & mask_) >= ((at - hole) & mask_)) {
      buckets_[hole] = buckets_[at];
      hole = at;
    }
  }
  buckets_[hole] = 0;
  --size_;
  (*this)[row].state = State::ABSENT;
  free_.push_back(row);
}

void Index::clear() {
  buckets_ = HugeColumn<uint64_t>(buckets_.size());
  size_ = 0;
  for (Row row = 0; row < next_; ++row) (*this)[row].state = State::ABSENT;
  free_.clear();
  next_ = 0;
}

}  // namespace nvmeof
