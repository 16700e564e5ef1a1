// SPDX-License-Identifier: Apache-2.0
#include "tiers/holds.h"

namespace nvmeof {

Holds::Advance Holds::advance(Wanted& wanted, Keys keys, Range range, size_t looks, Reason reason,
                              Bounds bounds) {
  const size_t count = wanted.taken.size();
  Advance done{range.next, looks};
  const size_t end = std::min(range.end, range.next + looks);
  // Memory latency dominates, so prefetch each later chunk's bucket, then its row, then its slots.
  const auto warm = [&](size_t chunk) {
    if (const size_t at = chunk + 3 * kAhead; at < end) tiers_.index.warm(keys[at]);
    if (const size_t at = chunk + 2 * kAhead; at < end)
      tiers_.index.warm_found(tiers_.index.hash(keys[at]));
    if (const size_t at = chunk + kAhead; at < end) tiers_.warm_slots(keys[at]);
  };
  while (done.next < range.end && done.looks > 0) {
    --done.looks;
    warm(done.next);
    const size_t chunk = done.next;
    const Source source = tiers_.lookup(keys[chunk], kFromCpu | kFromPool);
    if (source != Source::CPU && chunk < range.local) {
      done.skipped_first = std::min(done.skipped_first, chunk);
      done.skipped_last = chunk;
    } else if (source == Source::NONE) {
      done.next = count;  // a load ends here, so later chunks are useless
      break;
    } else if (!take(wanted, chunk, keys[chunk], source, reason, bounds)) {
      break;
    }
    ++done.next;
  }
  return done;
}

// Hold or fetch one chunk. Returns false if there is no room now.
bool Holds::take(Wanted& wanted, size_t chunk, const char* key, Source source, Reason reason,
                 Bounds bounds) {
  if (wanted.taken[chunk]) return true;
  const Row row = tiers_.index.find(key);
  Held* held = row == kNoRow ? nullptr : of(row, tiers_.index[row].generation);
  if (held == nullptr) {
    // The chunk is in the right tier and was just used, so it needs no hold.
    if (source == Source::CPU && reason == Reason::QUEUE) return true;
    if (this->held(reason) >= bounds.held_max) return false;
    if (source == Source::CPU) {
      if (!has_room()) return false;
      require(tiers_.hold(key) == row, "a chunk found in the CPU tier has no cache slot");
      held = &keep(row, reason);
    } else {
      held = fetching_ < bounds.fetching_max ? fetch(key, reason) : nullptr;
      if (held == nullptr) return false;
    }
  }
  ++held->wanters;
  const Row kept = row == kNoRow ? tiers_.index.find(key) : row;
  wanted.held.emplace_back(kept, held->generation);
  wanted.taken[chunk] = true;
  return true;
}

// Start fetching a chunk that is only in a pool, and hold it. Returns null if there is no room.
Holds::Held* Holds::fetch(const char* key, Reason reason) {
  const Row row = has_room() ? tiers_.begin_fetch(key, static_cast<size_t>(reason)) : kNoRow;
  if (row == kNoRow) return nullptr;
  tiers_.hold(key);
  ++fetching_;
  ++begun[static_cast<size_t>(reason)];
  Held& held = keep(row, reason);
  held.fetched = held.fetching = true;
  return &held;
}

void Holds::probe(const char* key) {
  const Source source = tiers_.lookup(key, kFromCpu | kFromPool);
  if (source == Source::POOL || source == Source::SHARED) fetch(key, Reason::PROBE);
}

Holds::Held& Holds::keep(Row row, Reason reason) {
  const Entry& entry = tiers_.index[row];
  ++counts_[static_cast<size_t>(reason)];
  return held_.insert_or_assign(row, Held{entry.generation, static_cast<Slot>(entry.cache), reason})
      .first->second;
}

Holds::Held* Holds::of(Row row, uint64_t generation) {
  const auto found = held_.find(row);
  return found != held_.end() && found->second.generation == generation ? &found->second : nullptr;
}

// Release a hold. how: how the chunk's fetch ended, if it was fetched.
Holds::Map::iterator Holds::release(Map::iterator found, End how) {
  const auto [row, held] = *found;
  fetching_ -= held.fetching;
  --counts_[static_cast<size_t>(held.reason)];
  const bool counted = how != End::CANCELLED || !mutant("cancelled_prefetches_are_not_counted");
  if (held.fetched && counted) ++ends[static_cast<size_t>(how)];
  const auto next = held_.erase(found);
  tiers_.release_hold(held.slot, row, held.generation);
  return next;
}

void Holds::leave(Wanted& wanted, std::vector<Cancel>& cancels) {
  if (mutant("holds_outlive_their_requests")) return;
  for (const auto& [row, generation] : wanted.held) {
    Held* const held = of(row, generation);
    if (held == nullptr || --held->wanters > 0) continue;
    End how = held->used ? End::USED : End::WASTED;
    // The slot's users are this hold, its fetch, and loads that wait for this fetch.
    const bool waited_for = held->used || tiers_.cache[held->slot].users != 2;
    const bool cancels_anyway = held->op && mutant("fetch_that_a_load_waits_for_is_cancelled");
    if (held->fetching && (!waited_for || cancels_anyway)) {
      how = End::CANCELLED;
      if (held->op)
        cancels.emplace_back(held->op, held->index);
      else
        tiers_.drop_fetch(static_cast<size_t>(held->reason), row);
    }
    release(held_.find(row), how);
  }
  wanted.held.clear();
}

void Holds::sent(uint64_t op, const Batch& batch) {
  for (size_t at = 0; at < batch.size(); ++at) {
    Held* const held = of(batch.rows[at], batch.generations[at]);
    if (held == nullptr || !held->fetching) continue;  // fetched only for a load
    held->op = op;
    held->index = static_cast<uint32_t>(at);
  }
}

void Holds::used(const Batch& load) {
  if (held_.empty()) return;
  for (size_t at = 0; at < load.size(); ++at)
    if (Held* const held = of(load.rows[at], load.generations[at])) held->used = true;
}

void Holds::ended(uint64_t op, const Batch& batch, std::span<const uint32_t> rows, bool probe) {
  for (const uint32_t at : rows) {
    Held* const held = of(batch.rows[at], batch.generations[at]);
    if (held == nullptr || held->op != op) continue;
    if (probe) {
      release(held_.find(batch.rows[at]), End::PROBE);
    } else {
      held->op = 0;
      held->fetching = false;
      --fetching_;
    }
  }
}

void Holds::lost(const Batch& batch, std::span<const uint32_t> rows) {
  if (mutant("doomed_chunk_stays_held")) return;
  for (const uint32_t at : rows) {
    Held* const held = of(batch.rows[at], batch.generations[at]);
    if (held == nullptr) continue;
    release(held_.find(batch.rows[at]), held->used && !held->fetching ? End::USED : End::FAILED);
  }
}

void Holds::reset() {
  for (auto at = held_.begin(); at != held_.end();)
    at = release(at, at->second.used ? End::USED : End::FAILED);
}

std::vector<Row> Holds::rows() const {
  std::vector<Row> rows;
  rows.reserve(held_.size());
  for (const auto& [row, held] : held_) rows.push_back(row);
  return rows;
}

}  // namespace nvmeof
