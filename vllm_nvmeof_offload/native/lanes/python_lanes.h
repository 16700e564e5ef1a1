// SPDX-License-Identifier: Apache-2.0
// Lanes implemented in Python: for peers, the fault injector and the simulator.
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

#include "lanes/lanes.h"

namespace nvmeof {

// A `LaneEnd`: token, code, errno, seconds, payload CRC or -1, and whether the buffer is released.
using PythonEnd = std::tuple<uint64_t, uint8_t, int, double, int64_t, bool>;

inline LaneEnd lane_end(const PythonEnd& end) {
  const auto& [token, code, error, ended_s, crc, released] = end;
  return {token, static_cast<Outcome>(code), error, std::llround(ended_s * 1e9), crc, released};
}

class PythonLanes final : public NativeLanes {
 public:
  // room() returns (reads, writes). submit() receives a list of `LaneOp`. cancel(token) implements
  // `cancel_one`. poll() returns a list of `PythonEnd`.
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
  void take(const LaneOp& op) override { taken_.push_back(op); }
  void start() override {
    if (taken_.empty()) return;
    const nanobind::gil_scoped_acquire locked;
    nanobind::list ops;
    for (const LaneOp& op : std::exchange(taken_, {})) ops.append(op);
    submit_(ops);
  }
  bool cancel_one(uint64_t token) override {
    const nanobind::gil_scoped_acquire locked;
    return nanobind::cast<bool>(cancel_(token));
  }
  void ended(std::vector<LaneEnd>& ends) override {
    const nanobind::gil_scoped_acquire locked;
    for (const auto& end : nanobind::cast<std::vector<PythonEnd>>(poll_()))
      ends.push_back(lane_end(end));
  }

  // For Python's cycle collector: the functions may refer to an object that refers to these lanes.
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
  nanobind::object room_, submit_, cancel_, poll_;
  std::vector<LaneOp> taken_;  // accepted but not started
};

}  // namespace nvmeof
