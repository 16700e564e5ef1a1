// SPDX-License-Identifier: Apache-2.0
#include <isa-l/crc.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstring>

#include "types.h"

namespace nvmeof {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

constexpr char kMagic[8] = {'v', 'N', 'V', 'M', 'e', 'K', 'V', '\0'};
constexpr uint16_t kFormatVersion = 1;
constexpr uint8_t kFlagAdoptable = 1;
constexpr size_t kCrcAt = kHeaderBytes - sizeof(uint32_t);

#pragma pack(push, 1)
struct Header {
  char magic[8];
  uint16_t version;
  uint8_t flags;
  uint8_t key_bytes;
  uint32_t epoch;
  uint64_t generation;
  uint64_t payload_bytes;
  uint32_t payload_crc;
  uint8_t key[kKeyBytesMax];
  uint8_t zero[46];
  uint8_t pool_uuid[kUuidBytes];
  uint32_t pool_slot;
  uint16_t rank;
};
struct Entry {
  uint32_t crc;
  uint32_t epoch;
  uint64_t generation;
  uint8_t flags;
  uint8_t key_bytes;
  uint8_t key[kKeyBytesMax];
};
#pragma pack(pop)
static_assert(offsetof(Header, key) == 36);
static_assert(offsetof(Header, pool_uuid) == 128);
static_assert(sizeof(Header) == 150);
static_assert(sizeof(Entry) == kEntryBytes);

uint32_t stored_crc(const std::byte* slot) {
  uint32_t crc;
  std::memcpy(&crc, slot + kCrcAt, sizeof crc);
  return crc;
}

bool intact(const std::byte* slot, const Header& header) {
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return false;
  if (crc32c(slot, kCrcAt) != stored_crc(slot)) return false;
  if (header.version != kFormatVersion || (header.flags & ~kFlagAdoptable) != 0) return false;
  if (header.key_bytes == 0 || header.key_bytes > kKeyBytesMax) return false;
  return std::all_of(header.key + header.key_bytes, header.key + kKeyBytesMax,
                     [](uint8_t byte) { return byte == 0; });
}

bool belongs(const Header& header, const SlotPlace& place) {
  return header.pool_slot == place.pool_slot && header.rank == place.pool.rank &&
         std::memcmp(header.pool_uuid, place.pool.uuid.data(), kUuidBytes) == 0;
}

}  // namespace

uint32_t crc32c(const void* data, size_t bytes) {
  // ISA-L counts in int, and neither inverts at the start nor at the end.
  constexpr size_t kStep = size_t{1} << 30;
  auto* at = static_cast<const unsigned char*>(data);
  uint32_t crc = ~uint32_t{0};
  while (bytes > 0) {
    const size_t step = std::min(bytes, kStep);
    crc = crc32_iscsi(const_cast<unsigned char*>(at), static_cast<int>(step), crc);
    at += step;
    bytes -= step;
  }
  return ~crc;
}

void seal(std::byte* slot, const Identity& identity, size_t payload_bytes, Stamp stamp,
          const SlotPlace& place) {
  assert(identity.key_bytes > 0 && identity.key_bytes <= kKeyBytesMax);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kFormatVersion;
  header.flags = stamp.adoptable ? kFlagAdoptable : 0;
  header.key_bytes = identity.key_bytes;
  header.epoch = stamp.epoch;
  header.generation = identity.generation;
  header.payload_bytes = payload_bytes;
  header.payload_crc = crc32c(slot + kHeaderBytes, payload_bytes);
  std::memcpy(header.key, identity.key.data(), identity.key_bytes);
  std::memcpy(header.pool_uuid, place.pool.uuid.data(), kUuidBytes);
  header.pool_slot = place.pool_slot;
  header.rank = place.pool.rank;
  std::memcpy(slot, &header, sizeof header);
  std::memset(slot + sizeof header, 0, kCrcAt - sizeof header);
  const uint32_t crc = crc32c(slot, kCrcAt);
  std::memcpy(slot + kCrcAt, &crc, sizeof crc);
}

Code verify(const std::byte* slot, const Identity& identity, size_t payload_bytes,
            const SlotPlace& place) {
  Header header;
  std::memcpy(&header, slot, sizeof header);
  if (!intact(slot, header)) return Code::kChecksumMismatch;
  if (header.key_bytes != identity.key_bytes || header.generation != identity.generation ||
      header.payload_bytes != payload_bytes ||
      std::memcmp(header.key, identity.key.data(), identity.key_bytes) != 0 ||
      !belongs(header, place))
    return Code::kStale;
  const bool right = crc32c(slot + kHeaderBytes, payload_bytes) == header.payload_crc;
  return right ? Code::kOk : Code::kChecksumMismatch;
}

uint32_t entry_crc(const std::byte* entry, uint64_t pool_slot) {
  std::array<std::byte, kEntryBytes> message;
  const auto slot = static_cast<uint32_t>(pool_slot);
  std::memcpy(message.data(), &slot, sizeof slot);
  std::memcpy(message.data() + sizeof slot, entry + sizeof slot, kEntryBytes - sizeof slot);
  return crc32c(message.data(), message.size());
}

std::array<std::byte, kEntryBytes> encode_entry(uint64_t pool_slot, const Identity& identity,
                                                Stamp stamp) {
  Entry entry{};
  entry.epoch = stamp.epoch;
  entry.generation = identity.generation;
  entry.flags = stamp.adoptable ? kFlagAdoptable : 0;
  entry.key_bytes = identity.key_bytes;
  std::memcpy(entry.key, identity.key.data(), identity.key_bytes);
  auto bytes = std::bit_cast<std::array<std::byte, kEntryBytes>>(entry);
  const uint32_t crc = entry_crc(bytes.data(), pool_slot);
  std::memcpy(bytes.data(), &crc, sizeof crc);
  return bytes;
}

}  // namespace nvmeof
