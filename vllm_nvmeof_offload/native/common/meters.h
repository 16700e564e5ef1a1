// SPDX-License-Identifier: Apache-2.0
// Measures each target's rate while operations are in flight. By Little's law, the rate is the
// number of operations in flight times the bytes per operation, divided by the time per operation.
// So neither idle time nor operations that outlast a period distort the rate.
//
// An unsaturated period yields bounds instead: at least the measured rate, and at most about `s /
// n` times that rate, where `n` operations were in flight and `s` saturate the target. A known rate
// outside these bounds moves towards the nearer one. So a few reads do not make a target look slow,
// and a target that has become slow is noticed even if it is rarely used.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace nvmeof {

// The meter for one target in one direction. All times are in seconds, on the same monotonic clock.
class Meter {
 public:
  // saturating: the number of operations in flight that saturates the target.
  explicit Meter(size_t saturating, double now_s = 0)
      : saturating_(static_cast<double>(saturating)), counted_until_s_(now_s) {}

  void began(double now_s) {
    count(now_s);
    ++in_flight_;
  }

  // done_bytes: 0 if the operation failed.
  void ended(double done_bytes, double began_s, double ended_s) {
    count(ended_s);
    --in_flight_;
    ++ended_;
    ended_s_ += std::max(0.0, ended_s - began_s);
    done_bytes_ += done_bytes;
  }

  // Return the rate as of the last `fold`.
  double rate() const { return rate_; }

  // End the period if it has measured enough. Return the rate in bytes per second, or 0 if unknown.
  double fold(double now_s) {
    count(now_s);
    if (!is_measurement()) return rate_;
    const double mean = operation_s_ / busy_s_;
    const double seen = ended_s_ > 0 ? mean * done_bytes_ / ended_s_ : 0.0;
    if (rate_ == 0) rate_ = seen;
    const double most = seen * std::max(1.0, saturating_ / mean);
    rate_ += kNewest * (std::min(std::max(rate_, seen), most) - rate_);
    busy_s_ = operation_s_ = ended_s_ = done_bytes_ = 0;
    ended_ = 0;
    return rate_;
  }

 private:
  // A period continues until it reaches one of these minimums.
  static constexpr double kBusySMin = 0.05;
  static constexpr size_t kEndedMin = 4;
  // The measured rate is 0 if operations are in flight for this long and none ends.
  static constexpr double kStallS = 1.0;
  static constexpr double kNewest = 0.5;  // the weight of the newest period

  // Add the time since the last call. Call this before any other count changes.
  void count(double now_s) {
    const double passed_s = std::max(0.0, now_s - counted_until_s_);
    if (in_flight_ > 0) {
      busy_s_ += passed_s;
      operation_s_ += passed_s * static_cast<double>(in_flight_);
    }
    counted_until_s_ += passed_s;
  }

  bool is_measurement() const {
    if (ended_ == 0) return rate_ > 0 && busy_s_ >= kStallS;
    const bool enough = busy_s_ >= kBusySMin || ended_ >= kEndedMin;
    return enough && busy_s_ > 0 && (done_bytes_ > 0 || rate_ > 0);
  }

  double saturating_;
  double counted_until_s_;
  int64_t in_flight_ = 0;
  double busy_s_ = 0;
  double operation_s_ = 0;  // operations in flight × seconds
  size_t ended_ = 0;
  double ended_s_ = 0;  // total duration of ended operations
  double done_bytes_ = 0;
  double rate_ = 0;
};

}  // namespace nvmeof
