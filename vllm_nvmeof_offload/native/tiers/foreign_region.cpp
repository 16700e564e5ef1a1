// SPDX-License-Identifier: Apache-2.0
#include "tiers/foreign_region.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lanes/log.h"

namespace nvmeof {

namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

constexpr size_t kGroupIdBytes = 4;
// The number of entries read at once, few enough to stay in the L2 cache until they are compared.
constexpr size_t kEntriesMax = 4096;
// The number of changed entries by which prefetching runs ahead.
constexpr size_t kAhead = 8;

// The number of log pages read at once.
constexpr uint32_t kLogPagesAtOnce = 64;
// An invalid log page may merely be half written. It counts as damaged after this many reads.
constexpr unsigned kLogReadsMax = 10;

// Read `bytes` at `offset`, or zeros beyond the end of the file. Returns an errno, or 0. For
// O_DIRECT, `into` consists of whole pages, and may be written beyond `bytes`.
int read_whole(int fd, std::byte* into, size_t bytes, uint64_t offset) {
  const size_t room = whole_pages(bytes);
  size_t done = 0;
  while (done < bytes) {
    const size_t from = done - done % kPageBytes;  // a short read may end anywhere
    const ssize_t count = pread(fd, into + from, room - from, static_cast<off_t>(offset + from));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    const size_t end = from + static_cast<size_t>(count);
    if (end <= done) break;
    done = end;
  }
  if (done < bytes) std::memset(into + done, 0, bytes - done);
  return 0;
}

bool is_zero(const std::byte* head) {
  return std::all_of(head, head + kLogHeadBytes,
                     [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

ForeignRegion::ForeignRegion(Home home, uint64_t slots, std::vector<Group> groups, int64_t young_ns)
    : home_(home),
      groups_(std::move(groups)),
      young_ns_(young_ns),
      heads_(slots),
      fingerprints_(slots),
      marks_(slots),
      log_buffer_(kLogPagesAtOnce * kLogPageBytes),
      buffer_(whole_pages(std::min<size_t>(slots, kEntriesMax) * kEntryBytes)) {}

void ForeignRegion::begin(ForeignWriter& table, uint32_t epoch, bool from_now) {
  // An entry from the log may not reach the table until later, and must not count as new then.
  const uint8_t known_before = from_now ? kBefore | kLogged : kBefore;
  const auto lock = table.lock();
  for (uint64_t slot = 0; slot < heads_.size(); ++slot) {
    withdraw(table, slot);
    if ((marks_[slot] & known_before) != 0) {
      marks_[slot] |= kBefore;
      continue;
    }
    marks_[slot] = 0;
    heads_[slot] = {};
  }
  young_.clear();
  epoch_ = epoch;
  from_now_ = from_now_ || from_now;
}

int ForeignRegion::scan(ForeignWriter& table, int fd, int64_t now_ns, bool log_is_ahead) {
  for (uint64_t first = 0; first < heads_.size(); first += kEntriesMax) {
    const size_t count = std::min<size_t>(heads_.size() - first, kEntriesMax);
    const uint64_t offset = first * kEntryBytes;
    if (const int error = read_whole(fd, buffer_.data(), count * kEntryBytes, offset)) return error;
    compare(table, first, count, now_ns, log_is_ahead);
  }
  from_now_ = false;
  ripen(table, now_ns);
  return 0;
}

int ForeignRegion::seek_log(int fd, uint32_t pages) {
  log_pages_ = pages;
  log_sequence_ = pages;  // the first sequence of an empty log
  log_index_ = 0;
  log_reads_ = 0;
  for (uint32_t first = 0; first < pages; first += kLogPagesAtOnce) {
    const uint32_t count = std::min(pages - first, kLogPagesAtOnce);
    const uint64_t offset = uint64_t{first} * kLogPageBytes;
    if (const int error = read_whole(fd, log_buffer_.data(), count * kLogPageBytes, offset))
      return error;
    for (uint32_t at = 0; at < count; ++at) {
      LogHead head;
      if (!decode_head(log_buffer_.data() + at * kLogPageBytes, head)) continue;
      if (head.sequence % pages != first + at || head.sequence < log_sequence_) continue;
      log_sequence_ = head.sequence;
      log_index_ = head.records;
    }
  }
  return 0;
}

int ForeignRegion::follow_log(ForeignWriter& table, int fd, int64_t now_ns) {
  uint32_t wanted = 1;  // usually nothing was logged, so begin with one page
  for (;;) {
    if (log_index_ == kLogRecords) {
      ++log_sequence_;
      log_index_ = 0;
    }
    const auto first = static_cast<uint32_t>(log_sequence_ % log_pages_);
    const uint32_t count = std::min(wanted, log_pages_ - first);
    const uint64_t offset = uint64_t{first} * kLogPageBytes;
    if (const int error = read_whole(fd, log_buffer_.data(), count * kLogPageBytes, offset))
      return error;
    for (uint32_t at = 0; at < count; ++at) {
      if (const int why = take_page(table, log_buffer_.data() + at * kLogPageBytes, now_ns))
        return why;
      if (log_index_ == kLogRecords) {
        if (at + 1 == count) break;
        ++log_sequence_;
        log_index_ = 0;
        continue;
      }
      ripen(table, now_ns);
      return 0;
    }
    wanted = kLogPagesAtOnce;
  }
}

bool ForeignRegion::may_have_news(int fd) const {
  struct stat status;
  if (!young_.empty() || fstat(fd, &status) != 0 || status.st_nlink == 0) return true;
  const bool is_full = log_index_ == kLogRecords;
  const uint64_t sequence = log_sequence_ + (is_full ? 1 : 0);
  const uint32_t taken = is_full ? 0 : log_index_;
  std::array<std::byte, kLogHeadBytes> page;
  const auto offset = static_cast<off_t>(sequence % log_pages_ * kLogPageBytes);
  if (pread(fd, page.data(), page.size(), offset) != static_cast<ssize_t>(page.size())) return true;
  LogHead head;
  if (!decode_head(page.data(), head))
    return !is_zero(page.data()) || sequence >= 2 * uint64_t{log_pages_};
  if (head.sequence == sequence) return head.records > taken;
  return head.sequence + log_pages_ != sequence;
}

// Apply the new records of the next page. Returns 0, or why the log cannot be followed.
int ForeignRegion::take_page(ForeignWriter& table, const std::byte* page, int64_t now_ns) {
  LogHead head;
  if (!decode_head(page, head)) {
    if (is_zero(page) && log_sequence_ < 2 * uint64_t{log_pages_}) return 0;  // never written
    return ++log_reads_ < kLogReadsMax ? 0 : kOverrun;
  }
  if (head.sequence != log_sequence_)
    return head.sequence + log_pages_ == log_sequence_ ? 0 : kOverrun;
  if (head.records <= log_index_) return 0;
  changed_.clear();
  const auto lock = table.lock();
  const int why = read_records(page, head.records, now_ns);
  take_changed(table, kLogged);
  return why;
}

// Read the page's records from `log_index_` on. The caller applies the PUTs in `changed_` together;
// applied one at a time, each would wait for memory.
int ForeignRegion::read_records(const std::byte* page, uint32_t records, int64_t now_ns) {
  while (log_index_ < records) {
    const std::byte* const at = page + kLogHeadBytes + log_index_ * kLogRecordBytes;
    LogRecord record;
    if (!decode_record(at, log_sequence_, log_index_, record))
      return ++log_reads_ < kLogReadsMax ? 0 : kOverrun;
    log_reads_ = 0;
    ++log_index_;
    if (const int why = read_record(record, now_ns)) return why;
  }
  return 0;
}

int ForeignRegion::read_record(const LogRecord& record, int64_t now_ns) {
  if (record.kind == LogKind::RESET) return record.epoch == epoch_ ? 0 : kReset;
  // A key that is too long for the record is only in the table.
  if (record.key_bytes > kLogKeyBytesMax || record.slot >= heads_.size()) return kOverrun;
  TableEntry entry{0, record.epoch, record.generation, record.flags, record.key_bytes, {}};
  std::memcpy(entry.key, record.key.data(), record.key_bytes);
  entry.crc = entry_crc(entry, record.slot);
  __builtin_prefetch(&heads_[record.slot]);
  __builtin_prefetch(&fingerprints_[record.slot]);
  __builtin_prefetch(&marks_[record.slot]);
  changed_.push_back(decode(entry, record.slot, now_ns));
  return 0;
}

void ForeignRegion::compare(ForeignWriter& table, uint64_t first, size_t count, int64_t now_ns,
                            bool log_is_ahead) {
  changed_.clear();
  for (size_t at = 0; at < count; ++at) {
    const auto& entry = reinterpret_cast<const TableEntry*>(buffer_.data())[at];
    const Head head{entry.crc, entry.epoch, entry.generation};
    uint8_t& marks = marks_[first + at];
    const bool is_kept = log_is_ahead && (marks & kLogged) != 0;
    marks &= static_cast<uint8_t>(~kLogged);
    if (head != heads_[first + at] && !is_kept)
      changed_.push_back(decode(entry, first + at, now_ns));
  }
  if (changed_.empty()) return;
  const auto lock = table.lock();
  take_changed(table, 0);
}

void ForeignRegion::take_changed(ForeignWriter& table, uint8_t mark) {
  for (size_t at = 0; at < changed_.size(); ++at) {
    if (at + kAhead < changed_.size()) {
      const Seen& next = changed_[at + kAhead];
      if (next.fingerprint != 0) table.warm(next.fingerprint);
      if (fingerprints_[next.slot] != 0) table.warm(fingerprints_[next.slot]);
    }
    const Seen& seen = changed_[at];
    if (seen.fingerprint != 0 && seen.head == heads_[seen.slot]) continue;  // found by a scan
    take(table, seen, mark);
  }
}

ForeignRegion::Seen ForeignRegion::decode(const TableEntry& entry, uint64_t slot,
                                          int64_t now_ns) const {
  Seen seen{now_ns, slot, {entry.crc, entry.epoch, entry.generation}, 0, false};
  if (entry.epoch != epoch_) return seen;
  if (entry.key_bytes < kGroupIdBytes || entry.key_bytes > kKeyBytesMax ||
      (entry.flags & ~kFlagSingleCopy) != 0 ||
      entry_crc(entry, static_cast<uint32_t>(slot)) != entry.crc) {
    seen.head = {};  // damaged or being written, so the next scan reads it again
    return seen;
  }
  const std::string_view key(reinterpret_cast<const char*>(entry.key), entry.key_bytes);
  const uint32_t group_id = group_id_of(key);
  const auto group = std::find_if(groups_.begin(), groups_.end(),
                                  [&](const Group& one) { return one.id == group_id; });
  if (group == groups_.end()) return seen;
  seen.single_copy = (entry.flags & kFlagSingleCopy) != 0;
  // Follow single copies only in the first set, and other chunks only in the first rank's part.
  const bool is_followed =
      seen.single_copy ? group->set_size > 1 && home_.rank < group->set_size : home_.rank == 0;
  if (is_followed) seen.fingerprint = fingerprint_of(key);
  return seen;
}

void ForeignRegion::take(ForeignWriter& table, const Seen& seen, uint8_t mark) {
  withdraw(table, seen.slot);
  heads_[seen.slot] = seen.head;
  marks_[seen.slot] = from_now_ ? kBefore : mark;
  if (seen.fingerprint == 0 || from_now_) return;
  if (young_ns_ == 0)
    offer(table, seen);
  else
    young_.push_back(seen);
}

void ForeignRegion::ripen(ForeignWriter& table, int64_t now_ns) {
  if (young_.empty()) return;
  const auto lock = table.lock();
  auto next = young_.begin();
  for (; next != young_.end() && now_ns - next->at_ns >= young_ns_; ++next)
    if (heads_[next->slot] == next->head && fingerprints_[next->slot] == 0) offer(table, *next);
  young_.erase(young_.begin(), next);
}

Place ForeignRegion::place_of_row(uint64_t slot) const {
  const uint32_t member = (marks_[slot] & kSingleCopy) != 0 ? home_.rank : kEveryMember;
  return owned_by(home_.owner, place_of(home_.target, static_cast<uint32_t>(slot), member));
}

void ForeignRegion::offer(ForeignWriter& table, const Seen& seen) {
  if (seen.single_copy) marks_[seen.slot] |= kSingleCopy;
  fingerprints_[seen.slot] = seen.fingerprint;
  table.put(seen.fingerprint, {place_of_row(seen.slot), seen.head.generation});
  ++rows_;
}

void ForeignRegion::withdraw(ForeignWriter& table, uint64_t slot) {
  if (fingerprints_[slot] == 0) return;
  table.remove(fingerprints_[slot], {place_of_row(slot), heads_[slot].generation});
  fingerprints_[slot] = 0;
  --rows_;
}

}  // namespace nvmeof
