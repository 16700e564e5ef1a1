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
  uint32_t epoch;
  uint64_t generation;
  uint32_t slot;
  uint8_t flags;
  uint8_t member;
  uint8_t kind;
  uint8_t key_bytes;
  uint8_t key[kLogKeyBytesMax];
};
// The bytes that a record's CRC covers.
struct Covered {
  uint64_t sequence;
  uint32_t index;
  std::byte body[sizeof(Record) - sizeof(uint32_t)];
};
struct Head {
  uint32_t magic;
  uint32_t records;
  uint64_t sequence;
  uint64_t lease_generation;
  uint32_t epoch;
  uint32_t crc;
};
#pragma pack(pop)
static_assert(sizeof(Record) == kLogRecordBytes);
static_assert(offsetof(Record, key) == 24);
static_assert(offsetof(Head, crc) == 28);
static_assert(kLogHeadBytes + kLogRecords * kLogRecordBytes == kLogPageBytes);

uint32_t crc_of(const std::byte* at, uint64_t sequence, uint32_t index) {
  Covered covered;
  covered.sequence = sequence;
  covered.index = index;
  std::memcpy(covered.body, at + sizeof(uint32_t), sizeof covered.body);
  return small_crc32c(&covered, sizeof covered);
}

bool is_known(uint8_t kind) {
  return kind == static_cast<uint8_t>(LogKind::PUT) || kind == static_cast<uint8_t>(LogKind::RESET);
}

bool is_direct(int fd) { return fd >= 0 && (fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

}  // namespace

void encode_record(std::byte* at, const LogRecord& record, uint64_t sequence, uint32_t index) {
  Record raw{0,
             record.epoch,
             record.generation,
             record.slot,
             record.flags,
             record.member,
             static_cast<uint8_t>(record.kind),
             record.key_bytes,
             {}};
  std::memcpy(raw.key, record.key.data(), sizeof raw.key);
  std::memcpy(at, &raw, sizeof raw);
  const uint32_t crc = crc_of(at, sequence, index);
  std::memcpy(at, &crc, sizeof crc);
}

bool decode_record(const std::byte* at, uint64_t sequence, uint32_t index, LogRecord& record) {
  Record raw;
  std::memcpy(&raw, at, sizeof raw);
  if (raw.crc != crc_of(at, sequence, index) || !is_known(raw.kind)) return false;
  record.epoch = raw.epoch;
  record.generation = raw.generation;
  record.slot = raw.slot;
  record.flags = raw.flags;
  record.member = raw.member;
  record.kind = static_cast<LogKind>(raw.kind);
  record.key_bytes = raw.key_bytes;
  std::memcpy(record.key.data(), raw.key, sizeof raw.key);
  return true;
}

void encode_head(std::byte* page, const LogHead& head) {
  Head raw{kMagic, head.records, head.sequence, head.lease_generation, head.epoch, 0};
  raw.crc = small_crc32c(&raw, offsetof(Head, crc));
  std::memset(page, 0, kLogHeadBytes);
  std::memcpy(page, &raw, sizeof raw);
}

bool decode_head(const std::byte* page, LogHead& head) {
  Head raw;
  std::memcpy(&raw, page, sizeof raw);
  if (raw.magic != kMagic || raw.crc != small_crc32c(page, offsetof(Head, crc)) ||
      raw.records > kLogRecords)
    return false;
  head = {raw.records, raw.sequence, raw.lease_generation, raw.epoch};
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
