// SPDX-License-Identifier: Apache-2.0
// Operations and outcomes, numbered as in the columns of commands and reports; the check of the
// rules that the code relies on, and the mutants that break those rules.
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

// The rule that is broken on purpose, to prove that the simulator detects the violation. Only the
// test build of the module contains mutants; in other builds `mutant` is false at compile time.
#ifdef NVMEOF_MUTANTS
inline std::string active_mutant;
inline bool mutant(std::string_view name) { return active_mutant == name; }
#else
constexpr bool mutant(const char*) { return false; }
#endif

}  // namespace nvmeof
