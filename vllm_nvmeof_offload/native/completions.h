// SPDX-License-Identifier: Apache-2.0
// Completions on their way to the caller, and the eventfd that says that there are some.
#pragma once

#include <mutex>
#include <vector>

#include "types.h"

namespace nvmeof {

class CompletionQueue {
 public:
  CompletionQueue();
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  int fd() const { return fd_; }
  void push(Completion completion);
  // All there are, oldest first; the eventfd is readable again only for later ones.
  std::vector<Completion> take();

 private:
  int fd_;
  std::mutex mutex_;
  std::vector<Completion> waiting_;
};

}  // namespace nvmeof
