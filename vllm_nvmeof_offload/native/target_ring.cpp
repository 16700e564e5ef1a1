// SPDX-License-Identifier: Apache-2.0
#include "target_ring.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <thread>

namespace nvmeof {
namespace {

// A transfer that the kernel turns away this often in a row has failed.
constexpr unsigned kRetriesMax = 64;

size_t whole_pages(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// Pieces are equal and of about `split` bytes: a remainder of one header page would cost as much as
// a whole piece.
size_t bytes_per_piece(size_t bytes, size_t split) {
  const size_t pieces = std::max<size_t>(1, (bytes - kHeaderBytes + split - 1) / split);
  return whole_pages((bytes + pieces - 1) / pieces);
}

}  // namespace

void enter_thread(const char* name) {
  pthread_setname_np(pthread_self(), name);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

TargetRing::TargetRing(const EngineSetup& setup, size_t index,
                       std::shared_ptr<CompletionQueue> completions)
    : setup_(setup),
      region_(setup.regions.at(index)),
      completions_(std::move(completions)),
      limits_(setup.limits),
      wake_fd_(make_eventfd(0)),
      target_(setup.targets[index]) {}

TargetRing::~TargetRing() { ::close(wake_fd_); }

std::shared_ptr<TargetRing> TargetRing::start(const EngineSetup& setup, size_t index,
                                              std::shared_ptr<CompletionQueue> completions,
                                              std::unique_ptr<Ring> ring) {
  std::shared_ptr<TargetRing> self(new TargetRing(setup, index, std::move(completions)));
  auto started = std::make_shared<Started>();
  std::thread([self, started, ring = std::move(ring)]() mutable {
    self->run(std::move(ring), std::move(started));
  }).detach();
  started->known.wait(false);
  if (started->failure) std::rethrow_exception(started->failure);
  std::thread([self] { self->run_table(); }).detach();
  return self;
}

// ---- the caller's side ------------------------------------------------------------------

void TargetRing::submit(const Request& request) {
  auto op = std::make_unique<Op>();
  op->request = request;
  op->offset = request.pool_slot / setup_.targets.size() * limits_.slot_bytes;
  op->bytes = kHeaderBytes + whole_pages(request.payload_bytes);
  op->piece_bytes = bytes_per_piece(op->bytes, limits_.split_bytes);
  op->pieces = static_cast<unsigned>((op->bytes + op->piece_bytes - 1) / op->piece_bytes);
  std::lock_guard lock(mutex_);
  op->target = target_;
  if (request.deadline_ns != kNever) {
    while (!deadlines_.empty() && !ops_.contains(deadlines_.top().second)) deadlines_.pop();
    deadlines_.emplace(request.deadline_ns, request.token);
  }
  queue_of(request.urgency).push_back(op.get());
  ops_.emplace(request.token, std::move(op));
  ++queued_;
}

void TargetRing::kick() {
  if (!waking_.exchange(true)) eventfd_write(wake_fd_, 1);
}

void TargetRing::replace(Target target) {
  {
    std::lock_guard lock(mutex_);
    target_ = target;
  }
  kick();  // the ring releases the old slab
}

bool TargetRing::cancel(uint64_t token) {
  std::lock_guard lock(mutex_);
  const auto found = ops_.find(token);
  if (found == ops_.end() || found->second->phase != Phase::kQueued || found->second->sealing)
    return false;
  finish(*found->second, Code::kCancelled);
  kick();  // it may have been a read that held writes back
  return true;
}

void TargetRing::lift(uint64_t barrier, Stamp stamp) {
  std::lock_guard lock(mutex_);
  for (Op* op : queue_of(Urgency::WRITE)) {
    if (op->request.barrier == 0 || op->request.barrier > barrier) continue;
    op->request.barrier = 0;
    op->request.stamp = stamp;
  }
  kick();
}

int64_t TargetRing::expire(int64_t now_ns) {
  std::lock_guard lock(mutex_);
  while (!deadlines_.empty()) {
    const auto [deadline_ns, token] = deadlines_.top();
    const auto found = ops_.find(token);
    // A token may be used again: then this is the deadline of an operation that has finished.
    const bool ended = found == ops_.end() || found->second->request.deadline_ns != deadline_ns;
    if (!ended && deadline_ns > now_ns) return deadline_ns;
    deadlines_.pop();
    if (ended) continue;
    Op& op = *found->second;
    if (op.sealing) {
      --queued_;
      op.phase = Phase::kOverdue;  // the ring's thread releases it
      leave_queue(op);
      completions_->push({token, Code::kDeadline, 0, false});
    } else if (op.phase == Phase::kQueued) {
      finish(op, Code::kDeadline);
    } else if (op.phase == Phase::kRunning) {
      Load& load = load_of(op);
      load.pieces -= op.pieces_in_flight;
      load.bytes -= op.bytes_in_flight;
      op.phase = Phase::kOverdue;
      completions_->push({token, Code::kDeadline, 0, false});
      // Between two pieces neither the kernel nor this ring works on it, and it gets no more.
      if (op.in_queue && op.pieces_in_flight == 0 && op.unchecked == 0)
        finish(op, Code::kReleased);
      else
        leave_queue(op);
    }
    kick();
  }
  return kNever;
}

void TargetRing::close() {
  std::lock_guard lock(mutex_);
  closing_ = true;
  for (auto& queue : queues_) {
    const auto waiting = queue;
    for (Op* op : waiting)
      if (op->phase == Phase::kQueued && !op->sealing) finish(*op, Code::kCancelled);
  }
  kick();
  table_work_.notify_all();
}

bool TargetRing::wait_ended(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, timeout, [this] { return threads_ == 0; });
}

// ---- under the mutex --------------------------------------------------------------------

const std::deque<TargetRing::Op*>& TargetRing::queue_of(Urgency urgency) const {
  return queues_[static_cast<size_t>(urgency)];
}

TargetRing::Load& TargetRing::load_of(const Op& op) {
  return op.request.is_read() ? reads_ : writes_;
}

bool TargetRing::reads_active() const {
  return reads_.pieces > 0 || !queue_of(Urgency::DEMAND).empty() ||
         !queue_of(Urgency::URGENT).empty() || !queue_of(Urgency::PREFETCH).empty();
}

bool TargetRing::may_issue(const Op& op, size_t bytes) const {
  const bool read = op.request.is_read();
  const Load& load = read ? reads_ : writes_;
  if (op.request.barrier != 0) return false;
  if (load.pieces == 0) return true;
  if (load.pieces >= limits_.depth) return false;
  size_t bound = read ? limits_.read_bytes_in_flight_max : limits_.write_bytes_in_flight_max;
  if (!read && reads_active()) bound = std::min(bound, limits_.write_bytes_beside_reads_max);
  return load.bytes + bytes <= bound;
}

TargetRing::Piece* TargetRing::new_piece(Op& op, size_t begin, size_t bytes) {
  if (free_pieces_.empty()) {
    pieces_.push_back(std::make_unique<Piece>());
    free_pieces_.push_back(pieces_.back().get());
  }
  Piece* piece = free_pieces_.back();
  free_pieces_.pop_back();
  *piece = {&op, begin, bytes, 0, 0};
  return piece;
}

bool TargetRing::take_piece(Urgency urgency, std::vector<Piece*>& pieces) {
  auto& queue = queue_of(urgency);
  if (queue.empty()) return false;
  Op& op = *queue.front();  // nothing overtakes within an urgency
  const size_t begin = op.next_piece * op.piece_bytes;
  const size_t bytes = std::min(op.piece_bytes, op.bytes - begin);
  if (!may_issue(op, bytes)) return false;
  if (op.phase == Phase::kQueued) {
    op.phase = Phase::kRunning;
    --queued_;
    if (setup_.gate) setup_.gate->started(op.request.pool_slot);
  }
  pieces.push_back(new_piece(op, begin, bytes));
  ++op.next_piece;
  ++op.pieces_in_flight;
  op.bytes_in_flight += bytes;
  load_of(op).pieces += 1;
  load_of(op).bytes += bytes;
  if (op.next_piece == op.pieces) leave_queue(op);
  return true;
}

// Returns whether there is more to issue at once: only one write that could not be sealed ahead is
// taken at a time, so that reads that come meanwhile do not wait for a row of checksums.
bool TargetRing::take_pieces(std::vector<Piece*>& pieces) {
  while (take_piece(Urgency::DEMAND, pieces) || take_piece(Urgency::URGENT, pieces) ||
         take_piece(Urgency::PREFETCH, pieces)) {
  }
  const auto& writes = queue_of(Urgency::WRITE);
  bool fresh = false;
  while (!writes.empty()) {
    const bool unsealed = !writes.front()->sealed && writes.front()->next_piece == 0;
    if (unsealed && fresh) return true;
    if (!take_piece(Urgency::WRITE, pieces)) break;
    fresh = fresh || unsealed;
  }
  return false;
}

void TargetRing::leave_queue(Op& op) {
  if (!op.in_queue) return;
  op.in_queue = false;
  auto& queue = queue_of(op.request.urgency);
  queue.erase(std::find(queue.begin(), queue.end(), &op));
}

void TargetRing::finish(Op& op, Code code, int error) {
  if (op.phase == Phase::kQueued) --queued_;
  leave_queue(op);
  if (op.phase == Phase::kOverdue) code = Code::kReleased;
  const Completion completion{op.request.token, code, error, true};
  ops_.erase(op.request.token);
  completions_->push(completion);
  if (closing_ && ops_.empty()) {
    kick();
    table_work_.notify_all();
  }
}

// Returns whether the piece has to be issued once more.
bool TargetRing::goes_on(Piece* piece, int result) {
  Op& op = *piece->op;
  if (op.failed || op.phase == Phase::kOverdue) return false;
  if (result == -EAGAIN || result == -EINTR) {
    if (++piece->retries <= kRetriesMax) return true;
  } else if (result > 0) {
    const size_t done = piece->done + static_cast<size_t>(result);
    if (done >= piece->bytes) return false;
    // The rest starts on a page boundary again, as O_DIRECT requires.
    const size_t whole = done / kPageBytes * kPageBytes;
    if (whole > piece->done) {
      piece->done = whole;
      piece->retries = 0;
      return true;
    }
  }
  op.failed = true;
  leave_queue(op);  // it gets no more pieces
  op.error = result > 0 ? EIO : -result;  // 0: the end of the file, or of the device
  return false;
}

void TargetRing::land(Piece* piece, int result) {
  if (goes_on(piece, result)) {
    again_.push_back(piece);
    return;
  }
  Op& op = *piece->op;
  if (op.phase == Phase::kRunning) {
    load_of(op).pieces -= 1;
    load_of(op).bytes -= piece->bytes;
  }
  op.pieces_in_flight -= 1;
  op.bytes_in_flight -= piece->bytes;
  if (op.request.is_read() && !op.failed && op.phase == Phase::kRunning) {
    ++op.unchecked;
    to_check_.push_back(piece);
  } else {
    release(piece);
  }
}

void TargetRing::release(Piece* piece) {
  Op& op = *piece->op;
  free_pieces_.push_back(piece);
  settle(op);
}

void TargetRing::settle(Op& op) {
  if (op.pieces_in_flight > 0 || op.unchecked > 0) return;
  if (op.failed || op.phase == Phase::kOverdue) {
    finish(op, Code::kIoError, op.error);
  } else if (op.next_piece == op.pieces) {
    if (op.request.is_read()) {
      const bool right = op.header.code != Code::kOk || op.crc == op.header.payload_crc;
      finish(op, right ? op.header.code : Code::kChecksumMismatch);
    } else {
      to_enter_.push_back(&op);
      table_work_.notify_one();
    }
  }
}

// ---- the ring's thread ------------------------------------------------------------------

void TargetRing::enter_own_thread(const char* name) {
  enter_thread(name);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (const int cpu : setup_.cpus)
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &cpus);
  sched_setaffinity(0, sizeof cpus, &cpus);  // failure is harmless, as with no CPUs at all
}

void TargetRing::run(std::unique_ptr<Ring> ring, std::shared_ptr<Started> started) {
  enter_own_thread("nvmeof-ring");
  try {
    ring->enable();
  } catch (const RingError&) {
    started->failure = std::current_exception();
  }
  const bool usable = !started->failure;
  started->known.store(true);
  started->known.notify_one();
  if (usable) loop(*ring);
  ring.reset();
  std::lock_guard lock(mutex_);
  --threads_;
  ended_.notify_all();
}

void TargetRing::loop(Ring& ring) {
  std::vector<Piece*> pieces;
  std::vector<std::pair<Piece*, int>> landed;
  bool armed = false;
  bool busy = false;      // there may be something to seal or verify: do not wait
  bool deferred = false;  // that work was put off once
  for (;;) {
    if (!armed) ring.arm(wake_fd_);
    armed = true;
    pieces.clear();
    int slab_fd;
    {
      std::lock_guard lock(mutex_);
      if (closing_ && ops_.empty()) return;
      slab_fd = target_.slab_fd;
      pieces.swap(again_);
      auto ready = std::partition(gated_.begin(), gated_.end(), [this](Piece* piece) {
        return !setup_.gate->open(piece->op->request.pool_slot);
      });
      pieces.insert(pieces.end(), ready, gated_.end());
      gated_.erase(ready, gated_.end());
      busy = take_pieces(pieces) || busy;
    }
    ring.use(slab_fd);
    issue(ring, pieces);
    const int entered = ring.enter(!busy);
    if (entered < 0 && entered != -EINTR && entered != -EAGAIN && entered != -EBUSY)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // unexpected; do not spin
    landed.clear();
    ring.reap([&](void* tag, int result) {
      if (tag != nullptr) {
        landed.emplace_back(static_cast<Piece*>(tag), result);
      } else {
        armed = false;
        waking_.store(false);  // before the queues are looked at: later kicks wake again
      }
    });
    {
      std::lock_guard lock(mutex_);
      for (const auto& [piece, result] : landed) land(piece, result);
    }
    // After a burst of completions, or a kick, the device comes first; but not twice in a row.
    if ((!landed.empty() || !armed) && !deferred) {
      deferred = busy = true;
      continue;
    }
    deferred = false;
    busy = check_one() || seal_one();
  }
}

void TargetRing::issue(Ring& ring, const std::vector<Piece*>& pieces) {
  for (Piece* piece : pieces) {
    Op& op = *piece->op;
    if (!op.request.is_read() && !op.sealed) {
      ring.enter(false);  // prepared pieces need not wait for a checksum
      seal_op(op);
    }
    if (setup_.gate && !setup_.gate->open(op.request.pool_slot)) {
      std::lock_guard lock(mutex_);
      gated_.push_back(piece);
      continue;
    }
    const size_t at = piece->begin + piece->done;
    ring.prepare(op.request.is_read(), op.target.slab_fd, op.request.address + at,
                 piece->bytes - piece->done, op.offset + at, piece);
  }
}

// Check the piece that has waited longest. Returns whether there was one.
bool TargetRing::check_one() {
  Piece* piece;
  bool wanted;
  {
    std::lock_guard lock(mutex_);
    if (to_check_.empty()) return false;
    piece = to_check_.front();
    to_check_.pop_front();
    wanted = !piece->op->failed && piece->op->phase == Phase::kRunning;
  }
  Op& op = *piece->op;
  if (wanted) check(*piece);
  std::lock_guard lock(mutex_);
  --op.unchecked;
  release(piece);
  return true;
}

// Nobody else touches the operation's header and CRC, and it stays while it has unchecked pieces.
void TargetRing::check(const Piece& piece) {
  Op& op = *piece.op;
  const Request& request = op.request;
  if (piece.begin == 0)
    op.header = prove_header(request.address, request.identity, request.payload_bytes,
                             place_of(op), request.stamp.tag);
  const size_t all = kHeaderBytes + request.payload_bytes;
  const size_t begin = std::max(piece.begin, kHeaderBytes);
  const size_t end = std::min(piece.begin + piece.bytes, all);
  if (begin < end)
    op.crc ^= crc_share(crc32c(request.address + begin, end - begin), all - end);
}

// Seal a waiting write, among those that could be in flight next.
bool TargetRing::seal_one() {
  Op* next = nullptr;
  {
    std::lock_guard lock(mutex_);
    size_t bytes = 0;
    for (Op* op : queue_of(Urgency::WRITE)) {
      if (op->request.barrier != 0 || bytes >= limits_.write_bytes_in_flight_max) break;
      bytes += op->bytes;
      if (op->sealed) continue;
      next = op;
      next->sealing = true;
      break;
    }
  }
  if (next == nullptr) return false;
  seal_op(*next);
  std::lock_guard lock(mutex_);
  next->sealing = false;
  if (next->phase == Phase::kOverdue) finish(*next, Code::kReleased);
  return true;
}

void TargetRing::seal_op(Op& op) {
  const Request& request = op.request;
  const uint32_t crc = request.payload_crc != kNoCrc
                           ? static_cast<uint32_t>(request.payload_crc)
                           : crc32c(request.address + kHeaderBytes, request.payload_bytes);
  seal(request.address, request.identity, request.payload_bytes, crc, request.stamp, place_of(op),
       kind_of(op));
  op.sealed = true;
}

SlotPlace TargetRing::place_of(const Op& op) const {
  return {region_, static_cast<uint32_t>(op.request.pool_slot / setup_.targets.size())};
}

// No start adopts a chunk of a group that the pool does not have, so any kind will do for it.
uint8_t TargetRing::kind_of(const Op& op) const {
  const uint32_t id = group_id_of(op.request.identity);
  for (const auto& [group, kind] : setup_.groups)
    if (group == id) return kind;
  return 0;
}

// ---- the table's thread -----------------------------------------------------------------

void TargetRing::run_table() {
  enter_own_thread("nvmeof-table");
  std::unique_lock lock(mutex_);
  for (;;) {
    table_work_.wait(lock, [this] { return !to_enter_.empty() || (closing_ && ops_.empty()); });
    if (to_enter_.empty()) break;
    Op& op = *to_enter_.front();
    to_enter_.pop_front();
    bool failed = false;
    int error = 0;
    // An overdue write is not waited for, and its slot may soon hold another chunk.
    if (op.phase == Phase::kRunning) {
      const Request& request = op.request;
      const int table_fd = op.target.table_fd;
      lock.unlock();
      const size_t slot = request.pool_slot / setup_.targets.size();
      const auto entry = encode_entry(slot, request.identity, request.stamp.epoch);
      const auto offset = static_cast<off_t>(slot * kEntryBytes);
      ssize_t done;
      do done = pwrite(table_fd, entry.data(), entry.size(), offset);
      while (done < 0 && errno == EINTR);
      failed = done != static_cast<ssize_t>(entry.size());
      if (failed) error = done < 0 ? errno : EIO;
      lock.lock();
    }
    finish(op, failed ? Code::kIoError : Code::kOk, error);
  }
  --threads_;
  ended_.notify_all();
}

}  // namespace nvmeof
