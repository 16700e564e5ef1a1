// SPDX-License-Identifier: Apache-2.0
// For the contract tests alone: operations on chosen pool slots start and then stay where a
// kernel that hangs would keep them. A server's engine has no gate.
#pragma once

#include <mutex>
#include <unordered_set>
#include <vector>

#include "types.h"

namespace nvmeof {

class StartGate {
 public:
  void shut(const std::vector<uint64_t>& pool_slots) {
    std::lock_guard lock(mutex_);
    shut_ = {pool_slots.begin(), pool_slots.end()};
  }
  // Note the start of an operation.
  void started(uint64_t pool_slot) {
    std::lock_guard lock(mutex_);
    started_.push_back(pool_slot);
  }
  bool open(uint64_t pool_slot) {
    std::lock_guard lock(mutex_);
    return !shut_.contains(pool_slot);
  }
  std::vector<uint64_t> starts() {
    std::lock_guard lock(mutex_);
    return started_;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<uint64_t> shut_;
  std::vector<uint64_t> started_;
};

}  // namespace nvmeof
