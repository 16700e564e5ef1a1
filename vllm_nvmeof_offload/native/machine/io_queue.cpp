// SPDX-License-Identifier: Apache-2.0
#include "machine/io_queue.h"

#include <algorithm>
#include <cmath>

namespace nvmeof {
namespace {

constexpr Urgency kReads[] = {Urgency::DEMAND, Urgency::URGENT, Urgency::SERVE, Urgency::PREFETCH};
constexpr int64_t kRatePeriodNs = 250'000'000;
constexpr int64_t kFoldPeriodNs = 50'000'000;
constexpr double kRateChangeMin = 0.1;
constexpr size_t kOfPeers = 2;  // the index of peers in `deadlines_`

double seconds(int64_t ns) { return static_cast<double>(ns) / 1e9; }

uint32_t regions_number(uint16_t owner, size_t target) {
  return static_cast<uint32_t>(owner) << 16 | static_cast<uint32_t>(target);
}

// Return whether a failed read of another engine's region is not the target's fault: the slot was
// reused, or the files were removed or truncated.
bool is_of_region(Outcome code, int error) {
  if (code != Outcome::IO_ERROR) return code != Outcome::OK;
  return error == 0 || error == EBADF || error == ENOENT || error == ESTALE;
}

bool differs(double reported, double now) {
  return std::abs(now - reported) > kRateChangeMin * reported;
}

}  // namespace

IoQueue::IoQueue(const IoOptions& options, NativeLanes& lanes, NativeLanes* peer_lanes,
                 int64_t now_ns)
    : peers(options.peers),
      options_(options),
      lanes_(lanes),
      peer_lanes_(peer_lanes),
      now_ns_(now_ns),
      targets_(options.targets),
      reported_(options.targets),
      rates_taken_ns_(now_ns),
      named_(options.stamp) {
  for (size_t target = 0; target < options.targets; ++target) {
    targets_[target].stamp = named_;
    queues_.emplace_back(options_);
    read_meters_.emplace_back(options.saturating_reads);
    write_meters_.emplace_back(options.saturating_writes);
  }
}

void IoQueue::enqueue(Task& task) {
  if (task.job->kind == OpKind::RESET)
    targets_[task.target].resets.push_back(&task);
  else if (!sums_first(task))
    queue_of(task).queue(task.urgency).push(task, task.deadline_ns && !task.job->serves());
  if (task.deadline_ns) retry_deadline_ns_ = std::min(retry_deadline_ns_, task.deadline_ns);
}

// Let the lanes compute the checksum before the write is queued. Return whether they do.
bool IoQueue::sums_first(Task& task) {
  const size_t bytes = payload_bytes(task);
  if (task.urgency != Urgency::WRITE || task.payload_crc >= 0) return false;
  const auto number = reinterpret_cast<uint64_t>(&task);
  return lanes_.sum(number, address(task) + options_.header_bytes, bytes) &&
         summing_.insert(&task).second;
}

void IoQueue::queue_summed() {
  sums_.clear();
  lanes_.summed(sums_);
  for (const Summed& one : sums_) {
    Task& task = *reinterpret_cast<Task*>(one.number);
    summing_.erase(&task);
    task.payload_crc = one.crc;
    queue_of(task).queue(Urgency::WRITE).push(task);
  }
}

void IoQueue::free_landed() {
  lanes_.landed(landed_);
  for (const uint64_t token : std::exchange(landed_, {})) {
    Flights::One* const one = in_flight_.find(token);
    if (!one || one->late) continue;  // ended, or no bound counts it any longer
    one->landed = true;
    const size_t bytes = transfer_bytes(*one->task);
    queue_of(*one->task).give_back(*one->task, one->urgency, bytes, now_ns_);
  }
}

bool IoQueue::stop_summing(Task& task) {
  if (!summing_.erase(&task)) return false;
  lanes_.forget(reinterpret_cast<uint64_t>(&task));
  return true;
}

void IoQueue::promote(Task& task, uint64_t load) {
  const bool waited = queue_of(task).queue(task.urgency).remove(task);
  if (mutant("promoted_fetch_never_runs")) return;
  task.urgency = Urgency::DEMAND;
  task.charged_to = load;
  if (waited) queue_of(task).queue(task.urgency).push(task, task.deadline_ns != 0);
}

bool IoQueue::cancel(Task& task) {
  if (stop_summing(task)) return true;
  if (queue_of(task).queue(task.urgency).remove(task) || awaiting_.remove(task)) return true;
  if (task.token == 0) return false;
  if (lanes_of(task.is_at_peer()).cancel_one(task.token)) ended({task.token, Outcome::CANCELLED});
  return false;
}

void IoQueue::give_to_peer(Task& task) {
  PeerLane& peer = peers[task.peer_number()];
  if (!task.deadline_ns) task.deadline_ns = now_ns_ + options_.read_deadline_ns;
  const int64_t until_ns = now_ns_ + (task.deadline_ns - now_ns_) / 2;
  Flights::One one{.task = &task, .urgency = Urgency::DEMAND, .peer = task.peer};
  one.peer_bytes = transfer_bytes(task);
  task.token = in_flight_.add(one);
  ++peers_in_flight_;
  ++peer.reads;
  ++peer.awaited;
  peer.bytes += one.peer_bytes;
  watch(task.token, until_ns, kOfPeers);
  LaneOp op = describe(task, task.token);
  op.peer = task.peer_number();
  op.until_ns = until_ns;
  peer_lanes_->take(op);
}

void IoQueue::abandon(uint64_t token) {
  Flights::One* const one = in_flight_.find(token);
  if (!one || std::exchange(one->late, true)) return;
  --peers[one->peer - size_t{1}].awaited;
}

IoQueue::Files IoQueue::files_of(uint16_t owner) const {
  const auto found = owners_.find(owner);
  return found == owners_.end() ? Files::AWAITED : found->second.files;
}

void IoQueue::await_files(Task& task) {
  if (!task.deadline_ns) task.deadline_ns = now_ns_ + options_.read_deadline_ns;
  retry_deadline_ns_ = std::min(retry_deadline_ns_, task.deadline_ns);
  awaiting_.push(task);
}

void IoQueue::await_files(uint16_t owner, Task* asked) {
  const int64_t deadline_ns = now_ns_ + options_.read_deadline_ns;
  owners_[owner] = {Files::AWAITED, deadline_ns};
  retry_deadline_ns_ = std::min(retry_deadline_ns_, deadline_ns);
  if (asked) await_files(*asked);
}

bool IoQueue::attached(uint16_t owner, int error) {
  if (files_of(owner) != Files::AWAITED) return false;
  const Outcome code = error ? Outcome::IO_ERROR : Outcome::OK;
  set_files(owner, error ? Files::NONE : Files::HERE, code, error);
  return true;
}

// Requeue the reads that wait for the engine's files, and end its ATTACH ops with this outcome.
void IoQueue::set_files(uint16_t owner, Files files, Outcome code, int error) {
  owners_[owner] = {files};
  std::vector<Task*> going;
  for (Task* task : awaiting_.take_all()) {
    if (task->owner != owner)
      awaiting_.push(*task);
    else if (task->job->kind == OpKind::ATTACH)
      events.push_back({task, code, error});
    else
      going.push_back(task);
  }
  std::ranges::reverse(going);  // because each is pushed to the front
  for (Task* task : going) queue_of(*task).queue(task->urgency).push(*task, true);
}

size_t IoQueue::foreign_reads(uint16_t owner, size_t target) const {
  const auto found = foreign_reads_.find(regions_number(owner, target));
  return found == foreign_reads_.end() ? 0 : found->second;
}

std::vector<Task*> IoQueue::take_queued_writes() {
  std::vector<Task*> tasks;
  if (mutant("old_writes_follow_the_reset")) return tasks;
  for (auto& queue : queues_) {
    for (Task* task : queue.queue(Urgency::WRITE).take_all()) tasks.push_back(task);
    if (mutant("reset_forgets_the_writes_of_other_targets")) break;
  }
  while (!summing_.empty()) {
    tasks.push_back(*summing_.begin());
    stop_summing(*tasks.back());
  }
  return tasks;
}

void IoQueue::set_target(size_t target, bool usable, uint32_t attachment) {
  Target& one = targets_.at(target);
  if (one.attachment != attachment) {
    one.succeeded[0] = one.succeeded[1] = false;
    one.stamp = named_;  // the reattachment wrote the newest superblock
  }
  one.usable = usable;
  one.attachment = attachment;
}

void IoQueue::begin_reset(uint64_t op, const Stamp& stamp, const Stamp& unnamed) {
  newest_reset_ = op;
  named_ = stamp;
  for (Target& target : targets_) target.stamp = unnamed;
}

uint64_t IoQueue::address(const Task& task) const {
  const bool lands = task.fills && mutant("a_pull_writes_into_its_cache_slot");
  if (task.stream < 0 || lands) return cache_address(task);
  return options_.stream_address + static_cast<size_t>(task.stream) * options_.slot_bytes;
}

uint64_t IoQueue::cache_address(const Task& task) const {
  require(task.cache >= 0, "a task has no slot");
  return options_.cache_address + static_cast<size_t>(task.cache) * options_.slot_bytes;
}

bool IoQueue::busy() const {
  return in_flight_.size() || awaiting_.size() || !summing_.empty() ||
         std::any_of(targets_.begin(), targets_.end(),
                     [](const Target& target) { return !target.resets.empty(); }) ||
         std::any_of(queues_.begin(), queues_.end(), [](const TargetQueue& queue) {
           return queue.waiting(false) || queue.waiting(true);
         });
}

size_t IoQueue::waiting(Urgency urgency) {
  size_t count = urgency == Urgency::WRITE ? summing_.size() : 0;
  for (auto& queue : queues_) count += queue.queue(urgency).size();
  return count;
}

void IoQueue::offer_reads() {
  first_ = (first_ + 1) % targets_.size();
  room_ = lanes_.room().reads;
  for (const Urgency urgency : kReads) offer(urgency);
  lanes_.start();
}

void IoQueue::offer_writes() {
  room_ = lanes_.room().writes;
  offer(Urgency::WRITE);
  lanes_.start();
}

// Hand over waiting tasks, one per target at a time, until the lane has no room. Tasks that can
// never start fail even if there is no room.
void IoQueue::offer(Urgency urgency) {
  std::vector<size_t> going;
  for (size_t at = 0; at < targets_.size(); ++at) {
    const size_t target = (first_ + at) % targets_.size();
    if (queues_[target].queue(urgency).size() > 0) going.push_back(target);
  }
  while (!going.empty())
    std::erase_if(going, [&](size_t target) { return !offer_one(target, urgency); });
}

// Hand over, fail or requeue one task. Return whether another task for this target may follow.
bool IoQueue::offer_one(size_t target, Urgency urgency) {
  FairQueue& queue = queues_[target].queue(urgency);
  Task* const task = queue.peek();
  if (task == nullptr) return false;
  if (urgency == Urgency::WRITE && !write_may_start(targets_[target])) return false;
  if (const auto failure = refusal(*task)) {
    queue.remove(*task);
    events.push_back({task, *failure, *failure == Outcome::IO_ERROR ? ENOENT : 0});
    return true;
  }
  if (task->owner && files_of(task->owner) == Files::AWAITED &&
      !mutant("reads_do_not_wait_for_their_files")) {
    queue.remove(*task);
    await_files(*task);
    return true;
  }
  if (!room_ || !queues_[target].has_room(urgency, transfer_bytes(*task), now_ns_)) return false;
  hand_over(*task, urgency);
  return true;
}

void IoQueue::hand_over(Task& task, Urgency urgency) {
  const bool is_write = urgency == Urgency::WRITE;
  const uint32_t attachment = targets_[task.target].attachment;
  TargetQueue& queue = queue_of(task);
  queue.take(urgency, transfer_bytes(task), now_ns_);
  queue.progressed(is_write);
  --room_;
  task.token = in_flight_.add({0, &task, urgency, false, false, attachment, now_ns_});
  if (!task.deadline_ns) task.deadline_ns = now_ns_ + patience_ns(is_write);
  watch(task.token, task.deadline_ns, is_write);
  if (task.owner) ++foreign_reads_[regions_number(task.owner, task.target)];
  writes_in_flight_ += is_write;
  targets_[task.target].writes_running += is_write;
  ++health_of(task.target, attachment).began;
  (is_write ? write_meters_ : read_meters_)[task.target].began(seconds(now_ns_));
  lanes_.take(describe(task, task.token));
}

LaneOp IoQueue::describe(const Task& task, uint64_t token) const {
  const bool is_write = task.urgency == Urgency::WRITE;
  return {token,
          task.job->kind,
          task.urgency,
          task.place,
          address(task),
          payload_bytes(task),
          is_write ? task.payload_crc : kNoCrc,
          identity_of(task.key(), task.content.generation),
          targets_[task.target].stamp,
          task.holder != kEveryMember,
          task.job->clients.empty() ? 0 : task.job->clients[task.index],
          !is_write && task.header_only};
}

// Return whether a superblock may be written: after all earlier writes and before all later ones,
// because their chunks could otherwise be confused. A write past its deadline may hang, so it is
// not awaited; its old epoch prevents its adoption.
bool IoQueue::reset_may_start(const Target& target) const {
  if (target.resets.empty() || target.resetting) return false;
  if (mutant("reset_overtakes_writes")) return true;
  if (mutant("a_reset_waits_for_a_late_write")) return writes_in_flight_ == 0;
  if (mutant("a_reset_waits_for_other_lanes"))
    return std::ranges::all_of(targets_, [](const Target& one) { return !one.writes_running; });
  return target.writes_running == 0;
}

bool IoQueue::write_may_start(const Target& target) const {
  if (mutant("a_write_passes_the_reset_before_it")) return true;
  if (mutant("a_write_behind_one_lanes_reset_passes_it"))
    return std::ranges::any_of(
        targets_, [](const Target& one) { return !one.resetting && one.resets.empty(); });
  // Writes queued before a reset were removed by `take_queued_writes`.
  return !target.resetting && target.resets.empty();
}

std::vector<const Task*> IoQueue::offer_resets() {
  std::vector<const Task*> offered;
  for (size_t number = 0; number < targets_.size(); ++number) {
    Target& target = targets_[number];
    if (mutant("suspect_target_fails_the_reset") && !target.resets.empty() && !target.usable) {
      events.push_back({target.resets.front(), Outcome::CANCELLED});
      target.resets.pop_front();
    }
    if (!reset_may_start(target)) continue;
    Task& task = *target.resets.front();
    target.resets.pop_front();
    target.resetting = true;
    const uint32_t attachment = target.attachment;
    task.token = in_flight_.add({0, &task, Urgency::WRITE, true, false, attachment, now_ns_});
    ++writes_in_flight_;
    if (!task.deadline_ns) task.deadline_ns = now_ns_ + patience_ns(true);
    if (!mutant("a_superblock_has_no_deadline")) watch(task.token, task.deadline_ns, true);
    // The target's writes wait for the superblock, so they do not count as stalled.
    queues_[number].progressed(true);
    offered.push_back(&task);
  }
  return offered;
}

// Record whether the target has the superblock and, unless `one` is late, the write's outcome.
void IoQueue::superblock_decided(const Flights::One& one, const LaneEnd& end) {
  const Task& task = *one.task;
  Target& target = targets_[task.target];
  const Outcome code = end.code;
  const bool named = code == Outcome::OK || mutant("failed_reset_is_ignored");
  if (named && task.job->op == newest_reset_ &&
      !(one.late && mutant("a_late_superblock_is_forgotten")))
    target.stamp = named_;
  if (one.late) return;
  target.resetting = false;
  queues_[task.target].progressed(true);
  if (code != Outcome::OK)
    unwritten.push_back({task.target, one.attachment, true, code, end.error, 0});
}

// Return the outcome of a read or write that must fail without an attempt. Superblocks are always
// attempted.
std::optional<Outcome> IoQueue::refusal(const Task& task) const {
  if (!targets_[task.target].usable) return Outcome::DEADLINE;
  if (task.owner && files_of(task.owner) == Files::NONE) return Outcome::IO_ERROR;
  return std::nullopt;
}

void IoQueue::fail_stalled() {
  for (auto& queue : queues_)
    for (const bool is_write : {false, true})
      for (Task* task : queue.take_stalled(now_ns_, patience_ns(is_write), is_write))
        events.push_back({task, Outcome::DEADLINE});
}

// Insert a deadline in order. Each kind has one time limit, so only retries precede older entries.
void IoQueue::watch(uint64_t token, int64_t deadline_ns, size_t kind) {
  auto& deadlines = deadlines_[kind];
  auto at = deadlines.end();
  while (at != deadlines.begin() && std::prev(at)->first > deadline_ns) --at;
  deadlines.insert(at, {deadline_ns, token});
}

void IoQueue::expire() {
  if (mutant("ops_have_no_deadline")) return;
  expire_retries();
  for (auto& deadlines : deadlines_) {
    if (&deadlines == &deadlines_[kOfPeers] && mutant("a_silent_peer_is_waited_for")) return;
    while (!deadlines.empty() && deadlines.front().first <= now_ns_) {
      const uint64_t token = deadlines.front().second;
      deadlines.pop_front();
      const Flights::One* const one = in_flight_.find(token);
      if (one && !one->late) give_up(token);
    }
  }
}

void IoQueue::expire_retries() {
  if (retry_deadline_ns_ > now_ns_) return;
  retry_deadline_ns_ = INT64_MAX;
  for (auto& queue : queues_)
    for (const Urgency urgency : kReads)
      for (Task* task : queue.queue(urgency).take_past(now_ns_, retry_deadline_ns_))
        events.push_back({task, Outcome::DEADLINE});
  expire_awaiting();
}

void IoQueue::expire_awaiting() {
  std::vector<uint16_t> late;
  for (const auto& [owner, one] : owners_) {
    if (one.deadline_ns <= now_ns_)
      late.push_back(owner);
    else
      retry_deadline_ns_ = std::min(retry_deadline_ns_, one.deadline_ns);
  }
  for (Task* task : awaiting_.take_past(now_ns_, retry_deadline_ns_))
    events.push_back({task, Outcome::DEADLINE});
  for (const uint16_t owner : late) set_files(owner, Files::NONE, Outcome::DEADLINE, 0);
}

void IoQueue::give_up(uint64_t token) {
  const LaneEnd end{token, Outcome::DEADLINE};
  const bool at_peer = in_flight_.find(token)->peer != Task::kAtNoPeer;
  if (lanes_of(at_peer).cancel_one(token)) {  // it had not started
    ended(end);
    return;
  }
  Flights::One* const found = in_flight_.find(token);
  require(found != nullptr, "a lane ended an operation while cancelling it");
  unreleased(*found, end);
}

void IoQueue::unreleased(Flights::One& found, const LaneEnd& end) {
  if (found.late) return;
  const Flights::One one = found;
  found.late = true;
  if (one.peer) {
    --peers[one.peer - size_t{1}].awaited;
  } else if (one.is_reset) {
    superblock_decided(one, end);
  } else {
    targets_[one.task->target].writes_running -= one.is_write();
    ++health_of(one.task->target, one.attachment).late;
    count_outcome(one, end);
  }
  events.push_back({one.task, end.code, end.error, false, 0, one.peer ? one.token : 0});
}

int64_t IoQueue::next_deadline_ns() {
  int64_t next_ns = retry_deadline_ns_;
  for (auto& deadlines : deadlines_) {
    while (!deadlines.empty() && !in_flight_.find(deadlines.front().second)) deadlines.pop_front();
    if (!deadlines.empty()) next_ns = std::min(next_ns, deadlines.front().first);
  }
  for (const auto& queue : queues_)
    for (const bool is_write : {false, true})
      next_ns = std::min(next_ns, queue.stalls_at_ns(patience_ns(is_write), is_write));
  return next_ns;
}

void IoQueue::poll_lanes(int64_t ahead_ns) {
  queue_summed();
  free_landed();
  ends_.clear();
  lanes_.ended(ends_);
  if (peer_lanes_) peer_lanes_->ended(ends_);
  for (LaneEnd& end : ends_) {
    if (end.ended_ns) end.ended_ns += ahead_ns;
    ended(end);
  }
}

void IoQueue::ended(const LaneEnd& end) {
  Flights::One* const found = in_flight_.find(end.token);
  require(found != nullptr, "a lane ends an operation that it does not have");
  if (!end.released) {
    unreleased(*found, end);
    return;
  }
  const Flights::One one = in_flight_.take(*found);
  if (one.peer) {
    peer_ended(one, end);
    return;
  }
  writes_in_flight_ -= one.is_write();
  if (one.task->owner) --foreign_reads_[regions_number(one.task->owner, one.task->target)];
  const Outcome code = end.code;
  if (!one.is_reset) {
    HealthCounts& counts = health_of(one.task->target, one.attachment);
    (one.late ? counts.released_late : counts.released) += 1;
    if (!one.late) {
      targets_[one.task->target].writes_running -= one.is_write();
      count_outcome(one, end);
    }
  }
  if (!one.late && retries(one, end)) return;
  if (one.is_reset) superblock_decided(one, end);
  if (one.late) {
    events.push_back({one.task, Outcome::RELEASED});
    return;
  }
  if (end.payload_crc >= 0) {
    one.task->is_proven = false;
    one.task->payload_crc = end.payload_crc;
  }
  events.push_back({one.task, code, end.error, true, end.ended_ns});
}

void IoQueue::peer_ended(const Flights::One& one, const LaneEnd& end) {
  PeerLane& peer = peers[one.peer - size_t{1}];
  --peers_in_flight_;
  --peer.reads;
  peer.awaited -= !one.late;
  peer.bytes -= one.peer_bytes;
  const Outcome code = one.late ? Outcome::RELEASED : end.code;
  events.push_back({one.task, code, end.error, true, end.ended_ns, one.token});
}

void IoQueue::count_outcome(const Flights::One& one, const LaneEnd& end) {
  Task& task = *one.task;
  const bool is_write = one.is_write();
  if (!one.landed) queue_of(task).give_back(task, one.urgency, transfer_bytes(task), now_ns_);
  const bool ok = end.code == Outcome::OK;
  const uint64_t bytes = ok ? transfer_bytes(task) : 0;
  // Prefer the engine's own timestamp, because this thread may see the end late.
  const double began_s = seconds(one.began_ns);
  const double ended_s = seconds(end.ended_ns ? end.ended_ns : now_ns_);
  (is_write ? write_meters_ : read_meters_)[task.target].ended(static_cast<double>(bytes), began_s,
                                                               ended_s);
  if (!is_write) targets_[task.target].read_bytes += bytes;
  TransferCounts& counts = is_write ? writes : reads;
  counts.operations += 1;
  counts.bytes += bytes;
  counts.seconds += std::max(0.0, ended_s - began_s);
  note_outcome(one, end);
}

void IoQueue::note_outcome(const Flights::One& one, const LaneEnd& end) {
  const Outcome code = end.code;
  if (code == Outcome::DEADLINE || code == Outcome::CANCELLED) return;  // the target did not answer
  if (one.task->owner && is_of_region(code, end.error) &&
      !mutant("a_regions_error_marks_its_target"))
    return;
  Target& target = targets_[one.task->target];
  const bool is_current = one.attachment == target.attachment;
  const bool answered = code != Outcome::IO_ERROR;  // right or wrong bytes
  if (!is_current || (answered && target.succeeded[one.is_write()])) return;
  target.succeeded[one.is_write()] = answered;
  health_outcomes.push_back(
      {one.task->target, one.attachment, one.is_write(), code, end.error, one.task->place});
}

HealthCounts& IoQueue::health_of(size_t target, uint32_t attachment) {
  for (HealthCounts& counts : health_counts)
    if (counts.target == target && counts.attachment == attachment) return counts;
  health_counts.push_back({static_cast<uint32_t>(target), attachment});
  return health_counts.back();
}

bool IoQueue::retries(const Flights::One& one, const LaneEnd& end) {
  Task& task = *one.task;
  const size_t number = static_cast<size_t>(std::max(0, end.error));
  const bool may_help = end.code == Outcome::IO_ERROR && number < options_.retryable.size() &&
                        options_.retryable[number];
  if (!may_help || task.job->kind == OpKind::WRITE || !task.retries_left || task.cancelled)
    return false;
  if (one.is_reset && task.deadline_ns <= now_ns_) return false;
  --task.retries_left;
  if (one.is_reset) {
    targets_[task.target].resetting = false;
    targets_[task.target].resets.push_front(&task);
    return true;
  }
  if (mutant("a_retry_gets_a_new_deadline"))
    task.deadline_ns = 0;
  else
    retry_deadline_ns_ = std::min(retry_deadline_ns_, task.deadline_ns);
  queue_of(task).queue(task.urgency).push(task, true);
  return true;
}

std::vector<IoQueue::Rate> IoQueue::take_rates() {
  std::vector<Rate> changed;
  if (now_ns_ - rates_taken_ns_ < kRatePeriodNs) return changed;
  rates_taken_ns_ = now_ns_;
  for (size_t target = 0; target < targets_.size(); ++target) {
    const double write = write_meters_[target].fold(seconds(now_ns_));
    const double read = read_meters_[target].fold(seconds(now_ns_));
    queues_[target].writes_at(write);
    auto& reported = reported_[target];
    if (!differs(reported.first, write) && !differs(reported.second, read)) continue;
    reported = {write, read};
    changed.push_back({target, write, read});
  }
  return changed;
}

double IoQueue::read_rate(size_t target) {
  if (now_ns_ - rates_folded_ns_ >= kFoldPeriodNs) {
    rates_folded_ns_ = now_ns_;
    for (Meter& meter : read_meters_) meter.fold(seconds(now_ns_));
  }
  return read_meters_[target].rate();
}

uint64_t IoQueue::bytes_before(size_t target) {
  TargetQueue& queue = queues_[target];
  const size_t waiting = queue.queue(Urgency::DEMAND).size() + queue.queue(Urgency::URGENT).size();
  return queue.read_bytes_held() + waiting * options_.slot_bytes;
}

uint64_t IoQueue::bytes_to_serve(size_t target) {
  return queues_[target].queue(Urgency::SERVE).size() * options_.slot_bytes;
}

}  // namespace nvmeof
