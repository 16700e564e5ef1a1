// SPDX-License-Identifier: Apache-2.0
// The foreign table as the manager sees it: which of its rows may be borrowed now, and whose
// regions the workers were told to open. What it accepts is still a hint, which the slot proves.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tiers/foreign_table.h"

namespace nvmeof {

// An owner whose regions are to be opened.
struct Attachment {
  uint32_t owner;
  OwnerRecord record;
};

class Foreign : public ForeignReader {
 public:
  // It accepts nobody before it has a tag.
  explicit Foreign(int fd) : ForeignReader(fd) {}
  // From now on it is this time, instead of that of the monotonic clock: for tests.
  void set_time(double now_s) { set_now_s_ = now_s; }

  // -- acceptance -------------------------------------------------------------------
  // tag: of the weights that compute here; zeros: they have no name, and nobody is accepted.
  void set_tag(const std::array<uint8_t, kTagBytes>& tag);
  // The weights are others, and a reset follows: what owners with this tag have was never offered,
  // so all of it is.
  void change_tag(const std::array<uint8_t, kTagBytes>& tag);
  // Its chunks are of our weights, were written after our last reset, and can be expected to come.
  bool accepts(uint32_t number) const;
  bool accepts(const ForeignRow& row) const {
    return accepts(owner_of(row.place)) && !is_refused(row);
  }
  // Everything known so far is void, here and with the follower.
  void reset();
  // It could not be read from there: for a while the row is not accepted.
  void refuse(const ForeignRow& row);
  // A borrow has ended. An owner of whose chunks many fail is not accepted for a while.
  void ended(const ForeignRow& row, bool ok);
  // A process holds the owner's directory: it keeps what it has by its own policy.
  bool lives(uint32_t number) const { return owner(number).state == OwnerState::COMPLETE; }

  // -- hints ------------------------------------------------------------------------
  // What living owners are to know now of their chunks that were borrowed at least twice: places
  // with their owners, and how often since the last hint. At most 64 a second of each owner, on
  // average; a chunk of which too many others were borrowed meanwhile is forgotten.
  std::vector<Hint> take_due_hints();

  // -- attachments ------------------------------------------------------------------
  // A command is to name places of this owner, which has just been accepted.
  void use(uint32_t number);
  // Commands name owners, or have named them: there may be something to attach or to detach.
  bool is_used() const { return !attached_.empty(); }
  // The owners that commands name and whose regions no worker has been sent.
  std::vector<Attachment> take_attachments();
  // The owners that are attached, and gone or others by now.
  std::vector<uint32_t> take_detachments();
  // On some rank: the owner is not accepted until its record changes.
  void attach_failed(uint32_t number);
  // It is to be attached again before it is used again. False: it is not attached.
  bool detach(uint32_t number) { return attached_.erase(number) > 0; }

 private:
  struct Distrust {
    double until_s = 0;
    bool attach_failed = false;
    OwnerRecord record;  // with which the attach failed
  };
  struct Trial {
    uint32_t ended = 0, failed = 0;
  };
  struct Borrowed {
    ForeignRow row;
    uint32_t times = 0;  // since the last hint
    bool again = false;  // it was borrowed at least twice
    bool due = false;    // it is in its owner's `Due`
  };
  struct Due {
    std::deque<ForeignRow> rows;
    uint32_t sent = 0;  // in the second that began then
    double since_s = 0;
  };
  struct HashRow {
    size_t operator()(const ForeignRow& row) const {
      // Neighbouring slots often have neighbouring generations: no sum or difference of both.
      const uint64_t mixed = static_cast<uint64_t>(row.place) * 0x9e3779b97f4a7c15;
      return static_cast<size_t>((mixed + row.generation) * 0xbf58476d1ce4e5b9);
    }
  };

  double now_s() const;
  bool is_refused(const ForeignRow& row) const;
  void count(const ForeignRow& row);
  // Where this row is counted, or the one that was there before.
  Borrowed& borrowed(const ForeignRow& row) {
    return borrowed_[HashRow()(row) >> (64 - kBorrowedBits)];
  }

  std::optional<double> set_now_s_;
  std::array<uint8_t, kTagBytes> tag_{};
  Since since_ = Since::NOW;  // for the next reset
  uint64_t floor_ = 0;        // an owner's rows of before this version are void
  std::unordered_map<ForeignRow, double, HashRow> refused_;  // until when
  std::deque<ForeignRow> refusals_;                          // the oldest first
  std::unordered_map<uint32_t, Distrust> distrusted_;
  std::unordered_map<uint32_t, Trial> trials_;
  std::unordered_map<uint32_t, OwnerRecord> attached_;  // as they were then
  std::vector<uint32_t> unsent_;                        // of these
  // By hash; a row takes the place of another one. Empty until something is borrowed.
  static constexpr int kBorrowedBits = 17;
  std::vector<Borrowed> borrowed_;
  std::unordered_map<uint32_t, Due> due_;  // by owner
};

}  // namespace nvmeof
