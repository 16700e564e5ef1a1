// SPDX-License-Identifier: Apache-2.0
#include "lanes/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>

namespace nvmeof {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

constexpr uint32_t kMagic = 0x474C564E;

#pragma pack(push, 1)
struct Record {
  uint32_t crc;
  LogRecord content;
};
// The bytes covered by a record's CRC.
struct Covered {
  uint64_t sequence;
  uint32_t index;
  LogRecord content;
};
struct Head {
  uint32_t magic;
  LogHead content;
  uint32_t crc;
};
#pragma pack(pop)
static_assert(sizeof(Record) == kLogRecordBytes);
static_assert(offsetof(LogRecord, key) == 20);
static_assert(offsetof(Head, crc) == 28);
static_assert(kLogHeadBytes + kLogRecords * kLogRecordBytes == kLogPageBytes);

uint32_t crc_of(const LogRecord& record, uint64_t sequence, uint32_t index) {
  const Covered covered{sequence, index, record};
  return small_crc32c(&covered, sizeof covered);
}

bool is_direct(int fd) { return fd >= 0 && (fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

}  // namespace

void encode_record(std::byte* at, const LogRecord& record, uint64_t sequence, uint32_t index) {
  const Record raw{crc_of(record, sequence, index), record};
  std::memcpy(at, &raw, sizeof raw);
}

bool decode_record(const std::byte* at, uint64_t sequence, uint32_t index, LogRecord& record) {
  Record raw;
  std::memcpy(&raw, at, sizeof raw);
  record = raw.content;
  return raw.crc == crc_of(record, sequence, index) &&
         (record.kind == LogKind::PUT || record.kind == LogKind::RESET);
}

void encode_head(std::byte* page, const LogHead& head) {
  Head raw{kMagic, head, 0};
  raw.crc = small_crc32c(&raw, offsetof(Head, crc));
  std::memset(page, 0, kLogHeadBytes);
  std::memcpy(page, &raw, sizeof raw);
}

bool decode_head(const std::byte* page, LogHead& head) {
  Head raw;
  std::memcpy(&raw, page, sizeof raw);
  if (raw.magic != kMagic || raw.crc != small_crc32c(page, offsetof(Head, crc)) ||
      raw.content.records > kLogRecords)
    return false;
  head = raw.content;
  return true;
}

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
