// SPDX-License-Identifier: Apache-2.0
#include "tiers/tiers.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <numeric>
#include <utility>

namespace nvmeof {

namespace {

// A pool slot is retired after this many of its reads, or of its writes, have failed in a row.
constexpr int kFailuresMax = 3;
// A write may go to a target whose queue takes up to this many times as long as the shortest.
constexpr double kPatience = 2.0;
// The number of victims between two steps of `warm_victims`.
constexpr size_t kStep = 6;

std::unique_ptr<Order> make(const MakeOrder& make_order, const Slots& slots) {
  if (make_order && slots.capacity()) return make_order(slots.all());  // not for 0 slots
  return std::make_unique<Lru>(slots.all());
}

// Return the maximum number of slots in a tier or target for one client's retained chunks.
size_t retained_max(const Options& options, size_t slots) {
  return static_cast<size_t>(options.retain_share * static_cast<double>(slots));
}

// Return the maximum number of chunks that one client may retain: its share of the tier that keeps
// them longest.
size_t retained_max(const Options& options) {
  size_t slots = 0;
  for (const Slot count : options.pool_slots) slots += options.writes ? count : 0;
  return retained_max(options, slots ? slots : options.cache_slots);
}

// Return whether the tier holds a whole copy of an entry in this state.
bool copied(State state, Source tier) {
  if (state == State::FETCHING && mutant("fetch_is_reported_at_its_start")) return true;
  if (tier == Source::CPU)
    return state == State::CACHED || state == State::WRITING || state == State::BOTH;
  return state == State::BOTH || state == State::POOLED || state == State::FETCHING;
}

// The cases that `Tiers::mixed` distinguishes.
enum class Seen : uint8_t { NOWHERE, CPU, POOL, ON_ITS_WAY };

Seen seen(State state) {
  if (state == State::POOLED) return Seen::POOL;
  if (state == State::FETCHING || state == State::BORROWING) return Seen::ON_ITS_WAY;
  return in_cache(state) ? Seen::CPU : Seen::NOWHERE;
}

uint32_t largest(const std::vector<uint32_t>& set_sizes) {
  return set_sizes.empty() ? 1 : std::ranges::max(set_sizes);
}

}  // namespace

Tiers::Tiers(Options options)
    : index(
          [&options] {
            uint64_t rows = options.cache_slots;
            for (const Slot slots : options.pool_slots) rows += slots;
            rows *= largest(options.set_sizes);
            require(rows < kNoRow, "too many slots, or parts of slots, for an index");
            return static_cast<Row>(rows);
          }(),
          options.key_bytes),
      sessions(index, index.capacity(), retained_max(options)),
      cache(options.cache_slots, largest(options.set_sizes)),
      options_(std::move(options)),
      recency_(options_.credit),
      arrivals_(cache.all().size()),
      stays_(cache.all().size()) {
  const uint32_t set_size = largest(options_.set_sizes);
  targets.reserve(options_.pool_slots.size());  // each target's order refers to its slots
  for (const Slot slots : options_.pool_slots) targets.emplace_back(slots, set_size);
  for (size_t group = 0; group < options_.group_ids.size(); ++group)
    trust_.emplace_back(options_.set_sizes.empty() ? 1 : options_.set_sizes.at(group));
  make_orders();
}

// Make new orders, in which nothing is evictable and nothing waits to be written.
void Tiers::make_orders() {
  backlog = passed_over_ = 0;
  keeping_ = false;
  cache_kept_ = {};
  stays_ = HugeColumn<Stay>(stays_.size());  // all are KEPT
  unkept_ = 0;
  clean = make(options_.make_order, cache);
  unwritten = make(options_.make_order, cache);
  arrivals_ = Arrivals(cache.all().size());
  for (Target& one : targets) {
    one.order = make(options_.make_order, one.slots);
    one.kept = {};
  }
}

// -- look-ups -------------------------------------------------------------------------

Source Tiers::lookup(Row row, const char* key, uint8_t sources) const {
  const Foreign* const foreign = options_.foreign;
  // Usually there are no other engines, and a miss then needs neither a call nor a fingerprint.
  if (row == kNoRow && foreign && !foreign->empty() && sources & kFromPool)
    return foreign_row(key).place == kNoPlace ? Source::NONE : Source::SHARED;
  return source_of(row, sources);
}

Source Tiers::source_of(Row row, uint8_t sources) const {
  if (row == kNoRow) return Source::NONE;
  const Entry& entry = index[row];
  const State state = entry.state;
  if (state == State::STORING && mutant("store_in_flight_is_a_miss")) return Source::NONE;
  if (in_cache(state)) {
    // A chunk being fetched counts as cached, unless the look-up is restricted to the CPU tier.
    const bool fetched = state == State::FETCHING || state == State::BORROWING;
    const bool there = !fetched || mutant("fetching_hits_in_the_second_look_up");
    const bool allowed = sources & kFromCpu && (there || sources & kFromPool);
    return allowed ? Source::CPU : Source::NONE;
  }
  return sources & kFromPool && target(entry.place).usable ? Source::POOL : Source::NONE;
}

std::string Tiers::present(Keys keys, uint8_t sources) const {
  std::string found;
  found.reserve(keys.size());
  const std::vector<Row>& rows = rows_of(keys);
  for (const Row row : rows) found += static_cast<char>(source_of(row, sources) != Source::NONE);
  if (!options_.foreign || !(sources & kFromPool)) return found;
  const std::vector<ForeignRow>& foreign = foreign_rows(keys, rows);
  for (size_t at = 0; at < foreign.size(); ++at)
    found[at] = found[at] || foreign[at].place != kNoPlace;
  return found;
}

size_t Tiers::weigh(Keys keys, std::span<const uint64_t> lane_bytes,
                    std::vector<uint64_t>& by_target) const {
  size_t leading = 0;
  bool all_cached = true;
  const std::vector<Row>& rows = rows_of(keys);
  const std::vector<ForeignRow>& foreign = foreign_rows(keys, rows);
  const auto read = [&](Place place, size_t group) {
    all_cached = false;
    by_target[target_of(place)] += read_bytes_of(place, group, lane_bytes);
  };
  for (size_t at = 0; at < rows.size(); ++at) {
    if (rows[at] == kNoRow) {
      all_cached = false;  // evicted since, or another engine has dropped it
      if (!foreign.empty() && foreign[at].place != kNoPlace)
        read(foreign[at].place, group_of(keys[at]));
      continue;
    }
    const Entry& entry = index[rows[at]];
    if (entry.state == State::BORROWING)
      all_cached = false;  // being read already
    else if (in_cache(entry.state) && entry.state != State::FETCHING)
      leading += all_cached;
    else
      read(entry.place, entry.group);
  }
  return leading;
}

void Tiers::warm_slots(const Entry& entry) const {
  if (entry.cache != kNoSlot) {
    cache.warm(static_cast<Slot>(entry.cache));
    clean->warm(static_cast<Slot>(entry.cache));
  }
  if (entry.place != kNoPlace) {
    const Target& one = target(entry.place);
    one.slots.warm(one.slot(entry.place));
    one.order->warm(one.slot(entry.place));
  }
}

void Tiers::touch(const std::vector<Row>& rows, bool ended) {
  const auto warm = [&](size_t at) {
    if (rows[at] == kNoRow) return;
    warm_slots(index[rows[at]]);
    if (index[rows[at]].flags & Entry::kDeduped)
      options_.foreign->warm({index.key(rows[at]), index.key_bytes()});
  };
  for (size_t at = rows.size(); at-- > rows.size() - std::min(rows.size(), kAhead);) warm(at);
  for (size_t at = rows.size(); at-- > 0;) {
    // In a long request, the rows that the look-up read have left the CPU's cache.
    if (at >= 2 * kAhead && rows[at - 2 * kAhead] != kNoRow) index.warm(rows[at - 2 * kAhead]);
    if (at >= kAhead) warm(at - kAhead);
    ++uses_;
    if (rows[at] == kNoRow) continue;
    Entry& entry = index[rows[at]];
    const bool credit = ended && !(entry.flags & Entry::kCredited);
    if (ended) entry.flags |= Entry::kCredited;
    if (entry.cache != kNoSlot) {
      const auto slot = static_cast<Slot>(entry.cache);
      if (unkept_ && stays_[slot] == Stay::SUPERSEDED) continue;  // its chunk is in no pool
      recency_.use(cache[slot], uses_, credit);
      home(slot).touch(slot);
    }
    if (entry.place != kNoPlace) {
      Target& one = target(entry.place);
      one.recency.use(one[entry.place], uses_, credit);
      one.order->touch(one.slot(entry.place));
    }
    if (entry.flags & Entry::kDeduped) want_if_lost(rows[at]);
  }
  for (size_t at = 0; ended && at < rows.size(); ++at) {
    if (at + kAhead < rows.size() && rows[at + kAhead] != kNoRow) index.warm(rows[at + kAhead]);
    if (rows[at] != kNoRow) index[rows[at]].flags &= static_cast<uint8_t>(~Entry::kCredited);
  }
}

// -- remembered answers ---------------------------------------------------------------

Whereabouts Tiers::whereabouts(Keys keys, uint8_t sources) const {
  const std::vector<Row>& rows = rows_of(keys);
  const std::vector<ForeignRow>& foreign = foreign_rows(keys, rows);
  Whereabouts found{{}, mixed(rows, foreign, sources)};
  if (std::ranges::find(rows, kNoRow) == rows.end()) found.rows = rows;
  return found;
}

uint64_t Tiers::mixed(std::span<const Row> rows, std::span<const ForeignRow> foreign,
                      uint8_t sources) const {
  if (mutant("remembered_answer_survives_an_eviction")) return 1;
  uint64_t mixed = 1;
  for (size_t at = 0; at < rows.size(); ++at) {
    if (at + kAhead < rows.size() && rows[at + kAhead] != kNoRow) index.warm(rows[at + kAhead]);
    const bool is_foreign = rows[at] == kNoRow && sources & kFromPool && !foreign.empty() &&
                            foreign[at].place != kNoPlace;
    if (is_foreign) {
      mixed = mix(mix(mixed, static_cast<uint64_t>(foreign[at].place)), foreign_loads_);
      continue;
    }
    if (rows[at] == kNoRow) return 0;
    // A remembered row may have been freed since, so it has no place, or may belong to another key.
    const Entry& entry = index[rows[at]];
    const Seen there = seen(entry.state);
    if (there == Seen::NOWHERE || source_of(rows[at], sources) == Source::NONE) return 0;
    mixed = mix(mixed, entry.generation ^ uint64_t{entry.hash} << 32);
    uint64_t word = static_cast<uint64_t>(there);
    if (!mutant("remembered_answer_survives_a_load")) word |= uint64_t{entry.loads} << 8;
    if (mutant("remembered_answer_survives_a_move")) word &= ~uint64_t{0xff};
    mixed = mix(mixed, word);
    if (there == Seen::POOL && !mutant("remembered_answer_survives_a_move"))
      mixed = mix(mixed, static_cast<uint64_t>(entry.place));
  }
  return mixed | 1;
}

// -- plans ----------------------------------------------------------------------------

size_t Tiers::group_of(const char* key) const {
  const uint32_t id = group_id_of({key, index.key_bytes()});
  const auto found = std::ranges::find(options_.group_ids, id);
  return static_cast<size_t>(found - options_.group_ids.begin());
}

Row Tiers::add_entry(const char* key, size_t group, uint64_t generation) {
  const Row row = index.add(key, generation);
  index[row].group = static_cast<uint8_t>(group);
  return row;
}

size_t Tiers::adopt(std::span<const Place> places, std::span<const uint64_t> generations,
                    const char* keys) {
  const size_t before = index.size();
  for (size_t at = 0; at < places.size(); ++at) {
    const char* const key = keys + at * index.key_bytes();
    if (at + kAhead < places.size()) index.warm(key + kAhead * index.key_bytes());
    const size_t group = group_of(key);
    if (group == options_.group_ids.size() || index.find(key) != kNoRow) continue;
    const Place place = places[at];
    Target& one = target(place);
    const Part part = part_of(group, member_of(place));
    if (!one.slots.can_divide(slot_of(place), part)) continue;
    const bool taken = one.slots.take_numbered(slot_of(place), part);
    require(taken, "a slot is adopted twice or out of range");
    const Row row = add_entry(key, group, generations[at]);
    index[row].place = place;
    one[place].row = row;
    one[place].used = ++uses_;
    on(row, Event::ADOPT);
    one.order->admit(one.slot(place));
  }
  return index.size() - before;
}

void Tiers::add(Batch& batch, Row row, int32_t slot, Place place, bool filling) const {
  batch.generations.push_back(index[row].generation);
  batch.groups.push_back(index[row].group);
  const int32_t column = slot == kNoSlot ? kNoSlot : column_of(static_cast<Slot>(slot));
  add_row(batch, row, index.key(row), column, place, filling);
}

// Add a row for a chunk that was evicted after its look-up: every rank will report it as STALE.
void Tiers::add_gone(Batch& batch, const char* key) const {
  const size_t group = group_of(key);
  batch.generations.push_back(0);
  batch.groups.push_back(group < options_.group_ids.size() ? static_cast<uint8_t>(group) : 0);
  add_row(batch, kNoRow, key, kNoSlot, kNoPlace, false);
}

void Tiers::add_row(Batch& batch, Row row, const char* key, int32_t slot, Place place,
                    bool filling) const {
  batch.rows.push_back(row);
  batch.keys.append(key, index.key_bytes());
  batch.cache.push_back(slot);
  batch.places.push_back(place);
  batch.filling.push_back(filling);
  batch.code.push_back(Outcome::OK);
  batch.error.push_back(0);
  batch.outcomes.push_back(options_.ranks);
  batch.releases.push_back(options_.ranks);
  ++batch.undecided;
  ++batch.unreleased;
}

StorePlan Tiers::plan_store(Keys keys, std::span<const uint8_t> wanted, uint64_t& generation,
                            std::span<const uint32_t> order, uint32_t client) {
  StorePlan plan;
  std::vector<uint32_t> fresh;  // indexes of keys
  const std::vector<Row> before = rows_of(keys);
  const auto is_provisional = [&wanted](size_t at) {
    return !wanted.empty() && static_cast<Store>(wanted[at]) == Store::PROVISIONALLY;
  };
  for (size_t at = 0; at < keys.size(); ++at) {
    if (before[at] != kNoRow && !is_provisional(at)) keep(before[at]);
    if (before[at] != kNoRow || group_of(keys[at]) == options_.group_ids.size()) continue;
    ++plan.absent;
    if (wanted.empty() || wanted[at]) fresh.push_back(static_cast<uint32_t>(at));
  }
  std::vector<Slot> held;
  if (fresh.size() > cache.free()) {
    touch(before, false);  // before evicting, so that chunks offered here are evicted last
    // Evicting a prefix to store its continuation would make the continuation unreachable. With
    // `demotes`, however, chunks that are also in the pool go first, even those of this prefix.
    for (size_t at = 0; at < (options_.demotes ? 0 : keys.size()); ++at) {
      const Row row = before[at];
      if (row == kNoRow || index[row].cache == kNoSlot) continue;
      const auto slot = static_cast<Slot>(index[row].cache);
      if (!home(slot).contains(slot)) continue;
      home(slot).withdraw(slot);
      held.push_back(slot);
    }
  }
  const auto put_back = [&] {
    for (const Slot slot : held) home(slot).admit(slot);
    held.clear();
  };
  plan.batch.reserve(fresh.size(), index.key_bytes());
  const std::vector<ForeignRow>& elsewhere = foreign_rows(keys, before, From::LIVING);
  const bool may_leave = !elsewhere.empty() && !mutant("a_duplicate_is_written");
  std::vector<uint32_t> by;  // the sort values of the batch's rows
  for (const uint32_t at : fresh) {
    const char* const key = keys[at];
    if (index.find(key) != kNoRow) continue;  // named twice
    const size_t group = group_of(key);
    const Part part = part_to_store(group);
    Slot slot = take_cache_slot(false, part);
    if (slot == kNone && !held.empty()) {
      put_back();
      slot = take_cache_slot(false, part);
    }
    if (slot == kNone) {
      plan.refused.assign(std::ranges::find(fresh, at), fresh.end());
      break;
    }
    const Row row = add_entry(key, group, ++generation);
    sessions.set_client(row, client);
    index[row].cache = static_cast<int32_t>(slot);
    cache[slot].row = row;
    on(row, Event::STORE_BEGIN);
    if (may_leave && elsewhere[at].place != kNoPlace) index[row].flags |= Entry::kDeduped;
    cache.use(slot);
    if (is_provisional(at)) stay(slot, Stay::PROVISIONAL);
    add(plan.batch, row, index[row].cache, kNoPlace, !mutant("write_begins_with_the_store"));
    if (!order.empty()) by.push_back(order[at]);
    if (mutant("write_begins_with_the_store")) {
      on(row, Event::COPIED);
      if (options_.writes) want(slot);
    }
  }
  put_back();
  touch(keys, false);
  if (!order.empty()) plan.batch.sort(by, index.key_bytes());
  return plan;
}

void Tiers::supersede(Keys keys) {
  const std::vector<Row>& rows = rows_of(keys);
  for (size_t at = 0; at < rows.size(); ++at) {
    if (rows[at] == kNoRow || index[rows[at]].cache == kNoSlot) continue;
    const auto slot = static_cast<Slot>(index[rows[at]].cache);
    if (stays_[slot] != Stay::PROVISIONAL) continue;
    stay(slot, Stay::SUPERSEDED);
    cool(slot, rows.size() - at);
  }
}

void Tiers::stay(Slot slot, Stay next) {
  counts.superseded += stays_[slot] == Stay::PROVISIONAL && next == Stay::SUPERSEDED;
  unkept_ += next != Stay::KEPT;
  unkept_ -= stays_[slot] != Stay::KEPT;
  stays_[slot] = next;
}

void Tiers::keep(Keys keys) {
  for (const Row row : rows_of(keys))
    if (row != kNoRow) keep(row);
}

void Tiers::keep(Row row) {
  if (!unkept_ || index[row].cache == kNoSlot) return;
  const auto slot = static_cast<Slot>(index[row].cache);
  if (stays_[slot] == Stay::KEPT) return;
  stay(slot, Stay::KEPT);
  cache[slot].used = ++uses_;
  if (index[row].state != State::CACHED || !options_.writes) return;  // or being stored
  clean->withdraw(slot);  // `settle` admits it again, perhaps to `unwritten`
  want_or_dedupe(row);
  settle(row);
}

void Tiers::cool(Keys keys) {
  if (!options_.writes) return;
  const std::vector<Row>& rows = rows_of(keys);
  for (size_t at = 0; at < rows.size(); ++at) {
    if (rows[at] == kNoRow || index[rows[at]].cache == kNoSlot) continue;
    const auto slot = static_cast<Slot>(index[rows[at]].cache);
    if (cache[slot].wanted && !options_.demotes) continue;        // eviction now would lose it
    if (cache[slot].requests <= 1) cool(slot, rows.size() - at);  // other requests use the rest
  }
}

// Set the last use of this slot's chunk to `used`, which is earlier than any real use.
void Tiers::cool(Slot slot, uint64_t used) {
  cache[slot].used = used;
  if (!home(slot).contains(slot)) return;  // it is filed when it is admitted
  home(slot).withdraw(slot);
  home(slot).admit(slot);
}

// -- retention ------------------------------------------------------------------------

bool Tiers::retain(uint64_t session, uint32_t client, uint32_t until, uint8_t priority, Keys keys) {
  const uint32_t one = sessions.open(session, client, until, priority);
  if (one == kNone) return false;
  start_keeping();
  sessions.mark(one, true);
  for (const Row row : rows_of(keys)) {
    if (row == kNoRow) continue;
    if (!make_retained_room(one, row)) break;
    if (sessions.add(one, row)) refile(row);
  }
  sessions.mark(one, false);
  if (!sessions.is_empty(one)) return true;
  sessions.close(one);
  return false;
}

// From now on, evict retained chunks last. Called when the first chunk is retained, so that
// retention costs nothing until then.
void Tiers::start_keeping() {
  if (std::exchange(keeping_, true)) return;
  const auto wrap = [this](std::unique_ptr<Order>& order, const Slots& slots, KeptSlots& kept) {
    kept.client_max = retained_max(options_, slots.capacity());
    order = std::make_unique<Keeping>(std::move(order), slots.all(), sessions, kept);
  };
  wrap(clean, cache, cache_kept_);
  wrap(unwritten, cache, cache_kept_);
  for (Target& one : targets) wrap(one.order, one.slots, one.kept);
}

// Take chunks from the client's sessions of lower priority until the session may retain this one.
bool Tiers::make_retained_room(uint32_t session, Row row) {
  while (sessions.lacks_room(session, row)) {
    const uint32_t below = sessions.below(session);
    if (below == kNone) return false;
    if (sessions.is_empty(below))
      sessions.close(below);
    else
      release_last(below);
  }
  return true;
}

void Tiers::release_last(uint32_t session) {
  if (const Row row = sessions.pop(session); row != kNoRow) refile(row);
}

void Tiers::expire(uint32_t now) {
  if (!sessions.size()) return;
  size_t left = kExpiredMax;
  for (uint32_t one; left > 0 && (one = sessions.due(now)) != kNone; --left) {
    for (; left > 1 && !sessions.is_empty(one); --left) release_last(one);
    if (sessions.is_empty(one)) sessions.close(one);
  }
}

// Admit an entry's evictable slots again, after its retention began or ended.
void Tiers::refile(Row row) {
  const auto again = [](Order& order, Slot slot) {
    if (!order.contains(slot)) return;
    order.withdraw(slot);
    order.admit(slot);
  };
  const Entry& entry = index[row];
  if (entry.cache != kNoSlot)
    again(home(static_cast<Slot>(entry.cache)), static_cast<Slot>(entry.cache));
  if (entry.place != kNoPlace)
    again(*target(entry.place).order, target(entry.place).slot(entry.place));
}

Batch Tiers::plan_load(Keys keys, size_t land_max, std::span<const uint32_t> order,
                       uint32_t client) {
  Batch batch;
  const std::vector<Row> rows = rows_of(keys);
  for (const Row row : rows) {
    if (row == kNoRow) continue;
    keep(row);
    sessions.set_client(row, client);  // unknown if it was fetched from another engine, or adopted
  }
  touch(rows, false);
  const uint64_t newest = uses_;
  batch.reserve(rows.size(), index.key_bytes());
  // Pin everything first: taking cache slots below must not evict a chunk of this load.
  const std::vector<ForeignRow>& foreign = foreign_rows(keys, rows);
  const auto row_at = [&rows](size_t at) { return at < rows.size() ? rows[at] : kNoRow; };
  for (size_t at = 0; at < rows.size(); ++at) {
    // In a long load, the memory that `touch` prefetched has left the CPU's cache.
    if (const Row later = row_at(at + 2 * kAhead); later != kNoRow) index.warm(later);
    if (const Row next = row_at(at + kAhead); next != kNoRow) warm_slots(index[next]);
    const Row row = rows[at];
    if (row == kNoRow) {
      if (!foreign.empty() && foreign[at].place != kNoPlace)
        add_foreign(batch, keys[at], foreign[at]);
      else
        add_gone(batch, keys[at]);
      continue;
    }
    Entry& entry = index[row];
    ++entry.loads;
    const bool cached = in_cache(entry.state);
    if (cached)
      cache.use(static_cast<Slot>(entry.cache));
    else
      target(entry.place).slots.use(target(entry.place).slot(entry.place));
    add(batch, row, cached ? entry.cache : kNoSlot, cached ? kNoPlace : entry.place, false);
    settle(row);
  }
  for (size_t at = 0; at < batch.size() && land_max > 0; ++at) {
    if (at + kAhead < batch.size()) warm(batch, at + kAhead);
    if (batch.places[at] == kNoPlace) continue;
    const bool borrows = is_foreign(batch.places[at]);
    if (borrows && index.find(keys[at]) != kNoRow) continue;  // named twice
    const Part part = part_of(batch.groups[at], member_of(batch.places[at]));
    const Slot slot = take_cache_slot(true, part);
    if (slot == kNone) break;
    if (borrows) {
      batch.rows[at] = borrow(keys[at], batch.generations[at], slot, newest - at);
      sessions.set_client(batch.rows[at], client);
    } else {
      fill_from_pool(batch.rows[at], slot);
    }
    batch.cache[at] = column_of(slot);
    batch.filling[at] = true;
    --land_max;
  }
  if (!order.empty()) batch.sort({order.begin(), order.end()}, index.key_bytes());
  return batch;
}

std::array<int64_t, 3> Tiers::tokens_by_source(const LoadRows& rows, int64_t first,
                                               int64_t last) const {
  struct Range {
    int64_t begin, end;
    size_t source;
  };
  std::vector<Range> ranges;
  ranges.reserve(rows.places.size());
  for (size_t at = 0; at < rows.places.size(); ++at) {
    const Place place = rows.places[at];
    if (rows.cache[at] == kNoSlot && place == kNoPlace) continue;
    const int64_t tokens = options_.group_tokens.at(rows.groups[at]);
    require(tokens || !rows.ends.empty(), "states need the ends of chunks");
    const auto number = static_cast<int64_t>(at);
    const int64_t end = rows.ends.empty() ? (first / tokens + number + 1) * tokens : rows.ends[at];
    const int64_t begin = tokens ? (end - 1) / tokens * tokens : 0;
    const size_t source = place == kNoPlace ? 0 : is_foreign(place) ? 2 : 1;
    ranges.push_back({std::max(begin, first), std::min(end, last), source});
  }
  const auto by_begin = [](const Range& one, const Range& two) { return one.begin < two.begin; };
  if (!std::ranges::is_sorted(ranges, by_begin)) std::ranges::sort(ranges, by_begin);
  // By source: the tokens before `ends` that ranges of this source, or of a later one, cover.
  std::array<int64_t, 3> counts{}, ends{first, first, first};
  for (const Range& range : ranges) {
    for (size_t source = 0; source <= range.source; ++source) {
      counts[source] += std::max<int64_t>(0, range.end - std::max(range.begin, ends[source]));
      ends[source] = std::max(ends[source], range.end);
    }
  }
  return {counts[0] - counts[1], counts[1] - counts[2], counts[2]};
}

Row Tiers::begin_fetch(const char* key, size_t reason) {
  const Row row = index.find(key);
  if (row == kNoRow && options_.foreign) return begin_borrow(key, reason);
  require(row != kNoRow && index[row].state == State::POOLED, "a chunk to fetch is not POOLED");
  const Entry& entry = index[row];
  Slots& slots = target(entry.place).slots;
  const Slot number = target(entry.place).slot(entry.place);
  slots.use(number);
  const Slot slot = take_cache_slot(true, part_of(entry.group, member_of(entry.place)));
  if (slot == kNone) {
    slots.release(number);
    return kNoRow;
  }
  fill_from_pool(row, slot);
  add(fetches_[reason], row, index[row].cache, index[row].place, true);
  settle(row);
  return row;
}

void Tiers::fill_from_pool(Row row, Slot slot) {
  Entry& entry = index[row];
  Target& one = target(entry.place);
  entry.cache = static_cast<int32_t>(slot);
  cache[slot].row = row;
  recency_.take_over(cache[slot], one.recency, one[entry.place]);
  cache.use(slot);
  on(row, Event::FETCH_BEGIN);
}

void Tiers::detach(Batch& fetch, size_t at) {
  const Row row = fetch.rows[at];
  require(fetch.filling[at] && index.holds(row, fetch.generations[at]), "the row is not a fetch");
  cancel_fetch(row);
  fetch.filling[at] = mutant("cancelled_fetch_still_counts_for_its_entry");
  if (mutant("cancelled_fetch_frees_its_slot_at_once"))
    cache.free_at_once(slot_of_column(fetch.cache[at]));
}

// Cancel the fetch of this entry: its chunk stays only where it was before.
void Tiers::cancel_fetch(Row row) {
  if (on(row, Event::FETCH_CANCELLED) == State::ABSENT) {
    forget(row, false);
  } else {
    leave_cache(row);
    settle(row);
  }
}

void Tiers::drop_fetch(size_t reason, Row row) {
  Batch& intended = fetches_[reason];
  const auto found = std::ranges::find(intended.rows, row);
  require(found != intended.rows.end(), "a fetch to drop is not planned");
  const auto at = static_cast<size_t>(found - intended.rows.begin());
  detach(intended, at);
  release(intended, at);
  if (!mutant("a_dropped_intent_leaves")) intended.remove(at, index.key_bytes());
}

Row Tiers::hold(const char* key) {
  const Row row = index.find(key);
  if (row == kNoRow || index[row].cache == kNoSlot) return kNoRow;
  if (!mutant("held_chunk_is_not_pinned")) cache.use(static_cast<Slot>(index[row].cache));
  settle(row);
  return row;
}

void Tiers::release_hold(Slot slot, Row row, uint64_t generation) {
  if (!mutant("held_chunk_is_not_pinned")) require(cache.release(slot), "a hold is released twice");
  if (index.holds(row, generation)) settle(row);
}

// -- writes ---------------------------------------------------------------------------

bool Tiers::write_due() const {
  if (mutant("demotion_begins_at_once")) return true;
  if (mutant("demotion_never_begins")) return !options_.demotes;
  if (!options_.demotes || passed_over_) return true;
  return cache.free() + clean->size() + pending < options_.clean_min;
}

void Tiers::drain() {
  while (pending < options_.writes_max && write_due()) {
    const Slot slot = next_to_write();
    if (slot == kNone) {
      passed_over_ = 0;
      return;
    }
    const Row row = cache[slot].row;
    const Place place = take_place(part_of(index[row].group, cache_member(column_of(slot))));
    if (place == kNoPlace) return;  // wait until a slot is released or a target answers again
    unwant(slot);
    passed_over_ -= passed_over_ > 0;
    Target& one = target(place);
    index[row].place = place;
    one[place].row = row;
    one.recency.take_over(one[place], recency_, cache[slot]);
    cache.use(slot);
    one.slots.use(one.slot(place));
    on(row, Event::WRITE_BEGIN);
    add(writes_, row, index[row].cache, place, false);
    writes_.clients.push_back(sessions.client_of(row));
    ++pending;
    ++one.pending;
    settle(row);
  }
}

void Tiers::want(Slot slot) {
  cache[slot].wanted = 1;
  ++backlog;
  arrivals_.admit(slot);  // `settle` admits it to `unwritten`
}

void Tiers::unwant(Slot slot) {
  cache[slot].wanted = 0;
  --backlog;
  arrivals_.withdraw(slot);
  unwritten->withdraw(slot);
}

// Choose the target of the next write; see manager/target_choice.py.
Target* Tiers::choose() {
  std::vector<size_t>& ready = ready_;
  ready.clear();
  for (size_t number = 0; number < targets.size(); ++number)
    if (const Target& one = targets[number];
        one.usable && (one.slots.free() || one.slots.parts.free() || one.order->size()))
      ready.push_back(number);
  if (ready.empty()) return nullptr;
  if (ready.size() == 1) return &targets[ready[0]];
  const bool known = std::ranges::all_of(ready, [&](size_t t) { return targets[t].speed > 0; });
  const auto speed = [&](size_t number) { return known ? targets[number].speed : 1.0; };
  double least = std::numeric_limits<double>::max(), shortest = least;
  for (const size_t number : ready) {
    least = std::min(least, targets[number].pass);
    shortest = std::min(shortest, static_cast<double>(targets[number].pending) / speed(number));
  }
  // A target that was unusable does not catch up: it continues from the others' pass.
  pass_ = std::max(pass_, least);
  const auto rank = [&](size_t number) {
    return std::tuple(targets[number].slots.free() == 0, std::max(targets[number].pass, pass_),
                      (number + targets.size() - turn_) % targets.size());
  };
  size_t chosen = targets.size();
  for (const size_t number : ready) {
    if (static_cast<double>(targets[number].pending) / speed(number) > kPatience * shortest)
      continue;
    if (chosen == targets.size() || rank(number) < rank(chosen)) chosen = number;
  }
  targets[chosen].pass = std::max(targets[chosen].pass, pass_) + 1 / speed(chosen);
  turn_ = (chosen + 1) % targets.size();
  return &targets[chosen];
}

// -- slots ----------------------------------------------------------------------------

// Prefetch the memory for the next victims step by step. leaves: whether they leave the index too.
void Tiers::warm_victims(const Order& order, const Slots& slots, bool leaves) const {
  if (const Slot slot = order.later(3 * kStep); slot != kNone) {
    slots.warm(slot);
    order.warm(slot);
  }
  if (const Slot slot = order.later(2 * kStep); slot != kNone && slots[slot].row != kNoRow)
    index.warm(slots[slot].row);
  const Slot slot = leaves ? order.later(kStep) : kNone;
  if (slot != kNone && slots[slot].row != kNoRow) index.warm_bucket(slots[slot].row);
}

bool Tiers::may_lose(bool is_read) const {
  if (is_read) return mutant("read_evicts_the_unwritten");
  if (mutant("a_store_evicts_the_unwritten")) return true;
  const auto takes_writes = [](const Target& one) {
    return one.usable && one.slots.retired < one.slots.capacity();
  };
  return std::ranges::none_of(targets, takes_writes);
}

// Take a cache slot, evicting if necessary. Returns kNone if all are pinned or unwritten.
Slot Tiers::take_cache_slot(bool is_read, const Part& part) {
  const Slot slot = cache.take(part);
  if (slot != kNone) return slot;
  if (cache.parts.end() > cache.capacity()) return make_cache_room(is_read, part);
  warm_victims(*clean, cache, false);
  const bool unwritten_first = unwritten->size() && mutant("unwritten_is_evicted_before_clean");
  Slot victim = unwritten_first ? unwritten->victim() : clean->victim();
  const bool is_clean = victim != kNone;
  if (!is_clean && may_lose(is_read)) victim = unwritten->victim();
  if (victim == kNone) return kNone;
  evict_cached(victim, is_clean);
  return cache.take();
}

void Tiers::evict_cached(Slot victim, bool is_clean) {
  if (is_clean && options_.demotes) {
    const Slot coldest = unwritten->peek();
    passed_over_ += coldest != kNone && cache[coldest].used < cache[victim].used;
  }
  const Row row = cache[victim].row;
  ++counts.cache_evictions;
  const bool unproven = options_.writes && stays_[victim] == Stay::PROVISIONAL;
  counts.refused_writes += cache[victim].wanted || unproven;
  leave_cache(row);
  evict(row, Event::EVICT_CACHE);
}

// Take a slot on a usable target, evicting if necessary. Returns kNoPlace if all are pinned.
Place Tiers::take_place(const Part& part) {
  Target* const one = choose();
  if (!one) return kNoPlace;
  const auto number = static_cast<uint32_t>(one - targets.data());
  Slot slot = one->slots.take(part);
  if (slot == kNone && one->slots.parts.end() > one->slots.capacity()) {
    const auto may = [one](Slot other) { return one->order->contains(other); };
    const auto evict = [this, one](Slot victim) { evict_pooled(*one, victim); };
    if (!make_room(one->slots, *one->order, part, may, evict)) return kNoPlace;
    slot = one->slots.take(part);
  } else if (slot == kNone) {
    warm_victims(*one->order, one->slots, true);
    const Slot victim = one->order->victim();
    require(victim != kNone, "a target without a slot was chosen");
    evict_pooled(*one, victim);
    slot = one->slots.take();
  }
  if (part.whole()) return place_of(number, slot);
  return place_of(number, one->slots.parts.row(slot), one->slots.parts.member(slot));
}

void Tiers::evict_pooled(Target& one, Slot victim) {
  const Row row = one.slots[victim].row;
  ++counts.pool_evictions;
  leave_pool(row, false);
  evict(row, Event::EVICT_POOL);
}

void Tiers::leave_cache(Row row) {
  Entry& entry = index[row];
  const auto slot = static_cast<Slot>(entry.cache);
  if (cache[slot].wanted) unwant(slot);
  clean->withdraw(slot);
  cache.orphan(slot, false);
  stay(slot, Stay::KEPT);
  entry.cache = kNoSlot;
}

void Tiers::leave_pool(Row row, bool retire) {
  Entry& entry = index[row];
  Target& one = target(entry.place);
  const Slot slot = one.slot(entry.place);
  one.order->withdraw(slot);
  one.slots.orphan(slot, retire);
  entry.place = kNoPlace;
  counts.retired += retire;
}

// -- entries --------------------------------------------------------------------------

State Tiers::on(Row row, Event event) {
  Entry& entry = index[row];
  const State before = entry.state, next = entry.state = after(before, event);
  if (options_.logs_moves && !(next == State::DOOMED && mutant("failures_are_not_reported")))
    for (const Source tier : {Source::CPU, Source::POOL})
      if (const bool had = copied(before, tier); had != copied(next, tier))
        log(tier, had, index.key(row));
  return next;
}

void Tiers::log(Source tier, bool removed, const char* key) {
  if (moves.empty() || moves.back().tier != tier || moves.back().removed != removed)
    moves.push_back({tier, removed, {}});
  moves.back().keys.append(key, index.key_bytes());
  moved_bytes += index.key_bytes();
}

// Admit the entry to the orders in which it is evictable, and withdraw it from the others.
void Tiers::settle(Row row) {
  const Entry& entry = index[row];
  const State state = entry.state;
  if (state == State::BOTH && mutant("settled_entries_are_not_admitted")) return;
  if (entry.cache != kNoSlot) {
    const auto slot = static_cast<Slot>(entry.cache);
    if (!cache.in_use(slot) && (state == State::CACHED || state == State::BOTH))
      home(slot).admit(slot);
    else
      home(slot).withdraw(slot);
  }
  if (entry.place != kNoPlace) {
    Target& one = target(entry.place);
    const Slot slot = one.slot(entry.place);
    if (!one.slots.in_use(slot) && (state == State::POOLED || state == State::BOTH))
      one.order->admit(slot);
    else
      one.order->withdraw(slot);
  }
}

void Tiers::evict(Row row, Event event) {
  // If another copy remains, it stays as evictable as it was.
  if (on(row, event) == State::ABSENT) forget(row, false);
}

// Make look-ups miss the key immediately. The entry's slots are freed when their last users release
// them.
void Tiers::doom(Row row, bool retire) {
  if (mutant("doomed_entry_still_hits")) return;
  on(row, Event::DOOM);
  forget(row, retire);
}

void Tiers::forget(Row row, bool retire) {
  if (index[row].cache != kNoSlot) leave_cache(row);
  if (index[row].place != kNoPlace) leave_pool(row, retire);
  sessions.forget(row);
  index.remove(row);
}

// -- facts ----------------------------------------------------------------------------

void Tiers::report(OpKind kind, Batch& batch, const Report& report, Effect& effect) {
  if (!report.crcs.empty()) compare(batch, report);
  const size_t count = report.indexes.empty() ? batch.size() : report.indexes.size();
  const auto row_at = [&](size_t k) { return report.indexes.empty() ? k : report.indexes[k]; };
  for (size_t k = 0; k < count; ++k) {
    if (k + kAhead < count) warm(batch, row_at(k + kAhead));
    const size_t at = row_at(k);
    Outcome code = report.codes.empty() ? Outcome::OK : static_cast<Outcome>(report.codes[k]);
    if (mutant("a_holders_failure_is_masked") && code != Outcome::RELEASED && is_single(batch, at))
      code = Outcome::OK;
    const int16_t error = report.errors.empty() ? int16_t{0} : report.errors[k];
    const bool released =
        code == Outcome::RELEASED || report.released.empty() || report.released[k];
    if (code != Outcome::RELEASED) {
      require(batch.outcomes[at] > 0, "a rank has reported a row twice");
      --batch.outcomes[at];
      // A real failure on any rank outweighs a cancellation on another.
      if (code != Outcome::OK &&
          (batch.code[at] == Outcome::OK || batch.code[at] == Outcome::CANCELLED)) {
        batch.code[at] = code;
        batch.error[at] = error;
      }
      bool lost = code != Outcome::OK && fails(kind, batch, at, code, error);
      const bool first_decides = mutant("first_rank_decides") && options_.ranks > 1;
      if (first_decides ? batch.outcomes[at] + 1 == options_.ranks : batch.outcomes[at] == 0) {
        --batch.undecided;
        lost |= decide(kind, batch, at);
        effect.decided.push_back(static_cast<uint32_t>(at));
        if (batch.code[at] != Outcome::OK) effect.failed.push_back(static_cast<uint32_t>(at));
      }
      if (lost) effect.lost.push_back(static_cast<uint32_t>(at));
    }
    if (!released) continue;
    require(batch.releases[at] > batch.outcomes[at], "a row is released before its outcome");
    const bool one_frees = mutant("release_of_one_rank_frees_a_row") && options_.ranks > 1;
    --batch.releases[at];
    if (one_frees ? batch.releases[at] + 1 == options_.ranks : batch.releases[at] == 0) {
      --batch.unreleased;
      release(batch, at);
    }
  }
}

void Tiers::warm(const Batch& batch, size_t at) const {
  if (batch.rows[at] == kNoRow) return;
  index.warm(batch.rows[at]);
  if (batch.cache[at] != kNoSlot) {
    cache.warm(slot_of_column(batch.cache[at]));
    clean->warm(slot_of_column(batch.cache[at]));
  }
  if (batch.places[at] != kNoPlace && !is_foreign(batch.places[at])) {
    const Target& one = target(batch.places[at]);
    one.slots.warm(one.slot(batch.places[at]));
    one.order->warm(one.slot(batch.places[at]));
  }
}

// Doom a row's entry after one rank's failure. Returns whether the chunk lost its cache slot.
bool Tiers::fails(OpKind kind, const Batch& batch, size_t at, Outcome code, int error) {
  if (mutant("failed_key_is_not_dropped")) return false;
  const Row row = batch.rows[at];
  const Place place = batch.places[at];
  if (kind == OpKind::WRITE || (code == Outcome::CANCELLED && kind != OpKind::STORE)) return false;
  if (is_foreign(place)) return fails_foreign(batch, at);
  const bool retire = place != kNoPlace && worn(failed_reads_, place, code, error);
  if (!holds(batch, at)) return false;
  const State state = index[row].state;
  const bool at_gate = code == Outcome::STALE && place == kNoPlace && kind == OpKind::LOAD;
  if (at_gate && !mutant("stale_at_a_gate_dooms_a_good_copy")) {
    // The failure says nothing about the pool's copy: at most the cache slot is lost.
    if (state == State::POOLED || state == State::FETCHING || state == State::STORING ||
        state == State::BORROWING)
      return false;
    if (state == State::BOTH) {
      on(row, Event::CACHE_LOST);
      leave_cache(row);
      settle(row);
      return true;
    }
  }
  doom(row, retire);
  return true;
}

// Decide a row on which every rank has reported. Returns whether the chunk lost its cache slot.
bool Tiers::decide(OpKind kind, const Batch& batch, size_t at) {
  const Row row = batch.rows[at];
  const bool ok = batch.code[at] == Outcome::OK;
  if (kind == OpKind::WRITE) {
    ended_write(batch, at);
    return false;
  }
  if (is_foreign(batch.places[at]))
    ended_borrow(batch, at);
  else if (ok && batch.places[at] != kNoPlace && !failed_reads_.empty())
    failed_reads_.erase(batch.places[at]);
  if (!holds(batch, at) || !batch.filling[at]) return false;
  if (kind == OpKind::STORE) {
    on(row, Event::COPIED);  // a failure would have doomed the entry
    const auto slot = static_cast<Slot>(index[row].cache);
    const bool provisional =
        stays_[slot] != Stay::KEPT && !mutant("provisional_is_written_at_once");
    if ((options_.writes && !provisional) || mutant("policy_off_is_ignored")) want_or_dedupe(row);
    return false;
  }
  if (ok)
    on(row, Event::FETCHED);
  else
    cancel_fetch(row);  // any failure but CANCELLED would have doomed the entry
  if (ok && is_foreign(batch.places[at]) && options_.writes) want_or_dedupe(row);
  return !ok;
}

void Tiers::ended_write(const Batch& batch, size_t at) {
  const Row row = batch.rows[at];
  const Place place = batch.places[at];
  --pending;
  --target(place).pending;
  if (!holds(batch, at)) return;  // the entry's slots were orphaned
  if (batch.code[at] == Outcome::OK || mutant("failed_write_counts_as_written")) {
    if (!failed_writes_.empty()) failed_writes_.erase(place);
    on(row, Event::WRITTEN);
    ++counts.written;
    return;
  }
  on(row, Event::WRITE_FAILED);
  const bool retire = worn(failed_writes_, place, batch.code[at], batch.error[at]);
  leave_pool(row, retire || batch.error[at] == ENOSPC);
}

void Tiers::release(const Batch& batch, size_t at) {
  if (batch.cache[at] != kNoSlot)
    require(cache.release(slot_of_column(batch.cache[at])), "a cache slot is released twice");
  if (const Place place = batch.places[at]; place != kNoPlace && !is_foreign(place))
    require(target(place).slots.release(target(place).slot(place)),
            "a pool slot is released twice");
  if (holds(batch, at)) settle(batch.rows[at]);
}

// Count a failure of the slot, unless the whole target failed. Returns whether to retire the slot.
bool Tiers::worn(std::unordered_map<Place, int>& failures, Place place, Outcome code, int error) {
  const auto number = static_cast<size_t>(error);
  const bool slots_fault = code == Outcome::IO_ERROR &&
                           (number >= options_.slot_errnos.size() || options_.slot_errnos[number]);
  if (slots_fault) ++failures[place];
  const auto found = failures.find(place);
  return found != failures.end() && found->second >= kFailuresMax;
}

size_t Tiers::evictable() const {
  return cache.free() + cache.parts.free() + clean->size() +
         (may_lose(false) ? unwritten->size() : 0);
}

size_t Tiers::fetches_intended() const {
  size_t count = 0;
  for (const Batch& intended : fetches_) count += intended.size();
  return count;
}

void Batch::reserve(size_t count, size_t key_bytes) {
  const auto each = [count](auto&... columns) { (columns.reserve(count), ...); };
  each(rows, generations, cache, places, groups, filling, code, error, outcomes, releases);
  keys.reserve(count * key_bytes);
}

void Batch::remove(size_t at, size_t key_bytes) {
  const auto each = [at](auto&... columns) { (columns.erase(at, 1), ...); };
  each(rows, generations, cache, places, groups, filling, code, error, outcomes, releases);
  keys.erase(at * key_bytes, key_bytes);
  --undecided;
  --unreleased;
}

void Batch::sort(const std::vector<uint32_t>& by, size_t key_bytes) {
  std::vector<size_t> order(size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, {}, [&by](size_t at) { return by[at]; });
  const auto sort_column = [&order](auto& column) {
    const auto before = column;
    for (size_t at = 0; at < order.size(); ++at) column[at] = before[order[at]];
  };
  const auto each = [&sort_column](auto&... columns) { (sort_column(columns), ...); };
  each(rows, generations, cache, places, groups, filling, code, error, outcomes, releases);
  decltype(keys) sorted;
  sorted.reserve(keys.size());
  for (const size_t at : order) sorted.append(keys.data() + at * key_bytes, key_bytes);
  keys = std::move(sorted);
}

// Log the removal of all entries, tier by tier, so that there are few moves of many keys each.
void Tiers::log_reset() {
  if (!options_.logs_moves || mutant("reset_is_not_reported")) return;
  for (const Source tier : {Source::CPU, Source::POOL}) {
    for (Row row = 0; row < index.end(); ++row) {
      const State state = index[row].state;
      const bool both = state == State::BOTH && tier == Source::POOL;
      if (both && mutant("reset_forgets_the_pools_copies")) continue;
      if (copied(state, tier)) log(tier, true, index.key(row));
    }
  }
}

void Tiers::reset() {
  // Drop operations that were only planned and are unknown to the ranks.
  for (size_t at = 0; at < writes_.size(); ++at) {
    --pending;
    --target(writes_.places[at]).pending;
    release(writes_, at);
  }
  writes_ = {};
  for (Batch& intended : fetches_) {
    for (size_t at = 0; at < intended.size(); ++at) release(intended, at);
    intended = {};
  }
  // Drop unreported arrivals, because the removals below cancel them.
  std::erase_if(moves, [this](const Move& move) {
    moved_bytes -= move.removed ? 0 : move.keys.size();
    return !move.removed;
  });
  make_orders();
  log_reset();
  sessions.clear();
  index.clear();
  cache.orphan_all();
  for (Target& one : targets) one.slots.orphan_all();
  failed_reads_.clear();
  failed_writes_.clear();
  // The weights may have changed, and the ranks have not compared the new bytes yet.
  for (Trust& trust : trust_) trust.equal = trust.stored = 0;
  if (options_.foreign) options_.foreign->reset();
}

}  // namespace nvmeof
