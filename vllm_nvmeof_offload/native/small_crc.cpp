// SPDX-License-Identifier: Apache-2.0
#include "small_crc.h"

#include <array>
#include <cstring>

namespace nvmeof {
namespace {

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

constexpr uint32_t plain_crc(const char* bytes, size_t count) {
  uint32_t crc = ~uint32_t{0};
  for (size_t at = 0; at < count; ++at)
    crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(bytes[at])) & 0xff];
  return ~crc;
}
static_assert(plain_crc("123456789", 9) == 0xE3069283);

#ifdef __x86_64__
__attribute__((target("sse4.2"))) uint32_t fast_crc(const char* bytes, size_t count) {
  uint64_t crc = ~uint32_t{0};
  size_t at = 0;
  for (; at + sizeof(uint64_t) <= count; at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, bytes + at, sizeof word);
    crc = __builtin_ia32_crc32di(crc, word);
  }
  auto rest = static_cast<uint32_t>(crc);
  for (; at < count; ++at)
    rest = __builtin_ia32_crc32qi(rest, static_cast<unsigned char>(bytes[at]));
  return ~rest;
}
const bool kHasFastCrc = __builtin_cpu_supports("sse4.2");
#endif

}  // namespace

uint32_t small_crc32c(const void* data, size_t bytes) {
  const auto* const text = static_cast<const char*>(data);
#ifdef __x86_64__
  if (kHasFastCrc) return fast_crc(text, bytes);
#endif
  return plain_crc(text, bytes);
}

}  // namespace nvmeof
