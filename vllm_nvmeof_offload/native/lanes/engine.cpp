// SPDX-License-Identifier: Apache-2.0
#include "lanes/engine.h"

#include <algorithm>
#include <utility>

#include "common/op.h"
#include "lanes/ring.h"

namespace nvmeof {
namespace {

// The caller is woken after every kTogether checksums and when none is left to compute.
constexpr size_t kTogether = 4;
// Waking a thread takes longer than computing the checksum of a payload smaller than this.
constexpr size_t kSummedAheadMin = 256 << 10;

// Create all rings before starting any: a ring can share its memory only until it is enabled.
std::vector<std::unique_ptr<Ring>> make_rings(const EngineSetup& setup) {
  std::vector<std::unique_ptr<Ring>> rings;
  int share_with = -1;
  for (const Target& target : setup.targets) {
    if (setup.threads > 0) {
      rings.push_back(std::make_unique<ThreadRing>(setup.threads, setup.cpus));
      continue;
    }
    auto ring = std::make_unique<Uring>(setup.limits.depth, setup.memory, target.slab_fd,
                                        setup.limits.slot_bytes, setup.registered, share_with);
    if (rings.empty()) share_with = ring->fd();
    rings.push_back(std::move(ring));
  }
  return rings;
}

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
  enter_thread("nvmeof-crc", cpus_);
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

Engine::Engine(const EngineSetup& setup)
    : operations_max_(setup.operations_max),
      completions_(std::make_shared<CompletionQueue>()),
      checksums_(completions_, setup.cpus) {
  std::vector<std::unique_ptr<Ring>> rings = make_rings(setup);
  try {
    for (size_t i = 0; i < rings.size(); ++i)
      targets_.push_back(TargetRing::start(setup, i, completions_, std::move(rings[i])));
  } catch (...) {
    for (const auto& target : targets_) target->close();
    throw;
  }
}

LaneRoom Engine::room() const {
  size_t held = 0;
  for (const auto& target : targets_) held += target->held();
  const size_t room = operations_max_ - std::min(operations_max_, held);
  return {room, room};
}

void Engine::take(const LaneOp& op) {
  require(op.is_read() || !is_foreign(op.place), "a write to another engine's region");
  targets_.at(target_of(op.place))->submit(op);
}

void Engine::start() {
  for (const auto& target : targets_) target->kick();
}

bool Engine::cancel_one(uint64_t token) {
  return std::ranges::any_of(targets_, [&](const auto& target) { return target->cancel(token); });
}

bool Engine::sum(uint64_t number, uint64_t address, size_t bytes) {
  if (bytes < kSummedAheadMin) return false;
  checksums_.add(number, reinterpret_cast<const std::byte*>(address), bytes);
  return true;
}

bool Engine::close(std::chrono::nanoseconds timeout) {
  checksums_.stop();
  for (const auto& target : targets_) target->close();
  const auto end = Clock::now() + timeout;
  bool ended = true;
  for (const auto& target : targets_) {
    const auto left = std::chrono::nanoseconds(end - Clock::now());
    ended = target->wait_ended(std::max(std::chrono::nanoseconds(0), left)) && ended;
  }
  return ended;
}

}  // namespace nvmeof
