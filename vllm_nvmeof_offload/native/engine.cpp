// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>

namespace nvmeof {

// Wakes the caller at deadlines, even while a ring's thread is stuck in the kernel.
struct Engine::Timer {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t next_ns = kNever;
  bool closing = false;

  void run(const std::vector<std::shared_ptr<TargetRing>>& targets) {
    enter_thread("nvmeof-timer");
    std::unique_lock lock(mutex);
    while (!closing) {
      next_ns = kNever;
      lock.unlock();
      int64_t earliest_ns = kNever;
      for (const auto& target : targets)
        earliest_ns = std::min(earliest_ns, target->expire(now_ns()));
      lock.lock();
      next_ns = std::min(next_ns, earliest_ns);
      if (closing) return;
      if (next_ns == kNever)
        changed.wait(lock);
      else
        changed.wait_until(lock, Clock::time_point(std::chrono::nanoseconds(next_ns)));
    }
  }

  void stop() {
    std::lock_guard lock(mutex);
    closing = true;
    changed.notify_one();
  }

  void wake_by(int64_t deadline_ns) {
    std::lock_guard lock(mutex);
    if (deadline_ns >= next_ns) return;
    next_ns = deadline_ns;
    changed.notify_one();
  }
};

Engine::Engine(const EngineSetup& setup)
    : queue_max_(setup.queue_max),
      completions_(std::make_shared<CompletionQueue>()),
      timer_(std::make_shared<Timer>()) {
  // Create all rings first, on this thread: a ring can share its registered memory only before it
  // is enabled.
  std::vector<std::unique_ptr<Ring>> rings;
  for (const Target& target : setup.targets) {
    const int share_with = rings.empty() ? -1 : rings.front()->fd();
    rings.push_back(std::make_unique<Ring>(setup.limits.depth, setup.memory, target.slab_fd,
                                           setup.limits.slot_bytes, setup.registered, share_with));
  }
  try {
    for (size_t i = 0; i < rings.size(); ++i)
      targets_.push_back(TargetRing::start(setup, i, completions_, std::move(rings[i])));
  } catch (...) {
    for (const auto& target : targets_) target->close();
    throw;
  }
  timer_thread_ = std::thread([timer = timer_, targets = targets_] { timer->run(targets); });
}

Engine::~Engine() {
  close({});
  timer_->stop();
  timer_thread_.join();
}

bool Engine::submit(const Request& request) {
  size_t queued = 0;
  for (const auto& target : targets_) queued += target->queued();
  if (queued >= queue_max_) return false;
  targets_[request.pool_slot % targets_.size()]->submit(request);
  if (request.deadline_ns != kNever) timer_->wake_by(request.deadline_ns);
  return true;
}

void Engine::replace_target(size_t index, Target target) { targets_.at(index)->replace(target); }

void Engine::kick() {
  for (const auto& target : targets_) target->kick();
}

void Engine::cancel(uint64_t token) {
  for (const auto& target : targets_)
    if (target->cancel(token)) return;
}

void Engine::lift(uint64_t barrier, Stamp stamp) {
  for (const auto& target : targets_) target->lift(barrier, stamp);
}

std::vector<Completion> Engine::poll(int64_t now_ns) {
  for (const auto& target : targets_) target->expire(now_ns);
  return completions_->take();
}

bool Engine::take(const LaneOp& op) {
  Request request;
  request.token = op.token;
  request.urgency = op.urgency;
  request.pool_slot = op.pool_slot;
  request.address = reinterpret_cast<std::byte*>(op.address);
  request.payload_bytes = op.payload_bytes;
  request.payload_crc = op.payload_crc;
  request.identity = identity_of(op.key, op.generation);
  request.deadline_ns = op.deadline_ns;
  request.stamp = op.stamp;
  return submit(request);
}

void Engine::ended(int64_t now_ns, std::vector<LaneEnd>& ends) {
  for (const Completion& one : poll(now_ns))
    ends.push_back(
        {one.token, static_cast<uint8_t>(one.code), one.error, one.released, one.ended_ns});
}

bool Engine::close(std::chrono::nanoseconds timeout) {
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
