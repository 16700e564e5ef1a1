// SPDX-License-Identifier: Apache-2.0
// Lanes whose operations have ended as soon as they start, without moving a byte: what remains of
// a transfer is the machine's own cost, which `bench hotpath` measures.
#pragma once

#include <sys/eventfd.h>

#include "lanes.h"

namespace nvmeof {

class InstantLanes final : public NativeLanes {
 public:
  // wake_fd: an eventfd.
  explicit InstantLanes(int wake_fd) : wake_fd_(wake_fd) {}

  LaneRoom room() const override { return {SIZE_MAX, SIZE_MAX}; }
  void take(const LaneOp& op) override { ends_.push_back({op.token}); }
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
  int wake_fd_;
  std::vector<LaneEnd> ends_;
};

}  // namespace nvmeof
