// SPDX-License-Identifier: Apache-2.0
// The order in which evictable slots of a tier or target are evicted. `EvictionPolicy` in
// manager/eviction.py defines the same contract for users' classes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/columns.h"
#include "common/op.h"
#include "tiers/index.h"
#include "tiers/slot_parts.h"

namespace nvmeof {

// The record of one slot of a tier or target; all bytes are zero until the slot is first taken. It
// fits in a quarter of a cache line, because the slots of a batch are accessed in random order.
struct SlotRecord {
  enum Kind : uint32_t { FREE, TAKEN, ORPHAN, RETIRED };

  uint64_t used = 0;  // when its chunk counts as last used; see `Recency`
  Row row = 0;        // the entry that names the slot, or kNoRow; undefined in a free slot
  uint32_t users : 26 = 0;
  uint32_t kind : 2 = FREE;
  uint32_t requests : 3 = 0;  // ended requests that used its chunk, at most kCreditedMax + 1
  uint32_t wanted : 1 = 0;    // whether its chunk is waiting to be written
};
static_assert(sizeof(SlotRecord) == 16);
inline constexpr uint32_t kUsersMax = (1U << 26) - 1;

using SlotRecords = HugeColumn<SlotRecord>;

class Order {
 public:
  virtual ~Order() = default;
  virtual void admit(Slot slot) = 0;     // makes the slot evictable
  virtual void withdraw(Slot slot) = 0;  // makes it non-evictable; no effect if it already was
  virtual void touch(Slot slot) = 0;     // records a new last use; no effect if not evictable
  virtual Slot peek() = 0;               // returns the next victim, or kNone
  virtual Slot victim() {
    const Slot slot = peek();
    if (slot != kNone) withdraw(slot);
    return slot;
  }
  virtual bool contains(Slot slot) const = 0;
  virtual size_t size() const = 0;

  // Prefetch the memory that `admit` and `withdraw` will read for this slot.
  virtual void warm(Slot) const {}
  // Return the likely victim after `count` others, or kNone if unknown.
  virtual Slot later(size_t) const { return kNone; }
};

using MakeOrder = std::function<std::unique_ptr<Order>(const SlotRecords& slots)>;

// Evicts the least recently used slot first; ties are broken by slot. Each slot has one record,
// filed by its last use in buckets of 1024 uses. If the slot has been used since then, its record
// is filed again when it is reached. A bucket is sorted when it becomes the oldest, so that the
// next victims are known in advance; a heap would take ten times as long.
class Lru final : public Order {
 public:
  explicit Lru(const SlotRecords& slots) : slots_(slots), filed_(slots.size()) {}

  void admit(Slot slot) override {
    uint64_t& filed = filed_[slot];
    count_ += !(filed & kInside);
    filed |= kInside;
    if (filed < kFiled || used(slot) < used_of(filed)) file(slot);
  }

  void withdraw(Slot slot) override {
    count_ -= filed_[slot] & kInside;
    filed_[slot] &= ~kInside;
  }

  void touch(Slot) override {}

  Slot peek() override {
    for (;;) {
      while (!open_.empty()) {
        const Record oldest = open_.back();
        uint64_t& filed = filed_[oldest.slot];
        const bool current = filed >= kFiled && used_of(filed) == oldest.used;
        if (current && filed & kInside && used(oldest.slot) == oldest.used) return oldest.slot;
        open_.pop_back();
        if (!current) continue;
        filed &= kInside;
        if (filed) file(oldest.slot);
      }
      if (buckets_.empty()) return kNone;
      open_next();
    }
  }

  Slot victim() override {
    const Slot slot = peek();
    if (slot == kNone) return kNone;
    open_.pop_back();
    filed_[slot] = 0;
    --count_;
    return slot;
  }

  bool contains(Slot slot) const override { return filed_[slot] & kInside; }
  size_t size() const override { return count_; }
  void warm(Slot slot) const override { prefetch(&filed_[slot]); }

  Slot later(size_t count) const override {
    return count < open_.size() ? open_[open_.size() - 1 - count].slot : kNone;
  }

 private:
  struct Record {
    uint64_t used;
    Slot slot;
    // Sorts the oldest last.
    bool operator<(const Record& other) const {
      return used != other.used ? used > other.used : slot > other.slot;
    }
  };
  // A record in a bucket: the low bits of its last use in the high half, its slot in the low half.
  using Packed = uint64_t;
  static constexpr int kBucketBits = 10, kSlotBits = 32;
  // An item of `filed_` is the use by which the record is filed, plus 1, shifted left by one bit.
  // The low bit says whether the slot is evictable.
  static constexpr uint64_t kInside = 1, kFiled = 2;

  static uint64_t used_of(uint64_t filed) { return (filed >> 1) - 1; }
  uint64_t used(Slot slot) const { return slots_[slot].used; }

  void file(Slot slot) {
    const uint64_t used = this->used(slot), number = used >> kBucketBits;
    filed_[slot] = (used + 1) << 1 | (filed_[slot] & kInside);
    if (number < opened_) {
      const Record record{used, slot};
      open_.insert(std::lower_bound(open_.begin(), open_.end(), record), record);
      return;
    }
    if (last_ == nullptr || last_number_ != number) {
      last_ = &buckets_[number];  // a map's items do not move
      last_number_ = number;
    }
    last_->push_back((used & ((1U << kBucketBits) - 1)) << kSlotBits | slot);
  }

  void open_next() {
    const auto oldest = buckets_.begin();
    std::vector<Packed>& filed = oldest->second;
    std::sort(filed.begin(), filed.end(), std::greater<>());
    for (const Packed record : filed)
      open_.push_back(
          {oldest->first << kBucketBits | record >> kSlotBits, static_cast<Slot>(record)});
    opened_ = oldest->first + 1;
    if (last_ == &filed) last_ = nullptr;
    buckets_.erase(oldest);
  }

  const SlotRecords& slots_;
  HugeColumn<uint64_t> filed_;  // by slot; 0 if it has no record and is not evictable
  std::map<uint64_t, std::vector<Packed>> buckets_;
  std::vector<Packed>* last_ = nullptr;  // the bucket that last got a record
  uint64_t last_number_ = 0;
  std::vector<Record> open_;  // the records of uses before bucket `opened_`, the oldest at the end
  uint64_t opened_ = 0;
  size_t count_ = 0;
};

// Slots in order of arrival: a circular list that begins and ends at a sentinel.
class Arrivals final {
 public:
  explicit Arrivals(size_t slots) : links_(slots + 1), none_(static_cast<Slot>(slots)) {
    links_[none_] = {none_ + 1, none_ + 1};
  }

  void admit(Slot slot) {
    if (links_[slot].next != 0) return;
    const Slot last = links_[none_].previous - 1;
    links_[slot] = {none_ + 1, last + 1};
    links_[last].next = links_[none_].previous = slot + 1;
  }

  void withdraw(Slot slot) {
    const Link link = std::exchange(links_[slot], {});
    if (link.next == 0) return;
    links_[link.previous - 1].next = link.next;
    links_[link.next - 1].previous = link.previous;
  }

  Slot first() const {  // returns kNone if the list is empty
    const Slot slot = links_[none_].next - 1;
    return slot == none_ ? kNone : slot;
  }

 private:
  struct Link {
    Slot next = 0, previous = 0;  // slot numbers + 1; 0 if the slot is not in the list
  };

  HugeColumn<Link> links_;
  Slot none_;
};

// The rule that determines the time at which the chunk in a tier's slot counts as last used.
//
// If more conversations are interleaved than a tier holds, plain LRU evicts each of them just
// before its next turn. Therefore, each request that uses a chunk, except the first, moves the
// chunk's last use ahead by `credit` uses, at most kCreditedMax times. A reused chunk is thus kept
// longer, but is still evicted after its conversation has ended. A prefix's head is used by every
// request that uses its tail, so the tail is evicted first.
//
// Only the CPU tier gives credit. The pool thus keeps the chunks that the CPU tier evicts in favour
// of credited ones, and the tiers together hold more distinct chunks. If the pool is at most twice
// as large as the CPU tier, it may evict the middle of a prefix whose end it keeps. This affects a
// few chunks in a thousand (test_eviction_order.py).
class Recency {
 public:
  static constexpr uint32_t kCreditedMax = 3;

  explicit Recency(uint64_t credit) : credit_(credit) {}

  void use(SlotRecord& slot, uint64_t now, bool ended) const {
    if (ended && slot.requests <= kCreditedMax) ++slot.requests;
    slot.used = now + credit_ * beyond(slot.requests);
  }

  // Set the last use of `slot`, which receives the chunk in `other_slot` of another tier.
  void take_over(SlotRecord& slot, const Recency& other, const SlotRecord& other_slot) const {
    slot.requests = other_slot.requests;
    // Clamp at 0: an unsigned value below 0 would wrap around and become the latest of all.
    const uint64_t used = other_slot.used + credit_ * beyond(slot.requests);
    slot.used = used - std::min(used, other.credit_ * beyond(slot.requests));
  }

 private:
  static uint64_t beyond(uint32_t requests) { return requests ? requests - 1 : 0; }

  uint64_t credit_;
};

// Slots 0 … capacity-1 of the CPU tier or of one target, and the parts of divided slots. A slot's
// users are the operations on it and its holds. A slot whose entry is removed is an orphan until
// its last user releases it, so that no buffer is reused before every rank has released it.
class Slots {
 public:
  explicit Slots(Slot capacity, uint32_t set_size = 1)
      : parts(capacity, set_size), records_(parts.end()), free_(capacity) {}

  const SlotRecords& all() const { return records_; }
  SlotRecord& operator[](Slot slot) { return records_[slot]; }
  const SlotRecord& operator[](Slot slot) const { return records_[slot]; }
  void warm(Slot slot) const { prefetch(&records_[slot]); }

  Slot capacity() const { return parts.rows(); }
  Slot free() const { return free_; }  // whole slots
  Slot taken() const { return capacity() - free_; }
  bool in_use(Slot slot) const {
    return records_[slot].users != 0 && !mutant("pinned_slot_is_evicted");
  }
  Slot count_in_use() const { return used_; }

  Slot take() {  // returns kNone if none is free
    if (free_ == 0) return kNone;
    Slot slot;
    if (again_.empty()) {
      while (records_[next_].kind != SlotRecord::FREE) ++next_;  // taken by number, for adoption
      slot = next_++;
    } else {
      slot = again_.back();
      again_.pop_back();
    }
    mark_taken(slot);
    --free_;
    return slot;
  }

  Slot take(const Part& wanted) {  // returns kNone if none is free
    if (wanted.whole()) return take();
    Slot slot = parts.take(wanted);
    if (slot == kNone) {
      const Slot row = take();
      if (row == kNone) return kNone;
      parts.divide(row, wanted.set_size);
      slot = parts.take(wanted);
    }
    mark_taken(slot);
    return slot;
  }

  // Take a slot by number, for adoption. Returns false if the slot is taken or `take` was called.
  bool take_numbered(Slot slot) {
    if (slot >= capacity() || records_[slot].kind != SlotRecord::FREE || next_ > 0 ||
        !again_.empty())
      return false;
    mark_taken(slot);
    --free_;
    return true;
  }

  // Return whether the row suits the part: one of them is whole, or their set sizes are equal.
  bool can_divide(Slot row, const Part& part) const {
    if (part.whole() || row >= capacity() || !parts.set_size(row)) return true;
    return parts.set_size(row) == part.set_size;
  }

  bool take_numbered(Slot row, const Part& part) {
    if (part.whole()) return take_numbered(row);
    if (row >= capacity() || part.set_size < 2 || part.member >= part.set_size) return false;
    if (!parts.set_size(row)) {
      if (!take_numbered(row)) return false;
      parts.divide(row, part.set_size);
    }
    const Slot slot = parts.part(row, part.member);
    if (records_[slot].kind != SlotRecord::FREE || next_ > 0 || !again_.empty()) return false;
    parts.take(slot);
    mark_taken(slot);
    return true;
  }

  // Return whether `wanted` could be taken if this slot were free.
  bool suits(Slot slot, const Part& wanted) const {
    if (!parts.is_part(slot)) return true;
    const Slot row = parts.row(slot);
    const uint32_t member = parts.member(slot);
    if (parts.taken(row) == uint64_t{1} << member) return true;  // the row would be whole
    return parts.set_size(row) == wanted.set_size && wanted.takes(member);
  }

  void use(Slot slot) {
    SlotRecord& record = records_[slot];
    require(record.kind == SlotRecord::TAKEN, "a slot that was not taken is used");
    require(record.users < kUsersMax, "a slot has too many users");
    used_ += record.users == 0;
    ++record.users;
  }

  bool release(Slot slot) {  // returns false if it had no user
    SlotRecord& record = records_[slot];
    if (record.users == 0) return mutant("cancelled_fetch_frees_its_slot_at_once");
    --record.users;
    if (record.users > 0) return true;
    --used_;
    if (record.kind == SlotRecord::ORPHAN) {
      --orphans;
      free_again(slot);
    }
    return true;
  }

  // Give up a removed entry's slot. retire: true if the slot must never be used again, because its
  // medium is failing.
  void orphan(Slot slot, bool retire) {
    SlotRecord& record = records_[slot];
    require(record.kind == SlotRecord::TAKEN, "a slot that was not taken is given up");
    record.row = kNoRow;
    record.requests = 0;
    record.wanted = 0;
    if (retire) {
      record.kind = SlotRecord::RETIRED;
      retired += !parts.is_part(slot) || parts.retire(slot);
    } else if (record.users && !mutant("orphan_is_free_at_once")) {
      record.kind = SlotRecord::ORPHAN;
      ++orphans;
    } else {
      free_again(slot);
    }
  }

  void orphan_all() {
    for (Slot slot = parts.end(); slot-- > 0;) {
      const bool divided = !parts.is_part(slot) && parts.set_size(slot);
      if (records_[slot].kind == SlotRecord::TAKEN && !divided) orphan(slot, false);
    }
  }

  // For a mutant only.
  void free_at_once(Slot slot) {
    used_ -= records_[slot].users > 0;
    records_[slot].users = 0;
    --orphans;
    free_again(slot);
  }

  SlotParts parts;
  Slot orphans = 0;
  Slot retired = 0;  // slots with at least one retired part

 private:
  void mark_taken(Slot slot) {
    records_[slot].kind = SlotRecord::TAKEN;
    records_[slot].row = kNoRow;
  }

  void free_again(Slot slot) {
    records_[slot].kind = SlotRecord::FREE;
    if (parts.is_part(slot)) {
      if (!parts.give(slot)) return;
      slot = parts.row(slot);
      records_[slot].kind = SlotRecord::FREE;
    }
    ++free_;
    again_.push_back(slot);
  }

  SlotRecords records_;
  std::vector<Slot> again_;  // slots that were taken before and are free again
  Slot next_ = 0;            // the first slot that was never taken
  Slot free_;
  Slot used_ = 0;  // slots with users
};

// A session as stored on disk; the generations of all sessions' chunks follow (`pool/format.py`).
#pragma pack(push, 1)
struct SavedSession {
  uint64_t id;
  uint32_t client;
  uint32_t until;
  uint32_t chunks;
  uint8_t priority;
};
#pragma pack(pop)
static_assert(sizeof(SavedSession) == 21);

// The chunks that requests ask to retain, by session. A session retains chunks until it expires or
// is dropped. A chunk is retained until the last of its sessions ends.
//
// A client is a number that stands for a salt, or 0 if unknown. The salt is part of every key, so a
// chunk has only one client. If a client has reached its limit, its lower-priority sessions lose
// their last chunks to make room.
//
// A session that expires at second s is in `wheel_[s % kWheel]`: each second examines one list.
class Sessions {
 public:
  // The maximum number of references that a client may have for each chunk that it may retain; all
  // clients together may have twice as many as that. Sessions without chunks are closed, so this
  // bounds sessions too.
  static constexpr size_t kReferencesPerChunk = 8;

  // chunks_max: the maximum number of chunks that one client may retain; 0 turns retention off.
  Sessions(const Index& index, Row rows, size_t chunks_max)
      : index_(&index), rows_(rows), chunks_max_(chunks_max), named_(kNames), wheel_(kWheel) {}

  size_t size() const { return count_; }
  size_t chunks() const { return chunks_; }
  bool retains(Row row) const { return chunks_ && rows_[row].sessions; }
  uint32_t client_of(Row row) const { return rows_[row].client; }
  // Record the client of the row's chunk. A retained chunk keeps its client, because it counts
  // towards that client's limit.
  void set_client(Row row, uint32_t client) {
    if (client && !rows_[row].sessions) rows_[row].client = client;
  }

  // Return the session's number after starting or extending it, or kNone if retention is off.
  uint32_t open(uint64_t id, uint32_t client, uint32_t until, uint8_t priority) {
    uint32_t one = find(id);
    if (one != kNone) {
      unlink(one);
    } else {
      if (!chunks_max_) return kNone;
      ++count_;
      one = taken(sessions_, free_, &Session::last);
      sessions_[one] = {};
      sessions_[one].id = id;
      sessions_[one].client = client;
      insert(named_[id % kNames], one, &Session::named);
    }
    sessions_[one].until = until;
    sessions_[one].priority = priority;
    link(one);
    return one;
  }

  // End a session, so that `due` returns it. Returns false if no session has this id.
  bool drop(uint64_t id) {
    const uint32_t one = find(id);
    if (one == kNone) return false;
    unlink(one);
    sessions_[one].until = now_;
    link(one);
    return true;
  }

  uint32_t due(uint32_t now) {
    now_ = std::max(now_, now);
    if (mutant("a_session_never_expires")) return kNone;
    if (now_ > next_ + kWheel) next_ = now_ - kWheel;
    for (; next_ <= now_; ++next_)
      for (uint32_t one = wheel_[next_ % kWheel]; one != 0; one = sessions_[one - 1].due.next)
        if (sessions_[one - 1].until <= now_) return one - 1;
    return kNone;
  }

  // Return the lowest-priority session of the same client, or kNone if none is below this one.
  uint32_t below(uint32_t one) const {
    const Session& session = sessions_[one];
    const auto found = ranked_.lower_bound(uint64_t{session.client} << 8);
    return found != ranked_.end() && found->first < rank(session) ? found->second - 1 : kNone;
  }

  // Mark the chunks of a session, or remove the marks. References to evicted chunks are removed.
  void mark(uint32_t one, bool marked) {
    uint32_t* at = &sessions_[one].last;
    while (*at != kNone) {
      Reference& reference = references_[*at];
      if (holds(reference)) {
        rows_[reference.row].marked = marked;
        at = &reference.next;
      } else {
        const uint32_t next = reference.next;
        give(*at, one);
        *at = next;
      }
    }
  }

  // Return whether retaining the row would exceed the limit of the session's client.
  bool lacks_room(uint32_t one, Row row) const {
    if (rows_[row].sessions) return false;
    const auto found = by_client_.find(sessions_[one].client);
    return found != by_client_.end() && found->second.chunks >= chunks_max_;
  }

  // Add a chunk to a session whose chunks are marked. Returns whether the chunk is newly retained.
  bool add(uint32_t one, Row row) {
    Retained& retained = rows_[row];
    const uint32_t client = sessions_[one].client;
    const size_t most = kReferencesPerChunk * chunks_max_;
    if (retained.marked || used_ >= 2 * most) return false;
    Owned& owned = by_client_[client];
    if (owned.references >= most) return false;
    const bool is_new = !retained.sessions;
    if (is_new) {
      retained.client = client;
      ++owned.chunks;
      ++chunks_;
    }
    ++retained.sessions;
    retained.marked = true;
    ++owned.references;
    ++used_;
    const uint32_t at = taken(references_, free_references_, &Reference::next);
    const auto generation = static_cast<uint32_t>((*index_)[row].generation);
    references_[at] = {row, generation, sessions_[one].last};
    sessions_[one].last = at;
    return is_new;
  }

  bool is_empty(uint32_t one) const { return sessions_[one].last == kNone; }

  // Remove a session's last chunk. Returns the chunk's row if no session retains it now, or kNoRow.
  Row pop(uint32_t one) {
    const uint32_t at = sessions_[one].last;
    const Reference reference = references_[at];
    sessions_[one].last = reference.next;
    give(at, one);
    if (!holds(reference) || --rows_[reference.row].sessions) return kNoRow;
    uncount(reference.row);
    return reference.row;
  }

  void close(uint32_t one) {
    unlink(one);
    if (const auto owned = by_client_.find(sessions_[one].client);
        owned != by_client_.end() && !owned->second.references && !owned->second.chunks)
      by_client_.erase(owned);
    remove(named_[sessions_[one].id % kNames], one, &Session::named);
    --count_;
    sessions_[one].last = std::exchange(free_, one);
  }

  void forget(Row row) {
    if (retains(row)) {
      rows_[row].sessions = 0;
      uncount(row);
    }
    if (rows_[row].client) rows_[row].client = 0;
  }

  // Append the sessions that have not ended, and the generations of their chunks in the same order.
  void save(std::vector<SavedSession>& sessions, std::vector<uint64_t>& generations) const {
    for (size_t name = 0; name < kNames; ++name)
      for (uint32_t one = named_[name]; one != 0; one = sessions_[one - 1].named.next) {
        const Session& session = sessions_[one - 1];
        if (session.until <= now_) continue;
        const size_t before = generations.size();
        for (uint32_t at = session.last; at != kNone; at = references_[at].next)
          if (holds(references_[at]))
            generations.push_back((*index_)[references_[at].row].generation);
        std::reverse(generations.begin() + static_cast<ptrdiff_t>(before), generations.end());
        const auto chunks = static_cast<uint32_t>(generations.size() - before);
        sessions.push_back({session.id, session.client, session.until, chunks, session.priority});
      }
  }

  void clear() {
    const uint32_t now = now_;
    *this = Sessions(*index_, static_cast<Row>(rows_.size()), chunks_max_);
    now_ = next_ = now;
  }

 private:
  static constexpr uint32_t kWheel = 4096, kNames = 1U << 17;

  struct Retained {
    uint32_t sessions : 31 = 0;
    uint32_t marked : 1 = 0;
    uint32_t client = 0;
  };
  struct Owned {  // what one client retains
    size_t chunks = 0, references = 0;
  };
  struct Reference {  // valid while the row is still the entry of this generation
    Row row = kNoRow;
    uint32_t generation = 0;  // its low half
    uint32_t next = kNone;    // the session's reference before this one, or kNone
  };
  struct Links {  // session numbers + 1, or 0
    uint32_t previous = 0, next = 0;
  };
  struct Session {
    uint64_t id = 0;
    uint32_t client = 0;
    uint32_t until = 0;
    uint32_t last = kNone;  // the last chunk's reference; in a free session, the next free one
    uint8_t priority = 0;
    Links due, ranked, named;
  };

  static uint64_t rank(const Session& one) { return uint64_t{one.client} << 8 | one.priority; }
  bool holds(const Reference& one) const {
    const Entry& entry = (*index_)[one.row];
    const bool same = static_cast<uint32_t>(entry.generation) == one.generation;
    return same && entry.state != State::ABSENT && rows_[one.row].sessions;
  }

  uint32_t find(uint64_t id) const {
    for (uint32_t one = named_[id % kNames]; one != 0; one = sessions_[one - 1].named.next)
      if (sessions_[one - 1].id == id) return one - 1;
    return kNone;
  }

  void uncount(Row row) {
    --by_client_[rows_[row].client].chunks;
    --chunks_;
  }

  // Return the first free item, or a new one. next: the member that links free items.
  template <typename Items, typename Item>
  static uint32_t taken(Items& items, uint32_t& free, uint32_t Item::* next) {
    if (free != kNone) return std::exchange(free, items[free].*next);
    items.emplace_back();
    return static_cast<uint32_t>(items.size() - 1);
  }
  void give(uint32_t at, uint32_t one) {
    --used_;
    --by_client_[sessions_[one].client].references;
    references_[at].next = std::exchange(free_references_, at);
  }

  void insert(uint32_t& head, uint32_t one, Links Session::* links) {
    (sessions_[one].*links) = {0, head};
    if (head != 0) (sessions_[head - 1].*links).previous = one + 1;
    head = one + 1;
  }
  void remove(uint32_t& head, uint32_t one, Links Session::* links) {
    const Links own = sessions_[one].*links;
    if (own.next != 0) (sessions_[own.next - 1].*links).previous = own.previous;
    (own.previous != 0 ? (sessions_[own.previous - 1].*links).next : head) = own.next;
  }
  void link(uint32_t one) {
    Session& session = sessions_[one];
    session.until = std::max(session.until, now_);
    next_ = std::min(next_, session.until);
    insert(wheel_[session.until % kWheel], one, &Session::due);
    insert(ranked_[rank(session)], one, &Session::ranked);
  }
  void unlink(uint32_t one) {
    const Session& session = sessions_[one];
    remove(wheel_[session.until % kWheel], one, &Session::due);
    const auto found = ranked_.find(rank(session));
    remove(found->second, one, &Session::ranked);
    if (found->second == 0) ranked_.erase(found);
  }

  const Index* index_;
  HugeColumn<Retained> rows_;
  size_t chunks_max_;
  size_t chunks_ = 0;  // retained chunks
  std::deque<Session> sessions_;
  size_t count_ = 0;  // sessions that are not free
  uint32_t free_ = kNone;
  std::unordered_map<uint32_t, Owned> by_client_;
  std::deque<Reference> references_;
  uint32_t free_references_ = kNone;
  size_t used_ = 0;             // references
  HugeColumn<uint32_t> named_;  // the first session's number + 1, by the low bits of the id
  HugeColumn<uint32_t> wheel_;
  std::map<uint64_t, uint32_t> ranked_;  // the first session's number + 1, by client and priority
  uint32_t now_ = 0, next_ = 0;          // the current second, and the first one not finished
};

// Counts of the slots that `Keeping` keeps: at most `client_max` per client, and twice as many in
// total.
struct KeptSlots {
  size_t client_max = 0, all = 0;
  std::unordered_map<uint32_t, size_t> by_client;
};

// An order that evicts retained chunks only if nothing else is left, least recently used first.
class Keeping final : public Order {
 public:
  Keeping(std::unique_ptr<Order> rest, const SlotRecords& slots, const Sessions& sessions,
          KeptSlots& counts)
      : rest_(std::move(rest)), kept_(slots), slots_(slots), sessions_(sessions), counts_(counts) {}

  void admit(Slot slot) override {
    const bool is_new = !keeps(slot);
    if (is_new && !may_keep(slot)) {
      rest_->admit(slot);
      return;
    }
    if (is_new) {
      ++counts_.by_client[client_of(slot)];
      ++counts_.all;
    }
    kept_.admit(slot);
  }
  void withdraw(Slot slot) override {
    if (!keeps(slot)) {
      rest_->withdraw(slot);
      return;
    }
    const auto found = counts_.by_client.find(client_of(slot));
    if (--found->second == 0) counts_.by_client.erase(found);
    --counts_.all;
    kept_.withdraw(slot);
  }
  void touch(Slot slot) override { rest_->touch(slot); }  // `kept_` needs no call
  Slot peek() override {
    const Slot slot = rest_->peek();
    return slot == kNone ? kept_.peek() : slot;
  }
  Slot victim() override {
    const Slot slot = rest_->victim();
    return slot == kNone && kept_.size() ? Order::victim() : slot;
  }
  bool contains(Slot slot) const override { return keeps(slot) || rest_->contains(slot); }
  size_t size() const override { return rest_->size() + kept_.size(); }
  void warm(Slot slot) const override { rest_->warm(slot); }
  Slot later(size_t count) const override { return rest_->later(count); }

 private:
  bool keeps(Slot slot) const { return kept_.size() && kept_.contains(slot); }
  bool may_keep(Slot slot) {
    const Row row = slots_[slot].row;
    if (row == kNoRow || !sessions_.retains(row) || rest_->contains(slot)) return false;
    if (mutant("retained_chunks_are_evicted_like_others")) return false;
    if (mutant("a_client_retains_all_that_it_wants")) return true;
    const auto found = counts_.by_client.find(client_of(slot));
    const size_t own = found == counts_.by_client.end() ? 0 : found->second;
    return own < counts_.client_max && counts_.all < 2 * counts_.client_max;
  }
  uint32_t client_of(Slot slot) const { return sessions_.client_of(slots_[slot].row); }

  std::unique_ptr<Order> rest_;
  Lru kept_;
  const SlotRecords& slots_;
  const Sessions& sessions_;
  KeptSlots& counts_;
};

// Evict chunks until `wanted` is free, in a tier whose slots may be divided. For a part, evict the
// coldest suitable one of the first few victims or, if there is none, all parts of the coldest row
// whose chunks can all be evicted. Returns false if nothing was evicted. may: whether a slot's
// chunk can be evicted. evict: evicts it.
template <typename May, typename Evict>
bool make_room(const Slots& slots, Order& order, const Part& wanted, May may, Evict evict) {
  constexpr size_t kVictimsPerMember = 4, kRowsMax = 256;  // limits on the search
  const size_t window = wanted.whole() ? 1 : kVictimsPerMember * wanted.set_size;
  std::vector<Slot> passed;  // unsuitable victims
  const auto free_row = [&](Slot victim) {
    const Slot row = slots.parts.row(victim);
    std::vector<Slot> parts;
    for (uint64_t left = slots.parts.taken(row); left != 0; left &= left - 1)
      parts.push_back(slots.parts.part(row, static_cast<uint32_t>(std::countr_zero(left))));
    const bool all = std::ranges::all_of(parts, [&](Slot part) {
      return may(part) || std::ranges::find(passed, part) != passed.end();
    });
    if (all) std::ranges::for_each(parts, evict);
    return all;
  };
  bool made = false;
  for (size_t rows = 0; !made && rows < kRowsMax;) {
    const Slot victim = passed.size() - rows < window ? order.victim() : kNone;
    if (victim != kNone && slots.suits(victim, wanted)) {
      evict(victim);
      made = true;
    } else if (victim != kNone) {
      passed.push_back(victim);
    } else if (rows < passed.size()) {
      made = free_row(passed[rows++]);
    } else {
      break;
    }
  }
  for (const Slot slot : passed)
    if (slots[slot].row != kNoRow) order.admit(slot);
  return made;
}

}  // namespace nvmeof
