// SPDX-License-Identifier: Apache-2.0
// Drives the worker's machine under sanitizers, without Python. A seed determines random commands
// on lanes that accept, end, hang and release operations at random. Exits with 1 on failure. A
// plain model checks the rules on which a manager relies:
//
// - Each row has one outcome, and one release, after which no lane uses its cache slot.
// - An operation has its group's payload size. A store's row without its blocks is STALE.
// - No operation is awaited beyond its deadline, even after a retry.
// - No other operation uses the buffer of a read.
// - A target's superblock waits for its writes, and later writes wait for the superblock. Later
//   writes have its epoch only if it was written.
// - No slot leaks, and loads do not wait for hanging slots.
// - Another engine's region is read only while its files are attached.
// - A peer gets at most its credits and half of the time until a deadline. It writes only into
//   stream slots, which no chunk uses while the peer may still write into them.
// - A load's copy checks whole payloads, which no other task gets before. A row fails if its CRC
//   differs from the one in the header.
// - Everything ends.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>

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

constexpr size_t kCacheSlots = 6, kStreamSlots = 5, kTargets = 2, kPoolSlots = 20, kPeers = 2;
constexpr uint16_t kOwners = 2;  // other engines
constexpr size_t kSlotBytes = 8192, kHeader = 4096, kKeyBytes = 12;
constexpr std::array<size_t, 3> kGroupBytes{kSlotBytes - kHeader, 512, 0};

// Return the group of the chunk with this number. The chunk's generation is the next number.
uint8_t group_of(uint64_t number) { return static_cast<uint8_t>(number % kGroupBytes.size()); }
constexpr size_t kReadsMax = 4, kWritesMax = 2;
constexpr size_t kReadBytesMax = 3 * kSlotBytes, kWriteBytesMax = 2 * kSlotBytes;
constexpr uint64_t kBase = 1 << 20;
constexpr int64_t kReadNs = 5'000'000, kWriteNs = 30'000'000, kTickNs = 1'000'000;

using Dice = std::mt19937_64;

bool chance(Dice& dice, unsigned per_cent) { return dice() % 100 < per_cent; }

template <typename Container>
auto pick(Dice& dice, Container& all) {
  auto at = all.begin();
  std::advance(at, static_cast<long>(dice() % all.size()));
  return at;
}

std::string key_of(const LaneOp& op) {
  const auto* const key = reinterpret_cast<const char*>(op.identity.key.data());
  return {key, op.identity.key_bytes};
}

// Peers' lanes, in which the test ends, fails, stops and releases reads.
class Peers final : public NativeLanes {
 public:
  struct Op {
    LaneOp op;
    bool wanted = true;
  };

  LaneRoom room() const override { return {0, 0}; }
  void take(const LaneOp& op) override {
    const PeerState& state = states.at(op.peer);
    CHECK(state.usable && held(op.peer) < state.reads_max);
    CHECK(op.until_ns > now_ns && op.until_ns <= now_ns + kReadNs / 2);
    CHECK(op.address >= kBase + kCacheSlots * kSlotBytes);
    CHECK(op.kind == OpKind::LOAD && !has(op.address));
    unproven->erase(op.address);
    taken_.push_back(op);
  }
  void start() override {
    for (const LaneOp& op : std::exchange(taken_, {})) CHECK(ops.try_emplace(op.token, op).second);
  }
  bool cancel_one(uint64_t token) override {
    CHECK(ops.contains(token));
    ops.at(token).wanted = false;
    return false;
  }
  void ended(std::vector<LaneEnd>& found) override {
    found.insert(found.end(), ends_.begin(), ends_.end());
    ends_.clear();
  }
  void end(Dice& dice, unsigned failing) {
    if (ops.empty()) return;
    auto& [token, one] = *pick(dice, ops);
    LaneEnd end{token, Outcome::OK};
    if (chance(dice, failing)) end.code = dice() % 2 ? Outcome::CHECKSUM_MISMATCH : Outcome::STALE;
    end.released = end.code == Outcome::OK || !one.wanted || dice() % 2;
    one.wanted = false;
    if (end.released) ops.erase(token);
    ends_.push_back(end);
  }
  void check() const {
    CHECK(taken_.empty());
    for (const auto& [token, one] : ops) CHECK(!one.wanted || one.op.until_ns > now_ns);
  }
  bool has(uint64_t address) const {
    const auto at = [=](const LaneOp& op) { return op.address == address; };
    return std::ranges::any_of(taken_, at) ||
           std::ranges::any_of(ops, [&](const auto& one) { return at(one.second.op); });
  }

  std::map<uint64_t, Op> ops;
  std::array<PeerState, kPeers> states;
  std::map<uint64_t, uint64_t>* unproven = nullptr;  // those of the other lanes
  int64_t now_ns = 0;

 private:
  size_t held(size_t peer) const {
    const auto at = [=](const LaneOp& op) { return op.peer == peer; };
    return static_cast<size_t>(
        std::ranges::count_if(taken_, at) +
        std::ranges::count_if(ops, [&](const auto& one) { return at(one.second.op); }));
  }
  std::vector<LaneOp> taken_;
  std::vector<LaneEnd> ends_;
};

// Lanes in which the test ends operations.
class Lanes final : public NativeLanes {
 public:
  struct Op {
    LaneOp op;
    int64_t deadline_ns = 0;  // since the first hand-over of its row
    bool queued = false;      // whether it has not started
    bool wanted = true;
    bool landed = false;  // whether the device has completed it
    bool holds_place() const { return wanted && !landed; }
  };

  LaneRoom room() const override {
    const size_t room = full ? 0 : depth - std::min(depth, ops.size());
    return {room, room};
  }
  void take(const LaneOp& op) override {
    CHECK(!full && ops.size() < depth && !ops.contains(op.token));
    check(op);
    if (op.urgency != Urgency::WRITE) unproven.erase(op.address);
    const auto retried = retries_.find(row_of(op));
    const bool is_write = op.urgency == Urgency::WRITE;
    int64_t deadline_ns = now_ns + (is_write ? kWriteNs : kReadNs);
    if (retried != retries_.end()) {
      deadline_ns = retried->second;
      CHECK(deadline_ns > now_ns);
      retries_.erase(retried);
    }
    ops[op.token] = {op, deadline_ns, op.token % 3 == 0};
  }
  void start() override {}
  // Accept only large payloads, so that both cases occur.
  bool sum(uint64_t number, uint64_t address, size_t bytes) override {
    if (bytes < kGroupBytes[0]) return false;
    CHECK(number && bytes == kGroupBytes[0] && address % kSlotBytes == kHeader);
    CHECK(summing_.emplace(number, address).second);
    return true;
  }
  void forget(uint64_t number) override {
    const size_t made = std::erase_if(sums_, [&](const auto& one) { return one.number == number; });
    CHECK(summing_.erase(number) + made == 1);
  }
  void summed(std::vector<Summed>& sums) override {
    sums.insert(sums.end(), sums_.begin(), sums_.end());
    sums_.clear();
  }
  void make_sum(Dice& dice) {
    if (summing_.empty()) return;
    const auto at = pick(dice, summing_);
    sums_.push_back({at->first, crc_of(at->second)});
    summing_.erase(at);
  }
  bool cancel_one(uint64_t token) override {
    if (!ops.contains(token)) return false;  // a superblock, which is not in `ops`
    Op& one = ops.at(token);
    one.wanted = false;
    if (one.queued) ops.erase(token);
    return !ops.contains(token);
  }
  void ended(std::vector<LaneEnd>& found) override {
    found.insert(found.end(), ends_.begin(), ends_.end());
    ends_.clear();
  }
  void landed(std::vector<uint64_t>& found) override { found = std::exchange(landed_, {}); }
  // Let the device complete one operation.
  void land(Dice& dice) {
    if (ops.empty()) return;
    auto& [token, one] = *pick(dice, ops);
    if (!one.wanted || one.queued || std::exchange(one.landed, true)) return;
    landed_.push_back(token);
  }
  // Check that the machine has given up all operations past their deadlines.
  void check_deadlines() const {
    for (const auto& [token, one] : ops) CHECK(!one.wanted || one.deadline_ns > now_ns);
  }

  void end(Dice& dice, unsigned failing) {
    if (ops.empty()) return;
    const auto at = pick(dice, ops);
    LaneEnd end{at->first, Outcome::OK};
    if (!at->second.wanted) {
      if (dice() % 2) end.code = Outcome::CANCELLED;
    } else if (chance(dice, failing)) {
      constexpr Outcome kFailures[] = {Outcome::IO_ERROR, Outcome::STALE,
                                       Outcome::CHECKSUM_MISMATCH};
      const Outcome failure = kFailures[dice() % 3];
      end.code = failure;
      const bool is_read = at->second.op.urgency != Urgency::WRITE;
      if (is_read && failure == Outcome::CHECKSUM_MISMATCH)
        damaged.insert(at->second.op.identity.generation);
      if (failure == Outcome::IO_ERROR) end.error = dice() % 2 ? EIO : ENOSPC;
      const bool again = end.error == EIO && at->second.op.urgency != Urgency::WRITE;
      if (again) retries_[row_of(at->second.op)] = at->second.deadline_ns;
    }
    const LaneOp& op = at->second.op;
    if (op.header_only && end.code == Outcome::OK && chance(dice, 80)) {
      end.payload_crc = crc_of(op.address + kHeader);
      unproven[op.address] = op.identity.generation;
    }
    ops.erase(at);
    ends_.push_back(end);
  }

  std::map<uint64_t, Op> ops;
  int64_t now_ns = 0;
  const Peers* peers = nullptr;
  bool full = false;
  size_t depth = 12;
  struct Lane {
    Stamp stamp;             // of the writes that may be accepted now
    size_t superblocks = 0;  // superblocks without an outcome
  };
  std::array<Lane, kTargets> lanes;
  std::set<uint16_t> files;  // engines whose files the lanes have
  std::set<uint64_t> whole;  // generations of chunks that loads copy whole
  std::map<uint64_t, uint64_t>
      unproven;                // by slot address: the generation of a payload not checked yet
  std::set<uint64_t> damaged;  // generations of damaged chunks
  static uint32_t crc_of(uint64_t address) { return static_cast<uint32_t>(address * 0x9e3779b1); }

 private:
  void check(const LaneOp& op) const {
    const auto owner = static_cast<uint16_t>(owner_of(op.place));
    CHECK(owner ? files.contains(owner)
                : slot_of(op.place) * kTargets + target_of(op.place) < kPoolSlots);
    CHECK((op.address - kBase) % kSlotBytes == 0);
    CHECK(!op.header_only || (op.is_read() && whole.contains(op.identity.generation)));
    CHECK(op.urgency != Urgency::WRITE || !unproven.contains(op.address));
    CHECK(op.address >= kBase && op.address < kBase + (kCacheSlots + kStreamSlots) * kSlotBytes);
    const bool is_write = op.urgency == Urgency::WRITE;
    CHECK(!peers->has(op.address));
    size_t same = 0;
    for (const auto& [token, other] : ops) {
      const bool other_writes = other.op.urgency == Urgency::WRITE;
      // Several writes may read one slot at the same time, as may an abandoned write.
      if (!(is_write && other_writes)) CHECK(other.op.address != op.address);
      const bool same_target = target_of(other.op.place) == target_of(op.place);
      same += same_target && other.holds_place() && other_writes == is_write;
    }
    CHECK(same < (is_write ? kWritesMax : kReadsMax));
    CHECK(op.payload_bytes == kGroupBytes[group_of(op.identity.generation - 1)]);
    const bool summed = is_write && op.payload_bytes == kGroupBytes[0];
    // The copy of the load that filled the slot may also have computed the CRC.
    const bool has_crc = is_write && op.payload_crc == int64_t{crc_of(op.address + kHeader)};
    CHECK(has_crc || (!summed && op.payload_crc == -1));
    size_t bytes = bytes_of(op);
    for (const auto& [token, other] : ops)
      if (other.holds_place() && (other.op.urgency == Urgency::WRITE) == is_write &&
          target_of(other.op.place) == target_of(op.place))
        bytes += bytes_of(other.op);
    CHECK(!same || bytes <= (is_write ? kWriteBytesMax : kReadBytesMax));
    if (is_stream(op)) {
      CHECK(std::ranges::count_if(ops, [&](const auto& one) {
              const LaneOp& other = one.second.op;
              return is_stream(other) && target_of(other.place) == target_of(op.place);
            }) < static_cast<ptrdiff_t>(kStreamSlots / kTargets));
    }
    const Lane& lane = lanes[target_of(op.place)];
    if (is_write) CHECK(!lane.superblocks && op.stamp == lane.stamp && !owner);
    CHECK(op.stamp.tag == lane.stamp.tag);
  }
  static bool is_stream(const LaneOp& op) { return op.address >= kBase + kCacheSlots * kSlotBytes; }
  static size_t bytes_of(const LaneOp& op) {
    return kHeader + (op.payload_bytes + 4095) / 4096 * 4096;
  }
  // Identifies a read and its retry among all reads of this test.
  using Row = std::tuple<Place, uint64_t, std::string, uint64_t>;
  static Row row_of(const LaneOp& op) {
    return {op.place, op.address, key_of(op), op.identity.generation};
  }

  std::vector<LaneEnd> ends_;
  std::map<Row, int64_t> retries_;        // deadlines
  std::map<uint64_t, uint64_t> summing_;  // payload addresses, by number
  std::vector<Summed> sums_;
  std::vector<uint64_t> landed_;
};

// An operation between a cache slot and a place: is_write, cache slot, pool slot, generation.
using Signature = std::tuple<bool, int32_t, int64_t, uint64_t>;

// A command in progress, and its reports so far.
struct Command {
  OpKind kind;
  std::vector<uint8_t> decided, released;  // by row
  bool finished = false;
  std::vector<Signature> rows = {};  // the operation that a lane may get, by row
  std::set<uint32_t> lacks = {};     // rows of a store that lack blocks
};

class World {
 public:
  explicit World(uint64_t seed)
      : dice_(seed),
        checks_(seed % 2),
        has_peers_(seed % 4 < 2),
        machine_(options(checks_, has_peers_), lanes_, 0, &peers_) {
    lanes_.peers = &peers_;
    peers_.unproven = &lanes_.unproven;
  }

  void run(size_t steps) {
    for (size_t step = 0; step < steps; ++step) {
      now_ns_ += static_cast<int64_t>(dice_() % 3) * kTickNs / 2;
      if (chance(dice_, 40) && commands_.size() < 30) command();
      if (chance(dice_, 10)) cancel();
      if (chance(dice_, 10)) cancel_awaited();
      if (chance(dice_, 5)) lanes_.full = !lanes_.full;
      if (chance(dice_, 10)) change_files();
      if (chance(dice_, 3)) usable_[dice_() % kTargets] ^= true;
      if (chance(dice_, 10)) change_peer();
      if (chance(dice_, 2)) hung_until_ns_ = now_ns_ + static_cast<int64_t>(dice_() % 60) * kTickNs;
      this->step(15);
    }
    drain();
  }

 private:
  static MachineOptions options(bool checks, bool has_peers) {
    MachineOptions made;
    made.peer_chunks_min = 1;
    made.copies_check = checks;
    made.cache_slots = kCacheSlots;
    made.stream_slots = kStreamSlots;
    made.pool_slots = kPoolSlots;
    std::vector<bool> retryable(EIO + 1);
    retryable[EIO] = true;
    made.io = {kTargets,
               kReadsMax,
               kWritesMax,
               kReadNs,
               kWriteNs,
               kHeader,
               kSlotBytes,
               {kGroupBytes.begin(), kGroupBytes.end()},
               kBase,
               kBase + kCacheSlots * kSlotBytes,
               2,
               2,
               retryable,
               kReadBytesMax,
               kWriteBytesMax,
               kSlotBytes,
               {}};
    if (has_peers) made.io.peers = kPeers;
    return made;
  }

  // Check that everything ends after the lanes respond again, and loads that wait for stream slots
  // even before that.
  void drain() {
    lanes_.full = false;
    hung_until_ns_ = now_ns_ + 4 * kWriteNs;
    usable_[0] = usable_[1] = true;
    while (now_ns_ < hung_until_ns_ - kTickNs) {
      now_ns_ += kTickNs;
      this->step(0);
    }
    CHECK(machine_.streams_waiting() == 0);
    hung_until_ns_ = 0;
    for (size_t step = 0; step < 2000 && !(machine_.idle() && commands_.empty()); ++step) {
      now_ns_ += kTickNs;
      this->step(0);
    }
    CHECK(machine_.idle() && commands_.empty() && lanes_.ops.empty() && superblocks_.empty());
    CHECK(peers_.ops.empty() && landings_.empty() && machine_.io.peers_in_flight() == 0);
    CHECK(machine_.streams_used() == 0 && machine_.streams_waiting() == 0);
    CHECK(machine_.io.reads_in_flight() == 0 && machine_.io.writes_in_flight() == 0);
  }

  // ---- commands

  // Begin a command of up to four rows, each with another cache slot.
  void command() {
    const uint64_t op = ++last_op_;
    if (chance(dice_, 8)) {
      commands_[op] = {OpKind::RESET, {0}, {0}};
      reset(op);
      return;
    }
    if (chance(dice_, 8)) return attach(op);
    auto kind = static_cast<OpKind>(dice_() % 4);
    if (kind == OpKind::WRITE && given_.size() < 4) kind = OpKind::STORE;
    std::string keys;
    std::vector<uint64_t> generations, pieces;
    std::vector<int32_t> cache;
    std::vector<int64_t> places;
    std::vector<uint8_t> groups;
    std::vector<uint32_t> first{0};
    std::set<int32_t> taken;
    const size_t rows = 1 + dice_() % 4;
    while (generations.size() < rows) {
      const auto slot = static_cast<int32_t>(dice_() % kCacheSlots);
      if (!taken.insert(slot).second) continue;
      const bool has_cache = kind != OpKind::LOAD || chance(dice_, 50);
      const bool has_place = kind == OpKind::WRITE || kind == OpKind::FETCH ||
                             (kind == OpKind::LOAD && chance(dice_, 70));
      // A read must expect the content of the slot's last fill.
      const bool fills = kind == OpKind::STORE || (has_place && kind != OpKind::WRITE);
      uint64_t number = ++last_number_;
      if (has_cache && !fills) {
        if (!given_.contains(slot)) {
          taken.erase(slot);
          continue;
        }
        number = given_[slot];
      } else if (has_cache) {
        given_[slot] = number;
      }
      char key[kKeyBytes + 1];
      std::snprintf(key, sizeof key, "%012llu", static_cast<unsigned long long>(number));
      keys += key;
      generations.push_back(number + 1);
      groups.push_back(group_of(number));
      cache.push_back(has_cache ? slot : -1);
      places.push_back(has_place ? place(dice_() % kPoolSlots) : -1);
      if (has_place && kind != OpKind::WRITE && chance(dice_, 30)) places.back() = foreign_place();
      const bool is_whole = kind == OpKind::LOAD && chance(dice_, 60);
      add_pieces(op, is_whole ? kGroupBytes[groups.back()] : 0, pieces);
      if (is_whole && has_place && checks_) lanes_.whole.insert(number + 1);
      first.push_back(static_cast<uint32_t>(pieces.size() / 3));
    }
    Command& command = commands_[op];
    command = {kind, std::vector<uint8_t>(rows), std::vector<uint8_t>(rows)};
    for (size_t row = 0; row < rows; ++row) {
      if (kind == OpKind::STORE && kGroupBytes[groups[row]] && first[row] == first[row + 1])
        command.lacks.insert(static_cast<uint32_t>(row));
      command.rows.emplace_back(kind == OpKind::WRITE, cache[row], places[row], generations[row]);
    }
    auto urgency = kind == OpKind::WRITE ? Urgency::WRITE : Urgency::DEMAND;
    if (kind == OpKind::FETCH) urgency = dice_() % 2 ? Urgency::URGENT : Urgency::PREFETCH;
    const bool moves = kind == OpKind::STORE || kind == OpKind::LOAD;
    machine_.begin(op, kind, urgency, {keys, generations, cache, places, groups, {}},
                   moves ? Pieces{pieces, first} : Pieces{}, moves ? fence_of(op) : 0);
  }

  // Add the pieces of a whole payload of this size, or if 0, of arbitrary parts. The KV cache
  // address of a piece is the op.
  void add_pieces(uint64_t op, size_t whole_bytes, std::vector<uint64_t>& pieces) {
    const size_t cut = dice_() % 2 ? whole_bytes : whole_bytes / 2;
    if (whole_bytes) pieces.insert(pieces.end(), {op, 0, cut});
    if (cut < whole_bytes) pieces.insert(pieces.end(), {op, cut, whole_bytes - cut});
    for (size_t piece = whole_bytes ? 0 : dice_() % 3; piece > 0; --piece)
      pieces.insert(pieces.end(), {op, piece * 64, 64});
  }

  // Return the op's fence. Jobs of one step share a fence, and fences are recorded in order.
  uint64_t fence_of(uint64_t op) {
    if (chance(dice_, 10)) return 0;
    newest_fence_ += chance(dice_, 70);
    fences_[op] = newest_fence_;
    return newest_fence_;
  }

  // Return the pool slot with this number. Consecutive numbers alternate between targets.
  static Place place(uint64_t number) {
    return place_of(static_cast<uint32_t>(number % kTargets),
                    static_cast<uint32_t>(number / kTargets));
  }
  void attach(uint64_t op) {
    const auto owner = static_cast<uint16_t>(1 + dice_() % kOwners);
    commands_[op] = {OpKind::ATTACH, {0}, {0}};
    machine_.attach(op, owner);
    awaited_.insert(owner);
  }

  // Another engine's region may be larger than ours.
  int64_t foreign_place() {
    const auto owner = static_cast<uint32_t>(1 + dice_() % kOwners);
    return owned_by(owner, place(dice_() % (2 * kPoolSlots)));
  }

  // Attach requested files or report a failure, or detach an engine's files, or request them.
  void change_files() {
    const auto owner = static_cast<uint16_t>(1 + dice_() % kOwners);
    if (awaited_.erase(owner)) {
      const int error = dice_() % 3 ? 0 : ENOENT;
      if (!error) lanes_.files.insert(owner);
      if (!machine_.io.attached(owner, error) || error) lanes_.files.erase(owner);
    } else if (chance(dice_, 20)) {
      machine_.io.detach(owner);
      lanes_.files.erase(owner);
    } else if (chance(dice_, 20)) {
      machine_.io.await_files(owner, nullptr);
      awaited_.insert(owner);
    }
  }

  void change_peer() {
    if (!has_peers_) return;
    const size_t peer = dice_() % kPeers;
    peers_.states[peer] = {chance(dice_, 80), dice_() % 3, static_cast<double>(dice_() % 2),
                           dice_() % 2 * kSlotBytes};
    machine_.set_peer(peer, peers_.states[peer]);
  }

  // Copy chunks that peers have read from stream slots into cache slots.
  void land() {
    while (!landings_.empty() && chance(dice_, 60)) {
      machine_.landed(landings_.back());
      landings_.pop_back();
    }
    const LandingBatch batch = machine_.take_landings();
    for (size_t at = 0; at < batch.rows.size(); at += 3) {
      const uint64_t streams = kBase + kCacheSlots * kSlotBytes;
      CHECK(batch.rows[at] < streams && batch.rows[at + 1] >= streams);
      CHECK(!peers_.has(batch.rows[at + 1]));
      lanes_.unproven.erase(batch.rows[at]);
    }
    if (!batch.rows.empty()) landings_.push_back(batch.number);
  }

  void cancel() {
    if (commands_.empty()) return;
    const auto at = pick(dice_, commands_);
    const std::vector<uint32_t> some{static_cast<uint32_t>(dice_() % at->second.decided.size())};
    machine_.cancel(at->first, chance(dice_, 50) ? nullptr : &some);
  }

  // Cancel a load whose read checks only the header, after another load began to wait for its slot.
  void cancel_awaited() {
    for (const auto& [token, one] : lanes_.ops) {
      const auto slot = static_cast<int32_t>((one.op.address - kBase) / kSlotBytes);
      if (!one.op.header_only || slot >= static_cast<int32_t>(kCacheSlots)) continue;
      const uint64_t number = one.op.identity.generation - 1;
      if (!given_.contains(slot) || given_[slot] != number) continue;
      const Signature row{false, slot, one.op.place, number + 1};
      const auto filler = std::ranges::find_if(commands_, [&](const auto& command) {
        return std::ranges::count(command.second.rows, row) > 0;
      });
      if (filler == commands_.end()) continue;
      const uint64_t cancelled = filler->first, op = ++last_op_;
      const std::vector<uint64_t> generations{number + 1}, pieces{op, 0, 64};
      const std::vector<uint32_t> first{0, 1};
      const std::vector<int32_t> cache{slot};
      const std::vector<int64_t> places{-1};
      const std::vector<uint8_t> groups{group_of(number)};
      commands_[op] = {OpKind::LOAD, {0}, {0}, false, {{false, slot, -1, number + 1}}};
      machine_.begin(op, OpKind::LOAD, Urgency::DEMAND,
                     {key_of(one.op), generations, cache, places, groups, {}}, {pieces, first},
                     fence_of(op));
      machine_.cancel(cancelled, nullptr);
      return;
    }
  }

  // ---- progress, as in worker/pipeline.py

  void step(unsigned failing) {
    machine_.io.set_time(now_ns_);
    while (!copies_.empty() && chance(dice_, failing ? 50 : 100)) {
      const auto at = pick(dice_, copies_);
      const uint64_t number = at->first;
      copies_.erase(at);
      const bool ok = !chance(dice_, failing);
      const std::vector<int64_t> crcs = ok ? found_by(number) : std::vector<int64_t>{};
      checking_.erase(number);
      machine_.copied(number, ok ? Outcome::OK : Outcome::IO_ERROR, ok ? 0 : EIO, crcs);
    }
    for (size_t left = dice_() % 3 + (failing ? 0 : 8); left > 0; --left) lanes_.make_sum(dice_);
    if (chance(dice_, 30)) lanes_.land(dice_);
    if (now_ns_ >= hung_until_ns_)
      for (size_t left = dice_() % 4 + (failing ? 0 : 8); left > 0; --left)
        lanes_.end(dice_, failing);
    if (now_ns_ >= hung_until_ns_)
      for (size_t left = dice_() % 3 + (failing ? 0 : 8); left > 0; --left)
        peers_.end(dice_, 2 * failing);
    while (!superblocks_.empty() && chance(dice_, failing ? 30 : 90)) end_superblock(failing);
    lanes_.now_ns = peers_.now_ns = now_ns_;
    machine_.io.poll_lanes(0);
    machine_.io.expire();
    lanes_.check_deadlines();
    give_up_superblocks();
    machine_.run();
    hand_over();
    while (machine_.run()) hand_over();
    peers_.check();
    land();
    if (chance(dice_, failing ? 30 : 100))
      passed_fence_ += dice_() % (newest_fence_ - passed_fence_ + 1);
    take_copies();
    take_in();
    check_buffers();
  }

  // Return the CRCs of the chunks of a batch of copies. Some of them are wrong.
  std::vector<int64_t> found_by(uint64_t number) {
    std::vector<int64_t> crcs;
    for (const uint64_t payload : checking_[number]) {
      const auto slot = lanes_.unproven.find(payload - kHeader);
      const bool right = !chance(dice_, 20);
      crcs.push_back(int64_t{Lanes::crc_of(payload)} ^ !right);
      if (right)
        lanes_.unproven.erase(slot);
      else
        lanes_.damaged.insert(slot->second);
    }
    return crcs;
  }

  // Check that checking copies cover whole unchecked payloads, and no other copy covers any.
  void check_proof(const CopyBatch& batch) {
    if (batch.is_store) {
      for (const uint64_t payload : batch.payloads) lanes_.unproven.erase(payload - kHeader);
      return;
    }
    size_t at = 0;
    for (size_t chunk = 0; batch.checks && chunk < batch.counts.size(); ++chunk) {
      uint64_t next = batch.payloads[chunk];
      CHECK(lanes_.unproven.contains(next - kHeader));
      for (size_t piece = 0; piece < batch.counts[chunk]; ++piece, at += 3) {
        CHECK(batch.pieces[at + 1] == next);
        next += batch.pieces[at + 2];
      }
      CHECK(next == batch.payloads[chunk] + batch.sizes[chunk]);
    }
    if (batch.checks) {
      CHECK(checks_ && at == batch.pieces.size());
      checking_[batch.number] = batch.payloads;
    }
    for (; at < batch.pieces.size(); at += 3) {
      const uint64_t inside = (batch.pieces[at + 1] - kBase) % kSlotBytes;
      CHECK(!lanes_.unproven.contains(batch.pieces[at + 1] - inside));
    }
  }

  // Check that copies in each direction are in one batch for all passed fences, and one per other
  // fence, with separate batches for loads that check.
  void take_copies() {
    std::set<std::tuple<bool, bool, uint64_t>> seen;
    for (const CopyBatch& batch : machine_.take_copies(passed_fence_)) {
      CHECK(batch.pieces.size() % 3 == 0);
      CHECK(seen.emplace(batch.is_store, batch.checks, batch.fence).second);
      check_proof(batch);
      CHECK(!batch.fence || batch.fence > passed_fence_);
      auto& ops = copies_[batch.number];
      for (size_t at = 0; at < batch.pieces.size(); at += 3) ops.insert(batch.pieces[at]);
      for (const uint64_t op : ops) {
        CHECK(batch.is_store == (commands_.at(op).kind == OpKind::STORE));
        CHECK(batch.fence == (fences_[op] > passed_fence_ ? fences_[op] : 0));
      }
    }
  }

  static Stamp stamp_of(uint64_t op, bool named) {
    Stamp stamp;
    stamp.epoch = static_cast<uint32_t>(2 * op + named);
    stamp.tag[0] = static_cast<uint8_t>(op);
    return stamp;
  }

  void reset(uint64_t op) {
    newest_reset_ = op;
    for (auto& lane : lanes_.lanes) {
      lane.stamp = stamp_of(op, false);
      ++lane.superblocks;
    }
    machine_.reset(op, stamp_of(op, true), stamp_of(op, false));
  }

  void begin_superblock(size_t target, uint64_t token, uint64_t op) {
    for (const auto& [other, one] : superblocks_) CHECK(one.target != target || one.late);
    for (const auto& [other, one] : lanes_.ops)
      CHECK(target_of(one.op.place) != target || one.op.urgency != Urgency::WRITE || !one.wanted);
    const auto before = again_.find(target);
    Superblock& one = superblocks_[token] = {target, op, now_ns_ + kWriteNs, false};
    if (before == again_.end()) return;
    CHECK(before->second.op == op);
    one.deadline_ns = before->second.deadline_ns;
    one.retried = true;
    again_.erase(before);
  }

  void give_up_superblocks() {
    for (auto& [token, one] : superblocks_) {
      if (one.late || one.deadline_ns > now_ns_) continue;
      one.late = true;
      --lanes_.lanes[one.target].superblocks;
    }
  }

  void end_superblock(unsigned failing) {
    const auto at = pick(dice_, superblocks_);
    const auto [token, one] = *at;
    superblocks_.erase(at);
    LaneEnd end{token, Outcome::OK};
    if (chance(dice_, 2 * failing)) {
      end.code = Outcome::IO_ERROR;
      end.error = dice_() % 2 ? EIO : ENOSPC;
    }
    const bool ok = !end.error;
    Lanes::Lane& lane = lanes_.lanes[one.target];
    const bool again = end.error == EIO && !one.late && !one.retried && one.deadline_ns > now_ns_;
    if (ok && one.op == newest_reset_) lane.stamp = stamp_of(one.op, true);
    if (again)
      again_[one.target] = one;
    else if (!one.late)
      --lane.superblocks;
    machine_.io.ended(end);
  }

  void hand_over() {
    for (const HealthCounts& one : std::exchange(machine_.io.health_counts, {}))
      CHECK(one.target < kTargets);
    machine_.io.health_outcomes.clear();
    for (size_t target = 0; target < kTargets; ++target)
      machine_.io.set_target(target, usable_[target], 0);
    machine_.io.offer_reads();
    for (const Task* task : machine_.io.offer_resets())
      begin_superblock(task->target, task->token, task->job->op);
    machine_.io.offer_writes();
    machine_.io.fail_stalled();
  }

  void take_in() {
    for (const Finished& one : machine_.take_finished()) {
      Command& command = commands_.at(one.op);
      CHECK(!command.finished && one.failed.size() == one.codes.size());
      command.finished = true;
      for (const auto& [number, ops] : copies_) CHECK(!ops.contains(one.op));
      fences_.erase(one.op);
    }
    for (const RowReport& report : machine_.take_reports()) take(report);
    machine_.io.take_rates();
  }

  // Check that each operation on a cache slot belongs to a row that is not released.
  void check_buffers() const {
    std::multiset<Signature> rows;
    for (const auto& [op, command] : commands_)
      for (size_t row = 0; row < command.rows.size(); ++row)
        if (!command.released[row]) rows.insert(command.rows[row]);
    for (const auto& [token, one] : lanes_.ops) {
      const auto slot = static_cast<int32_t>((one.op.address - kBase) / kSlotBytes);
      if (slot >= static_cast<int32_t>(kCacheSlots)) continue;
      const auto at = rows.find(
          {one.op.urgency == Urgency::WRITE, slot, one.op.place, one.op.identity.generation});
      CHECK(at != rows.end());
      rows.erase(at);
    }
  }

  void take(const RowReport& report) {
    Command& command = commands_.at(report.op);
    const bool moves = command.kind == OpKind::STORE || command.kind == OpKind::LOAD;
    CHECK(!moves || command.finished);
    for (size_t at = 0; at < report.indexes.size(); ++at) {
      const uint32_t row = report.indexes[at];
      const auto code = static_cast<Outcome>(report.codes.empty() ? 0 : report.codes[at]);
      const bool released = report.released.empty() || report.released[at];
      CHECK(!command.released[row] && (code == Outcome::RELEASED) == (command.decided[row] != 0));
      CHECK(code != Outcome::OK || released);
      CHECK(!command.lacks.contains(row) || code == Outcome::STALE);
      if (command.kind == OpKind::LOAD) {
        const bool is_damaged = lanes_.damaged.contains(std::get<3>(command.rows[row]));
        CHECK(is_damaged ? code != Outcome::OK : code != Outcome::CHECKSUM_MISMATCH);
      }
      CHECK(command.kind != OpKind::ATTACH || released);
      command.decided[row] = true;
      command.released[row] = released;
    }
    for (const uint8_t released : command.released)
      if (!released) return;
    commands_.erase(report.op);
  }

  Dice dice_;
  const bool checks_;  // copies of loads check payloads
  const bool has_peers_;
  Lanes lanes_;
  Peers peers_;
  Machine machine_;
  std::vector<uint64_t> landings_;
  int64_t now_ns_ = 0, hung_until_ns_ = 0;
  uint64_t last_op_ = 0, last_number_ = 0;  // the last op's number, and the last chunk's
  std::map<int32_t, uint64_t> given_;  // by cache slot: the number of the chunk of its last fill
  std::map<uint64_t, Command> commands_;
  std::map<uint64_t, std::set<uint64_t>> copies_;       // ops by batch number
  std::map<uint64_t, std::vector<uint64_t>> checking_;  // payload addresses by batch number
  uint64_t newest_fence_ = 0, passed_fence_ = 0;
  std::map<uint64_t, uint64_t> fences_;  // by op, of stores and loads that have one
  struct Superblock {
    size_t target;
    uint64_t op;
    int64_t deadline_ns;
    bool retried, late = false;
  };
  std::map<uint64_t, Superblock> superblocks_;  // by token
  std::map<size_t, Superblock> again_;  // by target: superblocks that failed and will be retried
  uint64_t newest_reset_ = 0;
  bool usable_[kTargets] = {true, true};
  std::set<uint16_t> awaited_;  // engines whose files were requested
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  const int seeds = std::atoi(argv[2]);
  for (int number = 0; number < seeds; ++number) {
    seed_now = seed + static_cast<uint64_t>(number);
    for (uint64_t world = 0; world < 100; ++world) World(seed_now * 1000 + world).run(2000);
    std::printf("seed %llu: ok\n", static_cast<unsigned long long>(seed_now));
  }
  return 0;
}
