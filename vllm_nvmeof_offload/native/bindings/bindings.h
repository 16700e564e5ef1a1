// SPDX-License-Identifier: Apache-2.0
// The functions that bind the parts of the module `_tiers`.
#pragma once

#include <nanobind/nanobind.h>

#include <span>

namespace nb = nanobind;

using ChunkBatch = nb::typed<nb::tuple, nb::bytes, nb::bytes, nb::bytes, nb::bytes, nb::bytes>;

// Return a column of a `protocol.ChunkBatch`.
template <typename T>
std::span<const T> column_of(const nb::tuple& batch, size_t number) {
  const auto column = nb::cast<nb::bytes>(batch[number]);
  return {reinterpret_cast<const T*>(column.data()), column.size() / sizeof(T)};
}

void bind_foreign(nb::module_& m);
void bind_machine(nb::module_& m);
void bind_look_ups(nb::module_& m);  // call this after binding `Tiers`
