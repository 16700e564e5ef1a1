// SPDX-License-Identifier: Apache-2.0
// Single copies of chunks in the tiers: choosing the ranks that store them, proving that ranks have
// equal bytes, and evicting them.
#include "tiers/tiers.h"

namespace nvmeof {

Part Tiers::part_of(size_t group, uint32_t member) const {
  if (member == kEveryMember) return {};
  return {trust_[group].set_size, member};
}

// Return the part of a slot in which to store a new chunk of the group. Until enough samples have
// been equal, all ranks store every chunk; after that, they all store only one chunk in
// `sample_every`, as a sample.
Part Tiers::part_to_store(size_t group) {
  Trust& trust = trust_[group];
  if (trust.set_size == 1 || trust.ended || trust.equal < options_.equal_min) return {};
  if (++trust.stored % options_.sample_every == 0) return {};
  return {trust.set_size, Part::kAnyMember};
}

void Tiers::compare(Batch& batch, const Report& report) {
  const size_t count = report.indexes.empty() ? batch.size() : report.indexes.size();
  size_t next = 0;  // the next CRC
  for (size_t k = 0; k < count; ++k) {
    const size_t at = report.indexes.empty() ? k : report.indexes[k];
    const bool ok = report.codes.empty() || static_cast<Outcome>(report.codes[k]) == Outcome::OK;
    Trust& trust = trust_[batch.groups[at]];
    if (!ok || trust.set_size == 1 || cache_member(batch.cache[at]) != kEveryMember) continue;
    require(next < report.crcs.size(), "a sample has no checksum");
    Samples::Seen seen =
        batch.samples.add(at, report.crcs[next++], report.rank, trust.set_size, options_.ranks);
    if (mutant("unequal_ranks_are_believed")) seen = Samples::Seen::ALL_EQUAL;
    if (seen == Samples::Seen::ALL_EQUAL) ++trust.equal;
    if (seen != Samples::Seen::DIFFERENT || trust.ended) continue;
    trust.ended = true;
    unequal_.push_back(batch.groups[at]);
  }
  require(next == report.crcs.size(), "there are more checksums than samples");
}

bool Tiers::is_single(const Batch& batch, size_t at) const {
  if (batch.places[at] != kNoPlace) return member_of(batch.places[at]) != kEveryMember;
  return batch.cache[at] != kNoSlot && cache_member(batch.cache[at]) != kEveryMember;
}

// Evict chunks until a cache slot for this part is free, and take it. Returns kNone if that fails.
Slot Tiers::make_cache_room(bool is_read, const Part& part) {
  const auto may_clean = [this](Slot slot) { return clean->contains(slot); };
  const auto evict_clean = [this](Slot victim) { evict_cached(victim, true); };
  if (make_room(cache, *clean, part, may_clean, evict_clean)) return cache.take(part);
  if (!may_lose(is_read)) return kNone;
  const auto may = [this](Slot slot) { return home(slot).contains(slot); };
  const auto evict = [this](Slot victim) { evict_cached(victim, false); };
  return make_room(cache, *unwritten, part, may, evict) ? cache.take(part) : kNone;
}

}  // namespace nvmeof
