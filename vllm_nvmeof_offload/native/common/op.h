// SPDX-License-Identifier: Apache-2.0
// Operations, outcomes, places and cache slots, as encoded in commands and reports; also,
// assertions of the protocol's rules, and mutants that break those rules.
#pragma once

#include <cstdint>
#include <stdexcept>
#ifdef NVMEOF_MUTANTS
#include <string>
#include <string_view>
#endif

namespace nvmeof {

// The kind of an op's command; see `protocol.OpKind`.
enum class OpKind : uint8_t { STORE, LOAD, WRITE, FETCH, RESET, ATTACH };

// The outcome of one chunk; see `errors.OutcomeKind`. RELEASED is not an outcome: it reports the
// release of a chunk whose outcome was reported earlier.
enum class Outcome : uint8_t {
  OK,
  IO_ERROR,
  CHECKSUM_MISMATCH,
  STALE,
  DEADLINE,
  CANCELLED,
  RELEASED,
};

// A programming error that violates a rule of the protocol; an AssertionError in Python.
struct BrokenRule : std::logic_error {
  using std::logic_error::logic_error;
};

inline void require(bool holds, const char* rule) {
  if (!holds) throw BrokenRule(rule);
}

// The rule to break, to prove that the simulator detects the violation. Only the test build
// of the module has mutants; in other builds `mutant` is false at compile time.
#ifdef NVMEOF_MUTANTS
inline std::string active_mutant;
inline bool mutant(std::string_view name) { return active_mutant == name; }
#else
constexpr bool mutant(const char*) { return false; }
#endif

// ---- places, as in `protocol.py`. Ranks that hold equal bytes for a group form a set. Member m in
// a place or cache slot means that rank m of each set has the only copy in that set.

// The place of a chunk in the pool: owner (15 bits), member (8), target (8), slot (32); or -1 for
// none. Owner 0 is this engine.
using Place = int64_t;
inline constexpr Place kNoPlace = -1;
inline constexpr int32_t kNoSlot = -1;
inline constexpr uint32_t kEveryMember = 255;  // every rank has its own part

inline Place place_of(uint32_t target, uint32_t slot, uint32_t member = kEveryMember) {
  return int64_t{member} << 40 | int64_t{target} << 32 | slot;
}
inline uint32_t member_of(Place place) { return static_cast<uint32_t>(place >> 40) & 0xff; }
inline uint32_t target_of(Place place) { return static_cast<uint32_t>(place >> 32) & 0xff; }
inline uint32_t slot_of(Place place) { return static_cast<uint32_t>(place); }
inline uint32_t owner_of(Place place) { return static_cast<uint32_t>(place >> 48); }
inline bool is_foreign(Place place) { return place >= int64_t{1} << 48; }
inline Place owned_by(uint32_t owner, Place place) { return int64_t{owner} << 48 | place; }

// A cache slot in a batch: its row in the low 24 bits; above them, the member + 1, or 0 for all.
inline int32_t cache_slot(uint32_t row, uint32_t member) {
  return static_cast<int32_t>((member == kEveryMember ? 0 : member + 1) << 24 | row);
}
inline uint32_t cache_row(int32_t cache) { return static_cast<uint32_t>(cache) & 0xffffff; }
inline uint32_t cache_member(int32_t cache) {
  return ((static_cast<uint32_t>(cache) >> 24) - 1) & 0xff;
}

}  // namespace nvmeof
