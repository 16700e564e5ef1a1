// SPDX-License-Identifier: Apache-2.0
// Look-ups for vLLM, which calls them key by key in a Python loop. Memory is prefetched, so that
// even with millions of entries a call costs less than calling an empty Python function.
#include "bindings/bindings.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "tiers/tiers.h"

using namespace nb::literals;
using namespace nvmeof;

namespace {

bool is_key(PyObject* key, const Index& index) {
  return PyBytes_Check(key) && static_cast<size_t>(PyBytes_GET_SIZE(key)) == index.key_bytes();
}

// Prefetches memory for the next look-ups by following a request's lists of keys up or down.
class Ahead {
 public:
  Ahead(const Index& index, const Foreign* foreign) : index_(index), foreign_(foreign) {}

  // Start following lists of keys, which may grow. vLLM's look-ups pass the same key objects that
  // these lists hold.
  void begin(const nb::iterable& lists) {
    end();
    warmed_ = foreign_ && !foreign_->empty() ? foreign_ : nullptr;
    for (const nb::handle list : lists) lists_.push_back(nb::cast<nb::list>(list));
    lost_ = 0;
  }

  void end() {
    lists_.clear();
    list_ = nullptr;
  }

  void follow(PyObject* key) {
    if (list_ == nullptr || !(moved(key, step_) || moved(key, -step_))) search(key);
  }

 private:
  // Prefetch distances, in keys.
  static constexpr Py_ssize_t kBucket = 16, kRow = 8;
  // After this many consecutive failed searches, the keys are assumed to be in no list.
  static constexpr int kLostMax = 2;

  PyObject* at(Py_ssize_t place) const {
    const bool is_in = place >= 0 && place < PyList_GET_SIZE(list_);
    return is_in ? PyList_GET_ITEM(list_, place) : nullptr;
  }

  bool moved(PyObject* key, Py_ssize_t step) {
    if (at(place_ + step) != key) return false;
    place_ += step;
    const bool goes_on = runs_ && step == step_;
    step_ = step;
    runs_ = true;
    for (Py_ssize_t n = goes_on ? kBucket : 1; n <= kBucket; ++n) fetch_bucket(place_ + n * step);
    for (Py_ssize_t n = goes_on ? kRow : 1; n <= kRow; ++n)
      index_.warm_found(hashes_[of(place_ + n * step)]);
    return true;
  }

  void search(PyObject* key) {
    list_ = nullptr;
    if (lost_ >= kLostMax) return;
    ++lost_;
    for (const nb::list& list : lists_) {
      PyObject** const items = PySequence_Fast_ITEMS(list.ptr());
      PyObject** const end = items + PyList_GET_SIZE(list.ptr());
      PyObject** const found = std::find(items, end, key);
      if (found == end) continue;
      list_ = list.ptr();
      place_ = found - items;
      runs_ = false;
      lost_ = 0;
      return;
    }
  }

  void fetch_bucket(Py_ssize_t place) {
    PyObject* const key = at(place);
    if (key == nullptr || !is_key(key, index_)) return;
    const uint32_t hash = index_.hash(PyBytes_AS_STRING(key));
    hashes_[of(place)] = hash;
    index_.warm_bucket_of(hash);
    if (warmed_) warmed_->warm({PyBytes_AS_STRING(key), index_.key_bytes()});
  }

  static size_t of(Py_ssize_t place) { return static_cast<size_t>(place) % (2 * kBucket); }

  const Index& index_;
  const Foreign* foreign_;
  const Foreign* warmed_ = nullptr;  // `foreign_`, or null if it was empty in `begin`
  std::vector<nb::list> lists_;
  PyObject* list_ = nullptr;  // the list with the last look-up's key
  Py_ssize_t place_ = 0, step_ = 1;
  bool runs_ = false;                           // whether the last two keys were neighbours
  int lost_ = 0;                                // failed searches in a row
  std::array<uint32_t, 2 * kBucket> hashes_{};  // of the last keys with prefetched buckets
};

using PyKeys = nb::typed<nb::list, nb::bytes>;
using Asked = std::tuple<PyKeys, PyKeys>;  // keys that hit, keys that missed

class LookUps {
 public:
  // sources_of: returns the sources that a load filter allows. hit, miss: the values to return to
  // vLLM.
  LookUps(nb::object tiers, nb::object sources_of, nb::object hit, nb::object miss)
      : owner_(std::move(tiers)),
        tiers_(nb::cast<const Tiers&>(owner_)),
        sources_of_(std::move(sources_of)),
        answers_{std::move(miss), hit, hit, hit},
        ahead_(tiers_.index, tiers_.foreign()) {}

  // Begin one request's look-ups, which may hit only in these sources. lists: the request's keys.
  void begin(uint8_t sources, const nb::typed<nb::iterable, nb::typed<nb::list, nb::any>>& lists) {
    context_ = {};
    allowed_ = sources;
    begun_ = true;
    hits_ = {};
    misses_ = {};
    rows_.clear();
    ahead_.begin(lists);
  }

  Asked end() {
    context_ = {};
    allowed_ = kFromCpu | kFromPool;
    begun_ = false;
    ahead_.end();
    tiers_.expect(rows_);  // the caller will ask more about these hits
    return {std::exchange(hits_, {}), std::exchange(misses_, {})};
  }

  // Look up a key. Returns null if a Python error is set.
  PyObject* look_up(PyObject* key, PyObject* context) {
    if (!is_key(key, tiers_.index)) {
      PyErr_SetString(PyExc_ValueError, "every offload key has the same number of bytes");
      return nullptr;
    }
    if (context != context_.ptr()) enter(context);
    if (begun_) ahead_.follow(key);
    const Row row = tiers_.index.find(PyBytes_AS_STRING(key));
    const Source source = tiers_.lookup(row, PyBytes_AS_STRING(key), sources_);
    ++counts_[static_cast<size_t>(source)];
    if (begun_ && PyList_Append((source == Source::NONE ? misses_ : hits_).ptr(), key) != 0)
      return nullptr;
    if (begun_ && source != Source::NONE) rows_.push_back(row);
    return answers_[static_cast<size_t>(source)].inc_ref().ptr();
  }

  std::vector<uint64_t> take_counts() {
    const auto counts = std::exchange(counts_, {});
    return {counts.begin(), counts.end()};
  }

 private:
  void enter(PyObject* context) {
    const nb::object filter = nb::borrow(context).attr("load_tier_filter");
    sources_ = allowed_ & nb::cast<uint8_t>(sources_of_(filter));
    context_ = nb::borrow(context);
  }

  nb::object owner_;
  const Tiers& tiers_;
  nb::object sources_of_;
  std::array<nb::object, kSources> answers_;  // by source
  nb::object context_;                        // the context of the previous look-up
  uint8_t sources_ = 0;                       // the sources that the context allows
  uint8_t allowed_ = kFromCpu | kFromPool;
  bool begun_ = false;
  nb::list hits_, misses_;
  std::vector<Row> rows_;                    // of the hits
  std::array<uint64_t, kSources> counts_{};  // by source
  Ahead ahead_;
};

extern "C" PyObject* look_up(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "a look-up needs a key and a request's context");
    return nullptr;
  }
  try {
    return nb::inst_ptr<LookUps>(self)->look_up(arguments[0], arguments[1]);
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef look_up_method = {"lookup",
                              // METH_FASTCALL functions have a different type from PyCFunction.
                              // NOLINTNEXTLINE(bugprone-casting-through-void)
                              reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(look_up)),
                              METH_FASTCALL, nullptr};

}  // namespace

void bind_look_ups(nb::module_& m) {
  using LookUp = nb::typed<nb::object, nb::typed<nb::callable, nb::any(nb::bytes, nb::any)>>;
  nb::class_<LookUps>(m, "LookUps")
      .def(nb::init<nb::typed<nb::object, Tiers>, nb::typed<nb::callable, uint8_t(nb::any)>,
                    nb::object, nb::object>(),
           "tiers"_a, "sources_of"_a, "hit"_a, "miss"_a)
      .def("begin", &LookUps::begin, "sources"_a, "lists"_a)
      .def("end", &LookUps::end)
      .def("take_counts", &LookUps::take_counts)
      // This is a built-in function, because nanobind's conversions and checks of arguments take
      // time.
      .def_prop_ro("lookup", [](nb::handle self) {
        return LookUp(nb::steal(PyCFunction_New(&look_up_method, self.ptr())));
      });
}
