// SPDX-License-Identifier: Apache-2.0
#include "machine/one_copy.h"

#include <poll.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

namespace nvmeof {

namespace {

constexpr size_t kMembersMax = 64;  // one bit of a word each
constexpr size_t kLineWords = 8;    // words per cache line
// The words of an announcement are: readers; op; row and code; generation.
constexpr size_t kAnnouncementWords = 4;
constexpr unsigned kStateBits = 2;

// Derive a fill's name from the chunk and the op: a chunk may be read into the same slot twice.
uint64_t name_of_fill(const Task& task, uint32_t op) {
  return task.content.generation ^ op * 0x9E3779B97F4A7C15u;
}

uint64_t fill_value(FillState state, uint64_t name) {
  return name << kStateBits | static_cast<uint64_t>(state);
}

}  // namespace

size_t SetMemory::part_words(const SetShape& shape) {
  const size_t words =
      kLineWords + shape.cache_slots + kAnnouncementWords * (shape.stream_slots + kNotices);
  return (words + kLineWords - 1) / kLineWords * kLineWords;
}

size_t SetMemory::bytes(const SetShape& shape) {
  return shape.members * part_words(shape) * sizeof(uint64_t);
}

SetMemory::SetMemory(void* memory, const SetShape& shape)
    : shape_(shape), part_words_(part_words(shape)), words_(static_cast<uint64_t*>(memory)) {
  require(shape.members > 1 && shape.members <= kMembersMax, "a set has 2 to 64 members");
  require(memory && reinterpret_cast<uintptr_t>(memory) % (kLineWords * sizeof(uint64_t)) == 0,
          "the words of a set are not aligned");
}

uint64_t* SetMemory::part(size_t member) const {
  require(member < shape_.members, "a set has no such member");
  return words_ + member * part_words_;
}

uint64_t* SetMemory::fill_word(size_t member, size_t slot) const {
  require(slot < shape_.cache_slots, "a cache slot is out of range");
  return part(member) + kLineWords + slot;
}

uint64_t* SetMemory::announcement(size_t member, size_t at) const {
  require(at < announcements(), "an announcement is out of range");
  return part(member) + kLineWords + shape_.cache_slots + kAnnouncementWords * at;
}

void SetMemory::count_progress(size_t member) {
  uint64_t* const word = part(member);
  store(word, load(word) + 1);
}

void SetMemory::set_fill(size_t member, size_t slot, FillState state, uint64_t name) {
  store(fill_word(member, slot), fill_value(state, name));
  // Later writes to the slot must not become visible before FILLING.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

FillState SetMemory::fill(size_t member, size_t slot, uint64_t name) const {
  const uint64_t word = load(fill_word(member, slot));
  const auto state = static_cast<FillState>(word & ((1 << kStateBits) - 1));
  return word == fill_value(state, name) ? state : FillState::EMPTY;
}

void SetMemory::announce(size_t member, size_t at, RowOf row, Outcome code, uint64_t readers) {
  uint64_t* const words = announcement(member, at);
  require(load(words) == 0, "an announcement is overwritten before all readers released it");
  std::atomic_ref(words[1]).store(row.op, std::memory_order_relaxed);
  std::atomic_ref(words[2]).store(uint64_t{row.row} << 8 | static_cast<uint8_t>(code),
                                  std::memory_order_relaxed);
  std::atomic_ref(words[3]).store(row.generation, std::memory_order_relaxed);
  store(words, readers);
}

SetMemory::Announced SetMemory::announced(size_t member, size_t at) const {
  const uint64_t* const words = announcement(member, at);
  const uint64_t what = load(words + 2);
  return {{load(words + 1), static_cast<uint32_t>(what >> 8), load(words + 3)},
          static_cast<Outcome>(what & 0xFF)};
}

void SetMemory::release(size_t member, size_t at, size_t reader) {
  std::atomic_ref(*announcement(member, at))
      .fetch_and(~(uint64_t{1} << reader), std::memory_order_acq_rel);
}

SetMember::SetMember(const SetOptions& options, const SetShape& shape, int64_t patience_ns)
    : options_(options),
      patience_ns_(patience_ns),
      memory_(options.memory, shape),
      holders_(options.members),
      fills_(options.members * shape.cache_slots) {
  require(options.member < options.members && options.addresses.size() == options.members,
          "a set does not match its members");
  for (const uint8_t size : options.set_sizes)
    require(size && options.members % size == 0, "a group's set size does not divide the members");
}

uint8_t SetMember::holder(uint8_t group, uint32_t member) const {
  const size_t size = options_.set_sizes[group];
  require(member < size, "a row names a member that its group does not have");
  return static_cast<uint8_t>(options_.member - options_.member % size + member);
}

uint64_t SetMember::address(const Task& task, size_t slot_bytes) const {
  size_t slot = static_cast<size_t>(task.cache);
  if (task.cache < 0) slot = memory_.shape().cache_slots + static_cast<size_t>(task.at_holder);
  return options_.addresses[task.holder] + slot * slot_bytes;
}

// Return one bit for each member with equal bytes for the task's group, except the holder.
uint64_t SetMember::other_members(const Task& task) const {
  const size_t size = options_.set_sizes[task.group];
  const uint64_t all = size == 64 ? UINT64_MAX : (uint64_t{1} << size) - 1;
  return all << (task.holder - task.holder % size) & ~(uint64_t{1} << task.holder);
}

void SetMember::set_fill(const Task& task, FillState state) {
  memory_.set_fill(options_.member, static_cast<size_t>(task.cache), state,
                   name_of_fill(task, static_cast<uint32_t>(task.job->op)));
}

void SetMember::lend(Task& task) {
  task.announced = true;
  memory_.announce(options_.member, static_cast<size_t>(task.stream), row_of(task), Outcome::OK,
                   other_members(task));
}

void SetMember::announce_failure(Task& task, Outcome code) {
  task.announced = true;
  failures_.push_back({row_of(task), code, other_members(task)});
  announce_failures();
}

void SetMember::announce_failures() {
  for (size_t at = memory_.shape().stream_slots; at < memory_.announcements(); ++at) {
    if (failures_.empty()) return;
    if (is_out(at)) continue;
    const Failure failure = failures_.front();
    failures_.pop_front();
    memory_.announce(options_.member, at, failure.row, failure.code, failure.readers);
  }
}

// Return whether a reader that has not left still uses this rank's announcement `at`.
bool SetMember::is_out(size_t at) {
  for (uint64_t left = memory_.readers(options_.member, at); left; left &= left - 1) {
    const auto reader = static_cast<size_t>(std::countr_zero(left));
    if (memory_.progress(reader) != SetMemory::kLeft) return true;
    memory_.release(options_.member, at, reader);
  }
  return false;
}

bool SetMember::is_lent(const Task& task) const {
  if (mutant("a_shared_stream_slot_returns_at_the_first_reader")) return false;
  return task.announced && task.stream >= 0 &&
         memory_.readers(options_.member, static_cast<size_t>(task.stream));
}

void SetMember::await_return(Task& task, int64_t now_ns) {
  loans_.push_back({&task, now_ns + patience_ns_});
}

void SetMember::look_at_loans(int64_t now_ns) {
  std::erase_if(loans_, [&](Loan& loan) {
    if (!is_out(static_cast<size_t>(loan.task->stream))) {
      events.push_back({loan.task, SetEvent::Kind::RETURNED});
      return true;
    }
    if (!loan.overdue && loan.overdue_ns <= now_ns) {
      loan.overdue = true;
      events.push_back({loan.task, SetEvent::Kind::OVERDUE});
    }
    return false;
  });
}

void SetMember::wait(Task& task, int64_t now_ns) {
  Holder& holder = holders_[task.holder];
  watch(task.holder, now_ns);
  if (task.cache >= 0) {
    task.at_holder = static_cast<int32_t>(holder.fills.size());
    holder.fills.push_back(&task);
  } else {
    holder.reads.emplace(row_of(task), &task);
  }
}

// Start timing a member's progress when the first task begins to wait for it.
void SetMember::watch(size_t member, int64_t now_ns) {
  Holder& holder = holders_[member];
  if (holder.waiting()) return;
  holder.progress = memory_.progress(member);
  holder.since_ns = now_ns;
  holder.stalled = false;
}

void SetMember::give_up(Task& task) {
  Holder& holder = holders_[task.holder];
  if (task.cache >= 0) {
    const auto at = static_cast<size_t>(task.at_holder);
    require(holder.fills.at(at) == &task, "a task does not wait for a member");
    holder.fills.back()->at_holder = task.at_holder;
    holder.fills[at] = holder.fills.back();
    holder.fills.pop_back();
  } else {
    require(holder.reads.erase(row_of(task)), "a task does not wait for a member");
    holder.given_up.insert(row_of(task));
  }
}

void SetMember::release(Task& task) {
  if (task.cache >= 0) return;
  const auto at = static_cast<size_t>(std::exchange(task.at_holder, -1));
  memory_.release(task.holder, at, options_.member);
}

bool SetMember::poll(int64_t now_ns) {
  look_at_loans(now_ns);
  if (!failures_.empty()) announce_failures();
  for (size_t member = 0; member < holders_.size(); ++member) {
    if (!holders_[member].watched()) continue;
    // Check the progress first, so that no word written before the member left is missed.
    look_at_progress(member, now_ns);
    look_at_fills(member);
    look_at_reads(member);
    if (holders_[member].stalled) fail_all(member);
  }
  return !events.empty();
}

void SetMember::look_at_progress(size_t member, int64_t now_ns) {
  Holder& holder = holders_[member];
  const uint64_t progress = memory_.progress(member);
  if (progress != holder.progress) {
    holder.progress = progress;
    holder.since_ns = now_ns;
    holder.stalled = false;
  }
  if (progress == SetMemory::kLeft || now_ns - holder.since_ns >= patience_ns_)
    holder.stalled = true;
}

void SetMember::look_at_fills(size_t member) {
  std::vector<Task*>& fills = holders_[member].fills;
  for (size_t at = 0; at < fills.size();) {
    Task& task = *fills[at];
    const auto slot = static_cast<size_t>(task.cache);
    FillState state = memory_.fill(member, slot, name_of_fill(task, last_fill(task)));
    if (mutant("a_reader_passes_the_fill_word")) state = FillState::HELD;
    if (state != FillState::HELD && state != FillState::FAILED) {
      ++at;
      continue;
    }
    give_up(task);  // moves the last fill to position `at`
    events.push_back(
        {&task, state == FillState::HELD ? SetEvent::Kind::HELD : SetEvent::Kind::FAILED});
  }
}

void SetMember::look_at_reads(size_t member) {
  Holder& holder = holders_[member];
  if (holder.reads.empty() && holder.given_up.empty()) return;
  const uint64_t own = uint64_t{1} << options_.member;
  for (size_t at = 0; at < memory_.announcements(); ++at) {
    if (!(memory_.readers(member, at) & own)) continue;
    const SetMemory::Announced one = memory_.announced(member, at);
    const auto found = holder.reads.find(one.row);
    if (found == holder.reads.end()) {
      // A row that was not given up is being copied, or belongs to a load not yet received here.
      if (holder.given_up.erase(one.row)) memory_.release(member, at, options_.member);
      continue;
    }
    Task& task = *found->second;
    holder.reads.erase(found);
    if (one.code == Outcome::OK) {
      task.at_holder = static_cast<int32_t>(at);
      events.push_back({&task, SetEvent::Kind::HELD});
    } else {
      memory_.release(member, at, options_.member);
      events.push_back({&task, SetEvent::Kind::FAILED});
    }
  }
}

void SetMember::fail_all(size_t member) {
  Holder& holder = holders_[member];
  std::vector<Task*> tasks = std::exchange(holder.fills, {});
  for (const auto& [row, task] : std::exchange(holder.reads, {})) {
    tasks.push_back(task);
    holder.given_up.insert(row);
  }
  for (Task* task : tasks) events.push_back({task, SetEvent::Kind::DEADLINE});
  if (memory_.progress(member) == SetMemory::kLeft) holder.given_up.clear();
}

bool SetMember::awaits() const {
  return !failures_.empty() ||
         std::ranges::any_of(loans_, [](const Loan& loan) { return !loan.overdue; }) ||
         std::ranges::any_of(holders_,
                             [](const Holder& one) { return one.watched() && !one.stalled; });
}

// Poll the words, because another process changes them without waking this one.
void SetMember::sleep(const std::vector<int>& fds, int64_t now_ns, int64_t time_ns) {
  constexpr int64_t kLookEveryNs = 200'000;
  constexpr int64_t kSecondNs = 1'000'000'000;
  std::vector<pollfd> files;
  files.reserve(fds.size());
  for (const int fd : fds) files.push_back({fd, POLLIN, 0});
  const auto clock = [] { return std::chrono::steady_clock::now().time_since_epoch(); };
  const auto end = clock() + std::chrono::nanoseconds(time_ns);
  while (!poll(now_ns)) {
    const int64_t left_ns = std::chrono::nanoseconds(end - clock()).count();
    if (left_ns <= 0) return;
    const int64_t wait_ns = awaits() ? std::min(left_ns, kLookEveryNs) : left_ns;
    const timespec wait{wait_ns / kSecondNs, wait_ns % kSecondNs};
    if (ppoll(files.data(), files.size(), &wait, nullptr) != 0) return;
  }
}

bool SetMember::idle() const {
  return failures_.empty() && loans_.empty() && events.empty() &&
         std::ranges::none_of(holders_, [](const Holder& one) { return one.watched(); });
}

int64_t SetMember::next_deadline_ns() const {
  int64_t next_ns = INT64_MAX;
  for (const Holder& one : holders_)
    if (one.waiting()) next_ns = std::min(next_ns, one.since_ns + patience_ns_);
  for (const Loan& loan : loans_)
    if (!loan.overdue) next_ns = std::min(next_ns, loan.overdue_ns);
  return next_ns;
}

}  // namespace nvmeof
