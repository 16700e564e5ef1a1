// SPDX-License-Identifier: Apache-2.0
#include "foreign_region.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

namespace nvmeof {

namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

// `pool/format.py` has the layout.
constexpr size_t kEntryBytes = 64, kKeyAt = 18, kKeyBytesMax = 46, kGroupIdBytes = 4;
constexpr size_t kFlagsAt = 16, kKeyBytesAt = 17;
constexpr uint8_t kFlagSingleCopy = 8;
// Entries that are read at once: they stay in the second level of cache until they are compared.
constexpr size_t kEntriesMax = 4096;
// Changes ahead of the one that is made.
constexpr size_t kAhead = 8;

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78 : 0);
    table[byte] = crc;
  }
  return table;
}

constexpr auto kCrcTable = make_crc_table();

// CRC-32C without instructions for it, which this part of the native code does not require.
constexpr uint32_t plain_crc(const char* bytes, size_t count) {
  uint32_t crc = ~uint32_t{0};
  for (size_t at = 0; at < count; ++at)
    crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(bytes[at])) & 0xff];
  return ~crc;
}
static_assert(plain_crc("123456789", 9) == 0xE3069283);

#ifdef __x86_64__
__attribute__((target("sse4.2"))) uint32_t fast_crc(const char* bytes) {
  uint64_t crc = ~uint32_t{0};
  for (size_t at = 0; at < kEntryBytes; at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, bytes + at, sizeof word);
    crc = __builtin_ia32_crc32di(crc, word);
  }
  return ~static_cast<uint32_t>(crc);
}
const bool kHasFastCrc = __builtin_cpu_supports("sse4.2");
#endif

// An entry's CRC is over its slot and what follows the CRC.
uint32_t crc_of(const std::byte* entry, uint32_t slot) {
  std::array<char, kEntryBytes> covered;
  std::memcpy(covered.data(), entry, kEntryBytes);
  std::memcpy(covered.data(), &slot, sizeof slot);
#ifdef __x86_64__
  if (kHasFastCrc) return fast_crc(covered.data());
#endif
  return plain_crc(covered.data(), covered.size());
}

// Read `bytes` at `offset`, and zeros behind the end of the file. Returns an errno.
int read_whole(int fd, std::byte* into, size_t bytes, uint64_t offset) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t count = pread(fd, into + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  std::memset(into + done, 0, bytes - done);
  return 0;
}

}  // namespace

ForeignRegion::ForeignRegion(Home home, uint64_t slots, std::vector<Group> groups,
                             int64_t young_ns)
    : home_(home),
      groups_(std::move(groups)),
      young_ns_(young_ns),
      heads_(slots),
      fingerprints_(slots),
      marks_(slots),
      buffer_(std::min<size_t>(slots, kEntriesMax) * kEntryBytes) {}

void ForeignRegion::begin(ForeignWriter& table, uint32_t epoch, bool from_now) {
  const auto lock = table.lock();
  for (uint64_t slot = 0; slot < heads_.size(); ++slot) {
    withdraw(table, slot);
    if (!from_now && (marks_[slot] & kBefore) != 0) continue;
    marks_[slot] = 0;
    heads_[slot] = {};
  }
  young_.clear();
  epoch_ = epoch;
  from_now_ = from_now_ || from_now;
}

int ForeignRegion::scan(ForeignWriter& table, int fd, int64_t now_ns) {
  for (uint64_t first = 0; first < heads_.size(); first += kEntriesMax) {
    const size_t count = std::min<size_t>(heads_.size() - first, kEntriesMax);
    const uint64_t offset = first * kEntryBytes;
    if (const int error = read_whole(fd, buffer_.data(), count * kEntryBytes, offset)) return error;
    compare(table, first, count, now_ns);
  }
  from_now_ = false;
  ripen(table, now_ns);
  return 0;
}

void ForeignRegion::compare(ForeignWriter& table, uint64_t first, size_t count, int64_t now_ns) {
  changed_.clear();
  for (size_t at = 0; at < count; ++at) {
    const std::byte* const entry = buffer_.data() + at * kEntryBytes;
    Head head;
    std::memcpy(&head, entry, sizeof head);
    if (head != heads_[first + at]) changed_.push_back(decode(entry, first + at, now_ns));
  }
  if (changed_.empty()) return;
  const auto lock = table.lock();
  for (size_t at = 0; at < changed_.size(); ++at) {
    if (at + kAhead < changed_.size()) {
      const Seen& next = changed_[at + kAhead];
      if (next.fingerprint != 0) table.warm(next.fingerprint);
      if (fingerprints_[next.slot] != 0) table.warm(fingerprints_[next.slot]);
    }
    take(table, changed_[at]);
  }
}

ForeignRegion::Seen ForeignRegion::decode(const std::byte* entry, uint64_t slot,
                                          int64_t now_ns) const {
  Seen seen{now_ns, slot, {}, 0, false};
  std::memcpy(&seen.head, entry, sizeof seen.head);
  if (seen.head.epoch != epoch_) return seen;
  const auto flags = static_cast<uint8_t>(entry[kFlagsAt]);
  const auto key_bytes = static_cast<size_t>(entry[kKeyBytesAt]);
  if (key_bytes < kGroupIdBytes || key_bytes > kKeyBytesMax || (flags & ~kFlagSingleCopy) != 0 ||
      crc_of(entry, static_cast<uint32_t>(slot)) != seen.head.crc) {
    seen.head = {};  // damaged, or being written: look at it again
    return seen;
  }
  const std::byte* const key = entry + kKeyAt;
  uint32_t group_id = 0;
  for (size_t at = key_bytes - kGroupIdBytes; at < key_bytes; ++at)
    group_id = group_id << 8 | static_cast<uint32_t>(key[at]);
  const auto group = std::find_if(groups_.begin(), groups_.end(),
                                  [&](const Group& one) { return one.id == group_id; });
  if (group == groups_.end()) return seen;
  seen.single_copy = (flags & kFlagSingleCopy) != 0;
  // Only the first set is followed, and of what every rank has a part only the first rank.
  const bool is_followed = seen.single_copy
                               ? group->set_size > 1 && home_.rank < group->set_size
                               : home_.rank == 0;
  const std::string_view text(reinterpret_cast<const char*>(key), key_bytes);
  if (is_followed) seen.fingerprint = fingerprint_of(text);
  return seen;
}

void ForeignRegion::take(ForeignWriter& table, const Seen& seen) {
  withdraw(table, seen.slot);
  heads_[seen.slot] = seen.head;
  marks_[seen.slot] = from_now_ ? kBefore : 0;
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
