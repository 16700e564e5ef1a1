// SPDX-License-Identifier: Apache-2.0
// Both tiers of the manager: the index, the slots, eviction, and the loops over the rows of a
// batch. Python decides once per batch what is to be stored, loaded, fetched and written; what
// runs per chunk runs here. Only the scheduler's thread calls it, and it does no I/O.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/op.h"
#include "common/small_column.h"
#include "tiers/accepted_owners.h"
#include "tiers/eviction.h"
#include "tiers/index.h"

namespace nvmeof {

// Of one group: whether the ranks of its sets are believed to have equal bytes. They say of
// samples, which all of them store, what bytes these have.
struct Trust {
  explicit Trust(uint32_t members) : set_size(members) {}

  uint32_t set_size;
  uint32_t equal = 0;   // samples that were equal in every set
  bool ended = false;   // two ranks of a set differed: no chunk has a single copy any more
  uint64_t stored = 0;  // chunks, since the ranks were believed
};

// The samples of a store's rows, as far as ranks have reported them.
class Samples {
 public:
  // How the bytes of a row compare once a rank has reported them.
  enum class Seen : uint8_t { SOME, ALL_EQUAL, DIFFERENT };

  // crc: of the row's payload on `rank`. ranks: of all sets.
  Seen add(size_t row, uint32_t crc, uint32_t rank, uint32_t set_size, uint32_t ranks) {
    const size_t at = row * ranks + rank / set_size;  // there are no more sets than ranks
    if (crcs_.size() <= at) crcs_.resize((row + 1) * ranks);
    if (reports_.size() <= row) reports_.resize(row + 1);
    ++reports_[row];
    constexpr uint64_t kKnown = uint64_t{1} << 32;
    if (crcs_[at] == 0) crcs_[at] = kKnown | crc;
    if (crcs_[at] != (kKnown | crc)) return Seen::DIFFERENT;
    return reports_[row] == ranks ? Seen::ALL_EQUAL : Seen::SOME;
  }

 private:
  std::vector<uint64_t> crcs_;     // by row and set: the first one; 0: none was reported
  std::vector<uint16_t> reports_;  // by row
};

using Keys = std::span<const char* const>;

// SHARED: the pool of another engine.
enum class Source : uint8_t { NONE, CPU, POOL, SHARED };
inline constexpr size_t kSources = 4;
// The tiers that a look-up may hit. Another engine's chunks are where ours of the pool are.
inline constexpr uint8_t kFromCpu = 1, kFromPool = 2;

// A chunk that other engines had is written once they have it no more, if so many requests have
// used it here.
inline constexpr uint32_t kUsesMin = 2;

// A loop over keys or rows fetches the memory of the one that is this far ahead.
inline constexpr size_t kAhead = 16;

// Why a chunk is fetched: `Reason` in manager/hold_and_prefetch.py.
inline constexpr size_t kFetchReasons = 3;

// What `wanted` says of a key that is offered for storing.
enum class Store : uint8_t { NOT, KEPT, PROVISIONALLY };
// Of a cache slot's chunk. A provisional one is not written; once a later boundary is stored it is
// superseded, and the next to be evicted.
enum class Stay : uint8_t { KEPT, PROVISIONAL, SUPERSEDED };

// One op's rows as columns, and what the ranks have reported on each.
struct Batch {
  size_t size() const { return rows.size(); }
  void reserve(size_t count, size_t key_bytes);
  void remove(size_t at, size_t key_bytes);
  // Sort the rows. by: of each row, as many values as rows.
  void sort(const std::vector<uint32_t>& by, size_t key_bytes);

  SmallColumn<Row> rows;       // kNoRow: of a load, the chunk is gone, or another engine's
  SmallColumn<char, 40> keys;  // joined
  SmallColumn<uint64_t> generations;
  SmallColumn<int32_t> cache;      // kNoSlot: none
  SmallColumn<Place> places;       // kNoPlace: none, or it is not read
  SmallColumn<uint8_t> groups;     // positions of KV cache groups
  SmallColumn<uint8_t> filling;    // the row's own fill: a store, a fetch, a landing; else 0
  SmallColumn<Outcome> code;       // the worst that a rank has reported
  SmallColumn<int16_t> error;      // errno, where code is IO_ERROR
  SmallColumn<uint16_t> outcomes;  // ranks whose outcome is owed
  SmallColumn<uint16_t> releases;  // ranks whose release is owed
  Samples samples;
  size_t undecided = 0, unreleased = 0;  // rows
};

// One rank's report on some rows of a batch. No indexes: on all of them. No codes: all are OK.
struct Report {
  std::span<const uint32_t> indexes;
  std::span<const uint8_t> codes;
  std::span<const int16_t> errors;
  std::span<const uint8_t> released;  // none: every row's buffers are released
  std::span<const uint32_t> crcs;     // of the rows that are samples, in this order
  uint32_t rank = 0;                  // if there are CRCs
};

// What a report has brought about, as indexes of the batch's rows.
struct Effect {
  std::vector<uint32_t> lost;     // their chunks are not in the cache slot any more
  std::vector<uint32_t> decided;  // all ranks have reported
  std::vector<uint32_t> failed;   // of these: one of the ranks has reported a failure

  void clear() {
    lost.clear();
    decided.clear();
    failed.clear();
  }
};

struct StorePlan {
  Batch batch;
  size_t absent = 0;              // keys without an entry
  std::vector<uint32_t> refused;  // the keys that were wanted and found no cache slot
};

// Bytes that one rank reads of a chunk. lane_bytes: by group; then, where ranks share single
// copies, of one of these, on average over the members.
inline uint64_t read_bytes_of(Place place, size_t group, std::span<const uint64_t> lane_bytes) {
  return lane_bytes[member_of(place) == kEveryMember ? group : lane_bytes.size() / 2 + group];
}

// Where a look-up finds the chunks of some keys. mixed: another number when one of them has moved
// to another tier or place, or has begun to be loaded; 0: one of them misses.
struct Whereabouts {
  std::vector<Row> rows;  // empty: some are other engines', which are found by their keys alone
  uint64_t mixed = 0;
};

// These keys, one after another, came to a tier or left it.
struct Move {
  Source tier;
  bool removed;
  std::string keys;
};

// Events since the counts were taken.
struct Counts {
  uint64_t cache_evictions = 0, pool_evictions = 0, refused_writes = 0, written = 0, retired = 0;
  uint64_t superseded = 0;   // chunks that were provisional and were never written
  uint64_t borrowed = 0;     // chunks read from other engines' regions by every rank
  uint64_t deduped = 0;      // chunks not written because another engine has them
  uint64_t hints_taken = 0;  // of others' hints, those on chunks that the pool still had
  bool operator==(const Counts&) const = default;
};

struct Options {
  Slot cache_slots = 0;
  std::vector<Slot> pool_slots;  // by target
  size_t key_bytes = 0;
  // By position, vLLM's number of each KV cache group, which ends its keys. A key of another group
  // is never stored or adopted.
  std::vector<uint32_t> group_ids{0};
  uint16_t ranks = 1;
  std::vector<uint32_t> set_sizes;  // of each group; empty: all are 1
  uint32_t equal_min = 8;           // chunks that a group's members stored alike before they share
  uint32_t sample_every = 1024;     // from then on, one chunk of so many is stored by all of them
  uint64_t credit = 0;              // `Recency`'s of the CPU tier, in uses
  bool writes = true;               // chunks are written to the pool
  bool demotes = false;             // on eviction; else as soon as they are stored
  bool logs_moves = false;
  size_t writes_max = 1;          // writes intended and under way
  size_t clean_min = 1;           // on eviction: slots to keep free, or evictable without a loss
  std::vector<bool> slot_errnos;  // by errno: a failure with it speaks against the slot
  MakeOrder make_order;           // none: Lru
  Foreign* foreign = nullptr;     // other engines' chunks; none: nothing is shared
};

// The pool's slots on one target, and the writes to it.
struct Target {
  Target(Slot count, uint32_t set_size);

  SlotRecord& operator[](Place place) { return slots[slot(place)]; }
  Slot slot(Place place) const {
    const uint32_t member = member_of(place), number = slot_of(place);
    return member == kEveryMember ? number : slots.parts.part(number, member);
  }

  Slots slots;
  Recency recency{0};  // returns do not count here
  std::unique_ptr<Order> order;
  bool usable = true;
  size_t pending = 0;  // writes intended and under way
  double speed = 0;    // its write rate as a share of the fastest one's; 0: unknown
  double pass = 0;     // writes that it was given, over its speed
};

class Tiers {
 public:
  explicit Tiers(Options options);

  // -- look-ups ---------------------------------------------------------------------
  Source lookup(const char* key, uint8_t sources) const;
  // Which of the keys a look-up would find now: 1 or 0 by key.
  std::string present(Keys keys, uint8_t sources) const;
  // Of keys that were just found: how many lead in the CPU tier; adds the others' bytes by target.
  // lane_bytes: see `read_bytes_of`.
  size_t weigh(Keys keys, std::span<const uint64_t> lane_bytes,
               std::vector<uint64_t>& by_target) const;
  // The keys, in prefix order, were used; ended: by an ended request. Heads outlive tails.
  void touch(Keys keys, bool ended) { touch(rows_of(keys), ended); }

  // -- remembered answers: manager/look_up.py ---------------------------------------
  Whereabouts whereabouts(Keys keys, uint8_t sources) const;
  // Whether they are the same, of the same keys and sources.
  bool unmoved(const Whereabouts& before, uint8_t sources) const {
    return mixed(before.rows, {}, sources) == before.mixed;
  }

  // -- plans ------------------------------------------------------------------------
  // Of a key in several places the first one is adopted. Returns the number of adopted entries.
  size_t adopt(std::span<const Place> places, std::span<const uint64_t> generations,
               const char* keys);
  // Keys come in prefix order. order: by key, its place in vLLM's list, which is that of the
  // batch's rows; empty: they come as in that list.
  // wanted: by key, or empty: all are kept. A provisional entry of a key that is to be kept now is
  // kept. Generations count up from `generation`.
  StorePlan plan_store(Keys keys, std::span<const uint8_t> wanted, uint64_t& generation,
                       std::span<const uint32_t> order = {});
  // A key without an entry becomes a row without slot and place. land_max: reads that may stay.
  Batch plan_load(Keys keys, size_t land_max, std::span<const uint32_t> order = {});
  // These keys' provisional entries are superseded; others are left alone.
  void supersede(Keys keys);
  // They are to be kept, and written like any other.
  void keep(Keys keys);
  // Make these chunks the next to leave the CPU tier, the last key first, except chunks that more
  // than one request has used. A chunk that waits to be written through keeps its turn, and without
  // a pool nothing changes.
  void cool(Keys keys);
  // Intend to read a key that is only in a pool into a cache slot; kNoRow: there is no slot, or
  // another engine has it no more.
  Row begin_fetch(const char* key, size_t reason);
  // The intended fetches, in their order, which are sent now.
  Batch take_fetches(size_t reason) { return std::exchange(fetches_[reason], {}); }
  // Take a fetch off its entry: later look-ups find the entry in the pool only.
  void detach(Batch& fetch, size_t at);
  // The same for a fetch that is only intended.
  void drop_fetch(size_t reason, Row row);
  // Begin the writes that the policy wants and the bound allows; `take_writes` sends them.
  void drain();
  Batch take_writes();
  // Keep a chunk in its cache slot, once more; kNoRow: it has none.
  Row hold(const char* key);
  void release_hold(Slot slot, Row row, uint64_t generation);
  // Other engines have borrowed chunks of our pool, which count as used by that. Takes so many of
  // their hints at most.
  void heed_hints(size_t max);

  // -- facts ------------------------------------------------------------------------
  void report(OpKind kind, Batch& batch, const Report& report, Effect& effect);
  // Fetch the memory of what a report on this row changes.
  void warm(const Batch& batch, size_t at) const;
  // The groups whose members have turned out to differ since the last call. What one of them stored
  // for all is then nothing to the others: the caller resets.
  std::vector<size_t> take_unequal() { return std::exchange(unequal_, {}); }
  void reset();

  // -- counts -----------------------------------------------------------------------
  size_t evictable() const;  // cache slots, free ones included
  size_t writes_intended() const { return writes_.size(); }
  size_t fetches_intended() const;

  // Other engines' chunks; none: nothing is shared.
  const Foreign* foreign() const { return options_.foreign; }

  Index index;
  Slots cache;
  std::unique_ptr<Order> clean;      // cache slots that are evictable without a loss
  std::unique_ptr<Order> unwritten;  // evictable ones whose chunks would be lost: see `may_lose`
  std::vector<Target> targets;
  // What the column `cache` of a batch says of a cache slot.
  int32_t column_of(Slot slot) const {
    const SlotParts& parts = cache.parts;
    if (!parts.is_part(slot)) return static_cast<int32_t>(slot);
    return cache_slot(parts.row(slot), parts.member(slot));
  }

  std::deque<Move> moves;
  size_t moved_bytes = 0;  // of keys in `moves`
  size_t backlog = 0;      // chunks that wait to be written
  size_t pending = 0;      // writes intended and under way
  Counts counts;

 private:
  Target& target(Place place) { return targets[target_of(place)]; }
  const Target& target(Place place) const { return targets[target_of(place)]; }
  Order& home(Slot slot) { return cache[slot].wanted ? *unwritten : *clean; }
  // The chunk to write next. Written through, they are written as they came, under any policy.
  Slot next_to_write() { return options_.demotes ? unwritten->peek() : arrivals_.first(); }
  // Whether a chunk that waits to be written may be evicted: only where no target takes writes. A
  // store is refused until then, because the middle of a prefix would be lost and its rest with it.
  bool may_lose(bool is_read) const;

  // Valid until the next call.
  const std::vector<Row>& rows_of(Keys keys) const {
    index.find(keys, found_);
    return found_;
  }
  Source source_of(Row row, uint8_t sources) const;
  // foreign: as `foreign_rows`.
  uint64_t mixed(std::span<const Row> rows, std::span<const ForeignRow> foreign,
                 uint8_t sources) const;
  // The position of the key's group; `group_ids.size()`: it is of no group that is offloaded.
  size_t group_of(const char* key) const;
  // Whether the row still is the entry that the batch names. A chunk may be borrowed again, in the
  // same generation, before all is reported on the first time. It has other slots then, because
  // those of the batch are in use.
  bool holds(const Batch& batch, size_t at) const {
    const Row row = batch.rows[at];
    if (row == kNoRow || !index.holds(row, batch.generations[at])) return false;
    const Entry& entry = index[row];
    if (!(entry.flags & Entry::kBorrowed)) return true;
    const bool same_place = batch.places[at] != kNoPlace && entry.place == batch.places[at];
    return same_place || (batch.cache[at] != kNoSlot &&
                          entry.cache == static_cast<int32_t>(slot_of_column(batch.cache[at])));
  }
  Row add_entry(const char* key, size_t group, uint64_t generation);
  void touch(const std::vector<Row>& rows, bool ended);
  void warm_slots(const Entry& entry) const;
  void warm_victims(const Order& order, const Slots& slots, bool leaves) const;
  void make_orders();
  State on(Row row, Event event);
  void log(Source tier, bool removed, const char* key);
  void log_reset();
  void settle(Row row);
  void doom(Row row, bool retire);
  void forget(Row row, bool retire);
  void evict(Row row, Event event);
  void leave_cache(Row row);
  void leave_pool(Row row, bool retire);
  Slot slot_of_column(int32_t cache_column) const {
    const uint32_t member = cache_member(cache_column), row = cache_row(cache_column);
    return member == kEveryMember ? row : cache.parts.part(row, member);
  }
  Slot take_cache_slot(bool is_read, const Part& part);
  Slot make_cache_room(bool is_read, const Part& part);
  void evict_cached(Slot victim, bool is_clean);
  Place take_place(const Part& part);
  void evict_pooled(Target& one, Slot victim);
  // -- other engines' chunks: borrowing.cpp
  // From whom: a living owner only, or anybody.
  enum class From : uint8_t { LIVING, ALL };
  ForeignRow foreign_row(const char* key, From from = From::ALL) const;
  // By key of which `rows` has none: that row. Empty: others have none of the keys, or the tiers
  // have all of them. Valid until the next call.
  const std::vector<ForeignRow>& foreign_rows(Keys keys, const std::vector<Row>& rows,
                                              From from = From::ALL) const;
  bool can_borrow(const ForeignRow& row, const char* key) const;
  void add_foreign(Batch& batch, const char* key, const ForeignRow& row);
  Row borrow(const char* key, uint64_t generation, Slot slot, uint64_t used);
  Row begin_borrow(const char* key, size_t reason);
  bool fails_foreign(const Batch& batch, size_t at);
  void ended_borrow(const Batch& batch, size_t at);
  void want_or_dedupe(Row row);
  void want_if_lost(Row row);
  Row pooled_at(Place place) const;
  // -- equal ranks: equal_ranks.cpp
  Part part_of(size_t group, uint32_t member) const;
  Part part_to_store(size_t group);
  bool is_single(const Batch& batch, size_t at) const;
  void compare(Batch& batch, const Report& report);
  Target* choose();
  bool write_due() const;
  void keep(Row row);
  void cool(Slot slot, uint64_t used);
  void stay(Slot slot, Stay next);
  void want(Slot slot);
  void unwant(Slot slot);
  void fill_from_pool(Row row, Slot slot);
  void cancel_fetch(Row row);
  void add(Batch& batch, Row row, int32_t slot, Place place, bool filling) const;
  void add_gone(Batch& batch, const char* key) const;
  void add_row(Batch& batch, Row row, const char* key, int32_t slot, Place place,
               bool filling) const;
  bool fails(OpKind kind, const Batch& batch, size_t at, Outcome code, int error);
  bool decide(OpKind kind, const Batch& batch, size_t at);
  void ended_write(const Batch& batch, size_t at);
  void release(const Batch& batch, size_t at);
  bool worn(std::unordered_map<Place, int>& failures, Place place, Outcome code, int error);

  Options options_;
  mutable std::vector<Row> found_;
  mutable std::vector<ForeignRow> foreign_found_;
  Recency recency_;                    // of the cache slots
  Arrivals arrivals_;                  // cache slots that wait to be written, pinned or not
  HugeColumn<Stay> stays_;             // by cache slot
  size_t unkept_ = 0;                  // of these, others than KEPT
  uint64_t uses_ = uint64_t{1} << 32;  // before the first one: what is to go before all others
  size_t passed_over_ = 0;  // evictions of clean slots while a colder one waited to be written
  Batch writes_;            // intended
  std::array<Batch, kFetchReasons> fetches_;  // intended, by reason
  uint64_t foreign_loads_ = 0;                // of other engines' chunks, which have no entry here
  std::vector<Trust> trust_;                  // by group
  std::vector<size_t> unequal_;               // groups whose members differ, until they are taken
  size_t turn_ = 0;  // the target that is chosen where nothing else decides
  double pass_ = 0;  // the least pass of those that could be chosen
  // By place, in a row. Counted apart: a device may take bytes and not return them.
  std::unordered_map<Place, int> failed_reads_, failed_writes_;
};

}  // namespace nvmeof
