// SPDX-License-Identifier: Apache-2.0
#include "tiers/foreign_table.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "common/op.h"

namespace nvmeof {

namespace {

constexpr uint64_t kMagic = 0x31454c4241544e56;
constexpr size_t kPage = 4096;
constexpr size_t kOwnersAt = kPage, kOwnerBytes = 64, kAreasAt = size_t{1} << 20;
static_assert(kOwnersAt + (kOwnersMax + 1) * kOwnerBytes <= kAreasAt);
// The size of the mapping; memory is used only as the file grows.
constexpr size_t kMappedBytes = size_t{1} << 36;
constexpr unsigned kLog2Min = 12;

// An owner's line: a count, which is odd while the record changes, and the record.
struct OwnerLine {
  uint64_t count;
  OwnerRecord record;
};
using OwnerWords = std::array<uint64_t, kOwnerBytes / sizeof(uint64_t)>;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

uint64_t word_at(const char* bytes, size_t count = sizeof(uint64_t)) {
  uint64_t value = 0;
  std::memcpy(&value, bytes, count);
  return value;
}

}  // namespace

uint64_t fingerprint_of(std::string_view key) {
  uint64_t mixed = key.size();
  for (size_t at = 0; at < key.size(); at += sizeof(uint64_t)) {
    const size_t left = key.size() - at;
    mixed ^= word_at(key.data() + at, left < sizeof(uint64_t) ? left : sizeof(uint64_t));
    mixed *= 0x9e3779b97f4a7c15;
    mixed ^= mixed >> 29;
  }
  mixed *= 0xbf58476d1ce4e5b9;
  mixed ^= mixed >> 32;
  return mixed == 0 ? 1 : mixed;
}

ForeignTable::ForeignTable(int fd, bool writes) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
  if (fd_ < 0) fail("dup");
  // Both sides write words of the first page, so both map it writable.
  void* const mapped =
      mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (mapped == MAP_FAILED) {
    close(fd_);
    fail("mmap of the foreign table");
  }
  memory_ = static_cast<std::byte*>(mapped);
  madvise(memory_, kMappedBytes, MADV_DONTDUMP);
  if (!writes) {
    mprotect(memory_ + kPage, kMappedBytes - kPage, PROT_READ);
    require(word(0).load(std::memory_order_acquire) == kMagic, "not a foreign table");
  }
}

ForeignTable::~ForeignTable() {
  munmap(memory_, kMappedBytes);
  close(fd_);
}

uint64_t* ForeignTable::owner_words(uint32_t number) const {
  require(number > 0 && number <= kOwnersMax, "an owner's number is out of range");
  return reinterpret_cast<uint64_t*>(memory_ + kOwnersAt + (number - 1) * kOwnerBytes);
}

OwnerRecord ForeignTable::owner(uint32_t number) const {
  uint64_t* const words = owner_words(number);
  OwnerWords copy;
  for (;;) {
    copy[0] = shared(words[0]).load(std::memory_order_acquire);
    for (size_t k = 1; k < copy.size(); ++k)
      copy[k] = shared(words[k]).load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (copy[0] % 2 == 0 && copy[0] == shared(words[0]).load(std::memory_order_relaxed)) break;
    // A writer that was killed during a change leaves an odd count forever.
    if (copy[0] % 2 != 0) return {};
  }
  return std::bit_cast<OwnerLine>(copy).record;
}

ForeignTable::Area ForeignTable::area() const {
  const uint64_t name = word(kAreaAt).load(std::memory_order_acquire);
  return {reinterpret_cast<Bucket*>(memory_ + (name >> 8) * kPage),
          (uint64_t{1} << (name & 0xff)) - 1};
}

void ForeignReader::warm(std::string_view key) const {
  const Area now = area();
  __builtin_prefetch(&now.buckets[fingerprint_of(key) & now.mask]);
}

uint64_t ForeignReader::ask_anew(Since since) {
  // Only the engine writes these words. `kOfAllAt` must be visible before the new version.
  const uint64_t version = version_asked() + 1;
  if (since == Since::EVER) word(kOfAllAt).store(version, std::memory_order_relaxed);
  word(kAskedAt).store(version, std::memory_order_release);
  return version;
}

ForeignWriter::ForeignWriter(int fd, size_t rows) : ForeignTable(fd, true), end_(kAreasAt) {
  struct stat file;
  if (fstat(fd_, &file) != 0) fail("fstat of the foreign table");
  if (file.st_size != 0) {
    require(word(0).load(std::memory_order_acquire) == kMagic, "not a foreign table");
    size_ = static_cast<uint64_t>(file.st_size);
    // This writer reuses the areas. A look-up still running there misses, as during any change.
    if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, kAreasAt,
                  static_cast<off_t>(size_ - kAreasAt)) != 0)
      fail("fallocate of the foreign table");
  }
  uint64_t name;
  make_area(rows, name);
  publish(name);
  word(kRowsAt).store(0, std::memory_order_relaxed);
  word(0).store(kMagic, std::memory_order_release);
}

ForeignTable::Area ForeignWriter::make_area(size_t rows, uint64_t& name) {
  const auto log2_rows = static_cast<unsigned>(std::bit_width(rows + rows / 2));
  const unsigned log2_buckets = log2_rows > kLog2Min ? log2_rows : kLog2Min;
  const uint64_t at = end_;
  const uint64_t end = (at + bytes_of(log2_buckets) + kPage - 1) / kPage * kPage;
  require(end <= kMappedBytes, "the foreign table is full");
  if (end > size_) {  // the file never shrinks, because readers map it
    if (ftruncate(fd_, static_cast<off_t>(end)) != 0) fail("ftruncate of the foreign table");
    size_ = end;
  }
  end_ = end;
  name = at / kPage << 8 | log2_buckets;
  return {reinterpret_cast<Bucket*>(memory_ + at), (uint64_t{1} << log2_buckets) - 1};
}

void ForeignWriter::publish(uint64_t name) {
  word(kAreaAt).store(name, std::memory_order_release);
  if (name_before_ != 0) {
    const auto at = static_cast<off_t>((name_before_ >> 8) * kPage);
    const auto bytes = static_cast<off_t>(bytes_of(name_before_));
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, bytes);  // may fail
  }
  name_before_ = name_;
  name_ = name;
}

void ForeignWriter::set_owner(uint32_t number, const OwnerRecord& record) {
  uint64_t* const words = owner_words(number);
  const uint64_t count = shared(words[0]).load(std::memory_order_relaxed);
  shared(words[0]).store(count | 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  const auto copy = std::bit_cast<OwnerWords>(OwnerLine{count, record});
  for (size_t k = 1; k < copy.size(); ++k)
    shared(words[k]).store(copy[k], std::memory_order_relaxed);
  shared(words[0]).store((count | 1) + 1, std::memory_order_release);
}

void ForeignWriter::insert(Area into, Bucket bucket) {
  uint64_t at = bucket.fingerprint & into.mask;
  while (into.buckets[at].fingerprint != 0) at = (at + 1) & into.mask;
  Bucket& free = into.buckets[at];
  shared(free.place).store(bucket.place, std::memory_order_relaxed);
  shared(free.generation).store(bucket.generation, std::memory_order_relaxed);
  shared(free.fingerprint).store(bucket.fingerprint, std::memory_order_release);
}

void ForeignWriter::warm(uint64_t fingerprint) const {
  const Area now = area();
  __builtin_prefetch(&now.buckets[fingerprint & now.mask], 1);
}

void ForeignWriter::put(uint64_t fingerprint, ForeignRow row) {
  const uint64_t count = rows();
  if ((count + 1) * 4 > (area().mask + 1) * 3) grow(count + 1);
  insert(area(), {fingerprint, static_cast<uint64_t>(row.place), row.generation});
  word(kRowsAt).store(count + 1, std::memory_order_relaxed);
}

bool ForeignWriter::remove(uint64_t wanted, ForeignRow row) {
  const Area now = area();
  uint64_t hole = wanted & now.mask;
  for (;; hole = (hole + 1) & now.mask) {
    const Bucket& bucket = now.buckets[hole];
    if (bucket.fingerprint == 0) return false;
    if (bucket.fingerprint == wanted && bucket.place == static_cast<uint64_t>(row.place) &&
        bucket.generation == row.generation)
      break;
  }
  // Move up buckets that a look-up would not find beyond the hole. A bucket's other words change
  // before its fingerprint, which a reader checks again after reading them.
  for (uint64_t at = (hole + 1) & now.mask; now.buckets[at].fingerprint != 0;
       at = (at + 1) & now.mask) {
    const Bucket moved = now.buckets[at];
    const uint64_t home = moved.fingerprint & now.mask;
    if (((at - home) & now.mask) < ((at - hole) & now.mask)) continue;
    Bucket& into = now.buckets[hole];
    shared(into.place).store(moved.place, std::memory_order_relaxed);
    shared(into.generation).store(moved.generation, std::memory_order_relaxed);
    shared(into.fingerprint).store(moved.fingerprint, std::memory_order_release);
    hole = at;
  }
  shared(now.buckets[hole].fingerprint).store(0, std::memory_order_release);
  word(kRowsAt).store(rows() - 1, std::memory_order_relaxed);
  return true;
}

void ForeignWriter::grow(size_t rows) {
  const Area old = area();
  uint64_t name;
  const Area next = make_area(rows, name);
  for (uint64_t at = 0; at <= old.mask; ++at)
    if (old.buckets[at].fingerprint != 0) insert(next, old.buckets[at]);
  publish(name);
}

}  // namespace nvmeof
