// SPDX-License-Identifier: Apache-2.0
// Python bindings for the foreign table, its engines, its regions, and (for tests) single rows.
#include "bindings/bindings.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "tiers/accepted_owners.h"
#include "tiers/foreign_region.h"

using namespace nb::literals;
using namespace nvmeof;

namespace {

std::array<uint8_t, kTagBytes> tag_of(const nb::bytes& bytes) {
  return bytes.size() ? sixteen(bytes) : std::array<uint8_t, kTagBytes>{};
}

void bind_owner(nb::module_& m) {
  nb::class_<OwnerRecord>(m, "OwnerRecord")
      .def(
          "__init__",
          [](OwnerRecord* self, uint64_t version, const nb::bytes& tag, const nb::bytes& pool_uuid,
             uint32_t engine_index, uint32_t state, uint64_t rows) {
            if (state > static_cast<uint32_t>(OwnerState::DEAD))
              throw nb::value_error("an owner has no such state");
            new (self) OwnerRecord{version,
                                   sixteen(tag),
                                   sixteen(pool_uuid),
                                   engine_index,
                                   static_cast<OwnerState>(state),
                                   rows};
          },
          "version"_a, "tag"_a, "pool_uuid"_a, "engine_index"_a, "state"_a, "rows"_a)
      .def_ro("version", &OwnerRecord::version)
      .def_prop_ro("tag", [](const OwnerRecord& one) { return bytes_of(one.tag); })
      .def_prop_ro("pool_uuid", [](const OwnerRecord& one) { return bytes_of(one.pool_uuid); })
      .def_ro("engine_index", &OwnerRecord::engine_index)
      .def_prop_ro("state", [](const OwnerRecord& one) { return static_cast<uint32_t>(one.state); })
      .def_ro("rows", &OwnerRecord::rows);
}

// Release the GIL, because these calls may wait for the table's lock.
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void bind_writer(nb::module_& m) {
  nb::class_<ForeignWriter>(m, "ForeignWriter")
      .def(nb::init<int, size_t>(), "fd"_a, "rows"_a)
      .def(
          "set_owner",
          [](ForeignWriter& writer, uint32_t number, const OwnerRecord& record) {
            const auto lock = writer.lock();
            writer.set_owner(number, record);
          },
          "number"_a, "record"_a, Unlocked())
      .def("owner", &ForeignWriter::owner, "number"_a)
      .def(
          "put",
          [](ForeignWriter& writer, const nb::bytes& key, Place place, uint64_t generation) {
            writer.put(fingerprint_of(view_of(key)), {place, generation});
          },
          "key"_a, "place"_a, "generation"_a)
      .def(
          "remove",
          [](ForeignWriter& writer, const nb::bytes& key, Place place, uint64_t generation) {
            return writer.remove(fingerprint_of(view_of(key)), {place, generation});
          },
          "key"_a, "place"_a, "generation"_a)
      .def("scanned", &ForeignWriter::scanned, "now_ns"_a)
      .def_prop_ro("version_asked", &ForeignWriter::version_asked)
      .def_prop_ro("version_of_all", &ForeignWriter::version_of_all)
      .def_prop_ro("rows", &ForeignWriter::rows);
}

void bind_region(nb::module_& m) {
  nb::class_<ForeignRegion>(m, "ForeignRegion")
      .def(
          "__init__",
          [](ForeignRegion* self, std::tuple<uint32_t, uint32_t, uint32_t> home, uint64_t slots,
             const std::vector<std::tuple<uint32_t, uint32_t>>& groups, int64_t young_ns) {
            std::vector<ForeignRegion::Group> all;
            all.reserve(groups.size());
            for (const auto& [id, set_size] : groups) all.push_back({id, set_size});
            const auto [owner, target, rank] = home;
            new (self) ForeignRegion({owner, target, rank}, slots, std::move(all), young_ns);
          },
          "home"_a, "slots"_a, "groups"_a, "young_ns"_a)
      .def("begin", &ForeignRegion::begin, "table"_a, "epoch"_a, "from_now"_a, Unlocked())
      .def("scan", &ForeignRegion::scan, "table"_a, "fd"_a, "now_ns"_a, "log_is_ahead"_a = false,
           Unlocked())
      .def_prop_ro_static("OVERRUN", [](nb::handle) { return ForeignRegion::kOverrun; })
      .def_prop_ro_static("RESET", [](nb::handle) { return ForeignRegion::kReset; })
      .def("seek_log", &ForeignRegion::seek_log, "fd"_a, "pages"_a, Unlocked())
      .def("follow_log", &ForeignRegion::follow_log, "table"_a, "fd"_a, "now_ns"_a, Unlocked())
      .def_static(
          "with_news",
          [](const std::vector<std::tuple<const ForeignRegion*, int>>& logs) {
            std::vector<size_t> found;
            const nb::gil_scoped_release unlocked;
            for (size_t at = 0; at < logs.size(); ++at) {
              const auto& [region, fd] = logs[at];
              if (region->may_have_news(fd)) found.push_back(at);
            }
            return found;
          },
          "logs"_a)
      .def("ripen", &ForeignRegion::ripen, "table"_a, "now_ns"_a, Unlocked())
      .def_prop_ro("rows", &ForeignRegion::rows);
}

void bind_acceptance(nb::module_& m) {
  nb::class_<Foreign, ForeignReader>(m, "Foreign")
      .def(nb::init<int>(), "fd"_a)
      .def("set_time", &Foreign::set_time, "now_s"_a)
      .def(
          "set_tag", [](Foreign& foreign, const nb::bytes& tag) { foreign.set_tag(tag_of(tag)); },
          "tag"_a)
      .def(
          "change_tag",
          [](Foreign& foreign, const nb::bytes& tag) { foreign.change_tag(tag_of(tag)); }, "tag"_a)
      .def("accepts", nb::overload_cast<uint32_t>(&Foreign::accepts, nb::const_), "owner"_a)
      .def_prop_ro("is_used", &Foreign::is_used)
      .def("take_attachments",
           [](Foreign& foreign) {
             std::vector<std::tuple<uint32_t, uint32_t, nb::bytes>> taken;
             for (const auto& [owner, record] : foreign.take_attachments())
               taken.emplace_back(owner, record.engine_index, bytes_of(record.pool_uuid));
             return taken;
           })
      .def("take_detachments", &Foreign::take_detachments)
      .def("attach_failed", &Foreign::attach_failed, "owner"_a)
      .def("detach", &Foreign::detach, "owner"_a);
}

}  // namespace

void bind_foreign(nb::module_& m) {
  bind_owner(m);
  nb::class_<ForeignReader>(m, "ForeignReader")
      .def(nb::init<int>(), "fd"_a)
      .def("owner", &ForeignReader::owner, "number"_a)
      .def(
          "rows_of",
          [](const ForeignReader& reader, const nb::bytes& key) {
            std::vector<std::tuple<Place, uint64_t>> rows;
            reader.find(view_of(key), [&](const ForeignRow& row) {
              rows.emplace_back(row.place, row.generation);
              return false;
            });
            return rows;
          },
          "key"_a)
      .def(
          "ask_anew",
          [](ForeignReader& reader, bool from_now) {
            return reader.ask_anew(from_now ? Since::NOW : Since::EVER);
          },
          "from_now"_a = true)
      .def_prop_ro("rows", &ForeignReader::rows)
      .def_prop_ro("scanned_ns", &ForeignReader::scanned_ns);
  bind_acceptance(m);
  bind_writer(m);
  bind_region(m);
}
