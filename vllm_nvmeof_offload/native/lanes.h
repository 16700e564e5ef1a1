// SPDX-License-Identifier: Apache-2.0
// Lanes, as the worker's machine drives them. A lane moves slots and nothing else. The machine owns
// deadlines, bounds and order (`io_queue.h`).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "op.h"

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

// A read or write of one slot. Pool slots are numbered over all of a rank's targets, also those of
// another engine's regions, which are only read.
struct LaneOp {
  uint64_t token = 0;
  OpKind kind = OpKind::LOAD;  // of the op that it belongs to, for lanes that play faults
  Urgency urgency = Urgency::DEMAND;
  uint64_t pool_slot = 0;
  uint64_t address = 0;  // of the slot in staging
  size_t payload_bytes = 0;
  int64_t payload_crc = -1;  // of a write: its payload's CRC, if the copy into staging made it
  std::string_view key;
  uint64_t generation = 0;
  Stamp stamp;  // a write carries it; a read's chunk has its tag
  bool single_copy = false;  // a write: no other member of the set has the chunk
  uint16_t owner = 0;        // of the region; 0: ours
  // A read: its header is to be checked, and what it names as its payload's CRC is to be returned.
  // The payload is checked where it is copied to. Lanes may check it all the same.
  bool header_only = false;
};

// One whose key stays.
struct KeptOp : LaneOp {
  explicit KeptOp(const LaneOp& op) : LaneOp(op), kept(op.key) { key = {}; }
  std::string kept;
};

// The end of one, however late: nothing touches its buffer any more.
struct LaneEnd {
  uint64_t token = 0;
  uint8_t code = 0;      // `Outcome`
  int error = 0;         // errno of an I/O error
  int64_t ended_ns = 0;  // CLOCK_MONOTONIC; 0: not known
  // Of a good read of which the header alone was checked: what its payload must have. -1: all was.
  int64_t payload_crc = -1;
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

}  // namespace nvmeof
