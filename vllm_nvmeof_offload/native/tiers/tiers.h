// SPDX-License-Identifier: Apache-2.0
// The manager's two tiers: the index, the slots, eviction, and the loops over a batch's rows.
// Python decides once per batch what to store, load, fetch and write; this code runs per chunk. It
// does no I/O, and only the scheduler's thread calls it.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/columns.h"
#include "common/op.h"
#include "tiers/accepted_owners.h"
#include "tiers/eviction.h"
#include "tiers/index.h"

namespace nvmeof {

// The evidence, from samples stored by all ranks, that a set's ranks hold equal bytes for a group.
struct Trust {
  explicit Trust(uint32_t members) : set_size(members) {}

  uint32_t set_size;
  uint32_t equal = 0;   // samples that were equal in every set
  bool ended = false;   // two ranks in a set differed, so single copies are no longer stored
  uint64_t stored = 0;  // chunks stored since `equal` became high enough
};

class Samples {
 public:
  enum class Seen : uint8_t { SOME, ALL_EQUAL, DIFFERENT };

  // Add a report. crc: the CRC of the row's payload on `rank`. ranks: the number of ranks over all
  // sets.
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
  std::vector<uint64_t> crcs_;     // the first CRC by row and set, or 0 if none was reported
  std::vector<uint16_t> reports_;  // by row
};

using Keys = std::span<const char* const>;

// The source in which a look-up finds a chunk. SHARED: the pool of another engine.
enum class Source : uint8_t { NONE, CPU, POOL, SHARED };
inline constexpr size_t kSources = 4;
// The tiers that a look-up may hit. Another engine's chunks count as chunks in the pool.
inline constexpr uint8_t kFromCpu = 1, kFromPool = 2;

// A chunk that other engines have dropped is written once this many requests have used it.
inline constexpr uint32_t kUsesMin = 2;

// How far ahead a loop over keys or rows prefetches memory.
inline constexpr size_t kAhead = 16;

// The maximum number of chunks that sessions release in one step, so that a long session does not
// delay the step.
inline constexpr size_t kExpiredMax = 4096;

// The number of reasons for a fetch; see `Reason` in manager/hold_and_prefetch.py.
inline constexpr size_t kFetchReasons = 3;

// The decision on a key offered for storage, as in the column `wanted`.
enum class Store : uint8_t { NOT, KEPT, PROVISIONALLY };
// The status of a cache slot's chunk. A provisional chunk is not written. When a later boundary is
// stored, the chunk is superseded and will be evicted next.
enum class Stay : uint8_t { KEPT, PROVISIONAL, SUPERSEDED };

// The rows of one op in columns, with the ranks' reports on each row.
struct Batch {
  size_t size() const { return rows.size(); }
  void reserve(size_t count, size_t key_bytes);
  void remove(size_t at, size_t key_bytes);
  // by: the sort value of each row.
  void sort(const std::vector<uint32_t>& by, size_t key_bytes);

  SmallColumn<Row> rows;       // kNoRow in a load if the chunk was evicted or is another engine's
  SmallColumn<char, 40> keys;  // all keys, joined
  SmallColumn<uint64_t> generations;
  SmallColumn<int32_t> cache;      // kNoSlot if there is no cache slot
  SmallColumn<Place> places;       // kNoPlace if there is no place, or it is not read
  SmallColumn<uint8_t> groups;     // positions of KV cache groups
  SmallColumn<uint8_t> filling;    // 1 if the row fills its cache slot, else 0
  SmallColumn<uint32_t> clients;   // in a write, as in `Sessions`; else empty
  SmallColumn<Outcome> code;       // the worst outcome reported by a rank
  SmallColumn<int16_t> error;      // errno, if code is IO_ERROR
  SmallColumn<uint16_t> outcomes;  // ranks that must still report an outcome
  SmallColumn<uint16_t> releases;  // ranks that must still report a release
  Samples samples;
  size_t undecided = 0, unreleased = 0;  // numbers of rows
};

// One rank's report on rows of a batch. If `indexes` is empty, it covers all rows; if `codes` is
// empty, these rows are OK.
struct Report {
  std::span<const uint32_t> indexes;
  std::span<const uint8_t> codes;
  std::span<const int16_t> errors;
  std::span<const uint8_t> released;  // empty if every row's buffers are released
  std::span<const uint32_t> crcs;     // the CRCs of the rows that are samples, in order
  uint32_t rank = 0;                  // valid if there are CRCs
};

// The effect of a report, as indexes into the batch's rows.
struct Effect {
  std::vector<uint32_t> lost;     // rows whose chunks are no longer in the cache slot
  std::vector<uint32_t> decided;  // rows on which all ranks have reported
  std::vector<uint32_t> failed;   // decided rows that failed on some rank

  void clear() {
    lost.clear();
    decided.clear();
    failed.clear();
  }
};

struct StorePlan {
  Batch batch;
  size_t absent = 0;              // keys without an entry
  std::vector<uint32_t> refused;  // keys that were wanted but got no cache slot
};

// Return how many bytes of a chunk one rank reads. lane_bytes: these bytes by group, first for
// chunks on every rank, then for single copies, averaged over the members.
inline uint64_t read_bytes_of(Place place, size_t group, std::span<const uint64_t> lane_bytes) {
  return lane_bytes[member_of(place) == kEveryMember ? group : lane_bytes.size() / 2 + group];
}

// The result of looking up some keys. `mixed` is a hash that changes when a chunk moves to another
// tier or place, or when a load of a chunk begins; it is 0 if a key misses.
struct Whereabouts {
  std::vector<Row> rows;  // empty if a chunk is another engine's, and thus found only by its key
  uint64_t mixed = 0;
};

// A run of successive keys that entered, or left, the same tier.
struct Move {
  Source tier;
  bool removed;
  std::string keys;
};

struct Counts {
  uint64_t cache_evictions = 0, pool_evictions = 0, refused_writes = 0, written = 0, retired = 0;
  uint64_t superseded = 0;  // provisional chunks that were never written
  uint64_t borrowed = 0;    // chunks read from other engines' regions by every rank
  uint64_t deduped = 0;     // chunks not written because another engine holds them
  bool operator==(const Counts&) const = default;
};

// The rows of a load, as in a `Batch`. ends: the number of the request's tokens up to each chunk's
// end; empty if all chunks use full attention and are consecutive, beginning with the chunk that
// contains the first token to load.
struct LoadRows {
  std::span<const int32_t> cache;
  std::span<const Place> places;
  std::span<const uint8_t> groups;
  std::span<const int64_t> ends;
};

struct Options {
  Slot cache_slots = 0;
  std::vector<Slot> pool_slots;  // by target
  size_t key_bytes = 0;
  // vLLM's numbers for the KV cache groups that are offloaded. A key ends with its group's number.
  std::vector<uint32_t> group_ids{0};
  // Tokens per chunk, by group; 0 for a state, which covers all tokens before its end.
  std::vector<uint32_t> group_tokens{1};
  uint16_t ranks = 1;
  std::vector<uint32_t> set_sizes;  // by group; empty if all are 1
  uint32_t equal_min = 8;           // equal samples that a group needs for single copies
  uint32_t sample_every = 1024;     // from then on, every rank stores one chunk in this many
  uint64_t credit = 0;              // the CPU tier's credit for `Recency`, in uses
  double retain_share = 0;          // the share of each tier's slots that one client may retain
  bool writes = true;               // whether chunks are written to the pool
  bool demotes = false;             // whether they are written on eviction, not when stored
  bool logs_moves = false;
  size_t writes_max = 1;          // limit on planned and running writes
  size_t clean_min = 1;           // if `demotes`: slots to keep free or evictable without loss
  std::vector<bool> slot_errnos;  // whether a failure means that the slot is bad, by errno
  MakeOrder make_order;           // empty for Lru
  Foreign* foreign = nullptr;     // other engines' chunks, or null if nothing is shared
};

struct Target {
  Target(Slot count, uint32_t set_size) : slots(count, set_size) {}

  SlotRecord& operator[](Place place) { return slots[slot(place)]; }
  Slot slot(Place place) const {
    const uint32_t member = member_of(place), number = slot_of(place);
    return member == kEveryMember ? number : slots.parts.part(number, member);
  }

  Slots slots;
  Recency recency{0};  // the pool gives no credit
  std::unique_ptr<Order> order;
  KeptSlots kept;
  bool usable = true;
  size_t pending = 0;  // planned and running writes
  double speed = 0;    // its write rate relative to the fastest target's, or 0 if unknown
  double pass = 0;     // the writes given to it, divided by its speed
};

class Tiers {
 public:
  explicit Tiers(Options options);

  // -- look-ups ---------------------------------------------------------------------
  Source lookup(const char* key, uint8_t sources) const {
    return lookup(index.find(key), key, sources);
  }
  // row: the key's row.
  Source lookup(Row row, const char* key, uint8_t sources) const;
  // Expect the keys of these rows, in this order, in the next call with keys.
  void expect(std::vector<Row>& rows) const { found_.swap(rows); }
  // Return one byte per key: 1 if a look-up would find the key now, else 0.
  std::string present(Keys keys, uint8_t sources) const;
  // Return how many leading keys are in the CPU tier, and add the other keys' bytes to `by_target`.
  // The keys must just have been found by a look-up. lane_bytes: see `read_bytes_of`.
  size_t weigh(Keys keys, std::span<const uint64_t> lane_bytes,
               std::vector<uint64_t>& by_target) const;
  // Record a use of these keys, given in prefix order, so that heads outlive tails. ended: whether
  // their request has ended, which counts only once for a key that is named twice.
  void touch(Keys keys, bool ended) { touch(rows_of(keys), ended); }

  // -- cached answers: manager/look_up.py ---------------------------------------
  Whereabouts whereabouts(Keys keys, uint8_t sources) const;
  // Return whether a look-up of the same keys and sources would give the same result now.
  bool unmoved(const Whereabouts& before, uint8_t sources) const {
    return mixed(before.rows, {}, sources) == before.mixed;
  }

  // -- plans ------------------------------------------------------------------------
  // Adopt the chunks found at start-up, but only the first for each key. Returns the number
  // adopted.
  size_t adopt(std::span<const Place> places, std::span<const uint64_t> generations,
               const char* keys);
  // Plan a store. keys: in prefix order. order: each key's position in vLLM's list, which
  // determines the order of the rows; empty if both orders are the same. wanted: a `Store` per key,
  // or empty to keep all; KEPT also keeps a provisional entry. Generations count up from
  // `generation`. client: as in `Sessions`.
  StorePlan plan_store(Keys keys, std::span<const uint8_t> wanted, uint64_t& generation,
                       std::span<const uint32_t> order = {}, uint32_t client = 0);
  // Plan a load. The row of a missing chunk has no slot or place. land_max: limit on cache slots
  // filled.
  Batch plan_load(Keys keys, size_t land_max, std::span<const uint32_t> order = {},
                  uint32_t client = 0);
  // Return how many of the tokens in [first, last) a load takes from the CPU tier, from our pool,
  // and from other engines' pools. A token whose chunks are in several of these counts towards the
  // last of them. Tokens whose chunks were evicted, or are outside a window, are not counted.
  std::array<int64_t, 3> tokens_by_source(const LoadRows& rows, int64_t first, int64_t last) const;
  void supersede(Keys keys);
  // Make these keys' entries KEPT, so that they are written like any others.
  void keep(Keys keys);
  // Make these chunks the next to be evicted from the CPU tier, last key first, except chunks that
  // several requests have used or that are waiting for write-through. Without a pool, nothing
  // changes.
  void cool(Keys keys);
  // Retain these chunks, given in prefix order, until second `until`, in addition to those that the
  // session already retains. Returns false if nothing is retained. See `Sessions`.
  bool retain(uint64_t session, uint32_t client, uint32_t until, uint8_t priority, Keys keys);
  // End the sessions that have expired by this second or have been dropped. A call ends the
  // retention of at most kExpiredMax chunks.
  void expire(uint32_t now);
  // Plan a fetch: the read, into a cache slot, of a chunk that is only in a pool. Returns kNoRow if
  // there is no slot, or if another engine no longer has the chunk.
  Row begin_fetch(const char* key, size_t reason);
  Batch take_fetches(size_t reason) { return std::exchange(fetches_[reason], {}); }
  // Detach a fetch from its entry: later look-ups find the entry only in the pool.
  void detach(Batch& fetch, size_t at);
  void drop_fetch(size_t reason, Row row);
  // Plan the writes that the policy wants and the bound allows; `take_writes` returns them.
  void drain();
  Batch take_writes() { return std::exchange(writes_, {}); }
  void warm_slots(const char* key) const {
    if (const Row row = index.find(key); row != kNoRow) warm_slots(index[row]);
  }
  // Add a hold to a chunk's cache slot. Returns the chunk's row, or kNoRow if it has no cache slot.
  Row hold(const char* key);
  void release_hold(Slot slot, Row row, uint64_t generation);

  // -- facts ------------------------------------------------------------------------
  void report(OpKind kind, Batch& batch, const Report& report, Effect& effect);
  void warm(const Batch& batch, size_t at) const;
  // Return and clear the groups in which members were found to differ since the last call. A
  // member's single copies are then wrong for the others, so the caller must reset the tiers.
  std::vector<size_t> take_unequal() { return std::exchange(unequal_, {}); }
  void reset();

  // -- counts -----------------------------------------------------------------------
  size_t evictable() const;  // cache slots, including free ones
  // Return the evictable slots whose chunks are retained, in the CPU tier and in the pool.
  std::pair<size_t, size_t> retained() const {
    size_t pool = 0;
    for (const Target& one : targets) pool += one.kept.all;
    return {cache_kept_.all, pool};
  }
  size_t writes_intended() const { return writes_.size(); }
  size_t fetches_intended() const;

  const Foreign* foreign() const { return options_.foreign; }

  Index index;
  Sessions sessions;
  Slots cache;
  std::unique_ptr<Order> clean;      // cache slots that are evictable without loss
  std::unique_ptr<Order> unwritten;  // evicting one of these slots loses its chunk; see `may_lose`
  std::vector<Target> targets;
  // Return a cache slot as encoded in a batch's column `cache`.
  int32_t column_of(Slot slot) const {
    const SlotParts& parts = cache.parts;
    if (!parts.is_part(slot)) return static_cast<int32_t>(slot);
    return cache_slot(parts.row(slot), parts.member(slot));
  }

  std::deque<Move> moves;
  size_t moved_bytes = 0;  // the bytes of all keys in `moves`
  size_t backlog = 0;      // chunks waiting to be written
  size_t pending = 0;      // planned and running writes
  Counts counts;

 private:
  Target& target(Place place) { return targets[target_of(place)]; }
  const Target& target(Place place) const { return targets[target_of(place)]; }
  Order& home(Slot slot) { return cache[slot].wanted ? *unwritten : *clean; }
  // Return the slot to write next. In write-through mode this is the oldest one, under any policy.
  Slot next_to_write() { return options_.demotes ? unwritten->peek() : arrivals_.first(); }
  // Return whether a chunk that is waiting to be written may be evicted: only for a store, and only
  // if no target accepts writes. Otherwise the store is refused, because a prefix needs all its
  // chunks.
  bool may_lose(bool is_read) const;

  // Return the rows of the keys, valid until the next call.
  const std::vector<Row>& rows_of(Keys keys) const {
    index.find(keys, found_);
    return found_;
  }
  Source source_of(Row row, uint8_t sources) const;
  uint64_t mixed(std::span<const Row> rows, std::span<const ForeignRow> foreign,
                 uint8_t sources) const;
  // Return the position of the key's group, or `group_ids.size()` if the group is not offloaded.
  size_t group_of(const char* key) const;
  // Return whether the row is still the entry that the batch names. Another engine's chunk may be
  // read again, with the same generation but into other slots, before all ranks have reported.
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
  // The engines to consider: only live ones, or all.
  enum class From : uint8_t { LIVING, ALL };
  ForeignRow foreign_row(const char* key, From from = From::ALL) const;
  // Return other engines' rows for the keys without a row here; empty if there are no such keys or
  // no foreign rows. Valid until the next call.
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
  // -- equal ranks: equal_ranks.cpp
  Part part_of(size_t group, uint32_t member) const;
  Part part_to_store(size_t group);
  bool is_single(const Batch& batch, size_t at) const;
  void compare(Batch& batch, const Report& report);
  Target* choose();
  bool write_due() const;
  void keep(Row row);
  void cool(Slot slot, uint64_t used);
  void start_keeping();
  bool make_retained_room(uint32_t session, Row row);
  void release_last(uint32_t session);
  void refile(Row row);
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
  bool keeping_ = false;               // whether the orders are `Keeping`
  KeptSlots cache_kept_;               // of `clean` and `unwritten`
  Recency recency_;                    // for the cache slots
  Arrivals arrivals_;                  // cache slots waiting to be written, pinned or not
  HugeColumn<Stay> stays_;             // by cache slot
  size_t unkept_ = 0;                  // the number of slots that are not KEPT
  uint64_t uses_ = uint64_t{1} << 32;  // smaller values belong to chunks to be evicted first
  size_t passed_over_ = 0;  // evictions of clean slots while a colder one waited to be written
  Batch writes_;            // planned
  std::array<Batch, kFetchReasons> fetches_;  // planned, by reason
  uint64_t foreign_loads_ = 0;                // loads of other engines' chunks without an entry
  std::vector<Trust> trust_;                  // by group
  std::vector<size_t> unequal_;               // groups with unequal members, until taken
  std::vector<size_t> ready_;                 // within `choose`, which runs per chunk
  size_t turn_ = 0;                           // the target chosen if all else is equal
  double pass_ = 0;                           // the lowest pass of all usable targets
  // Consecutive failures by place. A device may accept writes and fail reads, so both are counted.
  std::unordered_map<Place, int> failed_reads_, failed_writes_;
};

}  // namespace nvmeof
