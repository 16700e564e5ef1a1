// SPDX-License-Identifier: Apache-2.0
// Python bindings for the worker's machine. Per-chunk code runs without the GIL.
#include "bindings/bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <ctime>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "common/geometry.h"
#include "lanes/lanes.h"
#include "machine/machine.h"

using namespace nb::literals;
using namespace nvmeof;

namespace {

// The fields of a `LaneEnd`: token, code, errno, seconds, payload CRC or -1, and whether the buffer
// is released.
using PythonEnd = std::tuple<uint64_t, uint8_t, int, double, int64_t, bool>;

LaneEnd lane_end(const PythonEnd& end) {
  const auto& [token, code, error, ended_s, crc, released] = end;
  return {token, static_cast<Outcome>(code), error, std::llround(ended_s * 1e9), crc, released};
}

// Lanes implemented in Python: for peers, the fault injector and the simulator.
class PythonLanes final : public NativeLanes {
 public:
  // room: returns (reads, writes). submit: takes `LaneOp`s. poll: returns `PythonEnd`s.
  PythonLanes(nb::object room, nb::object submit, nb::object cancel, nb::object poll)
      : room_(std::move(room)),
        submit_(std::move(submit)),
        cancel_(std::move(cancel)),
        poll_(std::move(poll)) {}

  LaneRoom room() const override {
    const nb::gil_scoped_acquire locked;
    const auto [reads, writes] = nb::cast<std::pair<size_t, size_t>>(room_());
    return {reads, writes};
  }
  void take(const LaneOp& op) override { taken_.push_back(op); }
  void start() override {
    if (taken_.empty()) return;
    const nb::gil_scoped_acquire locked;
    nb::list ops;
    for (const LaneOp& op : std::exchange(taken_, {})) ops.append(op);
    submit_(ops);
  }
  bool cancel_one(uint64_t token) override {
    const nb::gil_scoped_acquire locked;
    return nb::cast<bool>(cancel_(token));
  }
  void ended(std::vector<LaneEnd>& ends) override {
    const nb::gil_scoped_acquire locked;
    for (const auto& end : nb::cast<std::vector<PythonEnd>>(poll_())) ends.push_back(lane_end(end));
  }

  // For Python's cycle collector: the functions may refer to an object that refers to these lanes.
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    const PythonLanes& lanes = *nb::inst_ptr<PythonLanes>(self);
    for (const auto* one : {&lanes.room_, &lanes.submit_, &lanes.cancel_, &lanes.poll_})
      Py_VISIT(one->ptr());
    return 0;
  }
  static int clear(PyObject* self) {
    PythonLanes& lanes = *nb::inst_ptr<PythonLanes>(self);
    for (auto* one : {&lanes.room_, &lanes.submit_, &lanes.cancel_, &lanes.poll_}) one->reset();
    return 0;
  }

 private:
  nb::object room_, submit_, cancel_, poll_;
  std::vector<LaneOp> taken_;  // accepted but not started
};

// For `bench hotpath`: the CPU time of all threads in sections without the GIL.
std::atomic<bool> metered{false};
std::atomic<int64_t> unlocked_ns{0};

int64_t thread_cpu_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

// Releases the GIL if the call processes many rows. Releasing and reacquiring it while other
// threads wait for it costs as much as processing a few dozen rows.
class Unlocked {
 public:
  explicit Unlocked(size_t rows = kRowsMin) {
    if (rows < kRowsMin) return;
    if (metered) began_ns_ = thread_cpu_ns();
    state_ = PyEval_SaveThread();
  }
  ~Unlocked() {
    if (began_ns_) unlocked_ns += thread_cpu_ns() - began_ns_;
    if (state_) PyEval_RestoreThread(state_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  static constexpr size_t kRowsMin = 64;
  int64_t began_ns_ = 0;            // 0 if not metered
  PyThreadState* state_ = nullptr;  // null if the GIL was kept
};

int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

// `nb::typed` declares the Python types for the generated stubs.
template <typename T>
using Array = nb::typed<nb::object, nb::ndarray<nb::numpy, T>>;
template <typename T>
using ArrayOrNone = nb::typed<nb::object, std::optional<nb::ndarray<nb::numpy, T>>>;
template <typename... Items>
using Tuple = nb::typed<nb::tuple, Items...>;
template <typename Item>
using List = nb::typed<nb::list, Item>;
template <typename Item>
using AnySequence = nb::typed<nb::handle, nb::typed<nb::sequence, Item>>;

// Return an array that owns the vector's items, with one dimension if `columns` is 0.
template <typename T>
Array<T> array(std::vector<T>&& items, size_t columns = 0) {
  auto* const kept = new std::vector<T>(std::move(items));
  const nb::capsule owner(kept,
                          [](void* data) noexcept { delete static_cast<std::vector<T>*>(data); });
  if (!columns) return nb::cast(nb::ndarray<nb::numpy, T>(kept->data(), {kept->size()}, owner));
  return nb::cast(
      nb::ndarray<nb::numpy, T>(kept->data(), {kept->size() / columns, columns}, owner));
}

// Return a column of a report, or None if it is empty.
template <typename T>
ArrayOrNone<T> column(std::vector<T>&& items) {
  if (items.empty()) return nb::none();
  return nb::object(array(std::move(items)));
}

// The fields of a `SetOptions`: memory, member, addresses, set sizes.
using Set = std::tuple<uintptr_t, size_t, std::vector<uint64_t>, std::vector<uint8_t>>;

using PyStamp = std::pair<uint32_t, nb::bytes>;  // a `pool.format.Stamp`

Stamp stamp_of(const PyStamp& pair) { return {pair.first, sixteen(pair.second)}; }

// `io_queue.h` and `machine.h` document the options.
void bind_options(nb::module_& m) {
  nb::class_<IoOptions>(m, "IoOptions")
      .def_rw("targets", &IoOptions::targets)
      .def_rw("reads_max", &IoOptions::reads_max)
      .def_rw("writes_max", &IoOptions::writes_max)
      .def_rw("read_deadline_ns", &IoOptions::read_deadline_ns)
      .def_rw("write_deadline_ns", &IoOptions::write_deadline_ns)
      .def_rw("header_bytes", &IoOptions::header_bytes)
      .def_rw("slot_bytes", &IoOptions::slot_bytes)
      .def_rw("group_bytes", &IoOptions::group_bytes)
      .def_rw("cache_address", &IoOptions::cache_address)
      .def_rw("stream_address", &IoOptions::stream_address)
      .def_rw("saturating_reads", &IoOptions::saturating_reads)
      .def_rw("saturating_writes", &IoOptions::saturating_writes)
      .def_rw("retryable", &IoOptions::retryable)
      .def_rw("read_bytes_max", &IoOptions::read_bytes_max)
      .def_rw("write_bytes_max", &IoOptions::write_bytes_max)
      .def_rw("write_bytes_beside_reads_max", &IoOptions::write_bytes_beside_reads_max)
      .def_rw("serve_share", &IoOptions::serve_share)
      .def_rw("serve_bytes_max", &IoOptions::serve_bytes_max)
      .def_rw("peers", &IoOptions::peers)
      .def("set_stamp", [](IoOptions& io, const PyStamp& stamp) { io.stamp = stamp_of(stamp); });
  nb::class_<MachineOptions>(m, "MachineOptions")
      .def(nb::init<>())
      .def_rw("io", &MachineOptions::io)
      .def_rw("cache_slots", &MachineOptions::cache_slots)
      .def_rw("stream_slots", &MachineOptions::stream_slots)
      .def_rw("pool_slots", &MachineOptions::pool_slots)
      .def_rw("serve_slots", &MachineOptions::serve_slots)
      .def_rw("peer_chunks_min", &MachineOptions::peer_chunks_min)
      .def_rw("copies_check", &MachineOptions::copies_check)
      .def("join_set", [](MachineOptions& options, const Set& set) {
        const auto& [memory, member, addresses, sizes] = set;
        options.set = {reinterpret_cast<void*>(memory), addresses.size(), member, addresses, sizes};
      });
}

using Tensors = std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>>;

void make_cache(CacheGeometry* self, const std::vector<std::pair<Tensors, size_t>>& groups) {
  std::vector<Geometry> all;
  all.reserve(groups.size());
  for (const auto& [tensors, per_chunk] : groups) {
    std::vector<CacheTensor> known;
    for (const auto& [address, stride, page, count] : tensors)
      known.push_back({address, stride, page, count});
    all.emplace_back(std::move(known), per_chunk);
  }
  new (self) CacheGeometry(std::move(all));
}

using PieceColumns = Tuple<nb::ndarray<nb::numpy, uint64_t>, nb::ndarray<nb::numpy, uint32_t>>;

Columns columns_of(const nb::tuple& batch) {
  const auto keys = column_of<char>(batch, 0);
  const Columns columns{{keys.data(), keys.size()},   column_of<uint64_t>(batch, 1),
                        column_of<int32_t>(batch, 2), column_of<int64_t>(batch, 3),
                        column_of<uint8_t>(batch, 4), {}};
  const size_t count = columns.generations.size();
  if (columns.cache.size() != count || columns.places.size() != count ||
      columns.groups.size() != count)
    throw nb::value_error("the columns differ in length");
  return columns;
}

void begin(Machine& machine, uint64_t op, uint8_t kind, uint8_t urgency, const ChunkBatch& batch,
           const nb::bytes& clients) {
  Columns columns = columns_of(batch);
  columns.clients = {static_cast<const uint32_t*>(clients.data()),
                     clients.size() / sizeof(uint32_t)};
  const Unlocked unlocked(columns.generations.size());
  machine.begin(op, static_cast<OpKind>(kind), static_cast<Urgency>(urgency), columns, {});
}

std::vector<size_t> numbers(nb::handle sequence) {
  std::vector<size_t> found;
  for (const nb::handle one : nb::borrow<nb::sequence>(sequence))
    found.push_back(nb::cast<size_t>(one));
  return found;
}

// The buffer of an int32[n] array. This is several times faster than an `nb::ndarray`.
class BlockIds {
 public:
  explicit BlockIds(nb::handle array) {
    if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS))
      throw nb::python_error();
    const bool fits = buffer_.ndim == 1 && buffer_.itemsize == sizeof(int32_t) && buffer_.format &&
                      std::string_view(buffer_.format) == "i";
    if (fits) return;
    PyBuffer_Release(&buffer_);
    throw nb::type_error("block ids must be int32[n]");
  }
  BlockIds(BlockIds&& other) noexcept : buffer_(std::exchange(other.buffer_, {})) {}
  BlockIds& operator=(BlockIds&&) = delete;
  ~BlockIds() { PyBuffer_Release(&buffer_); }
  std::span<const int32_t> span() const {
    return {static_cast<const int32_t*>(buffer_.buf), static_cast<size_t>(buffer_.shape[0])};
  }

 private:
  Py_buffer buffer_{};
};

using Ids = nb::typed<nb::handle, nb::ndarray<nb::numpy, int32_t>>;

PieceColumns cache_pieces(const CacheGeometry& geometry, bool is_store, Ids ids,
                          AnySequence<size_t> sizes, AnySequence<size_t> firsts,
                          const nb::bytes& groups) {
  const BlockIds blocks(ids);
  const JobBlocks job{blocks.span(),
                      numbers(sizes),
                      numbers(firsts),
                      {static_cast<const uint8_t*>(groups.data()), groups.size()}};
  std::vector<uint64_t> rows;
  std::vector<uint32_t> first;
  {
    const Unlocked unlocked(job.ids.size());
    geometry.pieces(job, is_store, rows, first);
  }
  return nb::make_tuple(array(std::move(rows), 3), array(std::move(first)));
}

// A store or load: (op, is_store, batch, block ids, sizes, firsts), as in copy/geometry.py.
using GivenTransfer = Tuple<uint64_t, bool, ChunkBatch, nb::ndarray<nb::numpy, int32_t>,
                            nb::typed<nb::sequence, size_t>, nb::typed<nb::sequence, size_t>>;

void begin_transfers(Machine& machine, const CacheGeometry& geometry,
                     AnySequence<GivenTransfer> transfers, uint64_t fence) {
  struct Transfer {
    uint64_t op;
    bool is_store;
    Columns columns;
    BlockIds ids;
    JobBlocks blocks;
  };
  std::vector<Transfer> all;
  all.reserve(nb::len(transfers));
  size_t rows_in_all = 0;
  for (const nb::handle handle : transfers) {
    const auto one = nb::borrow<nb::tuple>(handle);
    Columns columns = columns_of(nb::borrow<nb::tuple>(one[2]));
    Transfer& transfer = all.emplace_back(nb::cast<uint64_t>(one[0]), nb::cast<bool>(one[1]),
                                          columns, BlockIds(one[3]), JobBlocks{});
    transfer.blocks = {transfer.ids.span(), numbers(one[4]), numbers(one[5]), columns.groups};
    rows_in_all += columns.groups.size();
  }
  const Unlocked unlocked(rows_in_all);
  std::vector<uint64_t> rows;
  std::vector<uint32_t> first;
  for (const Transfer& one : all) {
    rows.clear();
    first.clear();
    geometry.pieces(one.blocks, one.is_store, rows, first);
    machine.begin(one.op, one.is_store ? OpKind::STORE : OpKind::LOAD, Urgency::DEMAND, one.columns,
                  {rows, first}, fence);
  }
}

void cancel(Machine& machine, uint64_t op, const std::optional<Column<uint32_t>>& rows) {
  if (!rows) {
    machine.cancel(op, nullptr);
    return;
  }
  const std::vector<uint32_t> some(rows->data(), rows->data() + rows->size());
  machine.cancel(op, &some);
}

void ended(Machine& machine, const std::vector<PythonEnd>& ends) {
  for (const PythonEnd& end : ends) machine.io.ended(lane_end(end));
}

double next_deadline(Machine& machine) {
  const int64_t next_ns = machine.next_deadline_ns();
  return next_ns == INT64_MAX ? INFINITY : static_cast<double>(next_ns) / 1e9;
}

void set_peer(Machine& machine, size_t peer, bool usable, size_t reads_max, double bytes_per_s,
              uint64_t queued_bytes, uint64_t lost) {
  machine.set_peer(peer, {usable, reads_max, bytes_per_s, queued_bytes, lost});
}

bool health_has_news(const IoQueue& io) {
  return std::ranges::any_of(io.health_counts,
                             [](const auto& one) { return one.late || one.released_late; }) ||
         std::ranges::any_of(io.health_outcomes,
                             [](const auto& one) { return one.code != Outcome::OK; });
}

// Handle the ends reported by lanes, and hand over tasks until nothing more advances. Returns true
// if Python must check a target's health, and then call again.
bool advance(Machine& machine, double ahead_s) {
  IoQueue& io = machine.io;
  const Unlocked unlocked(machine.to_move());
  io.poll_lanes(nanoseconds(ahead_s));
  io.expire();
  machine.run();
  do {
    if (health_has_news(io)) return true;
    io.offer_reads();
    io.offer_writes();
    io.fail_stalled();
    // Start all operations for which there is room, because the next call may come much later.
  } while (machine.run());
  return health_has_news(io);
}

// Return (token, target) of superblocks to write, and (target, code, errno) of failed or late ones.
std::optional<std::pair<std::vector<std::tuple<uint64_t, size_t>>,
                        std::vector<std::tuple<size_t, uint8_t, int>>>>
offer_resets(Machine& machine) {
  std::vector<std::tuple<uint64_t, size_t>> offered;
  for (const Task* task : machine.io.offer_resets())
    offered.emplace_back(task->token, task->target);
  if (offered.empty() && machine.io.unwritten.empty()) return std::nullopt;
  std::vector<std::tuple<size_t, uint8_t, int>> unwritten;
  for (const HealthOutcome& one : std::exchange(machine.io.unwritten, {}))
    unwritten.emplace_back(one.target, static_cast<uint8_t>(one.code), one.error);
  return std::pair(std::move(offered), std::move(unwritten));
}

// A `CopyBatch` as (number, is_store, fence, bytes, pieces, summed). summed: (counts, payloads,
// sizes, sampled) if checksums are needed, else None.
using SummedPieces =
    Tuple<nb::ndarray<nb::numpy, uint32_t>, nb::ndarray<nb::numpy, uint64_t>,
          nb::ndarray<nb::numpy, uint64_t>, std::optional<nb::ndarray<nb::numpy, uint8_t>>>;
using Copies = Tuple<uint64_t, bool, uint64_t, size_t, nb::ndarray<nb::numpy, uint64_t>,
                     std::optional<SummedPieces>>;

List<Copies> take_copies(Machine& machine, uint64_t passed) {
  std::vector<CopyBatch> batches;
  {
    const Unlocked unlocked(machine.to_copy());
    batches = machine.take_copies(passed);
  }
  nb::list all;
  for (CopyBatch& batch : batches) {
    nb::object summed = nb::none();
    if (batch.is_store || batch.checks)
      summed = nb::make_tuple(array(std::move(batch.counts)), array(std::move(batch.payloads)),
                              array(std::move(batch.sizes)), column(std::move(batch.sampled)));
    all.append(nb::make_tuple(batch.number, batch.is_store, batch.fence, batch.bytes,
                              array(std::move(batch.pieces), 3), summed));
  }
  return all;
}

// Return (number, rows) for the chunks to copy into cache slots, or None if there are none.
nb::typed<nb::object, std::optional<Tuple<uint64_t, nb::ndarray<nb::numpy, uint64_t>>>>
take_landings(Machine& machine) {
  LandingBatch batch = machine.take_landings();
  if (batch.rows.empty()) return nb::none();
  return nb::make_tuple(batch.number, array(std::move(batch.rows), 3));
}

// Consecutive ops whose rows are all OK and released share one tuple, with the fields of
// `protocol.OpReports`. Any other op has a tuple with the fields of `protocol.OpReport`.
using WholeReports = Tuple<nb::bytes, nb::bytes>;
using OneReport = Tuple<uint64_t, std::optional<nb::ndarray<nb::numpy, uint32_t>>,
                        std::optional<nb::ndarray<nb::numpy, uint8_t>>,
                        std::optional<nb::ndarray<nb::numpy, int16_t>>,
                        std::optional<nb::ndarray<nb::numpy, uint8_t>>, double,
                        std::optional<nb::ndarray<nb::numpy, uint32_t>>>;

List<std::variant<WholeReports, OneReport>> take_reports(Machine& machine) {
  std::vector<RowReport> reports;
  {
    const Unlocked unlocked(machine.to_report());
    reports = machine.take_reports();
  }
  nb::list all;
  std::vector<uint64_t> ops;
  std::vector<float> seconds;
  for (size_t at = 0; at < reports.size(); ++at) {
    RowReport& report = reports[at];
    const bool joins = at + 1 < reports.size() && reports[at + 1].whole();
    if (report.whole() && (joins || !ops.empty())) {
      ops.push_back(report.op);
      seconds.push_back(static_cast<float>(report.seconds));
      if (joins) continue;
      all.append(nb::make_tuple(bytes_of(ops), bytes_of(seconds)));
      ops.clear();
      seconds.clear();
      continue;
    }
    all.append(nb::make_tuple(
        report.op, report.all_rows ? nb::none() : column(std::move(report.indexes)),
        column(std::move(report.codes)), column(std::move(report.errors)),
        column(std::move(report.released)), report.seconds, column(std::move(report.crcs))));
  }
  return all;
}

// Return (op, [(row, code, errno) of failed rows], copied bytes, seconds) for each finished job.
List<Tuple<uint64_t, List<Tuple<uint32_t, uint8_t, int>>, uint64_t, double>> take_finished(
    Machine& machine) {
  nb::list all;
  for (const Finished& finished : machine.take_finished()) {
    nb::list failures;
    for (size_t at = 0; at < finished.failed.size(); ++at)
      failures.append(nb::make_tuple(finished.failed[at], finished.codes[at], finished.errors[at]));
    all.append(nb::make_tuple(finished.op, failures, finished.copied_bytes, finished.seconds));
  }
  return all;
}

// Per-target counts and outcomes since the last call, or None if there are none.
using Health = std::pair<std::vector<std::tuple<size_t, uint32_t, size_t, size_t, size_t, size_t>>,
                         std::vector<std::tuple<size_t, uint32_t, bool, uint8_t, int, Place>>>;

std::optional<Health> take_health(Machine& machine) {
  if (machine.io.health_counts.empty() && machine.io.health_outcomes.empty()) return std::nullopt;
  Health health;
  auto& [counts, outcomes] = health;
  for (const HealthCounts& one : std::exchange(machine.io.health_counts, {}))
    counts.emplace_back(one.target, one.attachment, one.began, one.late, one.released,
                        one.released_late);
  for (const HealthOutcome& one : std::exchange(machine.io.health_outcomes, {}))
    outcomes.emplace_back(one.target, one.attachment, one.is_write, static_cast<uint8_t>(one.code),
                          one.error, one.place);
  return health;
}

using Transferred = std::tuple<uint64_t, uint64_t, double>;  // operations, bytes, seconds

std::tuple<Transferred, Transferred, std::vector<uint64_t>> take_counts(Machine& machine) {
  const TransferCounts reads = std::exchange(machine.io.reads, {});
  const TransferCounts writes = std::exchange(machine.io.writes, {});
  std::vector<uint64_t> written;
  written.reserve(machine.written_bytes.size());
  for (uint64_t& bytes : machine.written_bytes) written.push_back(std::exchange(bytes, 0));
  return {Transferred{reads.operations, reads.bytes, reads.seconds},
          Transferred{writes.operations, writes.bytes, writes.seconds}, std::move(written)};
}

void reset(Machine& machine, uint64_t op, const PyStamp& stamp, const PyStamp& unnamed) {
  machine.reset(op, stamp_of(stamp), stamp_of(unnamed));
}

std::vector<std::tuple<size_t, double, double>> take_rates(Machine& machine) {
  std::vector<std::tuple<size_t, double, double>> all;
  for (const auto& rate : machine.io.take_rates())
    all.emplace_back(rate.target, rate.write, rate.read);
  return all;
}

// Return the bytes needed for the words of a set with this many slots per member.
size_t set_words_bytes(size_t members, size_t cache_slots, size_t stream_slots) {
  return SetMemory::bytes({members, cache_slots, stream_slots});
}

// Block until a word of another member changes, a file is readable, or the time has passed. Returns
// false immediately if no other member can cause an event.
bool await_set(Machine& machine, const std::vector<int>& fds, double seconds) {
  SetMember* const set = machine.set();
  if (!set || !set->awaits()) return false;
  const nb::gil_scoped_release unlocked;
  set->sleep(fds, machine.io.now_ns(), nanoseconds(seconds));
  return true;
}

std::tuple<size_t, size_t, size_t, size_t, size_t, size_t, size_t> levels(Machine& machine) {
  IoQueue& io = machine.io;
  return {machine.streams_used(),      machine.streams_waiting(),
          io.waiting(Urgency::DEMAND), io.waiting(Urgency::URGENT) + io.waiting(Urgency::PREFETCH),
          io.waiting(Urgency::WRITE),  io.reads_in_flight(),
          io.writes_in_flight()};
}

// peers: (end_s, has_room) for each peer's lane.
int choose(double own_end_s, bool own_room, const std::vector<std::pair<double, bool>>& peers) {
  std::vector<LaneEstimate> estimates;
  estimates.reserve(peers.size());
  for (const auto& [end_s, has_room] : peers) estimates.push_back({end_s, has_room});
  return choose_lane({own_end_s, own_room}, estimates);
}

void bind_op(nb::module_& m) {
  nb::class_<LaneOp>(m, "LaneOp")
      .def_ro("token", &LaneOp::token)
      .def_prop_ro("kind", [](const LaneOp& op) { return static_cast<uint8_t>(op.kind); })
      .def_prop_ro("urgency", [](const LaneOp& op) { return static_cast<uint8_t>(op.urgency); })
      .def_ro("place", &LaneOp::place)
      .def_ro("address", &LaneOp::address)
      .def_ro("payload_bytes", &LaneOp::payload_bytes)
      .def_ro("payload_crc", &LaneOp::payload_crc)
      .def_prop_ro(
          "key",
          [](const LaneOp& op) { return nb::bytes(op.identity.key.data(), op.identity.key_bytes); })
      .def_prop_ro("generation", [](const LaneOp& op) { return op.identity.generation; })
      .def_prop_ro("stamp",
                   [](const LaneOp& op) { return PyStamp(op.stamp.epoch, bytes_of(op.stamp.tag)); })
      .def_ro("single_copy", &LaneOp::single_copy)
      .def_ro("client", &LaneOp::client)
      .def_ro("header_only", &LaneOp::header_only)
      .def_ro("peer", &LaneOp::peer)
      .def_prop_ro("until_s",
                   [](const LaneOp& op) { return static_cast<double>(op.until_ns) / 1e9; });
}

void bind_parts(nb::module_& m) {
  bind_op(m);
  m.def("choose_lane", &choose, "own_end_s"_a, "own_room"_a, "peers"_a);
  m.def("meter_unlocked", [](bool on) { metered = on; });
  m.def("unlocked_s", [] { return static_cast<double>(unlocked_ns) / 1e9; });
  nb::class_<CacheGeometry>(m, "CacheGeometry")
      .def("__init__", &make_cache)
      .def("pieces", &cache_pieces);
  nb::class_<InstantLanes>(m, "InstantLanes")
      .def(nb::init<int, int>(), "wake_fd"_a, "error"_a = 0)
      .def_prop_ro("address", &address_of<InstantLanes>);
  static PyType_Slot collected[] = {
      {Py_tp_traverse, reinterpret_cast<void*>(&PythonLanes::traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(&PythonLanes::clear)},
      {0, nullptr}};
  nb::class_<PythonLanes>(m, "PythonLanes", nb::type_slots(collected))
      .def(nb::init<nb::typed<nb::callable, std::pair<size_t, size_t>()>,
                    nb::typed<nb::callable, void(List<LaneOp>)>,
                    nb::typed<nb::callable, bool(uint64_t)>,
                    nb::typed<nb::callable, std::vector<PythonEnd>()>>(),
           nb::kw_only(), "room"_a, "submit"_a, "cancel"_a, "poll"_a)
      .def_prop_ro("address", &address_of<PythonLanes>);
  m.def("set_words_bytes", &set_words_bytes, "members"_a, "cache_slots"_a, "stream_slots"_a);
}

void serve(Machine& machine, const std::vector<uint64_t>& tokens, const ChunkBatch& batch,
           const std::vector<double>& within_s) {
  machine.serve(tokens, columns_of(batch), within_s);
}

// Return (token, code, errno) for each read for a peer that has ended.
std::vector<std::tuple<uint64_t, uint8_t, int>> take_served(Machine& machine) {
  std::vector<std::tuple<uint64_t, uint8_t, int>> all;
  for (const Machine::Served& one : machine.take_served())
    all.emplace_back(one.token, static_cast<uint8_t>(one.code), one.error);
  return all;
}

void bind_peers(nb::class_<Machine>& machine) {
  machine.def("serve", &serve)
      .def("end_serving", [](Machine& machine,
                             const std::vector<uint64_t>& tokens) { machine.end_serving(tokens); })
      .def("take_served", &take_served)
      .def("serve_levels", &Machine::serve_levels)
      .def("set_peer", &set_peer, "peer"_a, "usable"_a, "reads_max"_a, "bytes_per_s"_a,
           "queued_bytes"_a, "lost"_a)
      .def("peer_rests", &Machine::peer_rests)
      .def("let_help", &Machine::let_help)
      .def("take_landings", &take_landings)
      .def("landed", &Machine::landed)
      .def("read_queues", &Machine::read_queues);
}

}  // namespace

void bind_machine(nb::module_& m) {
  bind_parts(m);
  bind_options(m);
  nb::class_<Machine> machine(m, "Machine");
  bind_peers(machine);
  machine
      .def(
          "__init__",
          [](Machine* self, const MachineOptions& options, uintptr_t lanes, double now_s,
             uintptr_t peer_lanes) {
            auto& driven = *reinterpret_cast<NativeLanes*>(lanes);
            auto* const of_peers = reinterpret_cast<NativeLanes*>(peer_lanes);
            new (self) Machine(options, driven, nanoseconds(now_s), of_peers);
          },
          "options"_a, "lanes"_a, "now_s"_a = 0.0, "peer_lanes"_a = 0)
      .def("begin", &begin, "op"_a, "kind"_a, "urgency"_a, "batch"_a, "clients"_a = nb::bytes(""))
      .def("begin_transfers", &begin_transfers)
      .def("reset", &reset, "op"_a, "stamp"_a, "unnamed"_a)
      .def("cancel", &cancel, "op"_a, "rows"_a = nb::none())
      .def("attach", &Machine::attach)
      .def("await_files",
           [](Machine& machine, uint16_t owner) { machine.io.await_files(owner, nullptr); })
      .def("attached", [](Machine& machine, uint16_t owner,
                          int error) { return machine.io.attached(owner, error); })
      .def("detach", [](Machine& machine, uint16_t owner) { machine.io.detach(owner); })
      .def("foreign_reads", [](const Machine& machine, uint16_t owner,
                               size_t target) { return machine.io.foreign_reads(owner, target); })
      .def("set_time",
           [](Machine& machine, double now_s) { machine.io.set_time(nanoseconds(now_s)); })
      .def("set_target",
           [](Machine& machine, size_t target, bool usable, uint32_t attachment) {
             machine.io.set_target(target, usable, attachment);
           })
      .def("ended", &ended)
      .def("advance", &advance)
      .def("next_deadline_s", &next_deadline)
      .def("offer_resets", &offer_resets)
      .def("take_copies", &take_copies)
      .def(
          "copied",
          [](Machine& machine, uint64_t number, uint8_t code, int error,
             const std::optional<Column<int64_t>>& crcs) {
            const Unlocked unlocked(machine.copying(number));
            machine.copied(number, static_cast<Outcome>(code), error, span_of(crcs));
          },
          "number"_a, "code"_a, "error"_a, "crcs"_a = nb::none())
      .def("take_reports", &take_reports)
      .def("take_finished", &take_finished)
      .def("take_health", &take_health)
      .def("take_counts", &take_counts)
      .def("take_rates", &take_rates)
      .def("levels", &levels)
      .def("await_set", &await_set, "fds"_a, "seconds"_a)
      .def("leave_set",
           [](Machine& machine) {
             if (machine.set()) machine.set()->leave();
           })
      .def_prop_ro("to_report", &Machine::to_report)
      .def_prop_ro("idle", &Machine::idle);
}
