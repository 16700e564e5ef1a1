// SPDX-License-Identifier: Apache-2.0
// Chunks that are kept in the CPU tier, and fetched into it, for requests that wait.
// manager/hold_and_prefetch.py chooses the requests, and how much each kind of them may have.
//
// A held chunk has one more user of its cache slot, so it is not evicted. It is held once, however
// many requests want it, and until none of them does.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tiers/tiers.h"

namespace nvmeof {

// Why a chunk is held or fetched: `Reason` in manager/hold_and_prefetch.py.
enum class Reason : uint8_t { RELOAD, QUEUE, PROBE };

class Holds {
 public:
  // How a fetch ended: the label `how` of the metric.
  enum class End : uint8_t { USED, WASTED, CANCELLED, FAILED, PROBE };
  static constexpr size_t kEnds = 5;

  // What is held of one request's chunks.
  struct Wanted {
    std::vector<bool> taken;                     // by chunk
    std::vector<std::pair<Row, uint64_t>> held;  // row, generation
  };
  struct Bounds {
    size_t held_max, fetching_max;
  };
  // A request's chunks from `next` on; those before `local` are in GPU memory.
  struct Range {
    size_t next, end, local;
  };
  // next: the chunks before it are done; all of them, if a load ends here. skipped: the first chunk
  // that was passed over because GPU memory has it, and the last one; `first` > `last`: none was.
  struct Advance {
    size_t next, looks;
    size_t skipped_first = SIZE_MAX, skipped_last = 0;
  };
  // A row of a fetch whose entry is to be detached: its chunk does not come.
  using Cancel = std::pair<uint64_t, uint32_t>;  // op, index

  // room_min: cache slots that always stay evictable.
  Holds(Tiers& tiers, size_t room_min) : tiers_(tiers), room_min_(room_min) {}

  // Hold and fetch chunks for a request, until the range, the looks or the room is used up.
  // key: of a chunk.
  Advance advance(Wanted& wanted, const std::function<const char*(size_t)>& key, Range range,
                  size_t looks, Reason reason, Bounds bounds);
  // Read a chunk in the background that is only in a pool, to measure it.
  void probe(const char* key);
  // The request wants nothing any more. Appends what is cancelled.
  void leave(Wanted& wanted, std::vector<Cancel>& cancels);
  // These fetches go to the ranks as this op.
  void sent(uint64_t op, const Batch& batch);
  // A load takes these chunks, from their cache slots where they have one.
  void used(const Batch& load);
  // These rows of a fetch have their outcome on every rank.
  void ended(uint64_t op, const Batch& batch, std::span<const uint32_t> rows, bool probe);
  // The chunks of these rows of an op are not in their cache slots any more.
  void lost(const Batch& batch, std::span<const uint32_t> rows);
  // Every entry was doomed, and no fetch that was not sent will be.
  void reset();

  std::vector<Row> rows() const;
  size_t held(Reason reason) const { return counts_[static_cast<size_t>(reason)]; }
  size_t fetching() const { return fetching_; }  // fetches under way that are still wanted

  std::array<uint64_t, kFetchReasons> begun{};  // fetches, by reason; the caller takes them
  std::array<uint64_t, kEnds> ends{};           // by how they ended

 private:
  struct Held {
    uint64_t generation;
    Slot slot;
    Reason reason;
    bool fetched = false;
    bool fetching = false;  // it was fetched, and the fetch has no outcome
    bool used = false;      // a load has taken the chunk
    uint64_t op = 0;        // its fetch, from when that is sent until it has its outcome
    uint32_t index = 0;     // of its row in `op`
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
