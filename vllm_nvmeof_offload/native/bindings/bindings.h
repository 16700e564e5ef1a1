// SPDX-License-Identifier: Apache-2.0
// Conversions for the bindings, and the functions that bind the parts of the module `_tiers`.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "lanes/lanes.h"

namespace nb = nanobind;

template <typename T>
using MutableColumn = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Column = MutableColumn<const T>;

template <typename T>
std::span<const T> span_of(const std::optional<Column<T>>& column) {
  return column ? std::span<const T>(column->data(), column->size()) : std::span<const T>();
}

inline std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

template <typename Items>
nb::bytes bytes_of(const Items& items) {
  return nb::bytes(items.data(), items.size() * sizeof(*items.data()));
}

inline std::array<uint8_t, 16> sixteen(const nb::bytes& bytes) {
  std::array<uint8_t, 16> found;
  if (bytes.size() != found.size()) throw nb::value_error("a tag or uuid must have 16 bytes");
  std::ranges::copy(view_of(bytes), found.begin());
  return found;
}

// Return the address under which `Machine` accepts these lanes.
template <typename Lanes>
uintptr_t address_of(Lanes& lanes) {
  return reinterpret_cast<uintptr_t>(static_cast<nvmeof::NativeLanes*>(&lanes));
}

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
