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
  std::lock_guard lock(mutex_);
  op->target = target_;
  op->region = region_;
  if (request.owner) {
    const auto found = foreign_.find(request.owner);
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
  }
  kick();  // the ring releases the old slab
}

void TargetRing::attach(uint16_t owner, const ForeignSlab& files) {
  std::lock_guard lock(mutex_);
  foreign_.insert_or_assign(owner, files);
}

void TargetRing::detach(uint16_t owner) {
  std::lock_guard lock(mutex_);
  foreign_.erase(owner);
}

bool TargetRing::cancel(uint64_t token) {
  std::lock_guard lock(mutex_);
  const auto found = ops_.find(token);
  if (found == ops_.end()) return false;
  Op& op = *found->second;
  if (op.started) {
    op.wanted = false;
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
    for (Op* op : std::exchange(*queue, {})) finish(*op, Code::kCancelled);
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
  if (setup_.gate) setup_.gate->started(op.request.pool_slot);
  for (size_t begin = 0; begin < op.bytes; begin += op.piece_bytes) {
    pieces.push_back(new_piece(op, begin, std::min(op.piece_bytes, op.bytes - begin)));
    ++op.pieces_in_flight;
  }
}

// Returns whether there is more to start at once. Only one write that needs a checksum is taken at
// a time, so that reads that come meanwhile do not wait for a row of checksums.
bool TargetRing::start_waiting(std::vector<Piece*>& pieces) {
  for (Op* op : std::exchange(reads_, {})) start(*op, pieces);
  for (bool slow = false; !writes_.empty(); writes_.pop_front()) {
    Op& op = *writes_.front();
    if (op.request.payload_crc == kNoCrc && std::exchange(slow, true)) return true;
    start(op, pieces);
  }
  return false;
}

void TargetRing::finish(Op& op, Code code, int error) {
  const Completion completion{op.request.token, code, error};
  ops_.erase(op.request.token);
  --held_;
  completions_->push(completion);
  if (closing_ && ops_.empty()) {
    kick();
    table_work_.notify_all();
  }
}

// Returns whether the piece has to be issued once more.
bool TargetRing::goes_on(Piece* piece, int result) {
  Op& op = *piece->op;
  if (op.failed || !op.wanted) return false;
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
  op.error = result > 0 ? EIO : -result;  // 0: the end of the file, or of the device
  return false;
}

void TargetRing::land(Piece* piece, int result) {
  if (goes_on(piece, result)) {
    again_.push_back(piece);
    return;
  }
  Op& op = *piece->op;
  op.pieces_in_flight -= 1;
  if (op.request.is_read() && !op.failed && op.wanted) {
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
  if (op.failed) {
    finish(op, Code::kIoError, op.error);
  } else if (!op.wanted) {
    finish(op, Code::kCancelled);
  } else if (op.request.is_read()) {
    const bool right = op.header.code != Code::kOk || op.crc == op.header.payload_crc;
    finish(op, right ? op.header.code : Code::kChecksumMismatch);
  } else {
    to_enter_.push_back(&op);
    table_work_.notify_one();
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
  bool busy = false;      // there may be something to start or check: do not wait
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
      busy = start_waiting(pieces) || busy;
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
    busy = check_one();
  }
}

void TargetRing::issue(Ring& ring, const std::vector<Piece*>& pieces) {
  for (Piece* piece : pieces) {
    Op& op = *piece->op;
    if (!op.request.is_read() && !op.sealed) {
      if (op.request.payload_crc == kNoCrc) ring.enter(false);  // others need not wait for it
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
    wanted = !piece->op->failed && piece->op->wanted;
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
  const auto slot = static_cast<uint32_t>(op.request.pool_slot / setup_.targets.size());
  return {op.region, slot, op.request.single_copy};
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
    Code code = Code::kCancelled;  // it was given up, and its slot may soon hold another chunk
    int error = 0;
    if (op.wanted) {
      const Request& request = op.request;
      const int table_fd = op.target.table_fd;
      lock.unlock();
      const size_t slot = request.pool_slot / setup_.targets.size();
      const auto entry =
          encode_entry(slot, request.identity, request.stamp.epoch, request.single_copy);
      const auto offset = static_cast<off_t>(slot * kEntryBytes);
      ssize_t done;
      do done = pwrite(table_fd, entry.data(), entry.size(), offset);
      while (done < 0 && errno == EINTR);
      code = done == static_cast<ssize_t>(entry.size()) ? Code::kOk : Code::kIoError;
      if (code != Code::kOk) error = done < 0 ? errno : EIO;
      lock.lock();
    }
    finish(op, code, error);
  }
  --threads_;
  ended_.notify_all();
}

}  // namespace nvmeof
