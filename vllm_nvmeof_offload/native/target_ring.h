// SPDX-License-Identifier: Apache-2.0
// One target: its queues, the thread that drives its ring, and the thread that writes its table.
//
// An operation is cut into pieces. Demand reads go before prefetches, and those before writes;
// within a class first come, first served. While reads wait or run, few write bytes are in
// flight. Writes are sealed before their first piece and reads verified after their last, on
// the ring's thread, while the kernel has enough to do: devices complete in bursts, and after one
// nothing may stand between them and their next pieces. Table entries are written by a thread of their own, for a buffered
// `pwrite` may wait for a journal, and reads must not wait with it.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <queue>
#include <unordered_map>

#include "completions.h"
#include "ring.h"
#include "start_gate.h"
#include "types.h"

namespace nvmeof {

struct TargetSetup {
  Target target;
  PoolId pool;
  unsigned count = 1;  // of targets: pool slot p lies at p / count of its target's slab
  Limits limits;
  cpu_set_t cpus;  // where the threads may run
  std::shared_ptr<CompletionQueue> completions;
  std::shared_ptr<StartGate> gate;  // null but in tests
};

class TargetRing {
 public:
  ~TargetRing();
  TargetRing(const TargetRing&) = delete;
  TargetRing& operator=(const TargetRing&) = delete;

  // Starts both threads, which keep the object alive. Throws RingError.
  static std::shared_ptr<TargetRing> start(const TargetSetup& setup, std::unique_ptr<Ring> ring);

  void submit(const Request& request);
  // Make the ring's thread look at what was submitted.
  void kick();
  // The files of what is submitted from now on.
  void replace(Target target);
  // Complete it with kCancelled if it has not started. False: not here, or started.
  bool cancel(uint64_t token);
  // Writes that waited for `barrier` or an earlier one may start, marked with `stamp`.
  void lift(uint64_t barrier, Stamp stamp);
  // Give kDeadline to what is past it; returns the earliest deadline left, or kNever.
  int64_t expire(int64_t now_ns);
  // Cancel what has not started; the threads end when the kernel has returned the rest.
  void close();
  bool wait_ended(std::chrono::nanoseconds timeout);

  size_t queued() const { return queued_.load(); }
  Figures figures();

 private:
  enum class Phase : uint8_t { kQueued, kRunning, kOverdue };
  struct Op {
    Request request;
    Target target;  // the files at the time of its submission
    Phase phase = Phase::kQueued;
    uint64_t offset = 0;
    unsigned next_piece = 0;  // the first that was not issued yet
    unsigned pieces_in_flight = 0;
    size_t bytes_in_flight = 0;
    bool waits_for_turn = true;  // it is in its class's queue
    bool sealing = false;  // the ring's thread works on its buffer: it cannot end now
    bool sealed = false;
    bool failed = false;
    int error = 0;  // where it failed: the first errno of any piece, or 0 for no progress
  };
  struct Piece {
    Op* op;
    size_t begin, bytes, done;
    unsigned retries;
  };
  struct Load {
    unsigned pieces = 0;
    size_t bytes = 0;
  };

  explicit TargetRing(const TargetSetup& setup);
  // How the ring's thread tells whoever started it that it may use the ring, or not.
  struct Started {
    std::atomic<bool> known{false};
    std::exception_ptr failure;
  };
  void run(std::unique_ptr<Ring> ring, std::shared_ptr<Started> started);
  void loop(Ring& ring);
  void run_table();
  void enter_thread(const char* name);

  // Under the mutex.
  bool take_pieces(std::vector<Piece*>& pieces);
  bool take_piece(Class io_class, std::vector<Piece*>& pieces);
  bool may_issue(const Op& op, size_t bytes) const;
  bool reads_active() const;
  size_t piece_bytes(unsigned piece) const;
  Piece* new_piece(Op& op, size_t begin, size_t bytes);
  void leave_queue(Op& op);
  void land(Piece* piece, int result);
  bool goes_on(Piece* piece, int result);
  void settle(Op& op);
  void finish(Op& op, Code code, int error = 0);
  Load& load_of(const Op& op);

  // On the ring's thread.
  void issue(Ring& ring, const std::vector<Piece*>& pieces);
  void prepare(Ring& ring, Piece* piece);
  bool verify_one();
  bool seal_one();
  void seal_op(Op& op);
  SlotPlace place_of(const Op& op) const;

  const TargetSetup setup_;
  const Limits limits_;
  const unsigned pieces_per_slot_;
  const size_t piece_bytes_;
  const int wake_fd_;
  std::atomic<bool> waking_{false};
  std::atomic<size_t> queued_{0};

  std::mutex mutex_;
  std::condition_variable table_work_;
  std::condition_variable ended_;
  std::unordered_map<uint64_t, std::unique_ptr<Op>> ops_;
  std::array<std::deque<Op*>, kClasses> queues_;
  std::priority_queue<std::pair<int64_t, uint64_t>, std::vector<std::pair<int64_t, uint64_t>>,
                      std::greater<>>
      deadlines_;  // (deadline, token); the tokens of finished operations go when they come up
  Load reads_, writes_;
  std::deque<Op*> to_verify_;
  std::deque<Op*> to_enter_;  // writes whose table entry comes next
  std::vector<Piece*> again_;
  std::vector<std::unique_ptr<Piece>> pieces_;  // all there are; they are used again
  std::vector<Piece*> free_pieces_;
  std::vector<Piece*> gated_;
  Target target_;
  bool closing_ = false;
  unsigned threads_ = 2;
  Figures figures_;
};

}  // namespace nvmeof
