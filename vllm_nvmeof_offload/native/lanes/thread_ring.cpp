// SPDX-License-Identifier: Apache-2.0
#include "lanes/ring.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "lanes/target_ring.h"

namespace nvmeof {
namespace {

// The number of threads per concurrent call, including spares.
constexpr size_t kThreadsPerCall = 4;

}  // namespace

ThreadRing::ThreadRing(size_t threads, const std::vector<int>& cpus)
    : threads_max_(threads), done_fd_(make_eventfd(EFD_NONBLOCK)) {
  try {
    while (threads_.size() < kThreadsPerCall * threads)
      threads_.emplace_back([this, cpus] {
        enter_thread("nvmeof-io", cpus);
        run();
      });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadRing::~ThreadRing() { stop(); }

void ThreadRing::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  close(done_fd_);
}

// ---- the caller's side ------------------------------------------------------------------

void ThreadRing::prepare(bool read, int slab_fd, std::byte* at, size_t bytes, uint64_t offset,
                         void* tag) {
  prepared_.push_back({read, slab_fd, at, bytes, offset, tag});
}

void ThreadRing::abandon(void* tag) {
  std::lock_guard lock(mutex_);
  for (auto* queue : {&reads_, &writes_})
    if (std::erase_if(*queue, [tag](const Call& call) { return call.tag == tag; }))
      complete(tag, -ECANCELED);
  for (Call* call : running_)
    if (call->tag == tag) call->lost = true;
  work_.notify_one();
}

int ThreadRing::enter(std::chrono::nanoseconds limit) {
  if (!prepared_.empty()) {
    std::lock_guard lock(mutex_);
    for (const Call& call : prepared_) {
      (call.read ? reads_ : writes_).push_back(call);
      work_.notify_one();
    }
  }
  prepared_.clear();
  pollfd files[] = {{done_fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
  const timespec most{limit.count() / 1'000'000'000, limit.count() % 1'000'000'000};
  const int ready = ppoll(files, std::size(files), limit == kForever ? nullptr : &most, nullptr);
  woken_ = ready > 0 && (files[1].revents & POLLIN) != 0;
  if (ready < 0) return -errno;
  return ready == 0 ? -ETIME : 0;
}

void ThreadRing::reap(const std::function<void(void*, int)>& each) {
  std::vector<std::pair<void*, int>> done;
  {
    std::lock_guard lock(mutex_);
    eventfd_t ignored;
    if (std::exchange(signalled_, false)) eventfd_read(done_fd_, &ignored);
    done.swap(done_);
  }
  for (const auto& [tag, result] : done) each(tag, result);
  if (!std::exchange(woken_, false)) return;
  eventfd_t ignored;
  eventfd_read(std::exchange(wake_fd_, -1), &ignored);
  each(nullptr, sizeof ignored);
}

// ---- the threads; under the mutex, except during the call itself ---------------------------

// Take the next call that may start. Returns false if there is none. Reads precede writes, but one
// write may always run, so that an endless sequence of reads cannot block it.
bool ThreadRing::take(Call& call) {
  size_t all = 0, writes = 0;
  for (const Call* one : running_) {
    all += !one->lost;
    writes += !one->lost && !one->read;
  }
  if (all >= threads_max_) return false;
  const bool write_may = !writes_.empty() && writes + 1 < threads_max_;
  const bool write_goes = write_may && (writes == 0 || reads_.empty());
  if (!write_goes && reads_.empty()) return false;
  auto& queue = write_goes ? writes_ : reads_;
  call = queue.front();
  queue.pop_front();
  return true;
}

void ThreadRing::complete(void* tag, int result) {
  done_.emplace_back(tag, result);
  if (!std::exchange(signalled_, true)) eventfd_write(done_fd_, 1);
}

void ThreadRing::run() {
  Call call;
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || take(call); });
    if (stopping_) return;
    running_.push_back(&call);
    lock.unlock();
    const auto offset = static_cast<off_t>(call.offset);
    const ssize_t moved = call.read ? pread(call.slab_fd, call.at, call.bytes, offset)
                                    : pwrite(call.slab_fd, call.at, call.bytes, offset);
    const int result = moved < 0 ? -errno : static_cast<int>(moved);
    lock.lock();
    std::erase(running_, &call);
    complete(call.tag, result);
  }
}

}  // namespace nvmeof
