// SPDX-License-Identifier: Apache-2.0
// Lanes whose operations have ended as soon as they start, without moving a byte: those of a server
// without a pool, and of `bench hotpath`, which measures what remains: the machine's own cost.
#pragma once

#include <sys/eventfd.h>

#include "lanes/lanes.h"

namespace nvmeof {

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
