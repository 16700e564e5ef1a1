// SPDX-License-Identifier: Apache-2.0
// CRC-32C of few bytes, without ISA-L, which the index and the follower do not require.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvmeof {

uint32_t small_crc32c(const void* data, size_t bytes);

}  // namespace nvmeof
