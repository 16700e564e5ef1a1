// SPDX-License-Identifier: Apache-2.0
// The lanes of the native engine, as the worker's machine drives them: without Python in between.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace nvmeof {

inline constexpr int64_t kNoDeadline = INT64_MAX;

// `protocol.Urgency`: the most urgent first. All but WRITE are reads.
enum class Urgency : uint8_t { DEMAND, URGENT, PREFETCH, WRITE };
inline constexpr size_t kUrgencies = 4;

inline constexpr size_t kTagBytes = 16;

// The epoch and share tag that a write carries; a read accepts only that tag. See `pool/format.py`.
struct Stamp {
  uint32_t epoch = 0;
  std::array<uint8_t, kTagBytes> tag{};
};

// A read or write of one slot. Pool slots are numbered over all of a rank's targets.
struct LaneOp {
  uint64_t token = 0;
  Urgency urgency = Urgency::DEMAND;
  uint64_t pool_slot = 0;
  uint64_t address = 0;  // of the slot in staging
  size_t payload_bytes = 0;
  int64_t payload_crc = -1;  // of a write: its payload's CRC, if the copy into staging made it
  std::string_view key;
  uint64_t generation = 0;
  int64_t deadline_ns = kNoDeadline;  // CLOCK_MONOTONIC
  Stamp stamp;
};

// What became of one: its outcome, its release, or both (`io/base.py`).
struct LaneEnd {
  uint64_t token = 0;
  uint8_t code = 0;  // `Outcome`; RELEASED: no outcome
  int error = 0;     // errno of an I/O error
  bool released = true;
  int64_t ended_ns = 0;  // CLOCK_MONOTONIC
};

class NativeLanes {
 public:
  virtual ~NativeLanes() = default;
  // False: the lane is full.
  virtual bool take(const LaneOp& op) = 0;
  // What was taken starts.
  virtual void start() = 0;
  virtual void cancel_one(uint64_t token) = 0;
  virtual void ended(int64_t now_ns, std::vector<LaneEnd>& ends) = 0;
};

}  // namespace nvmeof
