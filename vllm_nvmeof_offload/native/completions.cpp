// SPDX-License-Identifier: Apache-2.0
#include "completions.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

namespace nvmeof {

CompletionQueue::CompletionQueue() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

CompletionQueue::~CompletionQueue() { close(fd_); }

void CompletionQueue::push(Completion completion) {
  completion.ended_ns = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  std::lock_guard lock(mutex_);
  if (waiting_.empty()) eventfd_write(fd_, 1);
  waiting_.push_back(completion);
}

std::vector<Completion> CompletionQueue::take() {
  std::lock_guard lock(mutex_);
  eventfd_t ignored;
  eventfd_read(fd_, &ignored);  // even if nothing waits: others may have set it
  return std::exchange(waiting_, {});
}

}  // namespace nvmeof
