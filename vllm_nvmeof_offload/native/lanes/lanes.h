// SPDX-License-Identifier: Apache-2.0
// The interface between the worker's machine and its lanes, which only read and write slots.
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

namespace nvmeof {

// The urgency of an operation, most urgent first; see `protocol.Urgency`. All but WRITE are reads.
enum class Urgency : uint8_t { DEMAND, URGENT, SERVE, PREFETCH, WRITE };
inline constexpr size_t kUrgencies = 5;

inline constexpr size_t kPageBytes = 4096;
inline size_t whole_pages(size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

inline constexpr size_t kTagBytes = 16;

// The epoch and share tag that a write stores. A read succeeds only if the slot has the same tag.
// See `pool/format.py`.
struct Stamp {
  uint32_t epoch = 0;
  std::array<uint8_t, kTagBytes> tag{};
  bool operator==(const Stamp&) const = default;
};

inline constexpr size_t kKeyBytesMax = 46;

// Return the key's group: its last four bytes, in big-endian order.
inline uint32_t group_id_of(std::string_view key) {
  uint32_t id = 0;
  for (const char byte : key.substr(std::max(key.size(), sizeof id) - sizeof id))
    id = id << 8 | static_cast<uint8_t>(byte);
  return id;
}

// The identity expected in a slot's header; see `protocol.SlotIdentity`.
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

// A read or write of one slot. Other engines' slots are only ever read.
struct LaneOp {
  uint64_t token = 0;
  OpKind kind = OpKind::LOAD;  // the kind of its op, for lanes that inject faults
  Urgency urgency = Urgency::DEMAND;
  Place place = 0;
  uint64_t address = 0;          // staging address of the header page; the payload follows
  size_t payload_bytes = 0;      // at most a slot's capacity; only this much is transferred
  int64_t payload_crc = kNoCrc;  // in a write: the payload's CRC if the copy computed it
  Identity identity;
  Stamp stamp;               // stored by a write; a read requires its tag
  bool single_copy = false;  // in a write: no other rank holds the chunk
  uint32_t client = 0;       // in a write: the number for the salt in the chunk's key; 0 if unknown
  // In a read: return the payload's CRC from the header. The copy verifies it, so the lane need
  // not.
  bool header_only = false;
  size_t peer = 0;       // in a peer lane: the peer that reads the slot
  int64_t until_ns = 0;  // in a peer lane: the end of this attempt, on the machine's clock

  bool is_read() const { return urgency != Urgency::WRITE; }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address); }
};

// The end of an operation, however late. Its buffer is then free, unless `released` is false.
struct LaneEnd {
  uint64_t token = 0;
  Outcome code = Outcome::OK;
  int error = 0;         // the errno of an I/O error; 0 if no bytes moved and none was set
  int64_t ended_ns = 0;  // CLOCK_MONOTONIC, or 0 if unknown
  // The CRC that the payload must have, after a successful header-only read; else -1.
  int64_t payload_crc = kNoCrc;
  // False if the operation failed but its buffer may still be written (only in peer lanes). A
  // second end then reports only that the buffer is free.
  bool released = true;
};

struct LaneRoom {
  size_t reads = 0, writes = 0;
};

struct Summed {
  uint64_t number = 0;
  uint32_t crc = 0;
};

class NativeLanes {
 public:
  virtual ~NativeLanes() = default;
  // Compute the CRC of a payload in staging before its write, or return false to leave this to the
  // write. The payload must not change before `summed` or `forget`. number: not 0.
  virtual bool sum(uint64_t /*number*/, uint64_t /*address*/, size_t /*bytes*/) { return false; }
  virtual void forget(uint64_t /*number*/) {}
  virtual void summed(std::vector<Summed>& /*sums*/) {}
  virtual LaneRoom room() const = 0;
  // Accept an operation, which keeps using the target's current files. The caller respects `room`.
  virtual void take(const LaneOp& op) = 0;
  virtual void start() = 0;
  // Cancel an operation. Returns true if it had not started; no end then follows. Otherwise it
  // keeps running and its end will be ignored; a write then gets no table entry.
  virtual bool cancel_one(uint64_t token) = 0;
  virtual void ended(std::vector<LaneEnd>& ends) = 0;
  // Collect tokens of operations completed by the device, so that it can get more work. Optional.
  virtual void landed(std::vector<uint64_t>& /*tokens*/) {}
};

// -- The choice of the lane that reads a chunk: the one expected to finish first. The choice uses
// no state or clock, so that the worker and the simulators choose alike.

struct LaneEstimate {
  double end_s = 0;  // estimated time until the chunk is read, if the lane starts now
  bool has_room = false;
};

inline constexpr int kWait = -1;
inline constexpr int kOwnLane = 0;

// Return 0 for our own lane, i for peer i - 1, or -1 if the chunk should wait. The lane with the
// smallest end_s gets the chunk; on a tie, our own lane does, to spare other servers. If that lane
// has no room, the chunk waits for it, because end_s includes its queue. Only on a tie can another
// lane with room end earlier; that lane then gets the chunk.
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

// Lanes that end operations immediately, for servers without a pool and for `bench hotpath`.
class InstantLanes final : public NativeLanes {
 public:
  // wake_fd: an eventfd. error: the errno with which every operation fails, or 0 for success.
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
