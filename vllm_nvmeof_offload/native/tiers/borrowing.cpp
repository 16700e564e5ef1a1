// SPDX-License-Identifier: Apache-2.0
// Other engines' chunks in the tiers: deciding which can be read, and reading into cache slots.
#include <algorithm>

#include "common/op.h"
#include "tiers/tiers.h"

namespace nvmeof {

// Return whether the chunk can be read from the row's place now. The row is only a hint.
bool Tiers::can_borrow(const ForeignRow& row, const char* key) const {
  const uint32_t number = target_of(row.place), member = member_of(row.place);
  if (!is_foreign(row.place) || number >= targets.size() || !targets[number].usable) return false;
  if (!options_.foreign->accepts(row)) return false;
  const size_t group = group_of(key);
  if (group == options_.group_ids.size()) return false;
  const Trust& trust = trust_[group];
  return member == kEveryMember || (member < trust.set_size && trust.set_size > 1 && !trust.ended);
}

ForeignRow Tiers::foreign_row(const char* key, From from) const {
  ForeignRow found;
  options_.foreign->find({key, index.key_bytes()}, [&](const ForeignRow& row) {
    const bool can =
        can_borrow(row, key) && (from == From::ALL || options_.foreign->lives(owner_of(row.place)));
    if (can) found = row;
    return can;
  });
  return found;
}

const std::vector<ForeignRow>& Tiers::foreign_rows(Keys keys, const std::vector<Row>& rows,
                                                   From from) const {
  foreign_found_.clear();
  if (!options_.foreign || options_.foreign->empty()) return foreign_found_;
  if (std::ranges::find(rows, kNoRow) == rows.end()) return foreign_found_;
  foreign_found_.resize(keys.size());
  const auto warm = [&](size_t at) {
    if (rows[at] == kNoRow) options_.foreign->warm({keys[at], index.key_bytes()});
  };
  for (size_t at = 0; at < std::min(kAhead, keys.size()); ++at) warm(at);
  for (size_t at = 0; at < keys.size(); ++at) {
    if (at + kAhead < keys.size()) warm(at + kAhead);
    if (rows[at] == kNoRow) foreign_found_[at] = foreign_row(keys[at], from);
  }
  return foreign_found_;
}

void Tiers::add_foreign(Batch& batch, const char* key, const ForeignRow& row) {
  batch.generations.push_back(row.generation);
  batch.groups.push_back(static_cast<uint8_t>(group_of(key)));
  add_row(batch, kNoRow, key, kNoSlot, row.place, false);
  options_.foreign->use(owner_of(row.place));
  ++foreign_loads_;
}

// Add an entry for a chunk that is being read into this cache slot, which was just taken.
Row Tiers::borrow(const char* key, uint64_t generation, Slot slot, uint64_t used) {
  const Row row = add_entry(key, group_of(key), generation);
  index[row].cache = static_cast<int32_t>(slot);
  index[row].flags |= Entry::kBorrowed;
  if (!mutant("a_borrowed_chunk_is_written")) index[row].flags |= Entry::kDeduped;
  cache[slot].row = row;
  recency_.use(cache[slot], used, false);
  cache.use(slot);
  on(row, Event::BORROW_BEGIN);
  return row;
}

Row Tiers::begin_borrow(const char* key, size_t reason) {
  const ForeignRow found = foreign_row(key);
  if (found.place == kNoPlace) return kNoRow;
  const Slot slot = take_cache_slot(true, part_of(group_of(key), member_of(found.place)));
  if (slot == kNone) return kNoRow;
  const Row row = borrow(key, found.generation, slot, ++uses_);
  add(fetches_[reason], row, index[row].cache, found.place, true);
  options_.foreign->use(owner_of(found.place));
  return row;
}

// Handle another engine's chunk that a rank could not read. None of our slots is at fault, so only
// an entry that was being filled with the chunk is doomed. Returns whether there was such an entry.
bool Tiers::fails_foreign(const Batch& batch, size_t at) {
  options_.foreign->refuse({batch.places[at], batch.generations[at]});
  if (mutant("a_foreign_failure_dooms_an_own_row")) {
    const char* const key = batch.keys.data() + at * index.key_bytes();
    if (const Row row = index.find(key); row != kNoRow) doom(row, false);
  }
  if (!holds(batch, at)) return false;
  doom(batch.rows[at], false);
  return true;
}

void Tiers::ended_borrow(const Batch& batch, size_t at) {
  const bool ok = batch.code[at] == Outcome::OK;
  if (batch.code[at] == Outcome::CANCELLED) return;
  options_.foreign->ended({batch.places[at], batch.generations[at]}, ok);
  counts.borrowed += ok;
}

// Queue the write of a chunk now in a cache slot, unless another engine holds the chunk.
void Tiers::want_or_dedupe(Row row) {
  if (index[row].flags & Entry::kDeduped)
    ++counts.deduped;
  else
    want(static_cast<Slot>(index[row].cache));
}

// Queue the write of a chunk that was left to another engine, if no live engine has it now. No
// event reports this, so it is checked whenever the chunk is used.
void Tiers::want_if_lost(Row row) {
  Entry& entry = index[row];
  if (entry.state != State::CACHED || !options_.writes) return;
  const auto slot = static_cast<Slot>(entry.cache);
  if (stays_[slot] != Stay::KEPT || cache[slot].requests < kUsesMin) return;
  if (mutant("a_deduped_chunk_is_never_written")) return;
  if (foreign_row(index.key(row), From::LIVING).place != kNoPlace) return;
  entry.flags &= static_cast<uint8_t>(~Entry::kDeduped);
  clean->withdraw(slot);  // `settle` admits it to `unwritten`
  want(slot);
  settle(row);
}

}  // namespace nvmeof
