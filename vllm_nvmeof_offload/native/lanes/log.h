// SPDX-License-Identifier: Apache-2.0
// A region's log: its form on disk, which `pool/log.py` defines, with a test that compares the two
// implementations; and its writer, which is used on the thread that writes the table.
#pragma once

#include <isa-l/crc.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace nvmeof {

// CRC-32C of few bytes.
inline uint32_t small_crc32c(const void* data, size_t bytes) {
  auto* const text = static_cast<unsigned char*>(const_cast<void*>(data));
  return ~crc32_iscsi(text, static_cast<int>(bytes), ~uint32_t{0});
}

inline constexpr size_t kLogPageBytes = 4096;
inline constexpr size_t kLogHeadBytes = 64;
inline constexpr size_t kLogRecordBytes = 64;
inline constexpr uint32_t kLogRecords = 63;  // of a page
inline constexpr size_t kLogKeyBytesMax = 40;

enum class LogKind : uint8_t { PUT = 1, RESET = 3, HINT = 4 };

// Members are in their order on disk, behind the CRC.
struct LogRecord {
  uint32_t epoch = 0;
  uint64_t generation = 0;
  uint32_t slot = 0;  // within the region
  uint8_t flags = 0;  // of the table's entry
  uint8_t member = 0;
  LogKind kind = LogKind::PUT;
  uint8_t key_bytes = 0;  // more than `kLogKeyBytesMax`: the key is left out
  std::array<uint8_t, kLogKeyBytesMax> key{};
};

struct LogHead {
  uint32_t records = 0;
  uint64_t sequence = 0;
  uint64_t lease_generation = 0;
  uint32_t epoch = 0;
};

// at: the first byte of the record. index: in its page.
void encode_record(std::byte* at, const LogRecord& record, uint64_t sequence, uint32_t index);
// False: not intact, or of another position.
bool decode_record(const std::byte* at, uint64_t sequence, uint32_t index, LogRecord& record);

// Fill the first bytes of a page.
void encode_head(std::byte* page, const LogHead& head);
// False: not intact.
bool decode_head(const std::byte* page, LogHead& head);

// A chunk of another region was borrowed `count` times.
LogRecord hint_record(const std::array<uint8_t, 16>& region_uuid, uint32_t slot, uint8_t member,
                      uint64_t generation, uint32_t count);

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
