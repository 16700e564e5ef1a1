// SPDX-License-Identifier: Apache-2.0
// CRC-32C of few bytes.
#pragma once

#include <isa-l/crc.h>

#include <cstddef>
#include <cstdint>

namespace nvmeof {

inline uint32_t small_crc32c(const void* data, size_t bytes) {
  auto* const text = static_cast<unsigned char*>(const_cast<void*>(data));
  return ~crc32_iscsi(text, static_cast<int>(bytes), ~uint32_t{0});
}

}  // namespace nvmeof
