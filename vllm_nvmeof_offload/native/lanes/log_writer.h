// SPDX-License-Identifier: Apache-2.0
// Writes the log of one region, on the thread that writes its table. `pool/log.py` has the format.
#pragma once

#include <cstdint>

#include "lanes/log_format.h"

namespace nvmeof {

// Where a log begins to be written. pages: 0: there is none. next: the sequence of the first page.
struct LogStart {
  uint32_t pages = 0;
  uint64_t next = 0;
  uint64_t lease_generation = 0;
};

// A descriptor of its own of the same open file as `fd`; -1: of none.
int copy_of_fd(int fd);

class LogWriter {
 public:
  // fd: from `copy_of_fd`, because nothing waits for a record: by the time it is written, the last
  // operation on the target may have ended, and with it the use of the pool's descriptors.
  LogWriter(LogStart start, int fd);
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // Append a record. What is appended is written by `flush`, or when its page is full.
  void add(const LogRecord& record);
  // An error of the disk is not reported: the records are lost, and readers find a gap.
  void flush();
  // Go on in another file (from `copy_of_fd`), a lap later.
  void replace(int fd);

 private:
  void turn(uint64_t pages);

  const uint32_t pages_;
  int fd_;
  bool direct_;  // other hosts read the file, and whole pages bypass this kernel's page cache
  LogHead head_;
  bool is_written_ = true;  // all of the page
  alignas(kLogPageBytes) std::byte page_[kLogPageBytes]{};
};

}  // namespace nvmeof
