// SPDX-License-Identifier: Apache-2.0
#include "lanes/target_ring.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <thread>

namespace nvmeof {
namespace {

// A transfer fails after the kernel has refused it more than this many times in a row.
constexpr unsigned kRetriesMax = 64;
// The number of operations that count as a burst if they complete together.
constexpr size_t kBurst = 4;
// A thread that holds writes back must poll, because nothing wakes it when the permit is renewed.
constexpr std::chrono::nanoseconds kPermitPoll = std::chrono::milliseconds(5);

// Return the size of equal pieces of about `split` bytes, because a small last piece would cost as
// much as a full one.
size_t bytes_per_piece(size_t bytes, size_t split) {
  const size_t pieces = std::max<size_t>(1, (bytes - kHeaderBytes + split - 1) / split);
  return whole_pages((bytes + pieces - 1) / pieces);
}

}  // namespace

void enter_thread(const char* name, const std::vector<int>& cpus) {
  pthread_setname_np(pthread_self(), name);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus)
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);  // fails harmlessly if `cpus` is empty
}

TargetRing::TargetRing(const EngineSetup& setup, size_t index,
                       std::shared_ptr<CompletionQueue> completions)
    : setup_(setup),
      region_(setup.regions.at(index)),
      permit_(setup.permits.empty() ? Permit() : setup.permits.at(index)),
      completions_(std::move(completions)),
      wake_fd_(make_eventfd(0)),
      log_(setup.logs.empty() ? LogStart{} : setup.logs.at(index),
           copy_of_fd(setup.targets[index].log_fd)),
      table_sync_(permit_.leased() ? copy_of_fd(setup.targets[index].table_fd) : -1),
      target_(setup.targets[index]) {}

TargetRing::~TargetRing() {
  for (const auto& [table_fd, log_fd] : new_files_)
    for (const int fd : {table_fd, log_fd})
      if (fd >= 0) ::close(fd);
  ::close(wake_fd_);
}

std::shared_ptr<TargetRing> TargetRing::start(const EngineSetup& setup, size_t index,
                                              std::shared_ptr<CompletionQueue> completions,
                                              std::unique_ptr<Ring> ring) {
  std::shared_ptr<TargetRing> self(new TargetRing(setup, index, std::move(completions)));
  auto started = std::make_shared<Started>();
  std::thread([self, started, ring = std::move(ring)]() mutable {
    self->run(std::move(ring), started);
  }).detach();
  started->known.wait(false);
  if (started->failure) std::rethrow_exception(started->failure);
  try {
    std::thread([self] { self->run_table(); }).detach();
  } catch (...) {  // no thread could be created
    self->close();
    throw;
  }
  return self;
}

// ---- the caller's side ------------------------------------------------------------------

void TargetRing::submit(const LaneOp& request) {
  auto op = std::make_unique<Op>();
  op->request = request;
  op->offset = slot_of(request.place) * setup_.limits.slot_bytes;
  op->bytes = kHeaderBytes + whole_pages(request.payload_bytes);
  op->piece_bytes = bytes_per_piece(op->bytes, setup_.limits.split_bytes);
  std::lock_guard lock(mutex_);
  op->target = target_;
  op->region = region_;
  if (is_foreign(request.place)) {
    const auto found = foreign_.find(static_cast<uint16_t>(owner_of(request.place)));
    const ForeignSlab files = found == foreign_.end() ? ForeignSlab{} : found->second;
    op->target = {files.fd, -1};
    op->region = files.region;
  }
  queue_of(*op).push_back(op.get());
  ops_.emplace(request.token, std::move(op));
  ++held_;
}

void TargetRing::kick() {
  if (!waking_.exchange(true)) eventfd_write(wake_fd_, 1);
}

void TargetRing::replace(Target target) {
  {
    std::lock_guard lock(mutex_);
    target_ = target;
    const int synced_fd = permit_.leased() ? copy_of_fd(target.table_fd) : -1;
    new_files_.push_back({synced_fd, copy_of_fd(target.log_fd)});
  }
  kick();  // the ring releases the old slab
  table_work_.notify_one();
}

void TargetRing::attach(uint16_t owner, const ForeignSlab& files) {
  std::lock_guard lock(mutex_);
  foreign_.insert_or_assign(owner, files);
}

void TargetRing::detach(uint16_t owner) {
  std::lock_guard lock(mutex_);
  foreign_.erase(owner);
}

void TargetRing::note(const LogRecord& record) {
  std::lock_guard lock(mutex_);
  notes_.push_back(record);
  table_work_.notify_one();
}

bool TargetRing::cancel(uint64_t token) {
  std::lock_guard lock(mutex_);
  const auto found = ops_.find(token);
  if (found == ops_.end()) return false;
  Op& op = *found->second;
  if (op.started) {
    op.wanted = false;
    uncount(op);
    for (const auto& piece : pieces_)
      if (piece->op == &op) abandoned_.push_back(piece.get());
    kick();  // reads that were waiting for it may start now
    return false;
  }
  std::erase(queue_of(op), &op);
  ops_.erase(found);
  --held_;
  return true;
}

void TargetRing::close() {
  std::lock_guard lock(mutex_);
  closing_ = true;
  for (auto* queue : {&reads_, &writes_})
    for (Op* op : std::exchange(*queue, {})) finish(*op, Outcome::CANCELLED);
  kick();
  table_work_.notify_all();
}

bool TargetRing::wait_ended(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, timeout, [this] { return threads_ == 0; });
}

// ---- under the mutex --------------------------------------------------------------------

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

void TargetRing::start(Op& op, std::vector<Piece*>& pieces) {
  op.started = true;
  if (op.request.is_read()) read_bytes_started_ += op.counted_bytes = op.bytes;
  if (setup_.gate) setup_.gate->started(op.request.place);
  for (size_t begin = 0; begin < op.bytes; begin += op.piece_bytes) {
    pieces.push_back(new_piece(op, begin, std::min(op.piece_bytes, op.bytes - begin)));
    ++op.pieces_in_flight;
  }
}

bool TargetRing::read_may_start() const {
  return !reads_.empty() &&
         (read_bytes_started_ == 0 ||
          read_bytes_started_ + reads_.front()->bytes <= setup_.limits.read_bytes_started_max);
}

// Stop counting a read that the device has completed, or may never complete.
void TargetRing::uncount(Op& op) { read_bytes_started_ -= std::exchange(op.counted_bytes, 0); }

// Wait, releasing the mutex, until the operation may write. Returns false if it never may.
bool TargetRing::await_permit(std::unique_lock<std::mutex>& lock, const Op& op) {
  while (op.wanted && !permit_.open() && !permit_.lost() && !closing_)
    table_work_.wait_for(lock, kPermitPoll);
  return op.wanted && permit_.open();
}

// Start waiting operations. Returns whether more can start immediately. Without a permit, writes
// stay queued, so that the machine can cancel them. Writes without a checksum start one at a time,
// so that new reads do not wait for many checksums.
bool TargetRing::start_waiting(std::vector<Piece*>& pieces) {
  for (; read_may_start(); reads_.pop_front()) start(*reads_.front(), pieces);
  if (permit_.lost())
    for (Op* op : std::exchange(writes_, {})) finish(*op, Outcome::CANCELLED);
  for (bool slow = false; !writes_.empty() && permit_.open(); writes_.pop_front()) {
    Op& op = *writes_.front();
    if (op.request.payload_crc == kNoCrc && std::exchange(slow, true)) return true;
    start(op, pieces);
  }
  return false;
}

// End an operation. If pieces still await a check, the end of a read does not wake the caller:
// `check_one` will.
void TargetRing::finish(Op& op, Outcome code, int error) {
  LaneEnd end{op.request.token, code, error};
  if (op.request.header_only && code == Outcome::OK) end.payload_crc = op.header.payload_crc;
  const bool more_follow = op.request.is_read() && !to_check_.empty();
  ops_.erase(op.request.token);
  --held_;
  completions_->push(end, more_follow);
  if (closing_ && ops_.empty()) {
    kick();
    table_work_.notify_all();
  }
}

bool TargetRing::goes_on(Piece* piece, int result) {
  Op& op = *piece->op;
  if (op.failed || !op.wanted) return false;
  if (result == -EAGAIN || result == -EINTR) {
    if (++piece->retries <= kRetriesMax) return true;
  } else if (result > 0) {
    const size_t done = piece->done + static_cast<size_t>(result);
    if (done >= piece->bytes) return false;
    // The remainder must start on a page boundary, as O_DIRECT requires.
    const size_t whole = done / kPageBytes * kPageBytes;
    if (whole > piece->done) {
      piece->done = whole;
      piece->retries = 0;
      return true;
    }
  }
  op.failed = true;
  op.error = result > 0 ? EIO : -result;  // 0 at the end of the file or device
  return false;
}

void TargetRing::land(Piece* piece, int result) {
  if (goes_on(piece, result)) {
    again_.push_back(piece);
    return;
  }
  Op& op = *piece->op;
  op.pieces_in_flight -= 1;
  if (op.pieces_in_flight == 0) uncount(op);
  if (op.pieces_in_flight == 0 && !op.failed && op.wanted) landed_.push_back(op.request.token);
  if (op.request.is_read() && !op.failed && op.wanted) {
    ++op.unchecked;
    to_check_.push_back(piece);
  } else {
    release(piece);
  }
}

// Report a burst immediately: otherwise the device would be idle until the whole burst had been
// checked. A few operations are checked quickly, so the caller is not woken early for them.
void TargetRing::report_landed() {
  std::lock_guard lock(mutex_);
  if (landed_.size() >= kBurst) completions_->landed(landed_);
  landed_.clear();
}

void TargetRing::release(Piece* piece) {
  Op& op = *piece->op;
  free_pieces_.push_back(piece);
  settle(op);
}

void TargetRing::settle(Op& op) {
  if (op.pieces_in_flight > 0 || op.unchecked > 0) return;
  if (op.failed) {
    finish(op, Outcome::IO_ERROR, op.error);
  } else if (!op.wanted) {
    finish(op, Outcome::CANCELLED);
  } else if (op.request.is_read()) {
    const bool right =
        op.header.code != Outcome::OK || op.request.header_only || op.crc == op.header.payload_crc;
    finish(op, right ? op.header.code : Outcome::CHECKSUM_MISMATCH);
  } else {
    to_enter_.push_back(&op);
    table_work_.notify_one();
  }
}

// ---- the ring's thread ------------------------------------------------------------------

void TargetRing::run(std::unique_ptr<Ring> ring, const std::shared_ptr<Started>& started) {
  enter_thread("nvmeof-ring", setup_.cpus);
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
  bool busy = false;      // there may be something to start or check, so do not wait
  bool deferred = false;  // the checks were postponed once
  for (;;) {
    if (!armed) ring.arm(wake_fd_);
    armed = true;
    pieces.clear();
    int slab_fd;
    bool held_back;  // writes wait for a permit
    {
      std::lock_guard lock(mutex_);
      if (closing_ && ops_.empty()) return;
      for (Piece* piece : std::exchange(abandoned_, {})) ring.abandon(piece);
      slab_fd = target_.slab_fd;
      pieces.swap(again_);
      auto ready = std::partition(gated_.begin(), gated_.end(), [this](Piece* piece) {
        return !setup_.gate->open(piece->op->request.place);
      });
      pieces.insert(pieces.end(), ready, gated_.end());
      gated_.erase(ready, gated_.end());
      const bool more = start_waiting(pieces);
      held_back = !more && !writes_.empty();
      busy = more || busy;
    }
    ring.use(slab_fd);
    issue(ring, pieces);
    const int entered = ring.enter(busy ? kNoWait : held_back ? kPermitPoll : kForever);
    if (entered < 0 && entered != -EINTR && entered != -EAGAIN && entered != -EBUSY &&
        entered != -ETIME)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // unexpected; do not spin
    landed.clear();
    ring.reap([&](void* tag, int result) {
      if (tag != nullptr) {
        landed.emplace_back(static_cast<Piece*>(tag), result);
      } else {
        armed = false;
        waking_.store(false);  // before the queues are checked: later kicks wake again
      }
    });
    bool next_read;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [piece, result] : landed) land(piece, result);
      next_read = read_may_start();
    }
    // After completions or a kick, give the device more work first, because waking the caller takes
    // time. Do not do this twice in a row, unless a read was waiting for these completions.
    if ((!landed.empty() || !armed) && (!deferred || next_read)) {
      deferred = busy = true;
      continue;
    }
    deferred = false;
    report_landed();
    busy = check_one();
  }
}

void TargetRing::issue(Ring& ring, const std::vector<Piece*>& pieces) {
  for (Piece* piece : pieces) {
    Op& op = *piece->op;
    if (!op.request.is_read() && !op.sealed) {
      if (op.request.payload_crc == kNoCrc) ring.enter(kNoWait);  // do not delay the others
      seal_op(op);
    }
    if (setup_.gate && !setup_.gate->open(op.request.place)) {
      std::lock_guard lock(mutex_);
      gated_.push_back(piece);
      continue;
    }
    const size_t at = piece->begin + piece->done;
    ring.prepare(op.request.is_read(), op.target.slab_fd, op.request.data() + at,
                 piece->bytes - piece->done, op.offset + at, piece);
  }
}

bool TargetRing::check_one() {
  Piece* piece;
  bool wanted;
  {
    std::lock_guard lock(mutex_);
    if (to_check_.empty()) return false;
    piece = to_check_.front();
    to_check_.pop_front();
    wanted = !piece->op->failed && piece->op->wanted;
  }
  Op& op = *piece->op;
  if (wanted) check(*piece);
  std::lock_guard lock(mutex_);
  --op.unchecked;
  release(piece);
  completions_->notify(!to_check_.empty());
  return true;
}

// Check a piece, without the mutex: only this thread uses `header` and `crc`.
void TargetRing::check(const Piece& piece) {
  Op& op = *piece.op;
  const LaneOp& request = op.request;
  if (piece.begin == 0)
    op.header = prove_header(request.data(), request.identity, request.payload_bytes, place_of(op),
                             request.stamp.tag);
  if (request.header_only) return;
  const size_t all = kHeaderBytes + request.payload_bytes;
  const size_t begin = std::max(piece.begin, kHeaderBytes);
  const size_t end = std::min(piece.begin + piece.bytes, all);
  if (begin < end) op.crc ^= crc_share(crc32c(request.data() + begin, end - begin), all - end);
}

void TargetRing::seal_op(Op& op) {
  const LaneOp& request = op.request;
  const uint32_t crc = request.payload_crc != kNoCrc
                           ? static_cast<uint32_t>(request.payload_crc)
                           : crc32c(request.data() + kHeaderBytes, request.payload_bytes);
  seal(request.data(), request.identity, request.payload_bytes, crc, request.stamp, place_of(op),
       kind_of(op));
  op.sealed = true;
}

SlotPlace TargetRing::place_of(const Op& op) const {
  const LaneOp& request = op.request;
  return {op.region, slot_of(request.place), request.single_copy, request.client};
}

// Any kind will do for a group unknown to the pool, because no start-up adopts its chunks.
uint8_t TargetRing::kind_of(const Op& op) const {
  const uint32_t id = group_id_of(op.request.identity);
  for (const auto& [group, kind] : setup_.groups)
    if (group == id) return kind;
  return 0;
}

// ---- the table's thread -----------------------------------------------------------------

void TargetRing::run_table() {
  enter_thread("nvmeof-table", setup_.cpus);
  std::unique_lock lock(mutex_);
  for (;;) {
    await_table_work(lock);
    if (!has_table_work() && closing_ && ops_.empty()) break;
    log_notes(lock);
    if (!to_enter_.empty()) enter_front(lock);
    sync_table(lock);
    if (!to_enter_.empty()) continue;
    if (!permit_.open()) continue;  // pending log records are written with a later one
    lock.unlock();
    log_.flush();
    lock.lock();
  }
  lock.unlock();
  log_.replace(-1);
  table_sync_.replace(-1);
  lock.lock();
  --threads_;
  ended_.notify_all();
}

bool TargetRing::has_table_work() const {
  return !to_enter_.empty() || !notes_.empty() || !new_files_.empty();
}

void TargetRing::await_table_work(std::unique_lock<std::mutex>& lock) {
  const auto wakes = [this] { return has_table_work() || (closing_ && ops_.empty()); };
  if (table_sync_.is_waiting()) {
    table_work_.wait_until(lock, table_sync_.due(), wakes);
  } else {
    table_work_.wait(lock, wakes);
  }
}

// Sync the table if due. Without a permit, postpone this: another host may own the region now.
void TargetRing::sync_table(std::unique_lock<std::mutex>& lock) {
  if (!table_sync_.is_waiting() || Clock::now() < table_sync_.due()) return;
  if (!permit_.open()) {
    table_sync_.postpone();
    return;
  }
  lock.unlock();
  table_sync_.sync();
  lock.lock();
}

// Add the queued notes to the log. A reset's note is queued before any write of its epoch.
void TargetRing::log_notes(std::unique_lock<std::mutex>& lock) {
  const std::vector<TableFiles> files = std::exchange(new_files_, {});
  const std::vector<LogRecord> notes = std::exchange(notes_, {});
  if (files.empty() && notes.empty()) return;
  lock.unlock();
  for (const auto& [table_fd, log_fd] : files) {
    log_.replace(log_fd);
    table_sync_.replace(table_fd);
  }
  for (const LogRecord& note : notes) log_.add(note);
  lock.lock();
}

void TargetRing::enter_front(std::unique_lock<std::mutex>& lock) {
  Op& op = *to_enter_.front();
  to_enter_.pop_front();
  // Write no entry if the write was cancelled (its slot may be reused) or the region was taken
  // over.
  Outcome code = Outcome::CANCELLED;
  int error = 0;
  const LaneOp request = op.request;
  const SlotPlace place = place_of(op);
  if (await_permit(lock, op)) {
    const int table_fd = op.target.table_fd;
    lock.unlock();
    error = write_entry(table_fd, place, request);
    code = error == 0 ? Outcome::OK : Outcome::IO_ERROR;
    lock.lock();
  }
  finish(op, code, error);
  if (code != Outcome::OK) return;
  lock.unlock();
  log_.add(put_record(place.slot, request.identity, request.stamp.epoch, request.single_copy));
  lock.lock();
}

int TargetRing::write_entry(int table_fd, const SlotPlace& place, const LaneOp& request) {
  if (const int error = table_sync_.take_error()) return error;
  const TableEntry entry = encode_entry(place, request.identity, request.stamp.epoch);
  const auto offset = static_cast<off_t>(place.slot * kEntryBytes);
  ssize_t done;
  do done = pwrite(table_fd, &entry, sizeof entry, offset);
  while (done < 0 && errno == EINTR);
  if (done != static_cast<ssize_t>(sizeof entry)) return done < 0 ? errno : EIO;
  table_sync_.wrote();
  return 0;
}

}  // namespace nvmeof
