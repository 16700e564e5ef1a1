// SPDX-License-Identifier: Apache-2.0
// What the table of one region of another engine had when it was last read, and which of its
// chunks are in the foreign table. A scan reads the whole table and compares the first 16 bytes of
// each entry with those of the scan before: a slot that was written again has another checksum and
// another generation. Only what differs is decoded.
//
// A region with a log is scanned once, and then followed by the log's records: a PUT replaces what
// its slot had, as if a scan had found the same entry.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/huge_pages.h"
#include "lanes/log.h"
#include "tiers/foreign_table.h"
#include "tiers/place.h"

namespace nvmeof {

class ForeignRegion {
 public:
  struct Group {
    uint32_t id;
    uint32_t set_size;  // ranks that share single copies; 1: single copies are not offered
  };
  // The owner's number, our target where the region is, the owner's rank that writes it.
  struct Home {
    uint32_t owner, target, rank;
  };

  // slots: of the region. young_ns: an entry is offered so long after it was first seen.
  ForeignRegion(Home home, uint64_t slots, std::vector<Group> groups, int64_t young_ns);

  // Offer nothing of what was offered; from now on offer entries with this epoch. from_now: only
  // what is written after the next scan, whichever epochs follow.
  void begin(ForeignWriter& table, uint32_t epoch, bool from_now);
  // Read the table, of which fd is a file, and offer what it has. Returns an errno; 0: it was read
  // to its end. What is cut off counts as empty. log_is_ahead: a slot that the log has named since
  // the scan before stays as the log says, because the table may not have its entry yet.
  int scan(ForeignWriter& table, int fd, int64_t now_ns, bool log_is_ahead);
  // Find where the log goes on, of which fd is a file with so many pages: call it before a scan,
  // and `follow_log` after that. Returns an errno; 0: found.
  int seek_log(int fd, uint32_t pages);
  // Take in what was logged since. Returns an errno, or why the log does not lead on: what is known
  // stays, and has to be found again by a scan.
  static constexpr int kOverrun = -1;  // it has been written over, or is damaged
  static constexpr int kReset = -2;    // a superblock with another epoch was written
  int follow_log(ForeignWriter& table, int fd, int64_t now_ns);
  // False: `follow_log` would find nothing, nor was the file removed. Costs a fraction of that. Not
  // for a file that is open for O_DIRECT.
  bool may_have_news(int fd) const;
  // Regions of ours: uuid, target and rank. Hints in the log that name one of them are handed on.
  struct Ours {
    std::array<uint8_t, 16> uuid;
    uint32_t target;
  };
  void set_ours(std::vector<Ours> ours) { ours_ = std::move(ours); }
  // Offer what was too young. A scan ends with it.
  void ripen(ForeignWriter& table, int64_t now_ns);
  // The chunks that are offered.
  uint64_t rows() const { return rows_; }

 private:
  // Where an entry begins.
  struct Head {
    uint32_t crc = 0, epoch = 0;
    uint64_t generation = 0;
    bool operator==(const Head&) const = default;
  };
  // An entry that was seen for the first time. fingerprint: 0: it is not to be offered.
  struct Seen {
    int64_t at_ns;
    uint64_t slot;
    Head head;
    uint64_t fingerprint;
    bool single_copy;
  };
  // Of `marks_`. BEFORE: the entry was there when only later ones were asked for. LOGGED: the entry
  // is from the log, and no scan has ended since.
  static constexpr uint8_t kSingleCopy = 1, kBefore = 2, kLogged = 4;

  Seen decode(const std::byte* entry, uint64_t slot, int64_t now_ns) const;
  int take_page(ForeignWriter& table, const std::byte* page, int64_t now_ns);
  int read_records(ForeignWriter& table, const std::byte* page, uint32_t records, int64_t now_ns);
  int read_record(ForeignWriter& table, const LogRecord& record, int64_t now_ns);
  void take_hint(ForeignWriter& table, const LogRecord& record);
  void compare(ForeignWriter& table, uint64_t first, size_t count, int64_t now_ns,
               bool log_is_ahead);
  // mark: of what is taken; kLogged or 0.
  void take_changed(ForeignWriter& table, uint8_t mark);
  void take(ForeignWriter& table, const Seen& seen, uint8_t mark);
  void offer(ForeignWriter& table, const Seen& seen);
  void withdraw(ForeignWriter& table, uint64_t slot);
  Place place_of_row(uint64_t slot) const;

  const Home home_;
  const std::vector<Group> groups_;
  const int64_t young_ns_;
  uint32_t epoch_ = 0;
  bool from_now_ = false;
  uint64_t rows_ = 0;
  // By slot. A fingerprint is not 0 while the chunk is offered.
  HugeColumn<Head> heads_;
  HugeColumn<uint64_t> fingerprints_;
  std::vector<uint8_t> marks_;
  std::vector<Ours> ours_;
  uint32_t log_pages_ = 0;
  uint64_t log_sequence_ = 0;  // of the page that comes next, or is under way
  uint32_t log_index_ = 0;     // of the record there
  unsigned log_reads_ = 0;     // of the same position, which was not intact
  // Whole pages, as O_DIRECT requires.
  PageVector<std::byte> log_buffer_;
  PageVector<std::byte> buffer_;
  std::vector<Seen> changed_;
  std::vector<Seen> young_;  // the oldest first
};

}  // namespace nvmeof
