// SPDX-License-Identifier: Apache-2.0
// The on-disk form of a pool slot and of its table entry; `pool/format.py` defines it,
// and a test compares the two implementations.
#pragma once

#include <array>

#include "types.h"

namespace nvmeof {

uint32_t crc32c(const void* data, size_t bytes);

// Fill the header page in front of a complete payload.
void seal(std::byte* slot, const Identity& identity, size_t payload_bytes, Stamp stamp,
          const SlotPlace& place);

// kOk, kStale (an intact header of another identity, length or place) or kChecksumMismatch.
Code verify(const std::byte* slot, const Identity& identity, size_t payload_bytes,
            const SlotPlace& place);

std::array<std::byte, kEntryBytes> encode_entry(uint64_t pool_slot, const Identity& identity,
                                                Stamp stamp);

// The CRC that table entry `entry` (64 bytes) of `pool_slot` must carry.
uint32_t entry_crc(const std::byte* entry, uint64_t pool_slot);

}  // namespace nvmeof
