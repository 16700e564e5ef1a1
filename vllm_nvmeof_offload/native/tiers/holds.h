// SPDX-License-Identifier: Apache-2.0
// Chunks that are kept in the CPU tier, or fetched into it, for waiting requests.
// manager/hold_and_prefetch.py chooses the requests, and limits the chunks held by each kind of
// request.
//
// A hold counts as a user of the chunk's cache slot, so it prevents eviction. All requests that
// want a chunk share one hold on it.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tiers/tiers.h"

namespace nvmeof {

// The reason for holding or fetching a chunk; see `Reason` in manager/hold_and_prefetch.py.
enum class Reason : uint8_t { RELOAD, QUEUE, PROBE };

class Holds {
 public:
  // The way in which a fetch ended: the metric's label `how`.
  enum class End : uint8_t { USED, WASTED, CANCELLED, FAILED, PROBE };
  static constexpr size_t kEnds = 5;

  struct Wanted {
    std::vector<bool> taken;                     // whether each chunk is held
    std::vector<std::pair<Row, uint64_t>> held;  // row, generation
  };
  struct Bounds {
    size_t held_max, fetching_max;
  };
  // A request's chunks from `next` to `end`. Those before `local` are in GPU memory.
  struct Range {
    size_t next, end, local;
  };
  // Chunks before `next` are done; if a load would end here, `next` is past all chunks. looks:
  // look-ups left. skipped: chunks not held because GPU memory has them; first > last if none.
  struct Advance {
    size_t next, looks;
    size_t skipped_first = SIZE_MAX, skipped_last = 0;
  };
  // A row of a cancelled fetch, which the caller must detach from its entry.
  using Cancel = std::pair<uint64_t, uint32_t>;  // op, index

  // room_min: the number of cache slots that holds must leave evictable.
  Holds(Tiers& tiers, size_t room_min) : tiers_(tiers), room_min_(room_min) {}

  // Hold and fetch chunks until the range, `looks` or the room is used up. keys: the request's.
  Advance advance(Wanted& wanted, Keys keys, Range range, size_t looks, Reason reason,
                  Bounds bounds);
  // Fetch a chunk that is only in a pool, as a measurement.
  void probe(const char* key);
  // Release everything that the request holds. Appends the fetches to cancel to `cancels`.
  void leave(Wanted& wanted, std::vector<Cancel>& cancels);
  void sent(uint64_t op, const Batch& batch);
  void used(const Batch& load);
  // Record that all ranks have reported on these rows of a fetch, and if `probe`, end their holds.
  void ended(uint64_t op, const Batch& batch, std::span<const uint32_t> rows, bool probe);
  // Record that the chunks of these rows of an op are no longer in their cache slots.
  void lost(const Batch& batch, std::span<const uint32_t> rows);
  // Release all holds, after every entry has been doomed and all unsent fetches have been dropped.
  void reset();

  std::vector<Row> rows() const;
  size_t held(Reason reason) const { return counts_[static_cast<size_t>(reason)]; }
  size_t fetching() const { return fetching_; }  // unfinished fetches that are still wanted

  std::array<uint64_t, kFetchReasons> begun{};  // fetches begun, by reason; the caller resets them
  std::array<uint64_t, kEnds> ends{};           // fetches ended, by `End`; reset likewise

 private:
  struct Held {
    uint64_t generation;
    Slot slot;
    Reason reason;
    bool fetched = false;
    bool fetching = false;  // whether its fetch has no outcome yet
    bool used = false;      // whether a load has used the chunk
    uint64_t op = 0;        // the op of its fetch, from when it is sent until its outcome
    uint32_t index = 0;     // the index of its row in `op`
    uint32_t wanters = 0;
  };
  using Map = std::unordered_map<Row, Held>;

  bool has_room() const { return tiers_.evictable() > room_min_; }
  bool take(Wanted& wanted, size_t chunk, const char* key, Source source, Reason reason,
            Bounds bounds);
  Held* of(Row row, uint64_t generation);
  Held* fetch(const char* key, Reason reason);
  Held& keep(Row row, Reason reason);
  Map::iterator release(Map::iterator found, End how);

  Tiers& tiers_;
  const size_t room_min_;
  Map held_;  // by the row of the entry
  std::array<size_t, kFetchReasons> counts_{};
  size_t fetching_ = 0;
};

}  // namespace nvmeof
