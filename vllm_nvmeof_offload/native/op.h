// SPDX-License-Identifier: Apache-2.0
// Operations and their outcomes, numbered as in the columns of commands and reports.
#pragma once

#include <cstdint>

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

}  // namespace nvmeof
