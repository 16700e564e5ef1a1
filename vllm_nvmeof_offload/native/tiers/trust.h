// SPDX-License-Identifier: Apache-2.0
// Whether the ranks of a group's sets are believed to have equal bytes. They say of samples, which
// all of them store, what bytes these have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nvmeof {

// Of one group.
struct Trust {
  explicit Trust(uint32_t members) : set_size(members) {}

  uint32_t set_size;
  uint32_t equal = 0;   // samples that were equal in every set
  bool ended = false;   // two ranks of a set differed: no chunk has a single copy any more
  uint64_t stored = 0;  // chunks, since the ranks were believed
};

// The samples of a store's rows, as far as ranks have reported them.
class Samples {
 public:
  // How the bytes of a row compare once a rank has reported them.
  enum class Seen : uint8_t { SOME, ALL_EQUAL, DIFFERENT };

  // crc: of the row's payload on `rank`. ranks: of all sets.
  Seen add(size_t row, uint32_t crc, uint32_t rank, uint32_t set_size, uint32_t ranks) {
    const size_t at = row * ranks + rank / set_size;  // there are no more sets than ranks
    if (crcs_.size() <= at) crcs_.resize((row + 1) * ranks);
    if (reports_.size() <= row) reports_.resize(row + 1);
    ++reports_[row];
    constexpr uint64_t kKnown = uint64_t{1} << 32;
    if (crcs_[at] == 0) crcs_[at] = kKnown | crc;
    if (crcs_[at] != (kKnown | crc)) return Seen::DIFFERENT;
    return reports_[row] == ranks ? Seen::ALL_EQUAL : Seen::SOME;
  }

 private:
  std::vector<uint64_t> crcs_;     // by row and set: the first one; 0: none was reported
  std::vector<uint16_t> reports_;  // by row
};

}  // namespace nvmeof
