// SPDX-License-Identifier: Apache-2.0
// Lanes, as the worker's machine drives them. A lane moves slots and nothing else. The machine owns
// deadlines, bounds and order (`io_queue.h`).
#pragma once

#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/op.h"
#include "tiers/place.h"

namespace nvmeof {

// `protocol.Urgency`: the most urgent first. All but WRITE are reads.
enum class Urgency : uint8_t { DEMAND, URGENT, SERVE, PREFETCH, WRITE };
inline constexpr size_t kUrgencies = 5;

inline constexpr size_t kTagBytes = 16;

// The epoch and share tag that a write carries; a read accepts only that tag. See `pool/format.py`.
struct Stamp {
  uint32_t epoch = 0;
  std::array<uint8_t, kTagBytes> tag{};
  bool operator==(const Stamp&) const = default;
};

inline constexpr size_t kKeyBytesMax = 46;

// What a slot must have in it: `protocol.SlotIdentity`.
struct Identity {
  std::array<uint8_t, kKeyBytesMax> key{};
  uint8_t key_bytes = 0;
  uint64_t generation = 0;
  bool operator==(const Identity&) const = default;
};

inline Identity identity_of(std::string_view key, uint64_t generation) {
  if (key.empty() || key.size() > kKeyBytesMax)
    throw std::invalid_argument("offload key has " + std::to_string(key.size()) +
                                " bytes; the pool's format holds 1 to 46");
  Identity identity;
  std::copy(key.begin(), key.end(), identity.key.begin());
  identity.key_bytes = static_cast<uint8_t>(key.size());
  identity.generation = generation;
  return identity;
}

inline constexpr int64_t kNoCrc = -1;

// A read or write of one slot; other owners' places are only read.
struct LaneOp {
  uint64_t token = 0;
  OpKind kind = OpKind::LOAD;  // of the op that it belongs to, for lanes that play faults
  Urgency urgency = Urgency::DEMAND;
  Place place = 0;
  uint64_t address = 0;          // of header page and payload, in staging
  size_t payload_bytes = 0;      // at most what a slot holds; no more than this is transferred
  int64_t payload_crc = kNoCrc;  // of a write: its payload's CRC, if the copy into staging made it
  Identity identity;
  Stamp stamp;               // a write carries it; a read's chunk has its tag
  bool single_copy = false;  // a write: no other member of the set has the chunk
  // A read: its header is to be checked, and what it names as its payload's CRC is to be returned.
  // The payload is checked where it is copied to. Lanes may check it all the same.
  bool header_only = false;
  size_t peer = 0;       // of peers' lanes: which peer reads it,
  int64_t until_ns = 0;  // and when its try ends, by the machine's clock

  bool is_read() const { return urgency != Urgency::WRITE; }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address); }
};

// The end of one, however late: nothing touches its buffer any more.
struct LaneEnd {
  uint64_t token = 0;
  Outcome code = Outcome::OK;
  int error = 0;         // of an I/O error: errno; 0: no bytes were moved, and none was given
  int64_t ended_ns = 0;  // CLOCK_MONOTONIC; 0: not known
  // Of a good read of which the header alone was checked: what its payload must have. -1: all was.
  int64_t payload_crc = kNoCrc;
  // False: it has failed, and its buffer may still be written; another end follows, which says only
  // that this is over. Only peers' lanes end so.
  bool released = true;
};

// The operations of each kind that a lane takes now.
struct LaneRoom {
  size_t reads = 0, writes = 0;
};

// A checksum that was asked for by `NativeLanes::sum`.
struct Summed {
  uint64_t number = 0;
  uint32_t crc = 0;
};

class NativeLanes {
 public:
  virtual ~NativeLanes() = default;
  // Make the CRC of a payload in staging ahead of its write, beside all I/O. False: the lanes make
  // it with the write. Nothing changes the payload before `summed` or `forget`. number: not 0.
  virtual bool sum(uint64_t /*number*/, uint64_t /*address*/, size_t /*bytes*/) { return false; }
  virtual void forget(uint64_t /*number*/) {}
  virtual void summed(std::vector<Summed>& /*sums*/) {}
  virtual LaneRoom room() const = 0;
  // The caller keeps to the room. The target's files are those of now, until the end.
  virtual void take(const LaneOp& op) = 0;
  // What was taken starts, in its order.
  virtual void start() = 0;
  // True: it had not started and is gone; no end follows. False: it runs on, and nobody waits for
  // its outcome. A write then gets no table entry.
  virtual bool cancel_one(uint64_t token) = 0;
  virtual void ended(std::vector<LaneEnd>& ends) = 0;
  // Of operations that have not ended: the device is done with these, so that others may go there.
  // A hint: lanes need not know it.
  virtual void landed(std::vector<uint64_t>& /*tokens*/) {}
};

// -- which lane reads a chunk: the one that has it first. No state and no clock, so that the worker
// and simulators decide alike.

struct LaneEstimate {
  double end_s = 0;  // in which the chunk has come, if the lane is given it now
  bool has_room = false;
};

inline constexpr int kWait = -1;
inline constexpr int kOwnLane = 0;

// 0: the own lane; i: peer i - 1; -1: the chunk waits.
//
// The lane with the least end gets the chunk; on a tie the own one does, because it takes no other
// machine's time. A lane without room is waited for, since its end counts what it has already,
// unless one with room ends even earlier, which is possible on a tie only.
inline int choose_lane(const LaneEstimate& own, std::span<const LaneEstimate> peers) {
  constexpr double kTie = 1.05;
  const auto lane = [&](int number) -> const LaneEstimate& {
    return number == kOwnLane ? own : peers[static_cast<size_t>(number) - 1];
  };
  int best = kOwnLane, ready = own.has_room ? kOwnLane : kWait;
  for (int number = 1; number <= static_cast<int>(peers.size()); ++number) {
    const double end_s = lane(number).end_s;
    if (end_s < lane(best).end_s) best = number;
    if (lane(number).has_room && (ready == kWait || end_s < lane(ready).end_s)) ready = number;
  }
  if (own.end_s <= kTie * lane(best).end_s) best = kOwnLane;
  if (lane(best).has_room) return best;
  return ready != kWait && lane(ready).end_s < lane(best).end_s ? ready : kWait;
}

// Lanes whose operations have ended as soon as they start, without moving a byte: those of a server
// without a pool, and of `bench hotpath`, which measures what remains: the machine's own cost.
class InstantLanes final : public NativeLanes {
 public:
  // wake_fd: an eventfd. error: the errno with which everything ends; 0: everything is right.
  InstantLanes(int wake_fd, int error) : wake_fd_(wake_fd), error_(error) {}

  LaneRoom room() const override { return {SIZE_MAX, SIZE_MAX}; }
  void take(const LaneOp& op) override {
    const Outcome code = error_ ? Outcome::IO_ERROR : Outcome::OK;
    ends_.push_back({op.token, code, error_});
  }
  void start() override {
    if (!ends_.empty()) eventfd_write(wake_fd_, 1);
  }
  bool cancel_one(uint64_t) override { return false; }
  void ended(std::vector<LaneEnd>& ends) override {
    if (ends_.empty()) return;
    eventfd_t count;
    eventfd_read(wake_fd_, &count);
    ends.insert(ends.end(), ends_.begin(), ends_.end());
    ends_.clear();
  }

 private:
  const int wake_fd_;
  const int error_;
  std::vector<LaneEnd> ends_;
};

}  // namespace nvmeof
