// SPDX-License-Identifier: Apache-2.0
// The foreign table for Python: whole owners and, for tests, single rows.
#include "bindings_foreign.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "foreign_table.h"

using namespace nb::literals;
using namespace nvmeof;

namespace {

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

template <size_t kSize>
std::array<uint8_t, kSize> exactly(const nb::bytes& bytes) {
  if (bytes.size() != kSize) throw nb::value_error("a tag or uuid has 16 bytes");
  std::array<uint8_t, kSize> array;
  std::memcpy(array.data(), bytes.c_str(), kSize);
  return array;
}

template <size_t kSize>
nb::bytes bytes_of(const std::array<uint8_t, kSize>& array) {
  return nb::bytes(reinterpret_cast<const char*>(array.data()), kSize);
}

void bind_owner(nb::module_& m) {
  nb::class_<OwnerRecord>(m, "OwnerRecord")
      .def("__init__",
           [](OwnerRecord* self, uint64_t version, const nb::bytes& tag,
              const nb::bytes& pool_uuid, uint32_t engine_index, uint32_t state, uint64_t rows) {
             if (state > static_cast<uint32_t>(OwnerState::DEAD))
               throw nb::value_error("an owner has no such state");
             new (self) OwnerRecord{version,
                                    exactly<kTagBytes>(tag),
                                    exactly<16>(pool_uuid),
                                    engine_index,
                                    static_cast<OwnerState>(state),
                                    rows};
           },
           "version"_a, "tag"_a, "pool_uuid"_a, "engine_index"_a, "state"_a, "rows"_a)
      .def_ro("version", &OwnerRecord::version)
      .def_prop_ro("tag", [](const OwnerRecord& one) { return bytes_of(one.tag); })
      .def_prop_ro("pool_uuid", [](const OwnerRecord& one) { return bytes_of(one.pool_uuid); })
      .def_ro("engine_index", &OwnerRecord::engine_index)
      .def_prop_ro("state",
                   [](const OwnerRecord& one) { return static_cast<uint32_t>(one.state); })
      .def_ro("rows", &OwnerRecord::rows);
}

}  // namespace

void bind_foreign(nb::module_& m) {
  bind_owner(m);
  nb::class_<ForeignReader>(m, "ForeignReader")
      .def(nb::init<int>(), "fd"_a)
      .def("owner", &ForeignReader::owner, "number"_a)
      .def("rows_of",
           [](const ForeignReader& reader, const nb::bytes& key) {
             std::vector<std::tuple<Place, uint64_t>> rows;
             reader.find(view_of(key), [&](const ForeignRow& row) {
               rows.emplace_back(row.place, row.generation);
               return false;
             });
             return rows;
           },
           "key"_a)
      .def("ask_anew", &ForeignReader::ask_anew)
      .def_prop_ro("rows", &ForeignReader::rows)
      .def_prop_ro("scanned_ns", &ForeignReader::scanned_ns);
  nb::class_<ForeignWriter>(m, "ForeignWriter")
      .def(nb::init<int, size_t>(), "fd"_a, "rows"_a)
      .def("set_owner", &ForeignWriter::set_owner, "number"_a, "record"_a)
      .def("owner", &ForeignWriter::owner, "number"_a)
      .def("put",
           [](ForeignWriter& writer, const nb::bytes& key, Place place, uint64_t generation) {
             writer.put(view_of(key), {place, generation});
           },
           "key"_a, "place"_a, "generation"_a)
      .def("remove",
           [](ForeignWriter& writer, const nb::bytes& key, Place place, uint64_t generation) {
             return writer.remove(view_of(key), {place, generation});
           },
           "key"_a, "place"_a, "generation"_a)
      .def("scanned", &ForeignWriter::scanned, "now_ns"_a)
      .def_prop_ro("version_asked", &ForeignWriter::version_asked)
      .def_prop_ro("rows", &ForeignWriter::rows);
}
