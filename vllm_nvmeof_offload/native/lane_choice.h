// SPDX-License-Identifier: Apache-2.0
// Chooses the lane that reads a chunk: the one that has it first. It has no state and no clock, so
// that the worker and simulators decide alike.
#pragma once

#include <cstddef>
#include <span>

namespace nvmeof {

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

}  // namespace nvmeof
