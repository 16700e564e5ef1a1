// SPDX-License-Identifier: Apache-2.0
#include <isa-l/crc.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstring>
#include <span>

#include "lanes/types.h"

namespace nvmeof {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

constexpr char kMagic[8] = {'v', 'N', 'V', 'M', 'e', 'K', 'V', '\0'};
constexpr uint16_t kFormatVersion = 2;
constexpr uint8_t kFlagBlockCrcs = 4;
constexpr uint8_t kGroupKinds = 4;
constexpr size_t kCrcAt = kHeaderBytes - sizeof(uint32_t);
constexpr size_t kBlockCrcsAt = 160;
constexpr size_t kBlockCrcsMax = (kCrcAt - kBlockCrcsAt) / sizeof(uint32_t);

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
  uint8_t group_kind;
  uint8_t zero;
  uint32_t group_id;
  uint16_t block_crcs;
  uint8_t zeros[2];
  uint32_t client;
  uint8_t tag[kTagBytes];
  uint8_t mac[16];
  uint8_t region_uuid[kUuidBytes];
  uint32_t slot;
  uint16_t rank;
};
#pragma pack(pop)
static_assert(offsetof(Header, key) == 36);
static_assert(offsetof(Header, group_kind) == 82);
static_assert(offsetof(Header, tag) == 96);
static_assert(offsetof(Header, region_uuid) == 128);
static_assert(sizeof(Header) == 150);

uint32_t stored_crc(const std::byte* slot) {
  uint32_t crc;
  std::memcpy(&crc, slot + kCrcAt, sizeof crc);
  return crc;
}

bool all_zero(const uint8_t* begin, const uint8_t* end) {
  return std::all_of(begin, end, [](uint8_t byte) { return byte == 0; });
}

bool intact(const std::byte* slot, const Header& header) {
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return false;
  if (crc32c(slot, kCrcAt) != stored_crc(slot)) return false;
  if (header.version != kFormatVersion) return false;
  if ((header.flags & ~(kFlagBlockCrcs | kFlagSingleCopy)) != 0) return false;
  const bool has_block_crcs = (header.flags & kFlagBlockCrcs) != 0;
  if (has_block_crcs != (header.block_crcs != 0) || header.block_crcs > kBlockCrcsMax) return false;
  if (!all_zero(header.mac, header.mac + sizeof header.mac)) return false;
  if (header.key_bytes == 0 || header.key_bytes > kKeyBytesMax) return false;
  if (header.group_kind >= kGroupKinds) return false;
  return all_zero(header.key + header.key_bytes, header.key + kKeyBytesMax);
}

// Without the inversions, appending zero bytes to a message is a linear map of the message's CRC.
// This class holds the maps for 1, 2, 4, ... bytes, each as one table per nibble of a CRC.
class ZerosTable {
 public:
  ZerosTable() {
    std::array<uint32_t, 32> map;  // the image of each bit
    for (unsigned bit = 0; bit < 32; ++bit) map[bit] = append_one(uint32_t{1} << bit);
    for (auto& tables : tables_) {
      for (unsigned at = 0; at < 8; ++at)
        for (uint32_t nibble = 0; nibble < 16; ++nibble)
          tables[at][nibble] = image(map, nibble << (4 * at));
      std::array<uint32_t, 32> twice;
      for (unsigned bit = 0; bit < 32; ++bit) twice[bit] = image(map, map[bit]);
      map = twice;
    }
  }

  uint32_t append(uint32_t crc, uint64_t zeros) const {
    for (; zeros != 0; zeros &= zeros - 1) {
      const auto& tables = tables_[static_cast<size_t>(std::countr_zero(zeros))];
      uint32_t next = 0;
      for (unsigned at = 0; at < 8; ++at) next ^= tables[at][crc >> (4 * at) & 15];
      crc = next;
    }
    return crc;
  }

 private:
  static constexpr uint32_t kPolynomial = 0x82F63B78;  // Castagnoli, reflected

  static uint32_t append_one(uint32_t crc) {
    for (unsigned bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    return crc;
  }
  static uint32_t image(const std::array<uint32_t, 32>& map, uint32_t crc) {
    uint32_t sum = 0;
    for (; crc != 0; crc &= crc - 1) sum ^= map[static_cast<size_t>(std::countr_zero(crc))];
    return sum;
  }

  std::array<std::array<std::array<uint32_t, 16>, 8>, 64> tables_;
};

// The number of bytes per step, few enough to stay in the L1 cache from the copy to the checksum.
constexpr size_t kCopyStepBytes = 16 << 10;

// Copy without first reading the destination into cache, if the processor supports that. Call
// `end_stream` before another thread or a device uses the bytes.
void stream(std::byte* to, const std::byte* from, size_t bytes) {
#ifdef __SSE2__
  constexpr size_t kLine = 64;
  const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine)
    for (size_t word = 0; word < kLine; word += sizeof(__m128i)) {
      const auto* source = reinterpret_cast<const __m128i*>(from + at + word);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + word), _mm_loadu_si128(source));
    }
  std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

void end_stream() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// The processor prefetches only within a 4 KiB page, so a checksum over uncached bytes would stall
// at each page. Prefetching saves up to half of the time; which variant is best depends on the CPU.
constexpr size_t kCrcStepBytes = 4 << 10;
constexpr size_t kCrcAheadBytes = 8 << 10;
constexpr size_t kLineBytes = 64;

template <size_t fetched, int level>
uint32_t crc_ahead(const void* data, size_t bytes) {
  // ISA-L does not invert the CRC at the start or the end.
  auto* at = static_cast<const unsigned char*>(data);
  uint32_t crc = ~uint32_t{0};
  for (size_t done = 0; done < bytes;) {
    const size_t step = std::min(bytes - done, kCrcStepBytes);
    const size_t ahead = std::min(done + kCrcAheadBytes, bytes);
    const size_t end = ahead + std::min(bytes - ahead, fetched);
    for (size_t line = ahead; line < end; line += kLineBytes)
      __builtin_prefetch(at + line, 0, level);
    crc = crc32_iscsi(const_cast<unsigned char*>(at + done), static_cast<int>(step), crc);
    done += step;
  }
  return ~crc;
}

constexpr int kAnyLevel = 0, kSecondLevel = 2, kFirstLevel = 3;
constexpr CrcVariant kCrcVariants[] = {
    {"256 B ahead", &crc_ahead<256, kSecondLevel>},
    {"4 KiB ahead into L2", &crc_ahead<kCrcStepBytes, kSecondLevel>},
    {"4 KiB ahead into L1", &crc_ahead<kCrcStepBytes, kFirstLevel>},
    {"4 KiB ahead past the caches", &crc_ahead<kCrcStepBytes, kAnyLevel>},
};
std::atomic<const CrcVariant*> crc_variant{&kCrcVariants[0]};

}  // namespace

std::span<const CrcVariant> crc_variants() { return kCrcVariants; }

uint32_t crc32c(const void* data, size_t bytes) {
  return crc_variant.load(std::memory_order_relaxed)->crc(data, bytes);
}

const char* choose_crc(std::span<const std::byte> memory) {
  constexpr size_t kPieceBytes = 1 << 20;
  constexpr int kRounds = 4;
  const size_t pieces = memory.size() / kPieceBytes;
  if (pieces == 0) return crc_variant.load()->name;
  std::array<Clock::duration, std::size(kCrcVariants)> best;
  best.fill(Clock::duration::max());
  size_t piece = 0;
  for (int round = 0; round < kRounds; ++round) {
    for (size_t at = 0; at < best.size(); ++at) {
      const std::byte* const from = memory.data() + piece++ % pieces * kPieceBytes;
      const auto began = Clock::now();
      kCrcVariants[at].crc(from, kPieceBytes);
      best[at] = std::min(best[at], Clock::now() - began);
    }
  }
  crc_variant = &kCrcVariants[std::ranges::min_element(best) - best.begin()];
  return crc_variant.load()->name;
}

uint32_t crc_share(uint32_t crc, size_t bytes_after) {
  static const ZerosTable zeros;
  return zeros.append(crc, bytes_after);
}

uint32_t join_crcs(const uint32_t* words, const uint64_t* sizes, size_t parts) {
  constexpr size_t kWords = 32;
  uint32_t crc = ~uint32_t{0};
  for (size_t part = 0; part < parts; ++part) {
    crc = crc_share(crc, sizes[part]);
    for (size_t word = 0; word < kWords; ++word) crc ^= words[part * kWords + word];
  }
  return ~crc;
}

uint32_t copy_crc32c(void* to, const void* from, size_t bytes, uint32_t crc) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  crc = ~crc;
  for (size_t done = 0; done < bytes;) {
    const size_t step = std::min(bytes - done, kCopyStepBytes);
    stream(target + done, source + done, step);
    auto* hot = const_cast<std::byte*>(source + done);
    crc = crc32_iscsi(reinterpret_cast<unsigned char*>(hot), static_cast<int>(step), crc);
    done += step;
  }
  end_stream();
  return ~crc;
}

uint32_t copy_crc32c_at_target(void* to, const void* from, size_t bytes, uint32_t crc) {
  auto* target = static_cast<unsigned char*>(to);
  const auto* source = static_cast<const unsigned char*>(from);
  crc = ~crc;
  for (size_t done = 0; done < bytes;) {
    const size_t step = std::min(bytes - done, kCopyStepBytes);
    std::memcpy(target + done, source + done, step);  // not streamed, because it is read next
    crc = crc32_iscsi(target + done, static_cast<int>(step), crc);
    done += step;
  }
  return ~crc;
}

void seal(std::byte* slot, const Identity& identity, size_t payload_bytes, uint32_t payload_crc,
          const Stamp& stamp, const SlotPlace& place, uint8_t kind) {
  assert(identity.key_bytes > 0 && identity.key_bytes <= kKeyBytesMax);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kFormatVersion;
  if (place.single_copy) header.flags = kFlagSingleCopy;
  header.key_bytes = identity.key_bytes;
  header.epoch = stamp.epoch;
  header.generation = identity.generation;
  header.payload_bytes = payload_bytes;
  header.payload_crc = payload_crc;
  std::memcpy(header.key, identity.key.data(), identity.key_bytes);
  header.group_kind = kind;
  header.group_id = group_id_of(identity);
  std::memcpy(header.tag, stamp.tag.data(), kTagBytes);
  std::memcpy(header.region_uuid, place.region.uuid.data(), kUuidBytes);
  header.slot = place.slot;
  header.rank = place.region.rank;
  header.client = place.client;
  std::memcpy(slot, &header, sizeof header);
  std::memset(slot + sizeof header, 0, kCrcAt - sizeof header);
  const uint32_t crc = crc32c(slot, kCrcAt);
  std::memcpy(slot + kCrcAt, &crc, sizeof crc);
}

std::optional<SlotHeader> parse_header(const std::byte* slot) {
  Header header;
  std::memcpy(&header, slot, sizeof header);
  if (!intact(slot, header)) return std::nullopt;
  SlotHeader found;
  std::copy_n(header.key, kKeyBytesMax, found.identity.key.begin());
  found.identity.key_bytes = header.key_bytes;
  found.identity.generation = header.generation;
  if (header.group_id != group_id_of(found.identity)) return std::nullopt;
  std::copy_n(header.region_uuid, kUuidBytes, found.place.region.uuid.begin());
  found.place.region.rank = header.rank;
  found.place.slot = header.slot;
  found.place.single_copy = (header.flags & kFlagSingleCopy) != 0;
  found.place.client = header.client;
  found.payload_bytes = header.payload_bytes;
  found.payload_crc = header.payload_crc;
  found.stamp.epoch = header.epoch;
  std::copy_n(header.tag, kTagBytes, found.stamp.tag.begin());
  return found;
}

HeaderProof prove_header(const std::byte* slot, const Identity& identity, size_t payload_bytes,
                         const SlotPlace& place, const Tag& tag) {
  const std::optional<SlotHeader> found = parse_header(slot);
  if (!found) return {Outcome::CHECKSUM_MISMATCH, 0};
  const bool right = found->identity == identity && found->payload_bytes == payload_bytes &&
                     found->place.region == place.region && found->place.slot == place.slot &&
                     found->stamp.tag == tag;
  if (!right) return {Outcome::STALE, 0};
  return {Outcome::OK, found->payload_crc};
}

Outcome verify(const std::byte* slot, size_t bytes, const Identity& identity, size_t payload_bytes,
               const SlotPlace& place, const Tag& tag) {
  const HeaderProof proof = prove_header(slot, identity, payload_bytes, place, tag);
  if (proof.code != Outcome::OK) return proof.code;
  if (bytes < kHeaderBytes + payload_bytes) return Outcome::CHECKSUM_MISMATCH;
  const bool right = crc32c(slot + kHeaderBytes, payload_bytes) == proof.payload_crc;
  return right ? Outcome::OK : Outcome::CHECKSUM_MISMATCH;
}

TableEntry encode_entry(const SlotPlace& place, const Identity& identity, uint32_t epoch) {
  TableEntry entry;
  if (place.single_copy) entry.flags = kFlagSingleCopy;
  entry.epoch = epoch;
  entry.generation = identity.generation;
  entry.key_bytes = identity.key_bytes;
  std::memcpy(entry.key, identity.key.data(), identity.key_bytes);
  if (identity.key_bytes <= kClientAt)
    std::memcpy(entry.key + kClientAt, &place.client, sizeof place.client);
  entry.crc = entry_crc(entry, place.slot);
  return entry;
}

LogRecord put_record(uint32_t slot, const Identity& identity, uint32_t epoch, bool single_copy) {
  LogRecord record{.epoch = epoch,
                   .generation = identity.generation,
                   .slot = slot,
                   .flags = single_copy ? kFlagSingleCopy : uint8_t{0},
                   .key_bytes = identity.key_bytes};
  if (identity.key_bytes <= kLogKeyBytesMax)
    std::copy_n(identity.key.begin(), identity.key_bytes, record.key.begin());
  return record;
}

}  // namespace nvmeof
