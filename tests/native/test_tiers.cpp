// SPDX-License-Identifier: Apache-2.0
// Drives the manager's tiers under sanitizers, without Python. A seed determines random plans,
// holds, resets and reports of two ranks, while two other engines change their chunks. At the end,
// no slot is in use or an orphan, and every entry is found by its key. Exits with 1 on failure.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tiers/tiers.h"

using namespace nvmeof;

namespace {

uint64_t seed_now = 0;

#define CHECK(condition)                                                                        \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      std::fprintf(stderr, "seed %llu: %s:%d: %s\n", static_cast<unsigned long long>(seed_now), \
                   __FILE__, __LINE__, #condition);                                             \
      std::exit(1);                                                                             \
    }                                                                                           \
  } while (false)

constexpr size_t kKeys = 60, kKeyBytes = 12, kAnswers = 40;
constexpr uint16_t kRanks = 2;
constexpr uint32_t kOwners = 2;
constexpr std::array<uint8_t, kTagBytes> kTag{1};
constexpr std::array<uint64_t, 2> kGroupBytes{8192, 4096};

struct Op {
  OpKind kind;
  Batch batch;
  // By rank and row: 1 if the rank must still report an outcome or a release.
  std::vector<uint8_t> outcome[kRanks], release[kRanks];
};

struct Hold {
  Slot slot;
  Row row;
  uint64_t generation;
};

// The memfd of a foreign table.
class File {
 public:
  File() : fd(memfd_create("foreign", MFD_CLOEXEC)) { CHECK(fd >= 0); }
  File(const File&) = delete;
  ~File() { close(fd); }
  const int fd;
};

class World {
 public:
  explicit World(uint64_t seed)
      : dice_(seed), others_(file_.fd, 1), foreign_(file_.fd), tiers_(options(dice_, &foreign_)) {
    foreign_.set_tag(kTag);
    foreign_.set_time(0);
    for (size_t number = 0; number < kKeys; ++number) {
      char key[kKeyBytes - 3];
      std::snprintf(key, sizeof key, "%08zu", number);
      keys_.emplace_back(key);
      // The number of its group: 0, 3, or 1, which is not offloaded.
      const int group = number % 10 == 9 ? 1 : number % 2 * 3;
      keys_.back() += std::string{0, 0, 0, static_cast<char>(group)};
    }
  }

  // Return the number of chunks read from other engines.
  uint64_t run(size_t steps) {
    for (size_t step = 0; step < steps; ++step) {
      if (chance(60)) command();
      if (chance(20)) other_engine();
      if (chance(70)) report();
      tiers_.drain();
      send();
      recall();
    }
    rest();
    return tiers_.counts.borrowed;
  }

 private:
  bool chance(unsigned per_cent) { return dice_() % 100 < per_cent; }

  static Options options(std::mt19937_64& dice, Foreign* foreign) {
    Options made;
    if (dice() % 4) made.foreign = foreign;
    made.cache_slots = 12;
    made.pool_slots = {10, 9};
    made.key_bytes = kKeyBytes;
    made.group_ids = {0, 3};
    made.ranks = kRanks;
    made.credit = dice() % 8;
    made.demotes = dice() % 2;
    made.logs_moves = dice() % 2;
    made.writes_max = 4;
    made.clean_min = 2;
    made.slot_errnos.resize(EIO + 1);
    made.slot_errnos[EIO] = true;
    return made;
  }

  // Return up to six neighbouring keys.
  std::vector<const char*> some() {
    std::vector<const char*> found;
    const size_t first = dice_() % kKeys, count = 1 + dice_() % 6;
    for (size_t at = first; at < std::min(kKeys, first + count); ++at)
      found.push_back(keys_[at].data());
    return found;
  }

  // Return a random order of rows or, half of the time, an empty one.
  std::vector<uint32_t> order(size_t count) {
    std::vector<uint32_t> made(chance(50) ? count : 0);
    std::iota(made.begin(), made.end(), 0u);
    std::shuffle(made.begin(), made.end(), dice_);
    return made;
  }

  // ---- commands

  std::vector<const char*> hits(const std::vector<const char*>& keys) const {
    std::vector<const char*> found;
    for (const char* key : keys)
      if (tiers_.lookup(key, kFromCpu | kFromPool) != Source::NONE) found.push_back(key);
    return found;
  }

  // Check that remembered rows are unmoved only if a look-up of their keys gives the same result.
  void recall() {
    for (const auto& [keys, before] : answers_)
      if (tiers_.unmoved(before, kFromCpu | kFromPool))
        CHECK(tiers_.whereabouts(keys, kFromCpu | kFromPool).mixed == before.mixed);
    std::vector<const char*> keys = hits(some());
    Whereabouts there = tiers_.whereabouts(keys, kFromCpu | kFromPool);
    if (!there.rows.empty()) answers_.emplace_back(std::move(keys), std::move(there));
    if (answers_.size() > kAnswers) answers_.pop_front();
  }

  void command() {
    const std::vector<const char*> keys = some();
    const size_t what = dice_() % 20;
    if (what < 7) {
      begin(OpKind::STORE, tiers_.plan_store(keys, {}, generation_, order(keys.size())).batch);
    } else if (what < 13) {
      const std::vector<const char*> loaded =
          chance(90) ? hits(keys) : keys;  // some may be missing
      begin(OpKind::LOAD, tiers_.plan_load(loaded, dice_() % 3, order(loaded.size())));
    } else if (what < 16) {
      tiers_.touch(keys, chance(50));
      std::vector<uint64_t> by_target(2);
      tiers_.weigh(hits(keys), kGroupBytes, by_target);
    } else if (what < 18) {
      hold(keys.front());
    } else if (what == 18 && !holds_.empty()) {
      release(dice_() % holds_.size());
    } else if (what == 19) {
      rare();
    }
  }

  void rare() {
    if (chance(30)) {
      tiers_.reset();
      while (!holds_.empty()) release(0);
    } else if (chance(50)) {
      tiers_.targets[dice_() % 2].usable = chance(70);
    } else {
      tiers_.targets[dice_() % 2].speed = static_cast<double>(dice_() % 4) / 4;
    }
    tiers_.moves.clear();
    tiers_.moved_bytes = 0;
  }

  // Let another engine write a chunk, drop one, or change its state. Advance the time.
  void other_engine() {
    const uint32_t owner = 1 + static_cast<uint32_t>(dice_() % kOwners);
    if (chance(30)) {
      OwnerRecord record;
      record.tag = kTag;
      record.version = others_.version_asked();
      record.state = chance(80) ? OwnerState::COMPLETE : OwnerState::NONE;
      record.pool_uuid[0] = chance(90);
      others_.set_owner(owner, record);
    } else if (chance(60)) {
      const auto slot = static_cast<uint32_t>(dice_() % 50);
      const Offer offer{keys_[dice_() % kKeys],
                        {owned_by(owner, place_of(slot % 3, slot)), dice_() % 100}};
      others_.put(fingerprint_of(offer.key), offer.row);
      offers_.push_back(offer);
    } else if (!offers_.empty()) {
      CHECK(others_.remove(fingerprint_of(offers_.front().key), offers_.front().row));
      offers_.pop_front();
    }
    now_s_ += static_cast<double>(dice_() % 100) / 10;
    foreign_.set_time(now_s_);
    for (const Attachment& one : foreign_.take_attachments())
      if (chance(20)) foreign_.attach_failed(one.owner);
    foreign_.take_detachments();
    std::vector<const char*> keys = some();
    const std::vector<const char*> found = hits(keys);
    const Whereabouts there = tiers_.whereabouts(found, kFromCpu | kFromPool);
    CHECK(there.mixed != 0);
    CHECK(there.rows.empty() || tiers_.unmoved(there, kFromCpu | kFromPool));
  }

  // Hold a chunk, after fetching it if necessary.
  void hold(const char* key) {
    const Source source = tiers_.lookup(key, kFromCpu | kFromPool);
    if (source == Source::NONE || tiers_.evictable() <= 2) return;
    const bool fetches = source == Source::POOL || source == Source::SHARED;
    if (fetches && tiers_.begin_fetch(key, dice_() % kFetchReasons) == kNoRow) return;
    const Row row = tiers_.hold(key);
    CHECK(row != kNoRow);
    const Index& index = tiers_.index;
    holds_.push_back({static_cast<Slot>(index[row].cache), row, index[row].generation});
  }

  void release(size_t at) {
    const Hold one = holds_[at];
    holds_.erase(holds_.begin() + static_cast<long>(at));
    tiers_.release_hold(one.slot, one.row, one.generation);
  }

  void send() {
    begin(OpKind::WRITE, tiers_.take_writes());
    for (size_t reason = 0; reason < kFetchReasons; ++reason)
      begin(OpKind::FETCH, tiers_.take_fetches(reason));
  }

  void begin(OpKind kind, Batch batch) {
    if (batch.size() == 0) return;
    Op& op = ops_.emplace_back(Op{kind, std::move(batch), {}, {}});
    for (size_t rank = 0; rank < kRanks; ++rank) {
      op.outcome[rank].assign(op.batch.size(), 1);
      op.release[rank].assign(op.batch.size(), 1);
    }
  }

  // ---- reports

  // Report some rows of one op for one rank.
  void report() {
    if (ops_.empty()) return;
    auto at = ops_.begin();
    std::advance(at, static_cast<long>(dice_() % ops_.size()));
    report(at, dice_() % kRanks, 60, 15);
  }

  void report(std::list<Op>::iterator at, size_t rank, unsigned rows, unsigned failing) {
    Op& op = *at;
    std::vector<uint32_t> indexes;
    std::vector<uint8_t> codes, released;
    std::vector<int16_t> errors;
    for (uint32_t row = 0; row < op.batch.size(); ++row) {
      if (!op.release[rank][row] || !chance(rows)) continue;
      auto code = op.outcome[rank][row] ? Outcome::OK : Outcome::RELEASED;
      if (code == Outcome::OK && chance(failing)) code = static_cast<Outcome>(1 + dice_() % 5);
      const bool fails = code != Outcome::OK && code != Outcome::RELEASED;
      const bool frees = !fails || chance(failing ? 50 : 100);
      indexes.push_back(row);
      codes.push_back(static_cast<uint8_t>(code));
      errors.push_back(code == Outcome::IO_ERROR ? EIO : 0);
      released.push_back(frees);
      op.outcome[rank][row] = 0;
      op.release[rank][row] = !frees;
    }
    if (indexes.empty()) return;
    Effect effect;
    tiers_.report(op.kind, op.batch, {indexes, codes, errors, released}, effect);
    for (const uint32_t row : effect.decided) CHECK(row < op.batch.size());
    if (!op.batch.undecided && !op.batch.unreleased) ops_.erase(at);
  }

  // Report all rows until no operation is left.
  void rest() {
    foreign_.set_tag({});  // accept no other engine from now on
    tiers_.targets[0].usable = tiers_.targets[1].usable = true;
    while (!holds_.empty()) release(0);
    for (size_t round = 0; round < 1000; ++round) {
      tiers_.drain();
      send();
      if (ops_.empty()) break;
      const auto first = ops_.begin();
      const size_t before = ops_.size();
      for (size_t rank = 0; rank < kRanks && ops_.size() == before; ++rank)
        report(first, rank, 100, 0);
    }
    CHECK(ops_.empty() && tiers_.pending == 0 && tiers_.writes_intended() == 0);
    CHECK(tiers_.cache.count_in_use() == 0 && tiers_.cache.orphans == 0);
    for (const Target& target : tiers_.targets) CHECK(target.slots.orphans == 0);
    const Index& index = tiers_.index;
    size_t found = 0;
    for (const std::string& key : keys_) found += tiers_.lookup(key.data(), 3) != Source::NONE;
    CHECK(found == index.size());
  }

  struct Offer {
    std::string key;
    ForeignRow row;
  };

  std::mt19937_64 dice_;
  const File file_;
  ForeignWriter others_;
  Foreign foreign_;
  Tiers tiers_;
  std::list<Offer> offers_;
  double now_s_ = 0;
  std::vector<std::string> keys_;
  std::list<Op> ops_;
  std::vector<Hold> holds_;
  std::list<std::pair<std::vector<const char*>, Whereabouts>> answers_;  // the most recent ones
  uint64_t generation_ = 1000;  // unlike other engines' generations, which are below 100
};

// Check that the coldest chunk of the CPU tier becomes the coldest of the pool despite its uses.
void test_the_coldest_goes_on_as_such() {
  const Recency cache(100), pool(0);
  SlotRecord cached{}, pooled{};
  for (int requests = 0; requests < 3; ++requests) cache.use(cached, 50, true);
  pool.take_over(pooled, cache, cached);
  CHECK(pooled.used == 50);
  cached.used = 0;
  pool.take_over(pooled, cache, cached);
  CHECK(pooled.used == 0);
  cache.take_over(cached, pool, pooled);
  CHECK(cached.used == 200);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  test_the_coldest_goes_on_as_such();
  const uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  const int seeds = std::atoi(argv[2]);
  for (int number = 0; number < seeds; ++number) {
    seed_now = seed + static_cast<uint64_t>(number);
    uint64_t borrowed = 0;
    for (uint64_t world = 0; world < 30; ++world)
      borrowed += World(seed_now * 1000 + world).run(2000);
    CHECK(borrowed > 100);
    std::printf("seed %llu: ok\n", static_cast<unsigned long long>(seed_now));
  }
  return 0;
}
