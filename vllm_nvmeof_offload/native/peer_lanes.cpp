// SPDX-License-Identifier: Apache-2.0
#include "peer_lanes.h"

#include <algorithm>
#include <utility>

namespace nvmeof {

size_t PeerLanes::usable() const {
  return static_cast<size_t>(
      std::ranges::count_if(states_, [](const PeerState& state) { return state.usable; }));
}

bool PeerLanes::has_room(size_t peer, size_t bytes) const {
  const PeerState& state = states_[peer];
  const Held& held = held_[peer];
  if (!state.usable) return false;
  if (mutant("credits_are_ignored")) return true;
  return held.reads < state.reads_max && (!held.reads || held.bytes + bytes <= state.bytes_max);
}

bool PeerLanes::is_awaited(size_t peer) const {
  return states_[peer].usable && (held_[peer].awaited || has_room(peer, 0));
}

LaneEstimate PeerLanes::estimate(size_t peer, size_t bytes, double rate) const {
  const double known = states_[peer].bytes_per_s;
  const double left = static_cast<double>(queued_bytes(peer) + bytes);
  return {left / (known > 0 ? known : rate), has_room(peer, bytes)};
}

uint64_t PeerLanes::queued_bytes(size_t peer) const {
  return states_[peer].queued_bytes + held_[peer].bytes;
}

uint64_t PeerLanes::add(Task& task, size_t peer, size_t bytes, int64_t until_ns) {
  const uint64_t token = kTokenBit | ++count_;
  reads_[token] = {&task, peer, -1, bytes, until_ns};
  Held& held = held_[peer];
  ++held.reads;
  ++held.awaited;
  held.bytes += bytes;
  held.fresh.push_back(token);
  next_ns_ = std::min(next_ns_, until_ns);
  return token;
}

PeerRead* PeerLanes::find(uint64_t token) {
  const auto found = reads_.find(token);
  return found == reads_.end() ? nullptr : &found->second;
}

PeerRead PeerLanes::take(uint64_t token) {
  const auto found = reads_.find(token);
  require(found != reads_.end(), "a peer ends what it does not have");
  const PeerRead read = found->second;
  reads_.erase(found);
  Held& held = held_[read.peer];
  --held.reads;
  held.bytes -= read.bytes;
  if (read.task) --held.awaited;
  if (!read.offered) std::erase(held.fresh, token);
  return read;
}

void PeerLanes::abandon(PeerRead& read, int32_t slot) {
  read.task = nullptr;
  read.slot = slot;
  --held_[read.peer].awaited;
}

std::vector<uint64_t> PeerLanes::offer(size_t peer) {
  auto fresh = std::exchange(held_.at(peer).fresh, {});
  for (const uint64_t token : fresh) reads_.at(token).offered = true;
  return fresh;
}

std::vector<uint64_t> PeerLanes::take_back(size_t peer) {
  return states_.at(peer).usable ? std::vector<uint64_t>{} : held_[peer].fresh;
}

// Those whose try has ended without an outcome, each once.
std::vector<uint64_t> PeerLanes::expire(int64_t now_ns) {
  std::vector<uint64_t> late;
  if (next_ns_ > now_ns || mutant("a_silent_peer_is_waited_for")) return late;
  next_ns_ = INT64_MAX;
  for (auto& [token, read] : reads_) {
    if (read.is_overdue || !read.task) continue;
    if (read.until_ns > now_ns) {
      next_ns_ = std::min(next_ns_, read.until_ns);
      continue;
    }
    read.is_overdue = true;
    late.push_back(token);
  }
  std::ranges::sort(late);
  return late;
}

}  // namespace nvmeof
