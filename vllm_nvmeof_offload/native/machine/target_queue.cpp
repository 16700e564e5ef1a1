// SPDX-License-Identifier: Apache-2.0
#include "machine/target_queue.h"

#include <algorithm>

#include "machine/io_queue.h"

namespace nvmeof {
namespace {

// The engine is given at most as many bytes of writes as the target completes in this time, or
// kWriteAheadBytes if that is more.
constexpr double kWriteAheadS = 0.0125;
constexpr size_t kWriteAheadBytes = size_t{32} << 20;
// If a load has read from a target within this time, another load is expected soon.
constexpr int64_t kLoadsAgainNs = 2'000'000'000;

}  // namespace

bool TargetQueue::has_room(Urgency urgency, size_t bytes, int64_t now_ns) const {
  if (mutant("bytes_of_the_next_operation_do_not_count")) bytes = 0;
  const size_t fetches = held(Urgency::URGENT) + held(Urgency::PREFETCH);
  const size_t fetched = bytes_held(Urgency::URGENT) + bytes_held(Urgency::PREFETCH);
  const size_t reads = held(Urgency::DEMAND) + held(Urgency::SERVE) + fetches;
  if (urgency == Urgency::WRITE) {
    size_t bytes_max = write_bytes_max_;
    if (reads || waiting(false))
      bytes_max = std::min(bytes_max, options_.write_bytes_beside_reads_max);
    if (mutant("writes_keep_no_cap_beside_reads")) bytes_max = options_.write_bytes_max;
    const size_t writes = held(urgency);
    return !writes || (writes < options_.writes_max && bytes_held(urgency) + bytes <= bytes_max);
  }
  if (urgency == Urgency::SERVE && !has_serve_room(bytes, now_ns)) return false;
  const bool is_fetch = urgency == Urgency::URGENT || urgency == Urgency::PREFETCH;
  if (is_fetch && fetches && !mutant("fetches_take_every_place") &&
      (fetches >= options_.reads_max / 2 || fetched + bytes > options_.read_bytes_max / 2))
    return false;
  const size_t read = read_bytes_held();
  return !reads || (reads < options_.reads_max && read + bytes <= options_.read_bytes_max);
}

void TargetQueue::writes_at(double rate) {
  const auto ahead = static_cast<size_t>(kWriteAheadS * rate);
  write_bytes_max_ = std::min(options_.write_bytes_max, std::max(kWriteAheadBytes, ahead));
}

// Return whether one more read for a peer may start; the first always may. The bounds apply even
// while no load waits, so that the next load finds room and few bytes ahead of it in the device's
// queue, which ignores urgency. The bound is halved where loads are expected, because even few
// bytes delay a short load; elsewhere, half the bound would leave the target idle between reads.
bool TargetQueue::has_serve_room(size_t bytes, int64_t now_ns) const {
  if (!held(Urgency::SERVE) || mutant("serves_take_every_place")) return true;
  const size_t bytes_max = options_.serve_bytes_max / (has_loaded(now_ns) ? 2 : 1);
  if (bytes_held(Urgency::SERVE) + bytes > bytes_max) return false;
  const auto fits = [this](size_t wanted, size_t all) {
    return static_cast<double>(wanted) <= options_.serve_share * static_cast<double>(all);
  };
  return fits(held(Urgency::SERVE) + 1, options_.reads_max) &&
         fits(bytes_held(Urgency::SERVE) + bytes, options_.read_bytes_max);
}

bool TargetQueue::has_loaded(int64_t now_ns) const {
  if (mutant("serves_forget_that_loads_read")) return false;
  return held(Urgency::DEMAND) || (loaded_ns_ && now_ns - *loaded_ns_ < kLoadsAgainNs);
}

void TargetQueue::take(Urgency urgency, size_t bytes, int64_t now_ns) {
  queue(urgency).take();
  bytes_held_[static_cast<size_t>(urgency)] += bytes;
  if (urgency == Urgency::DEMAND) loaded_ns_ = now_ns;
}

void TargetQueue::give_back(Task& task, Urgency urgency, size_t bytes, int64_t now_ns) {
  queue(urgency).give_back(task);
  bytes_held_[static_cast<size_t>(urgency)] -= bytes;
  if (urgency == Urgency::DEMAND) loaded_ns_ = now_ns;
}

size_t TargetQueue::waiting(bool is_write) const {
  const size_t begin = is_write ? static_cast<size_t>(Urgency::WRITE) : 0;
  const size_t end = is_write ? kUrgencies : static_cast<size_t>(Urgency::WRITE);
  size_t count = 0;
  for (size_t at = begin; at < end; ++at) count += queues_[at].size();
  return count;
}

size_t TargetQueue::read_bytes_held() const {
  return bytes_held(Urgency::DEMAND) + bytes_held(Urgency::URGENT) + bytes_held(Urgency::SERVE) +
         bytes_held(Urgency::PREFETCH);
}

std::vector<Task*> TargetQueue::take_stalled(int64_t now_ns, int64_t patience_ns, bool is_write) {
  auto& since_ns = stalled_since_ns_[is_write];
  std::vector<Task*> stalled;
  if (waiting(is_write) == 0) {
    since_ns.reset();
  } else if (!since_ns) {
    since_ns = now_ns;
  } else if (now_ns - *since_ns >= patience_ns && !mutant("full_engine_blocks_forever") &&
             !mutant("room_at_a_target_is_not_released")) {
    for (size_t at = 0; at < kUrgencies; ++at)
      if ((static_cast<Urgency>(at) == Urgency::WRITE) == is_write)
        for (Task* task : queues_[at].take_all()) stalled.push_back(task);
  }
  return stalled;
}

int64_t TargetQueue::stalls_at_ns(int64_t patience_ns, bool is_write) const {
  const auto& since_ns = stalled_since_ns_[is_write];
  return since_ns && waiting(is_write) ? *since_ns + patience_ns : INT64_MAX;
}

}  // namespace nvmeof
