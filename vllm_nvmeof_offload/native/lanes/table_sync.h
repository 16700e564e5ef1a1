// SPDX-License-Identifier: Apache-2.0
// Brings a table's entries to its file system, for readers on other hosts. An entry is 64 bytes,
// which this kernel's page cache keeps for as long as it likes.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "lanes/types.h"

namespace nvmeof {

// At most one fdatasync a second, and none while nothing is written: the log, whose pages bypass
// the page cache, has the news meanwhile.
class TableSync {
 public:
  static constexpr std::chrono::seconds kPeriod{1};

  // fd: from `copy_of_fd`, because nothing waits for a sync: by then the last operation on the
  // target may have ended, and with it the use of the pool's descriptors. -1: never sync.
  explicit TableSync(int fd) : fd_(fd) {}
  ~TableSync() { close_file(); }
  TableSync(const TableSync&) = delete;
  TableSync& operator=(const TableSync&) = delete;

  bool is_waiting() const { return waits_; }
  Clock::time_point due() const { return due_; }

  // An entry was written.
  void wrote() {
    if (fd_ >= 0 && !std::exchange(waits_, true)) postpone();
  }
  void postpone() { due_ = Clock::now() + kPeriod; }
  // May block. An error is kept for `take_error`, and the next sync tries again.
  void sync() {
    if (fdatasync(fd_) == 0) {
      waits_ = false;
    } else {
      error_ = errno;
      postpone();
    }
  }
  // The errno of a sync that has failed since the last call; 0: none has. The entries that it lost
  // were of writes that have ended, so the next write fails in their place.
  int take_error() { return std::exchange(error_, 0); }
  // Go on in another file (from `copy_of_fd`).
  void replace(int fd) {
    close_file();
    fd_ = fd;
    waits_ = false;
    error_ = 0;
  }

 private:
  void close_file() {
    if (fd_ >= 0) close(fd_);
  }

  int fd_;
  int error_ = 0;
  bool waits_ = false;
  Clock::time_point due_;
};

}  // namespace nvmeof
