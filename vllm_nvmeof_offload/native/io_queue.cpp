// SPDX-License-Identifier: Apache-2.0
#include "io_queue.h"

#include <algorithm>
#include <cmath>

namespace nvmeof {
namespace {

constexpr Urgency kReads[] = {Urgency::DEMAND, Urgency::URGENT, Urgency::PREFETCH};
constexpr int64_t kRatePeriodNs = 250'000'000;
constexpr double kRateChangeMin = 0.1;

double seconds(int64_t ns) { return static_cast<double>(ns) / 1e9; }

bool differs(double reported, double now) {
  return std::abs(now - reported) > kRateChangeMin * reported;
}

}  // namespace

// ---- the queues of one target -----------------------------------------------------------

bool TargetQueue::has_room(Urgency urgency) const {
  if (urgency == Urgency::WRITE) return held(urgency) < writes_max_;
  const size_t fetches = held(Urgency::URGENT) + held(Urgency::PREFETCH);
  if (urgency != Urgency::DEMAND && fetches >= fetches_max_) return false;
  return held(Urgency::DEMAND) + fetches < reads_max_;
}

bool TargetQueue::waiting() const {
  return std::any_of(queues_.begin(), queues_.end(),
                     [](const FairQueue& queue) { return queue.size() > 0; });
}

std::vector<Task*> TargetQueue::take_stalled(int64_t now_ns, int64_t patience_ns, bool is_write) {
  const size_t begin = is_write ? static_cast<size_t>(Urgency::WRITE) : 0;
  const size_t end = is_write ? kUrgencies : static_cast<size_t>(Urgency::WRITE);
  size_t waiting = 0;
  for (size_t at = begin; at < end; ++at) waiting += queues_[at].size();
  auto& since_ns = stalled_since_ns_[is_write];
  std::vector<Task*> stalled;
  if (waiting == 0) {
    since_ns.reset();
  } else if (!since_ns) {
    since_ns = now_ns;
  } else if (now_ns - *since_ns >= patience_ns && !mutant("full_engine_blocks_forever") &&
             !mutant("room_at_a_target_is_not_released")) {
    for (size_t at = begin; at < end; ++at)
      for (Task* task : queues_[at].take_all()) stalled.push_back(task);
  }
  return stalled;
}

// ---- from the pipeline ------------------------------------------------------------------

IoQueue::IoQueue(const IoOptions& options, NativeLanes* native, int64_t now_ns)
    : options_(options),
      native_(native),
      now_ns_(now_ns),
      targets_(options.targets),
      reported_(options.targets),
      rates_taken_ns_(now_ns) {
  for (size_t target = 0; target < options.targets; ++target) {
    queues_.emplace_back(options.reads_max, options.writes_max);
    read_meters_.emplace_back(options.saturating_reads);
    write_meters_.emplace_back(options.saturating_writes);
  }
}

void IoQueue::enqueue(Task& task) {
  if (task.job->kind == OpKind::RESET)
    resets_.push_back(&task);
  else
    queue_of(task).queue(task.urgency).push(task);
}

void IoQueue::promote(Task& task, uint64_t load) {
  const bool waited = queue_of(task).queue(task.urgency).remove(task);
  if (mutant("promoted_fetch_never_runs")) return;
  task.urgency = Urgency::DEMAND;
  task.charged_to = load;
  if (waited) enqueue(task);
}

bool IoQueue::cancel(Task& task) {
  if (queue_of(task).queue(task.urgency).remove(task)) return true;
  if (task.token != 0) {
    if (native_)
      native_->cancel_one(task.token);
    else
      cancels.push_back(task.token);
  }
  return false;
}

std::vector<Task*> IoQueue::take_queued_writes() {
  std::vector<Task*> tasks;
  if (mutant("old_writes_follow_the_reset")) return tasks;
  for (auto& queue : queues_) {
    for (Task* task : queue.queue(Urgency::WRITE).take_all()) tasks.push_back(task);
    if (mutant("reset_forgets_the_writes_of_other_targets")) break;
  }
  return tasks;
}

void IoQueue::set_target(size_t target, bool usable, uint32_t attachment) {
  Target& one = targets_.at(target);
  if (one.attachment != attachment) one.succeeded[0] = one.succeeded[1] = false;
  one.usable = usable;
  one.attachment = attachment;
}

void IoQueue::set_stamp(const Stamp& stamp, bool reset_is_durable) {
  stamp_ = stamp;
  reset_is_durable_ = reset_is_durable;
}

uint64_t IoQueue::address(const Task& task) const {
  const size_t bytes = options_.slot_bytes;
  if (task.stream >= 0) return options_.stream_address + static_cast<size_t>(task.stream) * bytes;
  require(task.cache >= 0, "a task has no slot");
  return options_.cache_address + static_cast<size_t>(task.cache) * bytes;
}

bool IoQueue::busy() const {
  return !in_flight_.empty() || !resets_.empty() ||
         std::any_of(queues_.begin(), queues_.end(),
                     [](const TargetQueue& queue) { return queue.waiting(); });
}

size_t IoQueue::waiting(Urgency urgency) {
  size_t count = 0;
  for (auto& queue : queues_) count += queue.queue(urgency).size();
  return count;
}

// ---- towards the engine -----------------------------------------------------------------

void IoQueue::offer_reads() {
  first_ = (first_ + 1) % targets_.size();
  full_ = false;
  for (const Urgency urgency : kReads) offer(urgency);
  if (native_) native_->start();
}

void IoQueue::offer_writes() {
  full_ = false;
  offer(Urgency::WRITE);
  if (native_) native_->start();
}

// Offer what waits, one per target at a time, until the engine is full. What cannot go at all fails
// even then.
void IoQueue::offer(Urgency urgency) {
  std::vector<size_t> going;
  for (size_t at = 0; at < targets_.size(); ++at) {
    const size_t target = (first_ + at) % targets_.size();
    if (queues_[target].queue(urgency).size() > 0) going.push_back(target);
  }
  while (!going.empty())
    std::erase_if(going, [&](size_t target) { return !offer_one(target, urgency); });
}

// Whether more of this target may go on.
bool IoQueue::offer_one(size_t target, Urgency urgency) {
  FairQueue& queue = queues_[target].queue(urgency);
  Task* const task = queue.peek();
  if (task == nullptr || (urgency == Urgency::WRITE && !write_may_start())) return false;
  if (const auto failure = refusal(*task)) {
    queue.remove(*task);
    events.push_back({task, *failure});
    return true;
  }
  if (full_ || !queues_[target].has_room(urgency)) return false;
  if (!hand_over(*task, urgency)) {
    full_ = true;
    return false;
  }
  queue.take();
  return true;
}

bool IoQueue::hand_over(Task& task, Urgency urgency) {
  const bool is_write = urgency == Urgency::WRITE;
  const uint64_t token = next_token_++;
  const int64_t patience_ns = is_write ? options_.write_deadline_ns : options_.read_deadline_ns;
  const int64_t deadline_ns = task.deadline_ns ? task.deadline_ns : now_ns_ + patience_ns;
  if (!native_) {
    offered.push_back({&task, token, deadline_ns});
    return true;
  }
  const LaneOp op{token,
                  task.urgency,
                  static_cast<uint64_t>(task.pool_slot),
                  address(task),
                  payload_bytes(task),
                  is_write ? task.payload_crc : -1,
                  task.key(),
                  task.content.generation,
                  deadline_ns,
                  stamp_};
  if (!native_->take(op)) return false;
  took(task, urgency, token, deadline_ns);
  return true;
}

void IoQueue::took(Task& task, Urgency urgency, uint64_t token, int64_t deadline_ns) {
  const bool is_write = urgency == Urgency::WRITE;
  const uint32_t attachment = targets_[task.target].attachment;
  queue_of(task).progressed(is_write);
  task.token = token;
  task.deadline_ns = deadline_ns;
  in_flight_.emplace(token, InFlight{&task, urgency, false, false, attachment, now_ns_});
  writes_in_flight_ += is_write;
  writes_running_ += is_write;
  ++health_of(task.target, attachment).began;
  (is_write ? write_meters_ : read_meters_)[task.target].began(seconds(now_ns_));
}

void IoQueue::accepted(size_t count) {
  for (size_t at = 0; at < count; ++at) {
    const Offer& one = offered[at];
    took(*one.task, one.task->urgency, one.token, one.deadline_ns);
  }
  full_ = count < offered.size();
  for (size_t at = offered.size(); at > count; --at) {
    Task& task = *offered[at - 1].task;
    queue_of(task).queue(task.urgency).untake(task);
  }
  offered.clear();
}

// A reset waits for the writes before it, and writes after it wait for the reset. Otherwise a chunk
// from before could reach the disk as one from after. A write past its deadline is not waited for:
// it may hang for ever, and its epoch, taken when it was handed over, keeps it from being adopted,
// whenever it reaches the disk.
bool IoQueue::reset_may_start() const {
  if (mutant("reset_overtakes_writes")) return true;
  if (mutant("a_reset_waits_for_a_late_write")) return writes_in_flight_ == 0;
  return writes_running_ == 0;
}

bool IoQueue::write_may_start() const {
  if (mutant("reset_overtakes_writes")) return true;
  // What was queued before a reset has been taken out (`take_queued_writes`).
  return !resetting_ && resets_.empty();
}

IoQueue::Offer IoQueue::reset_to_offer() {
  if (resets_.empty()) return {};
  if (mutant("suspect_target_fails_the_reset") && !targets_[0].usable) {
    events.push_back({resets_.front(), Outcome::CANCELLED});
    resets_.pop_front();
    return {};
  }
  if (!reset_may_start()) return {};
  return {resets_.front(), next_token_++, kNoDeadline};
}

void IoQueue::reset_accepted(uint64_t token) {
  Task& task = *resets_.front();
  resets_.pop_front();
  task.token = token;
  in_flight_.emplace(token, InFlight{&task, Urgency::WRITE, true, false, 0, now_ns_});
  ++writes_in_flight_;
  ++writes_running_;
  resetting_ = true;
  // Their writes wait for the reset: their time begins again.
  for (auto& queue : queues_) queue.progressed(true);
}

// Why a read or write is not even tried. A reset is always tried.
std::optional<Outcome> IoQueue::refusal(const Task& task) const {
  const bool barred = barred_ && !mutant("failed_reset_is_ignored");
  if (barred && task.job->kind == OpKind::WRITE && !reset_is_durable_) return Outcome::CANCELLED;
  if (!targets_[task.target].usable) return Outcome::DEADLINE;
  return std::nullopt;
}

void IoQueue::fail_stalled() {
  fail_stalled(false, options_.read_deadline_ns);
  fail_stalled(true, options_.write_deadline_ns);
}

void IoQueue::fail_stalled(bool is_write, int64_t patience_ns) {
  for (auto& queue : queues_)
    for (Task* task : queue.take_stalled(now_ns_, patience_ns, is_write))
      events.push_back({task, Outcome::DEADLINE});
}

// ---- from the engine --------------------------------------------------------------------

void IoQueue::poll_native(int64_t engine_now_ns, int64_t ahead_ns) {
  if (!native_) return;
  ends_.clear();
  native_->ended(engine_now_ns, ends_);
  for (LaneEnd& end : ends_) {
    end.ended_ns += ahead_ns;
    ended(end);
  }
}

void IoQueue::ended(const LaneEnd& end) {
  const auto found = in_flight_.find(end.token);
  require(found != in_flight_.end(), "a lane ends what it does not have");
  const Outcome code = static_cast<Outcome>(end.code);
  const bool has_outcome = code != Outcome::RELEASED;
  if (has_outcome) count_outcome(found->second, end);
  const InFlight one = found->second;
  if (end.released) {
    in_flight_.erase(found);
    writes_in_flight_ -= one.is_write();
    writes_running_ -= one.is_write() && !one.late;
    if (!one.is_reset) {
      HealthCounts& counts = health_of(one.task->target, one.attachment);
      (one.late ? counts.released_late : counts.released) += 1;
    }
    if (has_outcome && retries(one, end)) return;
  }
  events.push_back({one.task, code, end.error, end.released, end.ended_ns});
  if (end.released && one.is_reset) {
    resetting_ = false;
    barred_ = code != Outcome::OK;
  }
}

void IoQueue::count_outcome(InFlight& one, const LaneEnd& end) {
  one.late = !end.released;
  if (one.late && one.is_write()) --writes_running_;
  if (one.is_reset) return;
  Task& task = *one.task;
  const bool is_write = one.is_write();
  queue_of(task).queue(one.urgency).give_back(task);
  const bool ok = static_cast<Outcome>(end.code) == Outcome::OK;
  const uint64_t bytes = ok ? transfer_bytes(task) : 0;
  // The engine's own time if it knows it: this thread may learn of the end late.
  const double began_s = seconds(one.began_ns);
  const double ended_s = seconds(end.ended_ns ? end.ended_ns : now_ns_);
  (is_write ? write_meters_ : read_meters_)[task.target].ended(static_cast<double>(bytes), began_s,
                                                               ended_s);
  TransferCounts& counts = is_write ? writes : reads;
  counts.operations += 1;
  counts.bytes += bytes;
  counts.seconds += std::max(0.0, ended_s - began_s);
  if (one.late) ++health_of(task.target, one.attachment).late;
  note_outcome(one, end);
}

void IoQueue::note_outcome(const InFlight& one, const LaneEnd& end) {
  const Outcome code = static_cast<Outcome>(end.code);
  if (code == Outcome::DEADLINE || code == Outcome::CANCELLED) return;  // no answers of the target
  Target& target = targets_[one.task->target];
  const bool is_current = one.attachment == target.attachment;
  const bool answered = code != Outcome::IO_ERROR;  // with bytes, right or wrong
  if (!is_current || (answered && target.succeeded[one.is_write()])) return;
  target.succeeded[one.is_write()] = answered;
  health_outcomes.push_back({one.task->target, one.attachment, one.is_write(), code, end.error,
                             static_cast<uint64_t>(one.task->pool_slot)});
}

HealthCounts& IoQueue::health_of(size_t target, uint32_t attachment) {
  for (HealthCounts& counts : health_counts)
    if (counts.target == target && counts.attachment == attachment) return counts;
  health_counts.push_back({static_cast<uint32_t>(target), attachment});
  return health_counts.back();
}

// Queue a read or reset once more if that may help. True: the failure is not reported.
bool IoQueue::retries(const InFlight& one, const LaneEnd& end) {
  Task& task = *one.task;
  const size_t number = static_cast<size_t>(std::max(0, end.error));
  const bool may_help = static_cast<Outcome>(end.code) == Outcome::IO_ERROR &&
                        number < options_.retryable.size() && options_.retryable[number];
  if (!may_help || task.job->kind == OpKind::WRITE || !task.retries_left || task.cancelled)
    return false;
  --task.retries_left;
  if (one.is_reset)
    resets_.push_front(&task);
  else
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
    auto& reported = reported_[target];
    if (!differs(reported.first, write) && !differs(reported.second, read)) continue;
    reported = {write, read};
    changed.push_back({target, write, read});
  }
  return changed;
}

}  // namespace nvmeof
