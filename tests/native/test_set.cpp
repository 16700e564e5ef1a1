// SPDX-License-Identifier: Apache-2.0
// Drives the machines of three ranks with equal bytes over one buffer, without Python, for the
// sanitizers. Commands reach the ranks at different times; lanes and copies end, fail and hang at
// random, from a seed; a rank may stop for longer than a deadline. Exits with 1 on failure. Checks
// that a slot, of any member, contains the row's chunk from the start to the end of each copy; that
// only the holder reads and writes; that each rank reports each row once; and that all slots are
// free at the end.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/op.h"
#include "machine/machine.h"

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

constexpr size_t kRanks = 3, kCacheSlots = 4, kStreamSlots = 2, kSlots = kCacheSlots + kStreamSlots;
constexpr size_t kSlotBytes = 8192, kHeader = 4096, kKeyBytes = 12, kPlaces = 16;
constexpr uint64_t kBase = 1 << 20;
constexpr int64_t kReadNs = 5'000'000, kWriteNs = 30'000'000, kTickNs = 1'000'000;

using Dice = std::mt19937_64;
bool chance(Dice& dice, unsigned per_cent) { return dice() % 100 < per_cent; }

// The generation of the chunk in each slot of all members, or 0 for none.
using Memory = std::array<uint64_t, kRanks * kSlots>;
size_t slot_at(uint64_t address) { return (address - kBase) / kSlotBytes; }

// A rank's lanes, in which the test ends operations.
class Lanes final : public NativeLanes {
 public:
  Lanes(Memory& memory, size_t rank) : memory_(memory), rank_(rank) {}

  LaneRoom room() const override { return {full ? 0u : 8u, full ? 0u : 8u}; }
  void take(const LaneOp& op) override {
    const size_t slot = slot_at(op.address);
    CHECK(slot / kSlots == rank_ && op.single_copy);
    if (op.urgency == Urgency::WRITE)
      CHECK(memory_[slot] == op.identity.generation);
    else
      memory_[slot] = 0;
    ops.push_back(op);
  }
  void start() override {}
  bool cancel_one(uint64_t) override { return false; }
  void ended(std::vector<LaneEnd>& found) override {
    found.insert(found.end(), ends_.begin(), ends_.end());
    ends_.clear();
  }
  void end_one(Dice& dice, unsigned failing) {
    if (ops.empty()) return;
    const size_t at = dice() % ops.size();
    const LaneOp op = ops[at];
    ops.erase(ops.begin() + static_cast<ptrdiff_t>(at));
    const bool ok = !chance(dice, failing);
    if (op.is_read()) memory_[slot_at(op.address)] = ok ? op.identity.generation : 0;
    ends_.push_back({op.token, ok ? Outcome::OK : Outcome::STALE});
  }

  std::vector<LaneOp> ops;
  bool full = false;

 private:
  Memory& memory_;
  const size_t rank_;
  std::vector<LaneEnd> ends_;
};

struct Row {
  OpKind kind;
  uint64_t generation;
  uint32_t member;
  int32_t slot = -1;  // cache row
  int32_t place = -1;
};

// An op of one row, and the numbers of reports by ranks.
struct Command {
  Row row;
  size_t outcomes = 0, releases = 0;
  bool failed = false;
};

class World {
 public:
  explicit World(uint64_t seed) : dice_(seed) {
    const SetShape shape{kRanks, kCacheSlots, kStreamSlots};
    words_.resize(SetMemory::bytes(shape) / 64);
    for (size_t rank = 0; rank < kRanks; ++rank) {
      ranks_[rank].lanes = std::make_unique<Lanes>(memory_, rank);
      ranks_[rank].machine =
          std::make_unique<Machine>(options(rank), *ranks_[rank].lanes, int64_t{0});
    }
  }

  void run(size_t steps) {
    for (size_t step = 0; step < steps; ++step) {
      now_ns_ += static_cast<int64_t>(dice_() % 3) * kTickNs / 2;
      if (commands_.size() < 20) command();
      for (Rank& rank : ranks_) {
        if (chance(dice_, 1)) rank.stopped_until_ns = now_ns_ + kReadNs * int64_t(dice_() % 3);
        if (chance(dice_, 1)) rank.hung_until_ns = now_ns_ + kReadNs * int64_t(dice_() % 3);
        if (chance(dice_, 3)) rank.lanes->full = !rank.lanes->full;
        if (rank.stopped_until_ns <= now_ns_) turn(rank, 10);
      }
    }
    for (size_t step = 0; step < 400 && !at_rest(); ++step) {
      now_ns_ += kTickNs;
      for (Rank& rank : ranks_) {
        rank.lanes->full = false;
        turn(rank, 0);
      }
    }
    CHECK(at_rest());
    for (const Rank& rank : ranks_) CHECK(rank.machine->streams_used() == 0);
  }

 private:
  struct alignas(64) Line {
    std::array<uint64_t, 8> words{};
  };
  struct Copy {
    uint64_t number;
    bool is_store;
    size_t slot;
    uint64_t generation;
  };
  struct Rank {
    std::unique_ptr<Lanes> lanes;
    std::unique_ptr<Machine> machine;
    std::deque<std::function<void(Machine&)>> inbox;
    std::vector<Copy> copies;
    int64_t stopped_until_ns = 0, hung_until_ns = 0;
  };
  // A member's cache slot: the generation that it holds unless an operation failed, and its users.
  struct Part {
    uint64_t generation = 0;
    size_t users = 0;
  };

  MachineOptions options(size_t rank) {
    MachineOptions made;
    made.cache_slots = kCacheSlots;
    made.stream_slots = kStreamSlots;
    const uint64_t base = kBase + rank * kSlots * kSlotBytes;
    made.io = {1,
               4,
               4,
               kReadNs,
               kWriteNs,
               kHeader,
               kSlotBytes,
               {kSlotBytes - kHeader},
               base,
               base + kCacheSlots * kSlotBytes,
               2,
               2,
               std::vector<bool>(EIO + 1)};
    made.set = {words_.data(), kRanks, rank, {}, {kRanks}};
    for (size_t member = 0; member < kRanks; ++member)
      made.set.addresses.push_back(kBase + member * kSlots * kSlotBytes);
    return made;
  }

  bool at_rest() const {
    return commands_.empty() && std::ranges::all_of(ranks_, [](const Rank& rank) {
             return rank.inbox.empty() && rank.copies.empty() && rank.machine->idle();
           });
  }

  // ---- the manager

  void command() {
    Row row{static_cast<OpKind>(dice_() % 4), ++generation_, uint32_t(dice_() % kRanks)};
    row.slot = static_cast<int32_t>(dice_() % kCacheSlots);
    Part& part = parts_[row.member][static_cast<size_t>(row.slot)];
    bool fills = row.kind == OpKind::STORE || row.kind == OpKind::FETCH;
    if (row.kind == OpKind::LOAD) {
      if (chance(dice_, 60)) row.place = static_cast<int32_t>(dice_() % kPlaces);
      fills = row.place >= 0;
      if (fills && chance(dice_, 60)) {
        row.slot = -1;
        fills = false;
      }
    } else if (row.kind != OpKind::STORE) {
      row.place = static_cast<int32_t>(dice_() % kPlaces);
    }
    if (row.slot >= 0) {
      if (fills ? part.users > 0 : part.generation == 0) return;
      if (fills) part.generation = row.generation;
      row.generation = part.generation;
      ++part.users;
    }
    const uint64_t op = ++last_op_;
    commands_[op] = {row};
    for (Rank& rank : ranks_)
      rank.inbox.push_back([this, op, row](Machine& machine) { begin(machine, op, row); });
    if (!chance(dice_, 10)) return;
    for (Rank& rank : ranks_)
      if (chance(dice_, 50))
        rank.inbox.push_back([op](Machine& machine) { machine.cancel(op, nullptr); });
  }

  static void begin(Machine& machine, uint64_t op, const Row& row) {
    char key[kKeyBytes + 1];
    std::snprintf(key, sizeof key, "%012llu", static_cast<unsigned long long>(row.generation));
    const int32_t cache =
        row.slot < 0 ? -1 : cache_slot(static_cast<uint32_t>(row.slot), row.member);
    const int64_t place =
        row.place < 0 ? -1 : place_of(0, static_cast<uint32_t>(row.place), row.member);
    const uint8_t group = 0;
    // The piece's KV cache address is the generation, which identifies the content.
    const std::array<uint64_t, 3> piece{row.generation, 0, 64};
    const std::array<uint32_t, 2> first{0, 1};
    const bool moves = row.kind == OpKind::STORE || row.kind == OpKind::LOAD;
    const auto urgency = row.kind == OpKind::WRITE   ? Urgency::WRITE
                         : row.kind == OpKind::FETCH ? Urgency::PREFETCH
                                                     : Urgency::DEMAND;
    machine.begin(op, row.kind, urgency,
                  {key, {&row.generation, 1}, {&cache, 1}, {&place, 1}, {&group, 1}, {}},
                  moves ? Pieces{piece, first} : Pieces{}, moves ? op : 0);
  }

  void take(const RowReport& report) {
    const auto found = commands_.find(report.op);
    CHECK(found != commands_.end());
    Command& command = found->second;
    const auto code = static_cast<Outcome>(report.codes.empty() ? 0 : report.codes[0]);
    if (code != Outcome::RELEASED) {
      ++command.outcomes;
      command.failed = command.failed || code != Outcome::OK;
    }
    command.releases += code == Outcome::RELEASED || report.released.empty() || report.released[0];
    CHECK(command.outcomes <= kRanks && command.releases <= command.outcomes);
    const Row row = command.row;
    if (row.slot >= 0 && command.failed && row.kind != OpKind::WRITE) {
      Part& part = parts_[row.member][static_cast<size_t>(row.slot)];
      if (part.generation == row.generation) part.generation = 0;  // no later row may expect it
    }
    if (command.releases < kRanks) return;
    if (row.slot >= 0) --parts_[row.member][static_cast<size_t>(row.slot)].users;
    commands_.erase(found);
  }

  // ---- a rank's thread

  void turn(Rank& rank, unsigned failing) {
    Machine& machine = *rank.machine;
    machine.io.set_time(now_ns_);
    for (size_t count = failing ? dice_() % 3 : SIZE_MAX; count && !rank.inbox.empty(); --count) {
      rank.inbox.front()(machine);
      rank.inbox.pop_front();
    }
    while (!rank.copies.empty() && chance(dice_, failing ? 50 : 100)) end_copy(rank, failing);
    if (rank.hung_until_ns <= now_ns_)
      for (size_t left = 1 + dice_() % 4; left > 0; --left) rank.lanes->end_one(dice_, failing);
    machine.io.poll_lanes(0);
    machine.io.expire();
    do {
      machine.run();
      machine.io.offer_reads();
      machine.io.offer_writes();
      machine.io.fail_stalled();
    } while (machine.run());
    for (const CopyBatch& batch : machine.take_copies(0)) {  // no fence has passed
      CHECK(batch.pieces.size() == 3);
      const size_t slot = slot_at(batch.pieces[1]);
      CHECK((batch.pieces[1] - kBase) % kSlotBytes == kHeader);
      rank.copies.push_back({batch.number, batch.is_store, slot, batch.pieces[0]});
      if (batch.is_store)
        memory_[slot] = 0;
      else
        CHECK(memory_[slot] == batch.pieces[0]);
    }
    machine.take_finished();
    machine.io.health_counts.clear();
    machine.io.health_outcomes.clear();
    for (const RowReport& report : machine.take_reports()) take(report);
  }

  void end_copy(Rank& rank, unsigned failing) {
    const Copy copy = rank.copies.back();
    rank.copies.pop_back();
    const bool ok = !chance(dice_, failing);
    if (!copy.is_store) CHECK(memory_[copy.slot] == copy.generation);
    if (copy.is_store && ok) memory_[copy.slot] = copy.generation;
    rank.machine->copied(copy.number, ok ? Outcome::OK : Outcome::IO_ERROR, ok ? 0 : EIO);
  }

  Dice dice_;
  Memory memory_{};
  std::vector<Line> words_;
  std::array<Rank, kRanks> ranks_;
  std::array<std::array<Part, kCacheSlots>, kRanks> parts_;
  std::map<uint64_t, Command> commands_;
  int64_t now_ns_ = 0;
  uint64_t last_op_ = 0, generation_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  const int seeds = std::atoi(argv[2]);
  for (int number = 0; number < seeds; ++number) {
    seed_now = seed + static_cast<uint64_t>(number);
    for (uint64_t world = 0; world < 100; ++world) World(seed_now * 1000 + world).run(1000);
    std::printf("seed %llu: ok\n", static_cast<unsigned long long>(seed_now));
  }
  return 0;
}
