// SPDX-License-Identifier: Apache-2.0
// Python bindings for the manager's tiers. Keys are bytes, and columns are numpy arrays.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <numeric>
#include <optional>

#include "bindings/bindings.h"
#include "tiers/holds.h"
#include "tiers/tiers.h"

using namespace nb::literals;
using namespace nvmeof;

namespace {

// A read-only view of a batch's column, which keeps the batch alive.
template <typename T>
using View = nb::typed<nb::object, nb::ndarray<nb::numpy, const T>>;

template <typename T>
View<T> view(nb::handle owner, const SmallColumn<T>& column) {
  const size_t shape[1] = {column.size()};
  return nb::cast(nb::ndarray<nb::numpy, const T>(column.data(), 1, shape, owner));
}

// `nb::typed` declares the Python types for the generated stubs.
using PyKey = nb::typed<nb::handle, nb::bytes>;
using PyKeys = nb::typed<nb::handle, nb::typed<nb::sequence, nb::bytes>>;
template <typename... Items>
using ListOf = nb::typed<nb::list, nb::typed<nb::tuple, Items...>>;

class KeyList {
 public:
  KeyList(nb::handle keys, size_t key_bytes)
      : sequence_(nb::steal(PySequence_Fast(keys.ptr(), "keys must be a sequence"))) {
    if (!sequence_.is_valid()) throw nb::python_error();
    const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence_.ptr()));
    PyObject** const items = PySequence_Fast_ITEMS(sequence_.ptr());
    keys_.reserve(count);
    for (size_t at = 0; at < count; ++at) {
      if (at + kAhead < count) prefetch(items[at + kAhead]);
      keys_.push_back(check(items[at], key_bytes));
    }
  }

  static const char* check(PyObject* key, size_t key_bytes) {
    if (!PyBytes_Check(key) || static_cast<size_t>(PyBytes_GET_SIZE(key)) != key_bytes)
      throw nb::value_error("every offload key has the same number of bytes");
    return PyBytes_AS_STRING(key);
  }

  operator Keys() const { return keys_; }

 private:
  nb::object sequence_;
  std::vector<const char*> keys_;
};

// A user's `EvictionPolicy`. Evictable slots are recorded here too, because a policy that returned
// a slot in use would cause that slot's data to be overwritten.
class PythonOrder final : public Order {
 public:
  PythonOrder(nb::object policy, size_t slots) : policy_(std::move(policy)), inside_(slots) {}
  void admit(Slot slot) override {
    policy_.attr("admit")(slot);
    set(slot, true);
  }
  void withdraw(Slot slot) override {
    policy_.attr("withdraw")(slot);
    set(slot, false);
  }
  void touch(Slot slot) override { policy_.attr("touch")(slot); }
  Slot peek() override { return checked(policy_.attr("peek")()); }
  Slot victim() override {
    const Slot slot = checked(policy_.attr("victim")());
    if (slot != kNone) set(slot, false);
    return slot;
  }
  bool contains(Slot slot) const override { return inside_[slot]; }
  size_t size() const override { return count_; }

 private:
  void set(Slot slot, bool is_inside) {
    count_ = count_ + is_inside - inside_[slot];
    inside_[slot] = is_inside;
  }

  Slot checked(const nb::object& given) const {
    if (given.is_none()) return kNone;
    const Slot slot = nb::cast<Slot>(given);
    if (slot >= inside_.size() || !inside_[slot])
      throw nb::value_error("the eviction policy returned a slot that is not evictable");
    return slot;
  }

  nb::object policy_;
  std::vector<bool> inside_;
  size_t count_ = 0;
};

MakeOrder order_maker(nb::object make) {
  if (make.is_none()) return {};
  return [make](const SlotRecords& slots) -> std::unique_ptr<Order> {
    // A memoryview yields Python integers; a numpy array would yield its own, which are slower and
    // overflow.
    static_assert(offsetof(SlotRecord, used) == 0 && sizeof(SlotRecord) % sizeof(uint64_t) == 0);
    char* const bytes = const_cast<char*>(reinterpret_cast<const char*>(slots.data()));
    const auto size = static_cast<Py_ssize_t>(slots.size() * sizeof(SlotRecord));
    const nb::object words = nb::steal(PyMemoryView_FromMemory(bytes, size, PyBUF_READ));
    const nb::slice each(nb::none(), nb::none(), nb::int_(sizeof(SlotRecord) / sizeof(uint64_t)));
    return std::make_unique<PythonOrder>(make(words.attr("cast")("Q")[each]), slots.size());
  };
}

void make_tiers(Tiers* at, Slot cache_slots, const std::vector<Slot>& pool_slots, size_t key_bytes,
                const std::vector<uint32_t>& group_ids, const std::vector<uint32_t>& group_tokens,
                uint16_t ranks, uint64_t credit, bool writes, bool demotes, bool logs_moves,
                size_t writes_max, size_t clean_min, const std::vector<bool>& slot_errnos,
                nb::object policy, const std::vector<uint32_t>& set_sizes, uint32_t equal_min,
                uint32_t sample_every, Foreign* foreign, double retain_share) {
  Options options;
  options.cache_slots = cache_slots;
  options.pool_slots = pool_slots;
  options.key_bytes = key_bytes;
  options.group_ids = group_ids;
  options.group_tokens = group_tokens;
  options.ranks = ranks;
  options.credit = credit;
  options.writes = writes;
  options.demotes = demotes;
  options.logs_moves = logs_moves;
  options.writes_max = writes_max;
  options.clean_min = clean_min;
  options.slot_errnos = slot_errnos;
  options.make_order = order_maker(std::move(policy));
  options.set_sizes = set_sizes;
  options.equal_min = equal_min;
  options.sample_every = sample_every;
  options.foreign = foreign;
  options.retain_share = retain_share;
  new (at) Tiers(std::move(options));
}

int lookup(const Tiers& tiers, PyKey key, uint8_t sources) {
  return static_cast<int>(
      tiers.lookup(KeyList::check(key.ptr(), tiers.index.key_bytes()), sources));
}

nb::bytes present(const Tiers& tiers, PyKeys keys, uint8_t sources) {
  return bytes_of(tiers.present(KeyList(keys, tiers.index.key_bytes()), sources));
}

std::tuple<size_t, std::vector<uint64_t>> weigh(const Tiers& tiers, PyKeys keys,
                                                const std::vector<uint64_t>& lane_bytes) {
  std::vector<uint64_t> by_target(tiers.targets.size());
  const size_t leading = tiers.weigh(KeyList(keys, tiers.index.key_bytes()), lane_bytes, by_target);
  return {leading, by_target};
}

using Stored = std::tuple<Batch, size_t, std::vector<uint32_t>, uint64_t>;

Stored plan_store(Tiers& tiers, PyKeys keys, std::optional<Column<uint8_t>> wanted,
                  uint64_t generation, std::optional<Column<uint32_t>> order, uint32_t client) {
  StorePlan plan = tiers.plan_store(KeyList(keys, tiers.index.key_bytes()), span_of(wanted),
                                    generation, span_of(order), client);
  return {std::move(plan.batch), plan.absent, std::move(plan.refused), generation};
}

std::tuple<int64_t, int64_t, int64_t> tokens_by_source(const Tiers& tiers, const ChunkBatch& batch,
                                                       int64_t first, int64_t last,
                                                       std::optional<Column<int64_t>> ends) {
  const LoadRows rows{column_of<int32_t>(batch, 2), column_of<Place>(batch, 3),
                      column_of<uint8_t>(batch, 4), span_of(ends)};
  const size_t count = rows.groups.size();
  if (rows.cache.size() != count || rows.places.size() != count ||
      (ends && rows.ends.size() != count))
    throw nb::value_error("the columns differ in length");
  const auto [cpu, pool, shared] = tiers.tokens_by_source(rows, first, last);
  return {cpu, pool, shared};
}

using Indexes = std::vector<uint32_t>;

// The rows that lost their cache slot, the rows decided (None for all), the decided rows that
// failed, and whether the last row was decided.
using Reported = std::tuple<Indexes, std::optional<Indexes>, Indexes, bool>;

Reported reported(Effect&& effect, const Batch& batch) {
  const bool ended = !effect.decided.empty() && batch.undecided == 0;
  std::optional<Indexes> decided;
  if (effect.decided.size() != batch.size()) decided = std::move(effect.decided);
  return {std::move(effect.lost), std::move(decided), std::move(effect.failed), ended};
}

Reported report(Tiers& tiers, int kind, Batch& batch, std::optional<Column<uint32_t>> indexes,
                std::optional<Column<uint8_t>> codes, std::optional<Column<int16_t>> errors,
                std::optional<Column<uint8_t>> released, std::optional<Column<uint32_t>> crcs,
                uint32_t rank) {
  Effect effect;
  const Report parts{span_of(indexes),  span_of(codes), span_of(errors),
                     span_of(released), span_of(crcs),  rank};
  tiers.report(static_cast<OpKind>(kind), batch, parts, effect);
  return reported(std::move(effect), batch);
}

using WholeReported = std::tuple<Indexes, std::vector<std::tuple<uint32_t, Reported>>>;

// Apply a rank's reports that all rows of these ops are OK and released. kinds: one per op.
WholeReported report_whole(Tiers& tiers, const nb::bytes& kinds,
                           const nb::typed<nb::list, Batch>& batches) {
  if (kinds.size() != batches.size()) throw nb::value_error("the columns differ in length");
  std::vector<Batch*> all;
  all.reserve(batches.size());
  for (const nb::handle one : batches) all.push_back(&nb::cast<Batch&>(one));
  WholeReported found;
  auto& [over, news] = found;
  Effect effect;
  constexpr size_t kAhead = 8;  // the distance, in ops, at which the first rows are prefetched
  for (uint32_t at = 0; at < all.size(); ++at) {
    const auto kind = static_cast<OpKind>(kinds.c_str()[at]);
    Batch& batch = *all[at];
    if (at + kAhead < all.size() && all[at + kAhead]->size()) tiers.warm(*all[at + kAhead], 0);
    effect.clear();
    tiers.report(kind, batch, {}, effect);
    if (!batch.undecided && !batch.unreleased) over.push_back(at);
    const bool is_read = kind == OpKind::LOAD || kind == OpKind::FETCH;
    if (!effect.lost.empty() || !effect.failed.empty() || (is_read && !effect.decided.empty()))
      news.emplace_back(at, reported(std::exchange(effect, {}), batch));
  }
  return found;
}

using Held = std::tuple<Row, uint64_t, int32_t>;  // row, generation, cache slot

std::optional<Held> held(const Tiers& tiers, Row row) {
  if (row == kNoRow) return std::nullopt;
  return Held{row, tiers.index[row].generation, tiers.index[row].cache};
}

// Return (state, generation, cache slot, place, key) for every entry, for inspection. Cache slots
// and places are encoded as in `protocol.ChunkBatch`.
ListOf<int, uint64_t, int32_t, Place, nb::bytes> entries(const Tiers& tiers) {
  nb::list found;
  const Index& index = tiers.index;
  for (Row row = 0; row < index.end(); ++row) {
    const Entry& entry = index[row];
    if (entry.state == State::ABSENT) continue;
    const auto slot = static_cast<Slot>(entry.cache);
    const int32_t column = entry.cache == kNoSlot ? kNoSlot : tiers.column_of(slot);
    found.append(nb::make_tuple(static_cast<int>(entry.state), entry.generation, column,
                                entry.place, nb::bytes(index.key(row), index.key_bytes())));
  }
  return found;
}

template <typename Count>
size_t sum(const Tiers& tiers, Count count) {
  size_t total = 0;
  for (const Target& one : tiers.targets) total += std::invoke(count, one.slots);
  return total;
}

// Take the oldest moves, up to `limit` bytes of keys: (tier, removed, joined keys) for each.
ListOf<int, bool, nb::bytes> take_moves(Tiers& tiers, size_t limit) {
  nb::list taken;
  while (limit > 0 && !tiers.moves.empty()) {
    Move& oldest = tiers.moves.front();
    const size_t bytes = std::min(limit, oldest.keys.size());
    taken.append(nb::make_tuple(static_cast<int>(oldest.tier), oldest.removed,
                                nb::bytes(oldest.keys.data(), bytes)));
    limit -= bytes;
    tiers.moved_bytes -= bytes;
    if (bytes == oldest.keys.size())
      tiers.moves.pop_front();
    else
      oldest.keys.erase(0, bytes);
  }
  return taken;
}

// Return copies of the columns as a `protocol.ChunkBatch`, because the rows change later.
ChunkBatch columns(const Batch& batch) {
  return nb::make_tuple(bytes_of(batch.keys), bytes_of(batch.generations), bytes_of(batch.cache),
                        bytes_of(batch.places), bytes_of(batch.groups));
}

// Return the bytes to read, by target, and the number of rows with a place.
std::tuple<std::vector<uint64_t>, size_t> lanes(const Batch& batch,
                                                const std::vector<uint64_t>& lane_bytes,
                                                size_t targets) {
  std::vector<uint64_t> bytes(targets);
  size_t count = 0;
  for (size_t at = 0; at < batch.size(); ++at) {
    if (batch.places[at] == kNoPlace) continue;
    const Place place = batch.places[at];
    bytes.at(target_of(place)) += read_bytes_of(place, batch.groups[at], lane_bytes);
    ++count;
  }
  return {std::move(bytes), count};
}

bool borrows(const Batch& batch) {
  bool found = false;  // branch-free, because nearly always all rows are examined
  for (size_t at = 0; at < batch.size(); ++at) found |= is_foreign(batch.places[at]);
  return found;
}

// Return whether any row was read completely from the pool, and whether any row was late or cut
// off.
std::tuple<bool, bool> came(const Batch& batch, bool was_cut) {
  bool any = false, missed = false;
  for (size_t at = 0; at < batch.size(); ++at) {
    if (batch.places[at] == kNoPlace) continue;
    const Outcome code = batch.code[at];
    any |= code == Outcome::OK || code == Outcome::STALE || code == Outcome::CHECKSUM_MISMATCH;
    missed |= code == Outcome::DEADLINE || (was_cut && code == Outcome::CANCELLED);
  }
  return {any, missed};
}

void bind_batch(nb::module_& m) {
  const auto column = []<typename T>(SmallColumn<T> Batch::* member) {
    return [member](nb::handle self) { return view(self, nb::cast<Batch&>(self).*member); };
  };
  nb::class_<Batch>(m, "Batch")
      .def("__len__", &Batch::size)
      .def("columns", &columns)
      .def_prop_ro("keys", [](const Batch& batch) { return bytes_of(batch.keys); })
      .def_prop_ro("rows", column(&Batch::rows))
      .def_prop_ro("generations", column(&Batch::generations))
      .def_prop_ro("cache", column(&Batch::cache))
      .def_prop_ro("places", column(&Batch::places))
      .def_prop_ro("groups", column(&Batch::groups))
      .def_prop_ro("filling", column(&Batch::filling))
      .def_prop_ro("clients", [](const Batch& batch) { return bytes_of(batch.clients); })
      .def_prop_ro("errors", column(&Batch::error))
      .def_prop_ro("codes",
                   [](nb::handle self) {
                     const Batch& batch = nb::cast<Batch&>(self);
                     const size_t shape[1] = {batch.size()};
                     const auto* data = reinterpret_cast<const uint8_t*>(batch.code.data());
                     const nb::ndarray<nb::numpy, const uint8_t> codes(data, 1, shape, self);
                     return View<uint8_t>(nb::cast(codes));
                   })
      .def("key",
           [](const Batch& batch, size_t at) {
             const size_t bytes = batch.keys.size() / batch.size();
             return nb::bytes(batch.keys.data() + at * bytes, bytes);
           })
      .def("generation", [](const Batch& batch, size_t at) { return batch.generations.at(at); })
      .def("lanes", &lanes)
      .def_prop_ro("borrows", &borrows)
      .def("came", &came)
      .def_ro("undecided", &Batch::undecided)
      .def_ro("unreleased", &Batch::unreleased)
      .def_prop_ro("over",
                   [](const Batch& batch) { return !batch.undecided && !batch.unreleased; });
}

template <void (Tiers::*call)(Keys)>
void with_keys(Tiers& tiers, PyKeys keys) {
  (tiers.*call)(KeyList(keys, tiers.index.key_bytes()));
}

void bind_calls(nb::class_<Tiers>& type) {
  type.def("__init__", &make_tiers, "cache_slots"_a, "pool_slots"_a, nb::kw_only(), "key_bytes"_a,
           "group_ids"_a = Options().group_ids, "group_tokens"_a = Options().group_tokens,
           "ranks"_a = 1, "credit"_a = 0, "writes"_a = true, "demotes"_a = false,
           "logs_moves"_a = false, "writes_max"_a = 1, "clean_min"_a = 1,
           "slot_errnos"_a = std::vector<bool>(), "policy"_a = nb::none(),
           "set_sizes"_a = std::vector<uint32_t>(), "equal_min"_a = Options().equal_min,
           "sample_every"_a = Options().sample_every, "foreign"_a.none() = nb::none(),
           "retain_share"_a = 0.0, nb::keep_alive<1, 19>())
      .def("__len__", [](const Tiers& tiers) { return tiers.index.size(); })
      .def("lookup", &lookup, "key"_a, "sources"_a = kFromCpu | kFromPool)
      .def("present", &present, "keys"_a, "sources"_a = kFromCpu | kFromPool)
      .def("weigh", &weigh, "keys"_a, "lane_bytes"_a)
      .def(
          "touch",
          [](Tiers& tiers, PyKeys keys, bool ended) {
            tiers.touch(KeyList(keys, tiers.index.key_bytes()), ended);
          },
          "keys"_a, "ended"_a = false)
      .def("adopt",
           [](Tiers& tiers, Column<int64_t> places, Column<uint64_t> generations,
              const nb::bytes& keys) {
             if (generations.size() != places.size() ||
                 keys.size() != places.size() * tiers.index.key_bytes())
               throw nb::value_error("the columns differ in length");
             return tiers.adopt({places.data(), places.size()},
                                {generations.data(), generations.size()}, keys.c_str());
           })
      .def("plan_store", &plan_store, "keys"_a, "wanted"_a, "generation"_a, "order"_a = nb::none(),
           "client"_a = 0)
      .def(
          "plan_load",
          [](Tiers& tiers, PyKeys keys, size_t land_max, std::optional<Column<uint32_t>> order,
             uint32_t client) {
            return tiers.plan_load(KeyList(keys, tiers.index.key_bytes()), land_max, span_of(order),
                                   client);
          },
          "keys"_a, "land_max"_a, "order"_a = nb::none(), "client"_a = 0)
      .def("tokens_by_source", &tokens_by_source, "batch"_a, "first"_a, "last"_a, "ends"_a)
      .def("supersede", &with_keys<&Tiers::supersede>)
      .def("keep", &with_keys<&Tiers::keep>)
      .def("cool", &with_keys<&Tiers::cool>)
      .def("begin_fetch",
           [](Tiers& tiers, PyKey key, size_t reason) {
             const char* const bytes = KeyList::check(key.ptr(), tiers.index.key_bytes());
             return held(tiers, tiers.begin_fetch(bytes, reason));
           })
      .def("take_fetches", &Tiers::take_fetches)
      .def("drop_fetch", &Tiers::drop_fetch)
      .def("detach", &Tiers::detach)
      .def("hold",
           [](Tiers& tiers, PyKey key) {
             return held(tiers, tiers.hold(KeyList::check(key.ptr(), tiers.index.key_bytes())));
           })
      .def("drain",
           [](Tiers& tiers) {
             tiers.drain();
             return tiers.counts != Counts{};
           })
      .def("take_writes", &Tiers::take_writes)
      .def("report", &report, "kind"_a, "batch"_a, "indexes"_a = nb::none(), "codes"_a = nb::none(),
           "errors"_a = nb::none(), "released"_a = nb::none(), "crcs"_a = nb::none(), "rank"_a = 0)
      .def("report_whole", &report_whole)
      .def("take_unequal", &Tiers::take_unequal)
      .def("reset", &Tiers::reset)
      .def("entries", &entries);
}

void bind_retention(nb::class_<Tiers>& type) {
  type.def(
          "retain",
          [](Tiers& tiers, PyKeys keys, uint64_t session, uint32_t client, uint32_t until,
             uint8_t priority) {
            return tiers.retain(session, client, until, priority,
                                KeyList(keys, tiers.index.key_bytes()));
          },
          "keys"_a, "session"_a, "client"_a, "until"_a, "priority"_a)
      .def("drop_session",
           [](Tiers& tiers, uint64_t session) { return tiers.sessions.drop(session); })
      .def("expire", &Tiers::expire)
      .def("save_sessions",
           [](const Tiers& tiers) {
             std::vector<SavedSession> sessions;
             std::vector<uint64_t> generations;
             tiers.sessions.save(sessions, generations);
             return std::pair(bytes_of(sessions), bytes_of(generations));
           })
      .def_prop_ro("retained", &Tiers::retained)
      .def_prop_ro("sessions", [](const Tiers& tiers) { return tiers.sessions.size(); });
}

void bind_state(nb::class_<Tiers>& type) {
  type.def("whereabouts",
           [](const Tiers& self, PyKeys keys, uint8_t sources) -> std::optional<Whereabouts> {
             Whereabouts found = self.whereabouts(KeyList(keys, self.index.key_bytes()), sources);
             return found.mixed ? std::optional(std::move(found)) : std::nullopt;
           })
      // The keys are needed only if `before` has no rows.
      .def("unmoved",
           [](const Tiers& self, const Whereabouts& before, PyKeys keys, uint8_t sources) {
             if (!before.rows.empty()) return self.unmoved(before, sources);
             const KeyList list(keys, self.index.key_bytes());
             return self.whereabouts(list, sources).mixed == before.mixed;
           })
      .def("set_usable",
           [](Tiers& self, size_t target, bool usable) { self.targets.at(target).usable = usable; })
      .def("set_speed",
           [](Tiers& self, size_t target, double speed) { self.targets.at(target).speed = speed; })
      .def("take_moves", &take_moves)
      .def("take_counts",
           [](Tiers& tiers) {
             const Counts counts = std::exchange(tiers.counts, {});
             return std::tuple(counts.cache_evictions, counts.pool_evictions, counts.refused_writes,
                               counts.written, counts.retired, counts.superseded, counts.borrowed,
                               counts.deduped);
           })
      .def_prop_ro("moved_bytes", [](const Tiers& tiers) { return tiers.moved_bytes; })
      .def_prop_ro("writes_intended", &Tiers::writes_intended)
      .def_prop_ro("fetches_intended", &Tiers::fetches_intended)
      .def_prop_ro("cache_slots", [](const Tiers& tiers) { return tiers.cache.capacity(); })
      .def_prop_ro("cache_taken", [](const Tiers& tiers) { return tiers.cache.taken(); })
      .def_prop_ro("cache_orphans", [](const Tiers& tiers) { return tiers.cache.orphans; })
      .def_prop_ro("cache_in_use", [](const Tiers& tiers) { return tiers.cache.count_in_use(); })
      .def_prop_ro("pool_taken", [](const Tiers& tiers) { return sum(tiers, &Slots::taken); })
      .def_prop_ro("pool_orphans",
                   [](const Tiers& tiers) {
                     return sum(tiers, [](const Slots& slots) { return slots.orphans; });
                   })
      .def_prop_ro("pool_retired",
                   [](const Tiers& tiers) {
                     return sum(tiers, [](const Slots& slots) { return slots.retired; });
                   })
      .def_ro("writes_pending", &Tiers::pending)
      .def_ro("backlog", &Tiers::backlog);
}

struct PyWanted {
  explicit PyWanted(nb::handle sequence, size_t key_bytes) : keys(sequence, key_bytes) {
    wanted.taken.resize(Keys(keys).size());
  }
  KeyList keys;
  Holds::Wanted wanted;
};

// The next chunk, the look-ups left, and the first and last chunk skipped, or -1.
using Advanced = std::tuple<size_t, size_t, int64_t, int64_t>;

Advanced advance(Holds& holds, PyWanted& wanted, size_t next, size_t end, size_t local,
                 size_t looks, uint8_t reason, size_t held_max, size_t fetching_max) {
  const Keys keys = wanted.keys;
  const Holds::Advance done =
      holds.advance(wanted.wanted, keys, {next, std::min(end, keys.size()), local}, looks,
                    static_cast<Reason>(reason), {held_max, fetching_max});
  const bool skipped = done.skipped_first != SIZE_MAX;
  return {done.next, done.looks, skipped ? static_cast<int64_t>(done.skipped_first) : -1,
          skipped ? static_cast<int64_t>(done.skipped_last) : -1};
}

using SomeRows = std::optional<std::vector<uint32_t>>;

void bind_holds(nb::module_& m) {
  nb::class_<PyWanted>(m, "Wanted");          // NOLINT(bugprone-unused-raii): registers the class
  nb::class_<Whereabouts>(m, "Whereabouts");  // NOLINT(bugprone-unused-raii): the same
  nb::class_<Holds>(m, "Holds")
      .def(nb::init<Tiers&, size_t>(), nb::keep_alive<1, 2>(), "tiers"_a, "room_min"_a)
      .def("wanted", [](const Holds&, const Tiers& tiers,
                        PyKeys keys) { return PyWanted(keys, tiers.index.key_bytes()); })
      .def("advance", &advance)
      .def("leave",
           [](Holds& holds, PyWanted& wanted) {
             std::vector<Holds::Cancel> cancels;
             holds.leave(wanted.wanted, cancels);
             return cancels;
           })
      .def("probe",
           [](Holds& holds, const Tiers& tiers, PyKey key) {
             holds.probe(KeyList::check(key.ptr(), tiers.index.key_bytes()));
           })
      .def("sent", &Holds::sent)
      .def("used", &Holds::used)
      .def(
          "ended",
          [](Holds& holds, uint64_t op, const Batch& batch, const SomeRows& rows, bool probe) {
            std::vector<uint32_t> all(rows ? 0 : batch.size());
            std::iota(all.begin(), all.end(), 0);
            holds.ended(op, batch, rows ? *rows : all, probe);
          },
          "op"_a, "batch"_a, "rows"_a.none(), "probe"_a)
      .def("lost", [](Holds& holds, const Batch& batch,
                      const std::vector<uint32_t>& rows) { holds.lost(batch, rows); })
      .def("reset", &Holds::reset)
      .def("keys",
           [](const Holds& holds, const Tiers& tiers) {
             std::vector<nb::bytes> keys;
             for (const Row row : holds.rows())
               keys.emplace_back(tiers.index.key(row), tiers.index.key_bytes());
             return keys;
           })
      // Fetches begun (by reason) and ended (by `End`) since the last call.
      .def("take_counts",
           [](Holds& holds) {
             return std::pair(std::exchange(holds.begun, {}), std::exchange(holds.ends, {}));
           })
      .def_prop_ro("fetching", &Holds::fetching)
      .def("held", [](const Holds& holds, uint8_t reason) {
        return holds.held(static_cast<Reason>(reason));
      });
}

}  // namespace

#ifndef NVMEOF_TIERS_MODULE
#define NVMEOF_TIERS_MODULE _tiers
#endif

NB_MODULE(NVMEOF_TIERS_MODULE, m) {
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const BrokenRule& broken) {
      PyErr_SetString(PyExc_AssertionError, broken.what());
    }
  });
  bind_batch(m);
  bind_foreign(m);
  bind_machine(m);
#ifdef NVMEOF_MUTANTS
  m.def("set_mutant", [](const char* name) { active_mutant = name; });
  m.def("after", [](int state, int event) {
    return static_cast<int>(after(static_cast<State>(state), static_cast<Event>(event)));
  });
#endif
  nb::class_<Tiers> tiers(m, "Tiers");
  bind_calls(tiers);
  bind_retention(tiers);
  bind_state(tiers);
  bind_holds(m);
  bind_look_ups(m);
}
