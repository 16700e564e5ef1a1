// SPDX-License-Identifier: Apache-2.0
// Python bindings for the I/O core and the CUDA calls, to which `io/engine.py` and `copy/driver.py`
// add types.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "bindings/bindings.h"
#include "copies/cuda.h"
#include "lanes/engine.h"

using namespace nvmeof;

namespace {

Identity identity_of(const nb::bytes& key, uint64_t generation) {
  return nvmeof::identity_of(view_of(key), generation);
}

std::byte* pointer(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

// targets: each target's descriptors of slab, table and log. logs: the number of pages, the first
// page's sequence number, the lease generation. permits: the address of each permit word, or 0
// without a lease.
void make_engine(Engine* at, const std::vector<std::tuple<int, int, int>>& targets, uintptr_t base,
                 size_t bytes, const std::vector<nb::bytes>& regions,
                 const std::vector<std::tuple<uint32_t, uint64_t, uint64_t>>& logs, uint16_t rank,
                 const std::vector<uintptr_t>& permits,
                 const std::vector<std::pair<uint32_t, uint8_t>>& groups, size_t slot_bytes,
                 bool registered, size_t threads, const nb::object& limits,
                 const std::vector<int>& cpus, std::shared_ptr<StartGate> gate) {
  const auto limit = [&limits](const char* name) { return nb::cast<size_t>(limits.attr(name)); };
  EngineSetup setup;
  for (const auto& [slab_fd, table_fd, log_fd] : targets)
    setup.targets.push_back({slab_fd, table_fd, log_fd});
  for (const auto& [pages, next, lease] : logs) setup.logs.push_back({pages, next, lease});
  for (const nb::bytes& uuid : regions) setup.regions.push_back({sixteen(uuid), rank});
  for (const uintptr_t word : permits)
    setup.permits.emplace_back(reinterpret_cast<const uint64_t*>(word));
  setup.groups = groups;
  setup.limits = {slot_bytes, limit("split_bytes"), static_cast<unsigned>(limit("depth")),
                  limit("read_bytes_started_max")};
  setup.memory = {pointer(base), bytes};
  setup.registered = registered;
  setup.threads = threads;
  setup.operations_max = limit("operations_max");
  setup.cpus = cpus;
  setup.gate = std::move(gate);
  nb::gil_scoped_release release;
  new (at) Engine(setup);
}

void submit(Engine& engine, uint64_t token, unsigned urgency, Place place, uintptr_t address,
            size_t payload_bytes, const nb::bytes& key, uint64_t generation, uint32_t epoch,
            const nb::bytes& tag, int64_t payload_crc, bool single_copy, uint32_t client,
            bool header_only) {
  LaneOp request;
  request.token = token;
  request.urgency = static_cast<Urgency>(urgency);
  request.place = place;
  request.address = address;
  request.payload_bytes = payload_bytes;
  request.identity = identity_of(key, generation);
  request.stamp = {epoch, sixteen(tag)};
  request.payload_crc = payload_crc;
  request.single_copy = single_copy;
  request.client = client;
  request.header_only = header_only;
  engine.take(request);
}

std::vector<std::tuple<uint64_t, uint8_t, int, int64_t, int64_t>> poll(Engine& engine) {
  std::vector<std::tuple<uint64_t, uint8_t, int, int64_t, int64_t>> found;
  for (const LaneEnd& one : engine.poll())
    found.emplace_back(one.token, static_cast<uint8_t>(one.code), one.error, one.ended_ns,
                       one.payload_crc);
  return found;
}

void entry_crcs(Column<uint8_t> entries, Column<int64_t> slots, MutableColumn<uint32_t> crcs) {
  const size_t count = slots.size();
  if (entries.size() != count * kEntryBytes || crcs.size() != count)
    throw nb::value_error("entries, slots and crcs differ in number");
  const auto* all = reinterpret_cast<const TableEntry*>(entries.data());
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i)
    crcs.data()[i] = entry_crc(all[i], static_cast<uint32_t>(slots.data()[i]));
}

using Words = Column<uint64_t>;

void copy(Words to, Words from, Words sizes) {
  if (to.size() != from.size() || to.size() != sizes.size())
    throw nb::value_error("the columns differ in length");
  nb::gil_scoped_release release;
  for (size_t i = 0; i < sizes.size(); ++i)
    std::memcpy(pointer(to.data()[i]), pointer(from.data()[i]), sizes.data()[i]);
}

// Copy pieces of payloads, and write each payload's CRC, or kNoCrc if its pieces do not cover it in
// order and without gaps. counts: the number of pieces per payload. loads: if true, payloads are
// the source, and the CRCs are of the bytes that arrived; if false, payloads are the destination.
void copy_payloads(Words to, Words from, Words sizes, Column<uint32_t> counts, Words payloads,
                   Words payload_sizes, MutableColumn<int64_t> crcs, bool loads) {
  const size_t pieces = std::accumulate(counts.data(), counts.data() + counts.size(), size_t{0});
  if (to.size() != pieces || from.size() != pieces || sizes.size() != pieces ||
      payloads.size() != counts.size() || payload_sizes.size() != counts.size() ||
      crcs.size() != counts.size())
    throw nb::value_error("pieces and payloads do not match");
  nb::gil_scoped_release release;
  const auto copy_one = loads ? &copy_crc32c_at_target : &copy_crc32c;
  const uint64_t* const places = loads ? from.data() : to.data();
  size_t at = 0;
  for (size_t payload = 0; payload < counts.size(); ++payload) {
    const uint64_t end = payloads.data()[payload] + payload_sizes.data()[payload];
    uint64_t next = payloads.data()[payload];
    uint32_t crc = 0;
    bool gapless = true;
    for (const size_t last = at + counts.data()[payload]; at < last; ++at) {
      const size_t bytes = sizes.data()[at];
      gapless = gapless && places[at] == next;
      crc = copy_one(pointer(to.data()[at]), pointer(from.data()[at]), bytes, crc);
      next += bytes;
    }
    crcs.data()[payload] = gapless && next == end ? static_cast<int64_t>(crc) : kNoCrc;
  }
}

using Lanes32 = nb::ndarray<const uint32_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;

// Write the CRC of each message. words, sizes: the parts of all messages, as for
// `nvmeof::join_crcs`. counts: the number of parts per message.
void join_crcs_of(Lanes32 words, Words sizes, Column<uint32_t> counts,
                  MutableColumn<uint32_t> crcs) {
  const size_t parts = std::accumulate(counts.data(), counts.data() + counts.size(), size_t{0});
  if (words.shape(0) != parts || sizes.size() != parts || crcs.size() != counts.size())
    throw nb::value_error("parts and messages do not match");
  nb::gil_scoped_release release;
  size_t at = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    crcs.data()[i] = join_crcs(words.data() + 32 * at, sizes.data() + at, counts.data()[i]);
    at += counts.data()[i];
  }
}

void seal_slot(MutableColumn<uint8_t> slot, const nb::bytes& key, uint64_t generation,
               size_t payload_bytes, int64_t payload_crc, uint32_t epoch, const nb::bytes& tag,
               const nb::bytes& region_uuid, uint16_t rank, uint32_t number, uint8_t kind,
               bool single_copy) {
  if (slot.size() < kHeaderBytes + payload_bytes) throw nb::value_error("the slot is too small");
  auto* data = reinterpret_cast<std::byte*>(slot.data());
  const uint32_t crc = payload_crc != kNoCrc ? static_cast<uint32_t>(payload_crc)
                                             : crc32c(data + kHeaderBytes, payload_bytes);
  seal(data, identity_of(key, generation), payload_bytes, crc, {epoch, sixteen(tag)},
       {{sixteen(region_uuid), rank}, number, single_copy}, kind);
}

unsigned verify_slot(Column<uint8_t> slot, const nb::bytes& key, uint64_t generation,
                     size_t payload_bytes, const nb::bytes& region_uuid, uint16_t rank,
                     uint32_t number, const nb::bytes& tag) {
  if (slot.size() < kHeaderBytes) return static_cast<unsigned>(Outcome::CHECKSUM_MISMATCH);
  const auto* data = reinterpret_cast<const std::byte*>(slot.data());
  return static_cast<unsigned>(verify(data, slot.size(), identity_of(key, generation),
                                      payload_bytes, {{sixteen(region_uuid), rank}, number},
                                      sixteen(tag)));
}

// The fields of `pool.format.SlotHeader`, in order.
using HeaderFields =
    std::tuple<std::tuple<nb::bytes, uint64_t>, std::tuple<nb::bytes, uint16_t, uint32_t>, size_t,
               uint32_t, std::tuple<uint32_t, nb::bytes>, bool, uint32_t>;

std::optional<HeaderFields> parse_slot_header(Column<uint8_t> page) {
  if (page.size() < kHeaderBytes) return std::nullopt;
  const auto found = parse_header(reinterpret_cast<const std::byte*>(page.data()));
  if (!found) return std::nullopt;
  const auto& [identity, place, payload_bytes, payload_crc, stamp] = *found;
  return HeaderFields{{nb::bytes(identity.key.data(), identity.key_bytes), identity.generation},
                      {bytes_of(place.region.uuid), place.region.rank, place.slot},
                      payload_bytes,
                      payload_crc,
                      {stamp.epoch, bytes_of(stamp.tag)},
                      place.single_copy,
                      place.client};
}

LogRecord reset_record(uint32_t epoch) { return {.epoch = epoch, .kind = LogKind::RESET}; }

nb::bytes encode_entry_of(uint32_t slot, const nb::bytes& key, uint64_t generation, uint32_t epoch,
                          bool single_copy, uint32_t client) {
  const TableEntry entry =
      encode_entry({{}, slot, single_copy, client}, identity_of(key, generation), epoch);
  return nb::bytes(&entry, sizeof entry);
}

void make_log(LogWriter* at, uint32_t pages, uint64_t next, uint64_t lease_generation, int fd) {
  new (at) LogWriter({pages, next, lease_generation}, copy_of_fd(fd));
}

void log_put(LogWriter& log, uint32_t slot, const nb::bytes& key, uint64_t generation,
             uint32_t epoch, bool single_copy) {
  log.add(put_record(slot, identity_of(key, generation), epoch, single_copy));
}

void as_os_error(const std::exception_ptr& caught, void*) {
  try {
    std::rethrow_exception(caught);
  } catch (const RingError& error) {
    nb::object args = nb::make_tuple(error.code().value(), error.step);
    PyErr_SetObject(PyExc_OSError, args.ptr());
  } catch (const std::system_error& error) {
    nb::object args = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, args.ptr());
  }
}

CudaHandle handle(uintptr_t number) { return reinterpret_cast<CudaHandle>(number); }

// addresses: the functions' addresses, in the order of their declarations.
void make_functions(CudaFunctions* at, uintptr_t context,
                    const std::array<uintptr_t, 8>& addresses) {
  static_assert(sizeof *at == sizeof context + sizeof addresses);
  std::array<uintptr_t, 9> words{context};
  std::ranges::copy(addresses, words.begin() + 1);
  new (at) CudaFunctions(std::bit_cast<CudaFunctions>(words));
}

// A `CudaFailure`, or None after success.
using Failure = std::optional<std::tuple<const char*, int, size_t>>;
using End = std::pair<uintptr_t, std::optional<EventWaiter*>>;  // a `CudaEnd`

CudaEnd end_of(const End& end) { return {handle(end.first), end.second.value_or(nullptr)}; }

// Release the GIL once for all calls, because each may wait for the driver.
template <typename Submit>
Failure unlocked(const Submit& submit) {
  CudaFailure failure;
  {
    const nb::gil_scoped_release release;
    failure = submit();
  }
  if (!failure.call) return std::nullopt;
  return std::tuple(failure.call, failure.status, failure.at);
}

Failure submit_columns(const CudaFunctions& cuda, const std::array<uintptr_t, 3>& columns,
                       size_t count, uintptr_t stream, uintptr_t attributes, const End& end) {
  const auto copies = std::bit_cast<CopyColumns>(columns);
  return unlocked([&] {
    return submit_copies(cuda, copies, count, handle(stream), handle(attributes), end_of(end));
  });
}

using Launches = nb::ndarray<uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Failure submit_rows(const CudaFunctions& cuda, uintptr_t kernel, unsigned threads,
                    Launches launches, uintptr_t stream, const End& end) {
  const std::span<uint64_t> rows{launches.data(), launches.size()};
  return unlocked([&] {
    return submit_launches(cuda, handle(kernel), threads, rows, launches.shape(1), handle(stream),
                           end_of(end));
  });
}

void bind_cuda(nb::module_& m) {
  nb::class_<EventWaiter>(m, "EventWaiter")
      .def(nb::init<const CudaFunctions&, int, const std::string&>(), nb::arg("functions"),
           nb::arg("wake_fd"), nb::arg("name"))
      .def("watch", [](EventWaiter& waiter, uintptr_t event) { waiter.watch(handle(event)); })
      .def_prop_ro("newest", &EventWaiter::newest)
      .def("is_over", &EventWaiter::is_over)
      .def("close", &EventWaiter::close, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<CudaFunctions>(m, "CudaFunctions")
      .def("__init__", &make_functions, nb::arg("context"), nb::arg("addresses"))
      .def("submit_copies", &submit_columns, nb::arg("columns"), nb::arg("count"),
           nb::arg("stream"), nb::arg("attributes"), nb::arg("end"))
      .def("submit_launches", &submit_rows, nb::arg("kernel"), nb::arg("threads"),
           nb::arg("launches"), nb::arg("stream"), nb::arg("end"))
      .def(
          "record",
          [](const CudaFunctions& cuda, uintptr_t event, uintptr_t stream) {
            return cuda.record(handle(event), handle(stream));
          },
          nb::call_guard<nb::gil_scoped_release>())
      // A query never blocks. If it released the GIL, another thread could hold it for 0.5 ms.
      .def("query",
           [](const CudaFunctions& cuda, uintptr_t event) { return cuda.query(handle(event)); });
}

void bind_engine(nb::module_& m) {
  nb::class_<Engine>(m, "Engine")
      .def("__init__", &make_engine, nb::arg("targets"), nb::arg("base"), nb::arg("length"),
           nb::kw_only(), nb::arg("regions"), nb::arg("logs"), nb::arg("rank"), nb::arg("permits"),
           nb::arg("groups"), nb::arg("slot_bytes"), nb::arg("registered"), nb::arg("threads"),
           nb::arg("limits"), nb::arg("cpus"), nb::arg("gate").none())
      .def("room",
           [](const Engine& engine) {
             const LaneRoom room = engine.room();
             return std::pair(room.reads, room.writes);
           })
      .def("submit", &submit)
      .def_prop_ro("address", &address_of<Engine>)
      .def("kick", &Engine::start, nb::call_guard<nb::gil_scoped_release>())
      .def("cancel", &Engine::cancel_one, nb::arg("token"))
      .def("replace_target",
           [](Engine& engine, size_t index, int slab_fd, int table_fd, int log_fd) {
             engine.target(index).replace({slab_fd, table_fd, log_fd});
           })
      .def("log_reset", [](Engine& engine, size_t target,
                           uint32_t epoch) { engine.target(target).note(reset_record(epoch)); })
      .def("attach",
           [](Engine& engine, uint16_t owner, size_t target, int slab_fd, const nb::bytes& uuid,
              uint16_t rank) {
             engine.target(target).attach(owner, {slab_fd, {sixteen(uuid), rank}});
           })
      .def("detach", [](Engine& engine, uint16_t owner,
                        size_t target) { engine.target(target).detach(owner); })
      .def("poll", &poll)
      .def("fileno", &Engine::fd)
      .def(
          "close",
          [](Engine& engine, double timeout_s) {
            return engine.close(std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9)));
          },
          nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

NB_MODULE(_native, m) {
  nb::register_exception_translator(&as_os_error);

  nb::class_<StartGate>(m, "StartGate")
      .def(nb::init<>())
      .def("shut", &StartGate::shut, nb::arg("places"))
      .def("starts", &StartGate::starts);

  bind_cuda(m);
  bind_engine(m);
  // The engine's log, for tests that act as another server.
  nb::class_<LogWriter>(m, "LogWriter")
      .def("__init__", &make_log)
      .def("put", &log_put)
      .def("reset", [](LogWriter& log, uint32_t epoch) { log.add(reset_record(epoch)); })
      .def("replace", [](LogWriter& log, int fd) { log.replace(copy_of_fd(fd)); })
      .def("flush", &LogWriter::flush);

  m.def("probe_ring", [](int fd, uintptr_t address, size_t bytes, bool registered) {
    Uring(32, {pointer(address), bytes}, fd, kPageBytes, registered).enable();
  });
  m.def(
      "choose_crc",
      [](uintptr_t address, size_t bytes) {
        return choose_crc({static_cast<const std::byte*>(pointer(address)), bytes});
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("copy", &copy);
  m.def("copy_payloads", &copy_payloads);
  m.def("join_crcs", &join_crcs_of);
  m.def("entry_crcs", &entry_crcs, nb::arg("entries"), nb::arg("slots"), nb::arg("crcs"));
  m.def("seal", &seal_slot);
  m.def("verify", &verify_slot);
  m.def("parse_header", &parse_slot_header);
  m.def("encode_entry", &encode_entry_of);
}
