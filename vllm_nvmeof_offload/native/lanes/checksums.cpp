// SPDX-License-Identifier: Apache-2.0
#include "lanes/engine.h"

#include <algorithm>
#include <utility>

#include "lanes/target_ring.h"

namespace nvmeof {
namespace {

// The caller is woken after every kTogether checksums and when none is left to compute.
constexpr size_t kTogether = 4;

}  // namespace

Checksums::Checksums(std::shared_ptr<CompletionQueue> completions, std::vector<int> cpus)
    : completions_(std::move(completions)), cpus_(std::move(cpus)), thread_([this] { run(); }) {}

void Checksums::add(uint64_t number, const std::byte* payload, size_t bytes) {
  std::lock_guard lock(mutex_);
  if (stopping_) return;
  waiting_.push_back({number, payload, bytes});
  changed_.notify_all();
}

void Checksums::forget(uint64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return now_ != number; });
  std::erase_if(waiting_, [&](const Payload& one) { return one.number == number; });
  std::erase_if(made_, [&](const Summed& one) { return one.number == number; });
}

void Checksums::take(std::vector<Summed>& summed) {
  std::lock_guard lock(mutex_);
  summed.insert(summed.end(), made_.begin(), made_.end());
  made_.clear();
}

void Checksums::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Checksums::run() {
  enter_thread("nvmeof-crc");
  run_on(cpus_);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    const Payload payload = waiting_.front();
    waiting_.pop_front();
    now_ = payload.number;
    lock.unlock();
    const uint32_t crc = crc32c(payload.address, payload.bytes);
    lock.lock();
    now_ = 0;
    made_.push_back({payload.number, crc});
    changed_.notify_all();
    if (made_.size() % kTogether == 0 || waiting_.empty()) completions_->wake();
  }
}

}  // namespace nvmeof
