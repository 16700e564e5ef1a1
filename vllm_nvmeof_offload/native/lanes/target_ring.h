// SPDX-License-Identifier: Apache-2.0
// One target: the thread that drives its ring (`ring.h`), and the thread that writes its table.
//
// Operations start immediately and in order, because the caller enforces the bounds. Only reads
// beyond `read_bytes_started_max` wait here, so that after a burst of completions the device gets
// more work before the caller wakes up. The ring's thread seals a write before issuing its first
// piece. It checks each piece of a read soon after arrival, while the piece may be in the CPU
// cache, but gives the device more work first. A second thread writes table entries, because a
// buffered `pwrite` may wait for a journal. The same thread then writes the log, and syncs a table
// that other hosts read; no operation waits for the log or the sync.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <unordered_map>
#include <utility>

#include "lanes/log.h"
#include "lanes/ring.h"
#include "lanes/types.h"

namespace nvmeof {

// Syncs a table to the device for readers on other hosts, at most once a second and only after
// writes: a 64-byte entry may otherwise stay in this kernel's page cache. Until the sync, readers
// find the entries in the log, which bypasses the page cache.
class TableSync {
 public:
  static constexpr std::chrono::seconds kPeriod{1};

  // fd: from `copy_of_fd`, because the pool may close its own descriptor before a sync; -1 to never
  // sync.
  explicit TableSync(int fd) : fd_(fd) {}
  ~TableSync() { close_file(); }
  TableSync(const TableSync&) = delete;
  TableSync& operator=(const TableSync&) = delete;

  bool is_waiting() const { return waits_; }
  Clock::time_point due() const { return due_; }

  void wrote() {
    if (fd_ >= 0 && !std::exchange(waits_, true)) postpone();
  }
  void postpone() { due_ = Clock::now() + kPeriod; }
  // Sync now; may block. An error is kept for `take_error`, and the next sync tries again.
  void sync() {
    if (fdatasync(fd_) == 0) {
      waits_ = false;
    } else {
      error_ = errno;
      postpone();
    }
  }
  // Return the errno of a sync that failed since the last call, or 0. The next write fails with it,
  // because the writes of the affected entries have already ended.
  int take_error() { return std::exchange(error_, 0); }
  // Continue in another file (from `copy_of_fd`).
  void replace(int fd) {
    close_file();
    fd_ = fd;
    waits_ = false;
    error_ = 0;
  }

 private:
  void close_file() {
    if (fd_ >= 0) close(fd_);
  }

  int fd_;
  int error_ = 0;
  bool waits_ = false;
  Clock::time_point due_;
};

struct EngineSetup {
  std::vector<Target> targets;
  std::vector<Region> regions;                       // by target
  std::vector<Permit> permits;                       // by target; empty if there are no leases
  std::vector<LogStart> logs;                        // by target; empty if there are no logs
  std::vector<std::pair<uint32_t, uint8_t>> groups;  // id and kind of each group
  Limits limits;
  // All staging memory, registered so that the kernel need not pin its pages for each operation.
  std::span<std::byte> memory;
  bool registered = true;
  size_t threads = 0;               // threads per target; 0 for io_uring
  size_t operations_max = 0;        // over all targets
  std::vector<int> cpus;            // CPUs on which threads may run; empty for the caller's
  std::shared_ptr<StartGate> gate;  // null except in tests
};

// Name the calling thread, block all signals in it, and restrict it to `EngineSetup::cpus`.
void enter_thread(const char* name, const std::vector<int>& cpus);

class TargetRing {
 public:
  ~TargetRing();

  // Start both threads of target `index`, which keep the object alive. Throws RingError.
  static std::shared_ptr<TargetRing> start(const EngineSetup& setup, size_t index,
                                           std::shared_ptr<CompletionQueue> completions,
                                           std::unique_ptr<Ring> ring);

  void submit(const LaneOp& request);
  void kick();
  // Use these files for later operations. Earlier operations still need the previous files.
  void replace(Target target);
  // Use these files for later reads of this engine's slots. They must outlive those reads.
  void attach(uint16_t owner, const ForeignSlab& files);
  void detach(uint16_t owner);
  // Cancel an operation. Returns false if it is unknown, or keeps running but gets no table entry.
  bool cancel(uint64_t token);
  void note(const LogRecord& record);
  // Cancel operations that have not started. The threads end once the others have completed.
  void close();
  bool wait_ended(std::chrono::nanoseconds timeout);

  size_t held() const { return held_.load(); }

 private:
  // The table thread's files (from `copy_of_fd`). They stay open longer than operations' files.
  struct TableFiles {
    int table_fd = -1;  // to be synced
    int log_fd = -1;
  };
  struct Op {
    LaneOp request;
    Target target;  // the files and the region at the time of submission
    Region region;
    uint64_t offset = 0;
    size_t bytes = 0;  // header page and payload, in whole pages
    size_t piece_bytes = 0;
    size_t counted_bytes = 0;  // this operation's share of `read_bytes_started_`
    bool started = false;
    bool wanted = true;  // false if it was cancelled after it started
    unsigned pieces_in_flight = 0;
    unsigned unchecked = 0;  // pieces of a read that have arrived but are not in `crc` yet
    uint32_t crc = 0;        // CRC of the payload without the unchecked pieces
    HeaderProof header;      // valid after the first piece was checked
    bool sealed = false;
    bool failed = false;
    int error = 0;  // after a failure: the errno, or 0 if a transfer made no progress
  };
  struct Piece {
    Op* op;
    size_t begin, bytes, done;
    unsigned retries;
  };
  TargetRing(const EngineSetup& setup, size_t index, std::shared_ptr<CompletionQueue> completions);
  // Set by the ring's thread when it knows whether the kernel allows it to use the ring.
  struct Started {
    std::atomic<bool> known{false};
    std::exception_ptr failure;
  };
  void run(std::unique_ptr<Ring> ring, const std::shared_ptr<Started>& started);
  void loop(Ring& ring);
  void run_table();
  bool has_table_work() const;
  void await_table_work(std::unique_lock<std::mutex>& lock);
  void enter_front(std::unique_lock<std::mutex>& lock);
  int write_entry(int table_fd, const SlotPlace& place, const LaneOp& request);
  void sync_table(std::unique_lock<std::mutex>& lock);
  void log_notes(std::unique_lock<std::mutex>& lock);

  // Called with the mutex held.
  bool await_permit(std::unique_lock<std::mutex>& lock, const Op& op);
  bool start_waiting(std::vector<Piece*>& pieces);
  void start(Op& op, std::vector<Piece*>& pieces);
  bool read_may_start() const;
  void uncount(Op& op);
  Piece* new_piece(Op& op, size_t begin, size_t bytes);
  std::deque<Op*>& queue_of(const Op& op) { return op.request.is_read() ? reads_ : writes_; }
  void land(Piece* piece, int result);
  void release(Piece* piece);
  bool goes_on(Piece* piece, int result);
  void settle(Op& op);
  void finish(Op& op, Outcome code, int error = 0);

  // Called on the ring's thread.
  void report_landed();
  void issue(Ring& ring, const std::vector<Piece*>& pieces);
  bool check_one();
  void check(const Piece& piece);
  void seal_op(Op& op);
  SlotPlace place_of(const Op& op) const;
  uint8_t kind_of(const Op& op) const;

  const EngineSetup setup_;
  const Region region_;
  const Permit permit_;
  const std::shared_ptr<CompletionQueue> completions_;
  const int wake_fd_;
  std::atomic<bool> waking_{false};
  std::atomic<size_t> held_{0};  // operations

  std::mutex mutex_;
  std::condition_variable table_work_;
  std::condition_variable ended_;
  std::unordered_map<uint64_t, std::unique_ptr<Op>> ops_;
  std::deque<Op*> reads_, writes_;  // not started
  size_t read_bytes_started_ = 0;   // started but not completed by the device
  std::deque<Piece*> to_check_;
  std::deque<Op*> to_enter_;      // writes that need a table entry next
  std::vector<uint64_t> landed_;  // operations that the device has completed since the last report
  std::vector<Piece*> again_;
  std::vector<std::unique_ptr<Piece>> pieces_;  // all pieces, which are reused
  std::vector<Piece*> free_pieces_;
  std::vector<Piece*> gated_;
  std::vector<Piece*> abandoned_;      // pieces of cancelled operations, for `Ring::abandon`
  std::vector<LogRecord> notes_;       // for the log, from other threads
  std::vector<TableFiles> new_files_;  // in order; only the table's thread may block on them
  LogWriter log_;                      // only the table's thread uses it
  TableSync table_sync_;               // only the table's thread uses it
  Target target_;
  std::unordered_map<uint16_t, ForeignSlab> foreign_;  // by owner
  bool closing_ = false;
  unsigned threads_ = 2;
};

}  // namespace nvmeof
