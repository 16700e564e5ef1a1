// SPDX-License-Identifier: Apache-2.0
// Shared words by which the members of a set (ranks with equal bytes) coordinate single copies. A
// single copy of a chunk is in one member's staging; the other members copy it from there.
//
// All members map this memory, which has one part per member. Only the member itself writes its
// part, except that readers release its announcements. A part contains:
//
//     progress       a count of the member's steps, so that the others notice when it hangs
//     fill words     for each cache slot, the name and the state of its last fill
//     announcements  for each stream slot, the load's row that it holds, and a bit for each member
//                    that has not released it. Further announcements, without a slot, name rows
//                    whose reads failed.
//
// Each word is atomic. A writer makes its bytes visible before the word that names them (release);
// a reader reads the word first (acquire). The memory is initially zero.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/op.h"

namespace nvmeof {

enum class FillState : uint8_t { EMPTY, FILLING, HELD, FAILED };

// A row of a load that all members receive. Its chunk's generation tells it apart from the rows of
// other servers.
struct RowOf {
  uint64_t op = 0;
  uint32_t row = 0;
  uint64_t generation = 0;
  bool operator==(const RowOf&) const = default;
};

struct SetShape {
  size_t members = 1;  // at most 64
  size_t cache_slots = 0;
  size_t stream_slots = 1;
};

class SetMemory {
 public:
  // The number of failed reads that a member can announce at a time.
  static constexpr size_t kNotices = 64;
  static constexpr uint64_t kLeft = UINT64_MAX;

  static size_t bytes(const SetShape& shape);
  // memory: `bytes(shape)` bytes, 64-byte aligned.
  SetMemory(void* memory, const SetShape& shape);

  const SetShape& shape() const { return shape_; }

  // -- progress. `kLeft` means that the member has left.
  uint64_t progress(size_t member) const { return load(part(member)); }
  void count_progress(size_t member);
  void leave(size_t member) { store(part(member), kLeft); }

  // -- fill words. `fill` also returns EMPTY if the word has another name.
  void set_fill(size_t member, size_t slot, FillState state, uint64_t name);
  FillState fill(size_t member, size_t slot, uint64_t name) const;

  // -- announcements, stream slots first.
  size_t announcements() const { return shape_.stream_slots + kNotices; }
  // readers: a bit per member. All must have released the previous announcement at this position.
  void announce(size_t member, size_t at, RowOf row, Outcome code, uint64_t readers);
  uint64_t readers(size_t member, size_t at) const { return load(announcement(member, at)); }
  struct Announced {
    RowOf row;
    Outcome code = Outcome::OK;
  };
  // Return an announcement that the calling reader has not released yet.
  Announced announced(size_t member, size_t at) const;
  void release(size_t member, size_t at, size_t reader);

 private:
  static size_t part_words(const SetShape& shape);
  static uint64_t load(const uint64_t* word) {
    return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
  }
  static void store(uint64_t* word, uint64_t value) {
    std::atomic_ref(*word).store(value, std::memory_order_release);
  }
  uint64_t* part(size_t member) const;
  uint64_t* fill_word(size_t member, size_t slot) const;
  uint64_t* announcement(size_t member, size_t at) const;

  const SetShape shape_;
  const size_t part_words_;
  uint64_t* const words_;
};

}  // namespace nvmeof
