// SPDX-License-Identifier: Apache-2.0
// Operations and their outcomes, numbered as in the columns of commands and reports; the rules that
// the code relies on, and the mutants that break them.
#pragma once

#include <cstdint>
#include <stdexcept>
#ifdef NVMEOF_MUTANTS
#include <string>
#include <string_view>
#endif

namespace nvmeof {

// `protocol.OpKind`: the command that an op is.
enum class OpKind : uint8_t { STORE, LOAD, WRITE, FETCH, RESET, ATTACH };

// `errors.OutcomeKind` of one chunk. RELEASED: no outcome, but the release that follows an earlier
// one.
enum class Outcome : uint8_t {
  OK,
  IO_ERROR,
  CHECKSUM_MISMATCH,
  STALE,
  DEADLINE,
  CANCELLED,
  RELEASED,
};

// A programming error: a rule of the protocol is broken. In Python it is an AssertionError.
struct BrokenRule : std::logic_error {
  using std::logic_error::logic_error;
};

inline void require(bool holds, const char* rule) {
  if (!holds) throw BrokenRule(rule);
}

// Rules that the simulator breaks on purpose, to show that it would notice. Only the tests' build
// of the module has them; in any other `mutant` is false at compile time.
#ifdef NVMEOF_MUTANTS
inline std::string active_mutant;
inline bool mutant(std::string_view name) { return active_mutant == name; }
#else
constexpr bool mutant(const char*) { return false; }
#endif

}  // namespace nvmeof
