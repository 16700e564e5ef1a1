// SPDX-License-Identifier: Apache-2.0
// The last known table of another engine's region, and its chunks in the foreign table. A scan
// reads the whole table and decodes the entries whose first 16 bytes changed: a rewritten slot has
// a new checksum and generation. A region with a log is scanned once, and then followed through its
// log records: a PUT replaces the slot's entry, as if a scan had found the new one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/columns.h"
#include "common/op.h"
#include "lanes/log.h"
#include "tiers/foreign_table.h"

namespace nvmeof {

class ForeignRegion {
 public:
  struct Group {
    uint32_t id;
    uint32_t set_size;  // ranks that share single copies; if 1, single copies are not offered
  };
  // owner: the engine's number. target: our target that holds the region. rank: the rank that
  // writes it.
  struct Home {
    uint32_t owner, target, rank;
  };

  // young_ns: the delay between seeing an entry and offering it.
  ForeignRegion(Home home, uint64_t slots, std::vector<Group> groups, int64_t young_ns);

  // Withdraw all entries offered so far, and from then on offer only entries from this epoch.
  // from_now: offer only those written after the next scan, even if the epoch changes.
  void begin(ForeignWriter& table, uint32_t epoch, bool from_now);
  // Read the table file `fd` and offer its entries; entries missing at its end count as empty.
  // Returns an errno, or 0. log_is_ahead: whether slots that the log named since the previous scan
  // keep the log's entries, which may not be in the table yet.
  int scan(ForeignWriter& table, int fd, int64_t now_ns, bool log_is_ahead);
  // Find the end of a log of this many pages, before a scan and `follow_log`. Returns an errno, or
  // 0.
  int seek_log(int fd, uint32_t pages);
  // Apply the records logged since the last call. Returns 0, an errno, or the reason for a scan.
  static constexpr int kOverrun = -1;  // the log was overwritten or is damaged
  static constexpr int kReset = -2;    // a superblock with another epoch was written
  int follow_log(ForeignWriter& table, int fd, int64_t now_ns);
  // Return whether `follow_log` may find something or the file was removed. This costs much less
  // than `follow_log`, but works only on a file that is open without O_DIRECT.
  bool may_have_news(int fd) const;
  // Offer entries that are old enough now. A scan does this at its end.
  void ripen(ForeignWriter& table, int64_t now_ns);
  uint64_t rows() const { return rows_; }

 private:
  struct Head {
    uint32_t crc = 0, epoch = 0;
    uint64_t generation = 0;
    bool operator==(const Head&) const = default;
  };
  // An entry seen for the first time. Its fingerprint is 0 if it must not be offered.
  struct Seen {
    int64_t at_ns;
    uint64_t slot;
    Head head;
    uint64_t fingerprint;
    bool single_copy;
  };
  // kBefore: the entry already existed when only later entries were requested. kLogged: the entry
  // came from the log, and no scan has confirmed it yet.
  static constexpr uint8_t kSingleCopy = 1, kBefore = 2, kLogged = 4;

  Seen decode(const TableEntry& entry, uint64_t slot, int64_t now_ns) const;
  int take_page(ForeignWriter& table, const std::byte* page, int64_t now_ns);
  int read_records(const std::byte* page, uint32_t records, int64_t now_ns);
  int read_record(const LogRecord& record, int64_t now_ns);
  void compare(ForeignWriter& table, uint64_t first, size_t count, int64_t now_ns,
               bool log_is_ahead);
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
  // The next three are by slot. A fingerprint is nonzero while the slot's chunk is offered.
  HugeColumn<Head> heads_;
  HugeColumn<uint64_t> fingerprints_;
  std::vector<uint8_t> marks_;
  uint32_t log_pages_ = 0;
  uint64_t log_sequence_ = 0;  // the sequence of the page that is read next
  uint32_t log_index_ = 0;     // the index of the next record in that page
  unsigned log_reads_ = 0;     // reads that found this position damaged
  // Both buffers consist of whole pages, as O_DIRECT requires.
  PageVector<std::byte> log_buffer_;
  PageVector<std::byte> buffer_;
  std::vector<Seen> changed_;
  std::vector<Seen> young_;  // entries that are not offered yet, oldest first
};

}  // namespace nvmeof
