// SPDX-License-Identifier: Apache-2.0
// Lanes whose operations Python moves: those of the injector of faults, and of the simulator.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lanes.h"

namespace nvmeof {

class PythonLanes final : public NativeLanes {
 public:
  // room() returns (reads, writes). submit takes a list of operations, of which each is a tuple in
  // the order of `io.base.IoOp`'s fields as `io.base.lanes_of` reads them. cancel(token) is
  // `cancel_one`. poll() returns what has ended: token, code, errno, seconds, payload CRC or -1.
  PythonLanes(nanobind::object room, nanobind::object submit, nanobind::object cancel,
              nanobind::object poll)
      : room_(std::move(room)),
        submit_(std::move(submit)),
        cancel_(std::move(cancel)),
        poll_(std::move(poll)) {}

  LaneRoom room() const override {
    const nanobind::gil_scoped_acquire locked;
    const auto [reads, writes] = nanobind::cast<std::pair<size_t, size_t>>(room_());
    return {reads, writes};
  }
  void take(const LaneOp& op) override { taken_.push_back({op, std::string(op.key)}); }
  void start() override {
    if (taken_.empty()) return;
    const nanobind::gil_scoped_acquire locked;
    nanobind::list ops;
    for (const auto& [op, key] : std::exchange(taken_, {})) ops.append(tuple_of(op, key));
    submit_(ops);
  }
  bool cancel_one(uint64_t token) override {
    const nanobind::gil_scoped_acquire locked;
    return nanobind::cast<bool>(cancel_(token));
  }
  void ended(std::vector<LaneEnd>& ends) override {
    using End = std::tuple<uint64_t, uint8_t, int, double, int64_t>;
    const nanobind::gil_scoped_acquire locked;
    for (const auto& [token, code, error, ended_s, crc] : nanobind::cast<std::vector<End>>(poll_()))
      ends.push_back({token, code, error, std::llround(ended_s * 1e9), crc});
  }

  // For Python's collector of cycles: the functions may hold whoever holds the lanes.
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nanobind::inst_ready(self)) return 0;
    const PythonLanes& lanes = *nanobind::inst_ptr<PythonLanes>(self);
    for (const auto* one : {&lanes.room_, &lanes.submit_, &lanes.cancel_, &lanes.poll_})
      Py_VISIT(one->ptr());
    return 0;
  }
  static int clear(PyObject* self) {
    PythonLanes& lanes = *nanobind::inst_ptr<PythonLanes>(self);
    for (auto* one : {&lanes.room_, &lanes.submit_, &lanes.cancel_, &lanes.poll_}) one->reset();
    return 0;
  }

 private:
  static nanobind::tuple tuple_of(const LaneOp& op, const std::string& key) {
    const auto tag = nanobind::bytes(op.stamp.tag.data(), op.stamp.tag.size());
    return nanobind::make_tuple(
        op.token, static_cast<uint8_t>(op.kind), static_cast<uint8_t>(op.urgency), op.pool_slot,
        op.address, nanobind::bytes(key.data(), key.size()), op.generation, op.payload_bytes,
        op.payload_crc, op.single_copy, op.owner, op.header_only, op.stamp.epoch, tag);
  }

  nanobind::object room_, submit_, cancel_, poll_;
  std::vector<std::pair<LaneOp, std::string>> taken_;  // not started
};

}  // namespace nvmeof
