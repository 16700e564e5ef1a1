// SPDX-License-Identifier: Apache-2.0
#include "machine/set_memory.h"

#include "common/op.h"

namespace nvmeof {
namespace {

constexpr size_t kMembersMax = 64;  // one bit of a word each
constexpr size_t kLineWords = 8;    // words per cache line
// The words of an announcement are: readers; op; row and code; generation.
constexpr size_t kAnnouncementWords = 4;
constexpr unsigned kStateBits = 2;

uint64_t fill_value(FillState state, uint64_t name) {
  return name << kStateBits | static_cast<uint64_t>(state);
}

}  // namespace

size_t SetMemory::part_words(const SetShape& shape) {
  const size_t words =
      kLineWords + shape.cache_slots + kAnnouncementWords * (shape.stream_slots + kNotices);
  return (words + kLineWords - 1) / kLineWords * kLineWords;
}

size_t SetMemory::bytes(const SetShape& shape) {
  return shape.members * part_words(shape) * sizeof(uint64_t);
}

SetMemory::SetMemory(void* memory, const SetShape& shape)
    : shape_(shape), part_words_(part_words(shape)), words_(static_cast<uint64_t*>(memory)) {
  require(shape.members > 1 && shape.members <= kMembersMax, "a set has 2 to 64 members");
  require(memory && reinterpret_cast<uintptr_t>(memory) % (kLineWords * sizeof(uint64_t)) == 0,
          "the words of a set are not aligned");
}

uint64_t* SetMemory::part(size_t member) const {
  require(member < shape_.members, "a set has no such member");
  return words_ + member * part_words_;
}

uint64_t* SetMemory::fill_word(size_t member, size_t slot) const {
  require(slot < shape_.cache_slots, "a cache slot is out of range");
  return part(member) + kLineWords + slot;
}

// The announcements follow the fill words.
uint64_t* SetMemory::announcement(size_t member, size_t at) const {
  require(at < announcements(), "an announcement is out of range");
  return part(member) + kLineWords + shape_.cache_slots + kAnnouncementWords * at;
}

void SetMemory::count_progress(size_t member) {
  uint64_t* const word = part(member);
  store(word, load(word) + 1);
}

void SetMemory::set_fill(size_t member, size_t slot, FillState state, uint64_t name) {
  store(fill_word(member, slot), fill_value(state, name));
  // Later writes to the slot must not become visible before FILLING.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

FillState SetMemory::fill(size_t member, size_t slot, uint64_t name) const {
  const uint64_t word = load(fill_word(member, slot));
  const auto state = static_cast<FillState>(word & ((1 << kStateBits) - 1));
  return word == fill_value(state, name) ? state : FillState::EMPTY;
}

void SetMemory::announce(size_t member, size_t at, RowOf row, Outcome code, uint64_t readers) {
  uint64_t* const words = announcement(member, at);
  require(load(words) == 0, "an announcement is overwritten before all readers released it");
  std::atomic_ref(words[1]).store(row.op, std::memory_order_relaxed);
  std::atomic_ref(words[2]).store(uint64_t{row.row} << 8 | static_cast<uint8_t>(code),
                                  std::memory_order_relaxed);
  std::atomic_ref(words[3]).store(row.generation, std::memory_order_relaxed);
  store(words, readers);
}

SetMemory::Announced SetMemory::announced(size_t member, size_t at) const {
  const uint64_t* const words = announcement(member, at);
  const uint64_t what = load(words + 2);
  return {{load(words + 1), static_cast<uint32_t>(what >> 8), load(words + 3)},
          static_cast<Outcome>(what & 0xFF)};
}

void SetMemory::release(size_t member, size_t at, size_t reader) {
  std::atomic_ref(*announcement(member, at))
      .fetch_and(~(uint64_t{1} << reader), std::memory_order_acq_rel);
}

}  // namespace nvmeof
