// SPDX-License-Identifier: Apache-2.0
#include "lanes/engine.h"

#include <algorithm>

#include "common/op.h"
#include "lanes/ring.h"

namespace nvmeof {
namespace {

// Waking a thread takes longer than computing a smaller payload's checksum.
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

void Engine::replace_target(size_t index, Target target) { targets_.at(index)->replace(target); }

void Engine::attach(uint16_t owner, size_t target, const ForeignSlab& files) {
  targets_.at(target)->attach(owner, files);
}

void Engine::detach(uint16_t owner, size_t target) { targets_.at(target)->detach(owner); }

void Engine::kick() {
  for (const auto& target : targets_) target->kick();
}

bool Engine::cancel(uint64_t token) {
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
