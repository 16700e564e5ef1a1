// SPDX-License-Identifier: Apache-2.0
// Rules that the simulator breaks on purpose, to show that it would notice. Only the tests' build
// of the module has them (NVMEOF_MUTANTS); in any other `mutant` is false at compile time.
#pragma once

#ifdef NVMEOF_MUTANTS
#include <string>
#include <string_view>

namespace nvmeof {
inline std::string active_mutant;
inline bool mutant(std::string_view name) { return active_mutant == name; }
}  // namespace nvmeof
#else
namespace nvmeof {
constexpr bool mutant(const char*) { return false; }
}  // namespace nvmeof
#endif
