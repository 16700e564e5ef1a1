// SPDX-License-Identifier: Apache-2.0
// The manager's view of the foreign table: the rows that may be read now, and the engines whose
// regions the workers must open. Even an accepted row is only a hint, which a read must verify.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tiers/foreign_table.h"

namespace nvmeof {

struct Attachment {
  uint32_t owner;
  OwnerRecord record;
};

class Foreign : public ForeignReader {
 public:
  // Accepts no engine before `set_tag`.
  explicit Foreign(int fd) : ForeignReader(fd) {}
  // For tests: use this time instead of the monotonic clock.
  void set_time(double now_s) { set_now_s_ = now_s; }

  // -- acceptance -------------------------------------------------------------------
  // tag: the tag of the weights in use here; if it is all zeros, no engine is accepted.
  void set_tag(const std::array<uint8_t, kTagBytes>& tag);
  // Set the tag of new weights, before a reset. After the reset, even the old chunks of engines
  // with this tag are offered, because none of these chunks was offered before.
  void change_tag(const std::array<uint8_t, kTagBytes>& tag);
  // Return whether the engine's chunks have our tag, postdate our reset, and can probably be read.
  bool accepts(uint32_t number) const;
  bool accepts(const ForeignRow& row) const {
    return accepts(owner_of(row.place)) && !is_refused(row);
  }
  // Discard everything learned so far, here and in the follower.
  void reset();
  // Ignore the row for a while, because it could not be read.
  void refuse(const ForeignRow& row);
  // Count a read that has ended. If many reads from an engine fail, the engine is ignored for a
  // while.
  void ended(const ForeignRow& row, bool ok);
  // Return whether a process holds the engine's directory and so manages its chunks.
  bool lives(uint32_t number) const { return owner(number).state == OwnerState::COMPLETE; }

  // -- attachments ------------------------------------------------------------------

  // Record that a command will name places in the pool of this engine, which has just been
  // accepted.
  void use(uint32_t number);
  bool is_used() const { return !attached_.empty(); }
  // Return the engines that commands name and that workers must still attach, each only once.
  std::vector<Attachment> take_attachments();
  // Return the attached engines that have since been removed or replaced.
  std::vector<uint32_t> take_detachments();
  // Ignore the engine until its record changes, because a rank failed to attach it.
  void attach_failed(uint32_t number);
  // Require a new attachment before the next use. Returns false if the engine was not attached.
  bool detach(uint32_t number) { return attached_.erase(number) > 0; }

 private:
  struct Distrust {
    double until_s = 0;
    bool attach_failed = false;
    OwnerRecord record;  // the record with which the attach failed
  };
  struct Trial {
    uint32_t ended = 0, failed = 0;
  };
  struct HashRow {
    size_t operator()(const ForeignRow& row) const {
      // Neighbouring slots often have neighbouring generations, so plain sums would collide.
      const uint64_t mixed = static_cast<uint64_t>(row.place) * 0x9e3779b97f4a7c15;
      return static_cast<size_t>((mixed + row.generation) * 0xbf58476d1ce4e5b9);
    }
  };

  double now_s() const;
  bool is_refused(const ForeignRow& row) const;

  std::optional<double> set_now_s_;
  std::array<uint8_t, kTagBytes> tag_{};
  Since since_ = Since::NOW;  // for the next reset
  uint64_t floor_ = 0;        // an engine's rows from before this version are void
  std::unordered_map<ForeignRow, double, HashRow> refused_;  // the time until which it is refused
  std::deque<ForeignRow> refusals_;                          // the rows of `refused_`, oldest first
  std::unordered_map<uint32_t, Distrust> distrusted_;
  std::unordered_map<uint32_t, Trial> trials_;
  std::unordered_map<uint32_t, OwnerRecord> attached_;  // each engine's record at its first use
  std::vector<uint32_t> unsent_;                        // engines not sent to workers yet
};

}  // namespace nvmeof
