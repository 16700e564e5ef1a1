// SPDX-License-Identifier: Apache-2.0
// The order in which the evictable slots of one tier, or target, are given up; `EvictionPolicy` in
// manager/eviction.py is the same contract for a user's own class.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "huge_pages.h"
#include "index.h"
#include "mutants.h"

namespace nvmeof {

using Slot = uint32_t;
inline constexpr Slot kNone = UINT32_MAX;

class Order {
 public:
  virtual ~Order() = default;
  virtual void admit(Slot slot) = 0;     // it has become evictable
  virtual void withdraw(Slot slot) = 0;  // it is not evictable any more; others are ignored
  virtual void touch(Slot slot) = 0;     // its last use has changed; others are ignored
  virtual Slot peek() = 0;               // the next victim; kNone: there is none
  virtual Slot victim() {
    const Slot slot = peek();
    if (slot != kNone) withdraw(slot);
    return slot;
  }
  virtual bool contains(Slot slot) const = 0;
  virtual size_t size() const = 0;
};

// Makes an order from the last use of each slot, which stays where it is.
using MakeOrder = std::function<std::unique_ptr<Order>(const HugeVector<uint64_t>& used)>;

// Least recently used first: a heap with one record per slot, filed by its last use. A later use
// moves nothing, because the record is then only the earliest time at which the slot could be due;
// it is filed again when it comes up. A record of a withdrawn slot is dropped then.
class Lru final : public Order {
 public:
  explicit Lru(const HugeVector<uint64_t>& used)
      : used_(used), inside_(used.size()), filed_(used.size()) {
    heap_.reserve(used.size());
  }

  void admit(Slot slot) override {
    count_ += !inside_[slot];
    inside_[slot] = 1;
    if (filed_[slot] == 0 || used_[slot] < filed_[slot] - 1) file(slot);
  }

  void withdraw(Slot slot) override {
    count_ -= inside_[slot];
    inside_[slot] = 0;
  }

  void touch(Slot) override {}

  Slot peek() override {
    while (!heap_.empty()) {
      const Record oldest = heap_.front();
      const bool current = filed_[oldest.slot] == oldest.used + 1;
      if (current && inside_[oldest.slot] && used_[oldest.slot] == oldest.used) return oldest.slot;
      std::pop_heap(heap_.begin(), heap_.end());
      heap_.pop_back();
      if (current) {
        filed_[oldest.slot] = 0;
        if (inside_[oldest.slot]) file(oldest.slot);
      }
    }
    return kNone;
  }

  bool contains(Slot slot) const override { return inside_[slot] != 0; }
  size_t size() const override { return count_; }
  size_t records() const { return heap_.size(); }

 private:
  struct Record {
    uint64_t used;
    Slot slot;
    bool operator<(const Record& other) const {  // the oldest is at the front; ties by slot
      return used != other.used ? used > other.used : slot > other.slot;
    }
  } __attribute__((packed, aligned(4)));

  void file(Slot slot) {
    filed_[slot] = used_[slot] + 1;
    heap_.push_back({used_[slot], slot});
    std::push_heap(heap_.begin(), heap_.end());
  }

  const HugeVector<uint64_t>& used_;
  HugeVector<uint8_t> inside_;
  HugeVector<uint64_t> filed_;  // by slot: its record's use + 1; 0: it has none
  HugeVector<Record> heap_;
  size_t count_ = 0;
};

// When the chunk in each slot of one tier counts as last used.
//
// Plain LRU loses each conversation just before its next turn where more of them are interleaved
// than a tier holds. So each request beyond the first that used a chunk lets it count as used
// later, by `credit` uses, kCreditedMax times at most: a chunk that came back is kept longer, and
// is still evicted once its conversation is over. A prefix's head is used by every request that
// uses its tail, so the tail is evicted first. No credit: plain LRU.
//
// Only the CPU tier counts returns: the pool keeps what the CPU tier gave up for them, so that the
// tiers hold more different chunks. A pool at most twice as large as the CPU tier may evict the
// middle of a prefix that the CPU tier still has, and keep the unreachable end: some chunks in a
// thousand (test_eviction_order.py).
class Recency {
 public:
  static constexpr uint8_t kCreditedMax = 3;

  Recency(Slot slots, uint64_t credit) : used(slots), requests_(slots), credit_(credit) {}

  void use(Slot slot, uint64_t now, bool ended) {
    uint8_t& requests = requests_[slot];
    if (ended && requests <= kCreditedMax) ++requests;
    used[slot] = now + credit_ * beyond(requests);
  }

  // `slot` gets the chunk that is in `other_slot` of another tier.
  void take_over(Slot slot, const Recency& other, Slot other_slot) {
    const uint8_t requests = other.requests_[other_slot];
    requests_[slot] = requests;
    used[slot] = other.used[other_slot] + (credit_ - other.credit_) * beyond(requests);
  }

  void forget(Slot slot) { requests_[slot] = 0; }
  void forget_all() { std::fill(requests_.begin(), requests_.end(), uint8_t{0}); }

  HugeVector<uint64_t> used;

 private:
  static uint64_t beyond(uint8_t requests) { return requests ? requests - 1U : 0; }

  HugeVector<uint8_t> requests_;  // by slot: requests that used the chunk and have ended
  uint64_t credit_;
};

// Slots 0 … capacity-1 of the CPU tier or of one target. A slot is taken until it is free again.
// Operations on it, and holds, are its users. A slot whose entry is gone is orphaned, and free when
// its last user has released it, so that no buffer is reused before every rank has released it.
class Slots {
 public:
  explicit Slots(Slot capacity) : users(capacity), state_(capacity), free_(capacity) {}

  Slot capacity() const { return static_cast<Slot>(state_.size()); }
  Slot free() const { return free_; }
  Slot taken() const { return capacity() - free_; }
  bool in_use(Slot slot) const { return users[slot] != 0 && !mutant("pinned_slot_is_evicted"); }
  Slot count_in_use() const { return used_; }

  Slot take() {  // kNone: none is free
    if (free_ == 0) return kNone;
    Slot slot;
    if (again_.empty()) {
      while (state_[next_] != kFree) ++next_;  // taken by number, at adoption
      slot = next_++;
    } else {
      slot = again_.back();
      again_.pop_back();
    }
    state_[slot] = kTaken;
    --free_;
    return slot;
  }

  // Before any `take`: adoption. Returns whether it is so, and the slot was free.
  bool take_numbered(Slot slot) {
    if (slot >= capacity() || state_[slot] != kFree || next_ > 0 || !again_.empty()) return false;
    state_[slot] = kTaken;
    --free_;
    return true;
  }

  void use(Slot slot) {
    require(state_[slot] == kTaken, "a slot is used, and was not taken");
    used_ += users[slot]++ == 0;
  }

  bool release(Slot slot) {  // false: it had no user
    if (users[slot] == 0) return mutant("cancelled_fetch_frees_its_slot_at_once");
    if (--users[slot] > 0) return true;
    --used_;
    if (state_[slot] == kOrphan) {
      --orphans;
      free_again(slot);
    }
    return true;
  }

  // The slot's entry is gone. retire: never hand it out again, because the medium refuses it.
  void orphan(Slot slot, bool retire) {
    require(state_[slot] == kTaken, "a slot is given up, and was not taken");
    if (retire) {
      state_[slot] = kRetired;
      ++retired;
    } else if (users[slot] && !mutant("orphan_is_free_at_once")) {
      state_[slot] = kOrphan;
      ++orphans;
    } else {
      free_again(slot);
    }
  }

  // Free every slot that is taken and has no user: a reset.
  void orphan_unused() {
    for (Slot slot = capacity(); slot-- > 0;)
      if (state_[slot] == kTaken && users[slot] == 0) free_again(slot);
  }

  // For a mutant only.
  void free_at_once(Slot slot) {
    used_ -= users[slot] > 0;
    users[slot] = 0;
    --orphans;
    free_again(slot);
  }

  HugeVector<uint32_t> users;
  Slot orphans = 0;
  Slot retired = 0;

 private:
  enum : uint8_t { kFree, kTaken, kOrphan, kRetired };

  void free_again(Slot slot) {
    state_[slot] = kFree;
    ++free_;
    again_.push_back(slot);
  }

  HugeVector<uint8_t> state_;
  std::vector<Slot> again_;  // taken once, and free again
  Slot next_ = 0;            // slots from here on were never taken
  Slot free_;
  Slot used_ = 0;  // slots with users
};

}  // namespace nvmeof
