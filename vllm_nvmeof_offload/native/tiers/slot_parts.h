// SPDX-License-Identifier: Apache-2.0
// Slots divided among the members of a set. A row is the same slot on every rank. In a divided row,
// each member's part holds a different chunk. A row is whole again when all its parts are free.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/columns.h"
#include "common/op.h"

namespace nvmeof {

using Slot = uint32_t;
inline constexpr Slot kNone = UINT32_MAX;
inline constexpr uint32_t kSetSizeMax = 64;

// The space that a chunk needs: a whole row, or a member's part of a row with `set_size` parts.
struct Part {
  static constexpr uint32_t kAnyMember = 254;  // members take turns

  uint32_t set_size = 1;
  uint32_t member = kEveryMember;

  bool whole() const { return member == kEveryMember; }
  bool takes(uint32_t other) const { return member == kAnyMember || member == other; }
};

// Divided rows and their parts. The slot numbers of parts follow those of all rows.
class SlotParts {
 public:
  // set_size: the size of the largest set, or 1 if every row stays whole.
  SlotParts(Slot rows, uint32_t set_size)
      : rows_(rows),
        stride_(set_size > 1 ? set_size : 0),
        divided_(stride_ ? rows : 0),
        links_(size_t{rows} * stride_),
        first_(stride_ + 1) {
    require(set_size <= kSetSizeMax, "a set has too many ranks");
    require(uint64_t{rows} * (stride_ + 1) < kNone, "too many parts of slots");
    for (uint32_t size = 2; size <= stride_; ++size) first_[size].assign(size, kNone);
  }

  Slot rows() const { return rows_; }
  Slot end() const { return rows_ + rows_ * stride_; }
  Slot free() const { return free_; }  // parts of divided rows
  bool is_part(Slot slot) const { return slot >= rows_; }
  Slot part(Slot row, uint32_t member) const { return rows_ + row * stride_ + member; }
  Slot row(Slot part) const { return (part - rows_) / stride_; }
  uint32_t member(Slot part) const { return (part - rows_) % stride_; }
  // Return the number of parts into which a row is divided, or 0 if it is whole.
  uint32_t set_size(Slot row) const { return stride_ ? divided_[row].set_size : 0; }
  // Return one bit for each member whose part is not free.
  uint64_t taken(Slot row) const { return divided_[row].taken; }

  void divide(Slot row, uint32_t set_size) {
    divided_[row].set_size = static_cast<uint8_t>(set_size);
    for (uint32_t member = set_size; member-- > 0;) link(part(row, member));
  }

  Slot take(const Part& wanted) {
    const bool any = wanted.member == Part::kAnyMember;
    for (uint32_t tried = 0; tried < (any ? wanted.set_size : 1); ++tried) {
      const uint32_t member = any ? (turn_ + tried) % wanted.set_size : wanted.member;
      const Slot part = first_[wanted.set_size].at(member);
      if (part == kNone) continue;
      if (any) turn_ = member + 1;
      take(part);
      return part;
    }
    return kNone;
  }

  void take(Slot part) {
    divided_[row(part)].taken |= bit(part);
    unlink(part);
  }

  // Free a part. Returns whether its row is whole now.
  bool give(Slot part) {
    const Slot row = this->row(part);
    divided_[row].taken &= ~bit(part);
    link(part);
    if (divided_[row].taken) return false;
    for (uint32_t member = 0; member < divided_[row].set_size; ++member)
      unlink(this->part(row, member));
    divided_[row].set_size = 0;
    return true;
  }

  // Retire a part. Returns whether it is the first retired part of its row.
  bool retire(Slot part) {
    bool& retired = divided_[row(part)].retired;
    return !std::exchange(retired, true);
  }

 private:
  struct Divided {
    uint64_t taken = 0;
    uint8_t set_size = 0;
    bool retired = false;  // whether one of its parts is retired
  };
  struct Link {
    Slot next, previous;
  };

  uint64_t bit(Slot part) const { return uint64_t{1} << member(part); }
  Slot& first_like(Slot part) { return first_[divided_[row(part)].set_size][member(part)]; }
  Link& link_of(Slot part) { return links_[part - rows_]; }

  void link(Slot part) {
    Slot& first = first_like(part);
    link_of(part) = {first, kNone};
    if (first != kNone) link_of(first).previous = part;
    first = part;
    ++free_;
  }

  void unlink(Slot part) {
    const Link link = link_of(part);
    if (link.next != kNone) link_of(link.next).previous = link.previous;
    (link.previous != kNone ? link_of(link.previous).next : first_like(part)) = link.next;
    --free_;
  }

  Slot rows_;
  uint32_t stride_;
  HugeColumn<Divided> divided_;           // by row
  HugeColumn<Link> links_;                // each part's neighbours in its list of free parts
  std::vector<std::vector<Slot>> first_;  // the first free part, by set size and member
  Slot free_ = 0;
  uint32_t turn_ = 0;  // the member that gets the next part
};

}  // namespace nvmeof
