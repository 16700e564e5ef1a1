// SPDX-License-Identifier: Apache-2.0
// The on-disk formats of a region's table entries (`pool/format.py`) and of its log
// (`pool/log.py`), and the log's writer.
#pragma once

#include <isa-l/crc.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "lanes/lanes.h"

namespace nvmeof {

inline uint32_t small_crc32c(const void* data, size_t bytes) {
  auto* const text = static_cast<unsigned char*>(const_cast<void*>(data));
  return ~crc32_iscsi(text, static_cast<int>(bytes), ~uint32_t{0});
}

inline constexpr uint8_t kFlagSingleCopy = 8;

#pragma pack(push, 1)
struct TableEntry {
  uint32_t crc = 0;
  uint32_t epoch = 0;
  uint64_t generation = 0;
  uint8_t flags = 0;
  uint8_t key_bytes = 0;
  uint8_t key[kKeyBytesMax]{};
};
#pragma pack(pop)
inline constexpr size_t kEntryBytes = 64;
static_assert(sizeof(TableEntry) == kEntryBytes);

// Return the CRC of an entry, which also covers the slot's number in the region.
inline uint32_t entry_crc(TableEntry entry, uint32_t slot) {
  entry.crc = slot;
  return small_crc32c(&entry, sizeof entry);
}

inline constexpr size_t kLogPageBytes = 4096;
inline constexpr size_t kLogHeadBytes = 64;
inline constexpr size_t kLogRecordBytes = 64;
inline constexpr uint32_t kLogRecords = 63;  // per page
inline constexpr size_t kLogKeyBytesMax = 40;

enum class LogKind : uint8_t { PUT = 1, RESET = 3 };

#pragma pack(push, 1)
// A record as stored on disk, without the CRC that precedes it.
struct LogRecord {
  uint32_t epoch = 0;
  uint64_t generation = 0;
  uint32_t slot = 0;  // within the region
  uint8_t flags = 0;  // the flags of the table entry
  uint8_t member = 0;
  LogKind kind = LogKind::PUT;
  uint8_t key_bytes = 0;  // the key is omitted if this exceeds `kLogKeyBytesMax`
  std::array<uint8_t, kLogKeyBytesMax> key{};
};

// A page's header as stored on disk, without the magic number before it and the CRC after it.
struct LogHead {
  uint32_t records = 0;
  uint64_t sequence = 0;
  uint64_t lease_generation = 0;
  uint32_t epoch = 0;
};
#pragma pack(pop)

// index: the record's index in its page.
void encode_record(std::byte* at, const LogRecord& record, uint64_t sequence, uint32_t index);
// Return false, with `record` undefined, if the record is damaged or belongs to another position.
bool decode_record(const std::byte* at, uint64_t sequence, uint32_t index, LogRecord& record);

void encode_head(std::byte* page, const LogHead& head);
// Returns false if the header is damaged.
bool decode_head(const std::byte* page, LogHead& head);

// The position at which a log's writer starts. pages: 0 if there is no log. next: the sequence
// number of the first page that it writes.
struct LogStart {
  uint32_t pages = 0;
  uint64_t next = 0;
  uint64_t lease_generation = 0;
};

// Return a duplicate of `fd`, or -1 if `fd` is negative.
int copy_of_fd(int fd);

class LogWriter {
 public:
  // fd: from `copy_of_fd`, because the pool may close its own descriptor before the records are
  // written.
  LogWriter(LogStart start, int fd);
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // Append a record. It is written by the next `flush`, or when its page is full.
  void add(const LogRecord& record);
  // Write the page. Disk errors are not reported: the records are then lost, and readers find a
  // gap.
  void flush();
  // Continue in another file (from `copy_of_fd`), one lap of the log later.
  void replace(int fd);

 private:
  void turn(uint64_t pages);

  const uint32_t pages_;
  int fd_;
  bool direct_;  // O_DIRECT: other hosts read the file, so whole pages bypass our page cache
  LogHead head_;
  bool is_written_ = true;  // the whole page is on disk
  alignas(kLogPageBytes) std::byte page_[kLogPageBytes]{};
};

}  // namespace nvmeof
