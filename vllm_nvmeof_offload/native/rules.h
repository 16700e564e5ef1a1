// SPDX-License-Identifier: Apache-2.0
// Rules of the protocol that the code relies on; in Python a broken one is an AssertionError.
#pragma once

#include <stdexcept>

namespace nvmeof {

// A programming error.
struct BrokenRule : std::logic_error {
  using std::logic_error::logic_error;
};

inline void require(bool holds, const char* rule) {
  if (!holds) throw BrokenRule(rule);
}

}  // namespace nvmeof
