// SPDX-License-Identifier: Apache-2.0
#include "lanes/log_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace nvmeof {

namespace {

bool is_direct(int fd) { return fd >= 0 && (fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

}  // namespace

int copy_of_fd(int fd) { return fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0); }

LogWriter::LogWriter(LogStart start, int fd)
    : pages_(start.pages), fd_(fd), direct_(is_direct(fd)) {
  head_.sequence = start.next;
  head_.lease_generation = start.lease_generation;
}

LogWriter::~LogWriter() {
  if (fd_ >= 0) close(fd_);
}

void LogWriter::add(const LogRecord& record) {
  if (pages_ == 0 || fd_ < 0) return;
  encode_record(page_ + kLogHeadBytes + head_.records * kLogRecordBytes, record, head_.sequence,
                head_.records);
  ++head_.records;
  head_.epoch = record.epoch;
  is_written_ = false;
  if (head_.records < kLogRecords) return;
  flush();
  turn(is_written_ ? 1 : pages_);
}

void LogWriter::flush() {
  if (is_written_) return;
  encode_head(page_, head_);
  const size_t bytes = direct_ ? kLogPageBytes : kLogHeadBytes + head_.records * kLogRecordBytes;
  const auto offset = static_cast<off_t>(head_.sequence % pages_ * kLogPageBytes);
  ssize_t done;
  do done = pwrite(fd_, page_, bytes, offset);
  while (done < 0 && errno == EINTR);
  is_written_ = done == static_cast<ssize_t>(bytes);
}

void LogWriter::replace(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
  direct_ = is_direct(fd);
  if (pages_ != 0) turn(pages_);
}

void LogWriter::turn(uint64_t pages) {
  head_.sequence += pages;
  head_.records = 0;
  std::memset(page_, 0, sizeof page_);
  is_written_ = true;
}

}  // namespace nvmeof
