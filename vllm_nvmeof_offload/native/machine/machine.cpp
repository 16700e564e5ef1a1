// SPDX-License-Identifier: Apache-2.0
#include "machine/machine.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace nvmeof {
namespace {

// A bit that marks the op numbers of reads for peers; no manager uses it.
constexpr uint64_t kServeJobs = uint64_t{1} << 63;

bool names_member(int32_t cache, int64_t place) {
  return (cache >= 0 && cache_member(cache) != kEveryMember) ||
         (place >= 0 && member_of(place) != kEveryMember);
}

}  // namespace

Machine::Machine(const MachineOptions& options, NativeLanes& lanes, int64_t now_ns,
                 NativeLanes* peer_lanes)
    : written_bytes(options.io.targets),
      io(options.io, lanes, peer_lanes, now_ns),
      options_(options),
      gates_(options.cache_slots),
      streams_(options.stream_slots, options.io.targets, options.io.peers),
      judge_(options.io.peers) {
  const size_t peers = options.io.peers;
  require(options.io.targets + peers < Task::kCameHome && peers <= 64, "too many lanes");
  require(!peers || peer_lanes, "peers have no lanes");
  if (!options.set.memory) return;
  require(options.set.set_sizes.size() == options.io.group_bytes.size(),
          "set sizes and groups differ in number");
  const SetShape shape{options.set.members, options.cache_slots, options.stream_slots};
  set_.emplace(options.set, shape, options.io.read_deadline_ns);
}

// ---- commands ---------------------------------------------------------------------------

// Add a job with this many tasks, and this many rows to report.
Job& Machine::open(uint64_t op, OpKind kind, size_t tasks, size_t rows) {
  auto& job = jobs_[op];
  require(job == nullptr, "an op is given twice");
  job = std::make_unique<Job>();
  job->op = op;
  job->kind = kind;
  job->started_ns = io.now_ns();
  job->tasks.resize(tasks);
  for (size_t at = 0; at < tasks; ++at) {
    job->tasks[at].job = job.get();
    job->tasks[at].index = static_cast<uint32_t>(at);
  }
  job->code.resize(rows);
  job->error.resize(rows);
  job->alive = tasks;
  job->undecided = job->unreported = rows;
  return *job;
}

void Machine::name_rows(Job& job, Urgency urgency, const Columns& columns) {
  const size_t count = job.tasks.size();
  job.keys = columns.keys;
  job.key_bytes = count ? columns.keys.size() / count : 0;
  const std::hash<std::string_view> hash;
  for (Task& task : job.tasks) {
    task.content = {hash(task.key()), columns.generations[task.index]};
    task.urgency = urgency;
    task.charged_to = job.op;
    task.group = columns.groups[task.index];
    require(task.group < options_.io.group_bytes.size(), "a row names an unknown group");
  }
}

void Machine::begin(uint64_t op, OpKind kind, Urgency urgency, const Columns& columns,
                    const Pieces& pieces, uint64_t fence) {
  const size_t count = columns.generations.size();
  Job& job = open(op, kind, count, count);
  job.fence = fence;
  require(!job.moves_blocks() || pieces.first.size() == count + 1,
          "the pieces do not match the rows");
  job.pieces.assign(pieces.rows.begin(), pieces.rows.end());
  job.first_piece.assign(pieces.first.begin(), pieces.first.end());
  require(columns.clients.empty() || columns.clients.size() == count, "rows lack their clients");
  job.clients.assign(columns.clients.begin(), columns.clients.end());
  name_rows(job, urgency, columns);
  for (Task& task : job.tasks)
    take_slots(task, columns.cache[task.index], columns.places[task.index]);
  for (Task& task : job.tasks) start(task);
}

void Machine::take_slots(Task& task, int32_t cache, Place place) {
  const OpKind kind = task.job->kind;
  task.cache = cache < 0 ? kNoSlot : static_cast<int32_t>(cache_row(cache));
  if (names_member(cache, place)) name_holder(task, cache, place);
  if (place >= 0) place_row(task, place);
  const bool is_load = kind == OpKind::LOAD, is_store = kind == OpKind::STORE;
  require(is_load || (task.cache >= 0 && is_store == (place < 0)), "a row lacks a slot or a place");
  const bool lands = task.cache >= 0 && place >= 0 && kind != OpKind::WRITE;
  task.fills = (is_store || lands) && !is_elsewhere(task);
  if ((is_store || lands) && task.holder != kEveryMember) set_->give_fill(task);
  task.header_only = options_.copies_check && is_load && place >= 0 &&
                     task.holder == kEveryMember &&
                     (is_whole(task) || mutant("a_part_is_copied_unproven"));
}

// Return whether a load's pieces cover the whole payload, in order.
bool Machine::is_whole(const Task& task) const {
  const Job& job = *task.job;
  uint64_t next = 0;
  for (size_t at = job.first_piece[task.index]; at < job.first_piece[task.index + 1]; ++at) {
    if (job.pieces[3 * at + 1] != next) return false;
    next += job.pieces[3 * at + 2];
  }
  return next && next == io.payload_bytes(task);
}

void Machine::place_row(Task& task, Place place) {
  task.target = static_cast<uint8_t>(target_of(place));
  require(task.target < options_.io.targets, "a place names an unknown target");
  task.place = place;
  task.owner = static_cast<uint16_t>(owner_of(place));
  require(!task.owner || task.job->kind != OpKind::WRITE, "a write to another engine's region");
  const uint64_t before = uint64_t{slot_of(place)} * options_.io.targets + task.target;
  require(task.owner || !options_.pool_slots || before < options_.pool_slots,
          "a place is outside the pool");
}

void Machine::start(Task& task) {
  if (is_elsewhere(task)) {
    start_elsewhere(task);
  } else if (task.cache < 0 && task.place < 0) {
    decide(task, Outcome::STALE);  // the chunk was evicted while the load was planned
  } else if (task.cache < 0) {
    task.step = Step::STREAM;
    streams_.wait(task);
  } else {
    if (task.job->kind == OpKind::LOAD) promote_fetches(task);
    Grants grants;
    gates_.ask(task, grants);
    follow(grants);
  }
}

void Machine::promote_fetches(const Task& load) {
  for (Task* filler : gates_.fillers(load.cache))
    if (filler->urgency == Urgency::URGENT || filler->urgency == Urgency::PREFETCH)
      io.promote(*filler, load.job->op);
}

void Machine::reset(uint64_t op, const Stamp& stamp, const Stamp& unnamed) {
  // No earlier write may happen after the reset, wherever it is waiting.
  for (auto& [number, job] : jobs_) {
    if (job->kind != OpKind::WRITE) continue;
    for (Task& task : job->tasks)
      if (task.step == Step::GATE) cancel_task(task);
  }
  for (Task* task : io.take_queued_writes()) {
    leave_slot(*task);
    decide(*task, Outcome::CANCELLED);
  }
  if (!mutant("serve_reads_survive_a_reset")) {
    std::vector<Task*> serving;
    serving.reserve(serving_.size());
    for (const auto& [token, task] : serving_) serving.push_back(task);
    for (Task* task : serving) stop_serving(*task);
  }
  io.begin_reset(op, stamp, unnamed);
  Job& job = open(op, OpKind::RESET, options_.io.targets, 1);
  job.superblocks_left = job.tasks.size();
  for (Task& task : job.tasks) {
    task.target = static_cast<uint8_t>(task.index);
    task.urgency = Urgency::WRITE;
    task.step = Step::IO;
    io.enqueue(task);
  }
}

void Machine::attach(uint64_t op, uint16_t owner) {
  Task& task = open(op, OpKind::ATTACH, 1, 1).tasks[0];
  task.urgency = Urgency::WRITE;
  task.step = Step::IO;
  task.owner = owner;
  io.await_files(owner, &task);
}

void Machine::cancel(uint64_t op, const std::vector<uint32_t>* rows) {
  const auto found = jobs_.find(op);
  if (found == jobs_.end()) return;
  Job& job = *found->second;
  if (job.kind == OpKind::STORE || job.kind == OpKind::RESET || job.kind == OpKind::ATTACH) return;
  if (set_) take_set_events();
  const auto cancel_one = [this](Task& task) {
    if (task.step == Step::LAND || task.step == Step::COPY) return;
    if (task.step == Step::ZOMBIE || task.step == Step::DONE) return;
    task.cancelled = true;
    cancel_task(task);
  };
  if (rows == nullptr) {
    for (Task& task : job.tasks) cancel_one(task);
  } else {
    for (const uint32_t row : *rows) cancel_one(job.tasks.at(row));
  }
}

void Machine::cancel_task(Task& task) {
  task.header_only = false;  // no copy will check the payload if the chunk is read later
  if (task.step == Step::GATE) {
    Grants grants;
    require(gates_.withdraw(task, grants), "a task does not wait at a gate");
    if (task.fills) note_fill(task, FillState::FAILED);
    decide(task, Outcome::CANCELLED);
    follow(grants);
  } else if (task.step == Step::STREAM) {
    streams_.withdraw(task);
    if (read_for_others(task)) {
      read_here(task);
      decide(task, Outcome::CANCELLED, 0, false);
    } else {
      leave_slot(task);
      decide(task, Outcome::CANCELLED);
    }
  } else if (task.step == Step::MEMBER) {
    set_->give_up(task);
    decide(task, Outcome::CANCELLED);
  } else if (!read_for_others(task) && io.cancel(task)) {
    leave_slot(task);
    decide(task, Outcome::CANCELLED);
  } else if (!read_for_others(task) && task.is_at_peer() && task.fills) {
    leave_to_peer(task);
    leave_slot(task);
    decide(task, Outcome::CANCELLED);
  } else {
    // The engine still holds the task's buffer, but nothing will be copied from it for this job.
    decide(task, Outcome::CANCELLED, 0, false);
  }
}

// ---- progress ---------------------------------------------------------------------------

bool Machine::run() {
  bool moved = set_ && (set_->poll(io.now_ns()), take_set_events());
  for (Task* task : streams_.take_past(io.now_ns())) {
    moved = true;
    decide(*task, Outcome::DEADLINE);
  }
  hand_out_stream_slots();
  const auto events = std::exchange(io.events, {});
  for (const IoEvent& event : events) io_event(event);
  hand_out_stream_slots();
  io.start_peers();
  moved = moved || !events.empty();
  if (set_ && moved) set_->count_progress();
  return moved;
}

size_t Machine::to_move() {
  size_t count =
      io.events.size() + io.reads_in_flight() + io.writes_in_flight() + io.peers_in_flight();
  for (size_t urgency = 0; urgency < kUrgencies; ++urgency)
    count += io.waiting(static_cast<Urgency>(urgency));
  return count + streams_.waiting();
}

size_t Machine::to_copy() const {
  size_t count = 0;
  for (const auto& [op, tasks] : to_copy_) count += tasks.size();
  return count;
}

size_t Machine::to_report() const {
  size_t count = 0;
  for (const uint64_t op : news_) count += jobs_.at(op)->decided.size();
  return count;
}

void Machine::hand_out_stream_slots() {
  while (choose_next()) continue;
  for (Task* task : streams_.take_unservable()) {
    if (task->fills)
      read_here(*task);
    else
      decide(*task, Outcome::DEADLINE);
  }
}

void Machine::superblock_event(const IoEvent& event) {
  Task& task = *event.task;
  Job& job = *task.job;
  const bool is_late = task.step == Step::ZOMBIE;
  task.step = event.released ? Step::DONE : Step::ZOMBIE;
  if (event.released) --job.alive;
  if (!is_late) {
    --job.superblocks_left;
    const bool ok = event.code == Outcome::OK;
    if (job.undecided && (ok || !job.superblocks_left)) {
      job.undecided = 0;
      job.code[0] = static_cast<uint8_t>(event.code);
      job.error[0] = static_cast<int16_t>(event.error);
      job.ended_ns = event.ended_ns ? event.ended_ns : io.now_ns();
      job.decided.push_back(0);
      list(job);
    }
  }
  forget_if_over(job.op);
}

void Machine::io_event(const IoEvent& event) {
  if (event.peers_token) {
    peer_event(event);
    return;
  }
  Task& task = *event.task;
  if (task.job->kind == OpKind::RESET) {
    superblock_event(event);
    return;
  }
  if (task.job->serves()) {
    serve_event(event);
    return;
  }
  streams_.leave(task);
  if (task.step == Step::ZOMBIE) {
    // The task was cancelled or is past its deadline: only its buffer still matters.
    if (!event.released)
      mark_hung(task);
    else if (!read_again(task))
      released_late(task, event.code == Outcome::OK &&
                              (task.is_proven || mutant("a_cancelled_read_counts_as_proven")));
    return;
  }
  require(event.code != Outcome::RELEASED, "a release comes before its outcome");
  if (!event.released) {
    decide(task, event.code, event.error, false);
    mark_hung(task);
    return;
  }
  const OpKind kind = task.job->kind;
  const bool ok = event.code == Outcome::OK || mutant("pipeline_ignores_failed_reads");
  if (ok && kind == OpKind::WRITE) written_bytes[task.target] += io.transfer_bytes(task);
  if (ok && kind == OpKind::LOAD) {
    read_ended(task);
    return;
  }
  leave_slot(task, ok);
  decide(task, ok ? Outcome::OK : event.code, event.error, true, event.ended_ns);
}

void Machine::read_ended(Task& task) {
  judge_.read(task, io);
  if (is_shared_read(task)) set_->lend(task);
  const bool is_lent = task.is_proven || mutant("an_unproven_slot_is_lent");
  if (task.fills && is_lent) {  // now other tasks may read the cache slot
    note_fill(task, FillState::HELD);
    task.fills = false;
    task.reads = true;
    Grants grants;
    gates_.filled_and_read(task.cache, grants);
    follow(grants);
  }
  ready_to_copy(task);
}

// Read a cancelled load's chunk again, verifying the payload, if other tasks wait for its slot.
// Returns false if none waits or the deadline has passed.
bool Machine::read_again(Task& task) {
  if (task.is_proven || mutant("a_cancelled_read_counts_as_proven")) return false;
  if (!task.fills || !gates_.awaited(task.cache) || task.deadline_ns <= io.now_ns()) return false;
  task.header_only = false;
  task.is_proven = true;
  read_here(task);
  return true;
}

// ---- jobs -------------------------------------------------------------------------------

// Decide a chunk's outcome. released: false if an engine holds its buffer. ended_ns: 0 if unknown.
void Machine::decide(Task& task, Outcome code, int error, bool released, int64_t ended_ns) {
  require(task.step != Step::ZOMBIE && task.step != Step::DONE, "a chunk is decided twice");
  Job& job = *task.job;
  if (code != Outcome::OK && is_shared_read(task)) set_->announce_failure(task, code);
  task.step = released ? Step::DONE : Step::ZOMBIE;
  if (released)
    --job.alive;
  else
    hold_buffer(task);
  if (task.holds_buffer && mutant("outcome_counts_as_release")) {
    task.holds_buffer = false;
    --job.unreleased;
  }
  job.code[task.index] = static_cast<uint8_t>(code);
  job.error[task.index] = static_cast<int16_t>(error);
  job.ended_ns = std::max(job.ended_ns, ended_ns ? ended_ns : io.now_ns());
  job.decided.push_back(task.index);
  if (code != Outcome::OK) job.failed.push_back(task.index);
  --job.undecided;
  // Failures must reach vLLM in the same step as the end of the job, so report all rows together.
  if (job.moves_blocks() && job.undecided) return;
  list(job);
  if (job.moves_blocks()) finish(job);
}

void Machine::finish(Job& job) {
  judge_.ended(job, io.now_ns());
  Finished& finished = finished_.emplace_back();
  finished.op = job.op;
  std::sort(job.failed.begin(), job.failed.end());
  finished.failed = job.failed;
  for (const uint32_t row : job.failed) {
    finished.codes.push_back(job.code[row]);
    finished.errors.push_back(job.error[row]);
  }
  finished.copied_bytes = job.copied_bytes;
  finished.seconds = job.seconds();
}

void Machine::list(Job& job) {
  if (job.listed) return;
  job.listed = true;
  news_.push_back(job.op);
}

void Machine::hold_buffer(Task& task) {
  if (task.stream >= 0 && mutant("stream_slot_is_free_at_the_outcome")) streams_.give_back(task);
  if (task.cache < 0) return;
  task.holds_buffer = true;
  ++task.job->unreleased;
  if (!task.fills || read_for_others(task)) return;
  note_fill(task, FillState::FAILED);
  Grants grants;
  gates_.abandon(task.cache, grants);
  follow(grants);
}

// Return whether a cancelled load's read continues because other tasks wait for its cache slot.
bool Machine::read_for_others(const Task& task) const {
  if (task.job->kind != OpKind::LOAD || !task.fills || task.cache < 0) return false;
  return task.cancelled && gates_.awaited(task.cache);
}

void Machine::mark_hung(Task& task) {
  if (task.stream >= 0) {
    streams_.mark_hung(task);
  } else if (task.fills && task.cache >= 0) {
    note_fill(task, FillState::FAILED);
    Grants grants;
    gates_.abandon(task.cache, grants);
    follow(grants);
  }
}

void Machine::released_late(Task& task, bool filled) {
  task.step = Step::DONE;
  leave_slot(task, filled);
  Job& job = *task.job;
  --job.alive;
  if (task.holds_buffer) {
    task.holds_buffer = false;
    --job.unreleased;
    if (task.reported) {  // otherwise the report of its outcome includes the release
      job.late.push_back(task.index);
      list(job);
    }
  }
  forget_if_over(job.op);
}

std::vector<RowReport> Machine::take_reports() {
  std::vector<RowReport> reports;
  for (const uint64_t op : std::exchange(news_, {})) {
    Job& job = *jobs_.at(op);
    job.listed = false;
    if (job.moves_blocks() && job.undecided) continue;  // a late release before the job's end
    report_rows(job, reports);
    forget_if_over(op);
  }
  return reports;
}

void Machine::report_rows(Job& job, std::vector<RowReport>& reports) {
  if (!job.decided.empty()) {
    RowReport& report = reports.emplace_back();
    report.op = job.op;
    report.seconds = job.seconds();
    job.ended_ns = 0;
    report.indexes = std::exchange(job.decided, {});
    std::sort(report.indexes.begin(), report.indexes.end());
    job.unreported -= report.indexes.size();
    bool failed = false, held = false;
    for (const uint32_t row : report.indexes) {
      failed = failed || job.code[row];
      held = held || job.tasks[row].holds_buffer;
      job.tasks[row].reported = true;
    }
    for (const uint32_t row : report.indexes) {
      if (failed) {
        report.codes.push_back(job.code[row]);
        report.errors.push_back(job.error[row]);
      }
      if (held) report.released.push_back(!job.tasks[row].holds_buffer);
      if (!job.crcs.empty() && !job.code[row] && is_sampled(job.tasks[row]))
        report.crcs.push_back(job.crcs[row]);
    }
    if (mutant("row_is_released_with_its_batch")) report.released.clear();
    report.all_rows = report.indexes.size() == job.code.size();
  }
  if (!job.late.empty()) {
    RowReport& report = reports.emplace_back();
    report.op = job.op;
    report.indexes = std::exchange(job.late, {});
    report.codes.assign(report.indexes.size(), static_cast<uint8_t>(Outcome::RELEASED));
  }
}

void Machine::forget_if_over(uint64_t op) {
  const auto found = jobs_.find(op);
  const Job& job = *found->second;
  if (!job.unreported && !job.unreleased && !job.alive && job.late.empty() && !job.listed)
    jobs_.erase(found);
}

// ---- slots ------------------------------------------------------------------------------

void Machine::follow(Grants& grants) {
  for (const Grant& grant : grants) follow_one(grant);
}

void Machine::follow_one(const Grant& grant) {
  Task& task = *grant.task;
  if (grant.stale) {
    decide(task, Outcome::STALE);
    return;
  }
  task.reads = !task.fills;
  if (task.fills) note_fill(task, FillState::FILLING);
  if (lacks_blocks(task) && !mutant("a_hole_is_stored")) {
    leave_slot(task);
    decide(task, Outcome::STALE);
  } else if (task.place >= 0) {
    go_to_lane(task);
  } else {
    ready_to_copy(task);
  }
}

// Return whether this is a store for which vLLM did not pass all blocks of the chunk.
bool Machine::lacks_blocks(const Task& task) const {
  const Job& job = *task.job;
  if (job.kind != OpKind::STORE || io.payload_bytes(task) == 0) return false;
  return job.first_piece[task.index] == job.first_piece[task.index + 1];
}

// Give back the slot that the task holds, if any. filled, crc: as for `SlotGates::filled`.
void Machine::leave_slot(Task& task, bool filled, int64_t crc) {
  Grants grants;
  if (task.stream >= 0)
    streams_.give_back(task);
  else
    streams_.leave(task);
  if (task.cache >= 0 && task.reads) {
    task.reads = false;
    gates_.read(task.cache, grants);
  } else if (task.cache >= 0 && task.fills) {
    task.fills = false;
    note_fill(task, filled ? FillState::HELD : FillState::FAILED);
    gates_.filled(task.cache, filled, grants, crc);
  }
  follow(grants);
}

// ---- copies -----------------------------------------------------------------------------

void Machine::ready_to_copy(Task& task) {
  task.step = Step::COPY;
  to_copy_[task.job->op].push_back(&task);
}

std::vector<CopyBatch> Machine::take_copies(uint64_t passed) {
  std::vector<CopyBatch> batches;
  for (auto& [op, tasks] : std::exchange(to_copy_, {})) {
    if (options_.copies_check) {
      const auto proven = [](const Task* task) { return task->is_proven; };
      const auto unproven = std::ranges::stable_partition(tasks, proven);
      batch({unproven.begin(), unproven.end()}, passed, batches);
      tasks.erase(unproven.begin(), unproven.end());
    }
    batch(tasks, passed, batches);
  }
  if (mutant("job_finishes_while_dma_runs"))
    for (const CopyBatch& batch : batches) {
      copied(batch.number, Outcome::OK, 0);
      copying_[batch.number] = {};
    }
  return batches;
}

// Add tasks of one job, either all proven or all unproven, to a batch.
void Machine::batch(const std::vector<Task*>& tasks, uint64_t passed,
                    std::vector<CopyBatch>& batches) {
  if (tasks.empty()) return;
  const Task& first = *tasks.front();
  CopyBatch& batch = batch_for(*first.job, !first.is_proven, passed, batches);
  add_copies(tasks, batch);
  auto& copying = copying_[batch.number];
  copying.insert(copying.end(), tasks.begin(), tasks.end());
}

// Return a batch, new if necessary, for the job's direction and fence. Passed fences count as one.
CopyBatch& Machine::batch_for(const Job& job, bool checks, uint64_t passed,
                              std::vector<CopyBatch>& batches) {
  const bool is_store = job.kind == OpKind::STORE;
  const bool may_start =
      job.fence <= passed || mutant("an_open_fences_chunks_go_with_the_passed_ones");
  const uint64_t fence = may_start ? 0 : job.fence;
  const auto joins = [&](const CopyBatch& batch) {
    const bool same = batch.fence == fence;
    return batch.is_store == is_store && batch.checks == checks &&
           !mutant("each_job_is_a_copy_of_its_own") &&
           (same || (batch.fence && fence && mutant("copies_of_several_fences_are_one")));
  };
  const auto found = std::find_if(batches.begin(), batches.end(), joins);
  if (found != batches.end()) return *found;
  CopyBatch& batch = batches.emplace_back();
  batch.number = next_batch_++;
  batch.fence = fence;
  batch.is_store = is_store;
  batch.checks = checks;
  return batch;
}

void Machine::add_copies(const std::vector<Task*>& tasks, CopyBatch& batch) {
  Job& job = *tasks.front()->job;
  const uint64_t bytes_before = batch.bytes;
  for (const Task* task : tasks) {
    const uint64_t payload = payload_address(*task);
    const uint32_t count = job.first_piece.at(task->index + 1) - job.first_piece[task->index];
    if (batch.is_store || batch.checks) {
      batch.counts.push_back(count);
      batch.payloads.push_back(payload);
      batch.sizes.push_back(io.payload_bytes(*task));
      if (set_ || batch.checks) batch.sampled.push_back(batch.checks || is_sampled(*task));
    }
    for (size_t at = job.first_piece[task->index]; at < job.first_piece[task->index + 1]; ++at) {
      const uint64_t* piece = &job.pieces.at(3 * at);
      batch.pieces.insert(batch.pieces.end(), {piece[0], payload + piece[1], piece[2]});
      batch.bytes += piece[2];
    }
  }
  job.copied_bytes += batch.bytes - bytes_before;
}

void Machine::copied(uint64_t number, Outcome code, int error, std::span<const int64_t> crcs) {
  const auto found = copying_.find(number);
  require(found != copying_.end(), "a batch of copies ends twice");
  const std::vector<Task*> tasks = std::move(found->second);
  copying_.erase(found);
  if (mutant("failed_copy_counts_as_copied")) code = Outcome::OK;
  require(crcs.empty() || crcs.size() == tasks.size(), "the checksums and chunks differ in number");
  for (size_t at = 0; at < tasks.size(); ++at) {
    Task& task = *tasks[at];
    const int64_t crc = crcs.empty() ? -1 : crcs[at];
    if (set_ && code == Outcome::OK && is_sampled(task)) keep_crc(task, crc);
    if (set_ && set_->is_lent(task)) {  // other ranks still copy from its stream slot
      set_->await_return(task, io.now_ns());
      decide(task, code, error, false);
      continue;
    }
    if (set_ && is_elsewhere(task)) set_->release(task);
    const size_t of = mutant("a_failed_check_reports_other_blocks") ? (at + 1) % tasks.size() : at;
    const Outcome outcome =
        code == Outcome::OK ? checked(*tasks[of], crcs.empty() ? -1 : crcs[of]) : code;
    leave_slot(task, outcome == Outcome::OK, crc);
    decide(task, outcome, error);
  }
  if (set_) set_->count_progress();
}

Outcome Machine::checked(const Task& task, int64_t crc) const {
  if (task.is_proven || mutant("a_job_finishes_before_its_checks")) return Outcome::OK;
  require(crc >= 0, "an unchecked chunk is copied");
  return crc == task.payload_crc ? Outcome::OK : Outcome::CHECKSUM_MISMATCH;
}

// ---- peers ------------------------------------------------------------------------------

// Give one chunk a stream slot and a lane. Returns false if every chunk must wait.
bool Machine::choose_next() {
  for (size_t asked = 0; asked < streams_.targets(); ++asked) {
    const size_t target = streams_.turn();
    Task* task = streams_.take_returned(target);
    const bool is_new = task == nullptr;
    if (is_new) task = streams_.peek(target);
    if (is_new && task) {
      const int lane = choose(*task);
      if (lane == kWait) continue;
      if (lane != kOwnLane) {
        give_to_peer(*task, static_cast<size_t>(lane) - 1);
        return true;
      }
      streams_.take(*task);
    }
    if (!task) continue;
    task->step = Step::IO;
    io.enqueue(*task);
    return true;
  }
  return false;
}

bool Machine::may_go_to_peer(const Task& task) const {
  const Job& job = *task.job;
  return job.kind == OpKind::LOAD && task.holder == kEveryMember &&
         (job.peers || mutant("a_hint_of_helpers_is_ignored")) &&
         job.tasks.size() >= options_.peer_chunks_min;
}

int Machine::choose(const Task& task) {
  const bool own_room = streams_.target_has_room(task);
  if (!may_go_to_peer(task) || !streams_.usable_peers())
    return own_room || task.fills ? kOwnLane : kWait;  // a fill needs no stream slot here
  const size_t bytes = io.transfer_bytes(task);
  double rate = io.read_rate(task.target);
  for (const PeerLane& peer : io.peers)
    if (rate <= 0) rate = peer.state.bytes_per_s;
  if (rate <= 0) rate = 1;  // no rate is known, so treat all lanes as equal
  const double before = static_cast<double>(io.bytes_before(task.target) + bytes);
  estimates_.clear();
  for (size_t peer = 0; peer < io.peers.size(); ++peer) {
    const PeerLane& lane = io.peers[peer];
    LaneEstimate& estimate = estimates_.emplace_back(lane.estimate(bytes, rate));
    // Do not wait for a peer without room unless one of its reads will make room.
    const bool may_help = task.job->lets_help(peer) || mutant("a_hint_of_helpers_is_ignored");
    if (!may_help || !lane.is_awaited()) estimate = {INFINITY, false};
    if (!streams_.peer_has_room(peer)) estimate.has_room = false;
  }
  return choose_lane({before / rate, own_room}, estimates_);
}

void Machine::let_help(uint64_t op, uint64_t peers) {
  const auto found = jobs_.find(op);
  if (found != jobs_.end()) found->second->peers = peers;
}

void Machine::give_to_peer(Task& task, size_t peer) {
  task.peer = static_cast<uint8_t>(peer + 1);
  streams_.take(task);
  task.step = Step::IO;
  io.give_to_peer(task);
  judge_.given(task, peer, io);
}

void Machine::set_peer(size_t peer, const PeerState& state) {
  io.peers.at(peer).state = state;
  judge_.lost(peer, state.lost, io.now_ns());
  streams_.set_usable_peers(static_cast<size_t>(
      std::ranges::count_if(io.peers, [](const PeerLane& one) { return one.state.usable; })));
}

void Machine::peer_event(const IoEvent& event) {
  if (streams_.release(event.peers_token)) return;  // the task continued without this read
  Task& task = *event.task;
  judge_.ended(task.peer_number(), event.code, event.error, io.now_ns());
  const bool is_over = task.step == Step::ZOMBIE && !task.fills;  // it was cancelled
  const bool ok = event.code == Outcome::OK || mutant("a_failed_pull_counts_as_pulled");
  if (!event.released && is_over) {
    streams_.mark_hung(task);
  } else if (!event.released) {
    leave_to_peer(task);
    go_home(task);
  } else if (is_over) {
    released_late(task, false);
  } else if (ok) {
    task.fills ? land(task) : read_ended(task);
  } else if (mutant("a_peers_failure_is_the_chunks")) {
    leave_slot(task);
    decide(task, event.code, event.error);
  } else {
    streams_.give_back(task);
    go_home(task);
  }
}

// Leave the stream slot to the peer, which may still write into it. The task continues without one.
void Machine::leave_to_peer(Task& task) {
  streams_.abandon(task);
  io.abandon(task.token);
}

// Read a chunk locally after its peer failed, with the original deadline and retry
// (docs/protocol.md, rule 16).
void Machine::go_home(Task& task) {
  judge_.failed(task);
  task.peer = mutant("a_chunk_is_asked_of_two_peers") ? Task::kAtNoPeer : Task::kCameHome;
  task.token = 0;
  if (mutant("a_second_try_gets_a_new_deadline"))
    task.deadline_ns = io.now_ns() + options_.io.read_deadline_ns;
  if (mutant("a_peers_failure_uses_the_retry")) task.retries_left = 0;
  const bool is_past = task.deadline_ns <= io.now_ns();
  if (task.step == Step::ZOMBIE && (is_past || !gates_.awaited(task.cache))) {
    released_late(task, false);
  } else if (is_past) {
    leave_slot(task);
    decide(task, Outcome::DEADLINE);
  } else if (task.fills) {
    read_here(task);
  } else {
    task.step = Step::STREAM;
    streams_.wait(task);
  }
}

void Machine::read_here(Task& task) {
  if (task.step != Step::ZOMBIE) task.step = Step::IO;
  io.enqueue(task);
}

// Queue a task that may now use its cache slot. If a peer may read it, its lane is chosen later.
void Machine::go_to_lane(Task& task) {
  if (!task.fills || !streams_.usable_peers() || !may_go_to_peer(task)) {
    read_here(task);
    return;
  }
  task.step = Step::STREAM;
  streams_.wait(task);
}

// Queue the copy of a verified chunk from its stream slot into its cache slot.
void Machine::land(Task& task) {
  if (task.step != Step::ZOMBIE) task.step = Step::LAND;
  to_land_.push_back(&task);
}

LandingBatch Machine::take_landings() {
  LandingBatch batch;
  if (to_land_.empty()) return batch;
  batch.number = next_batch_++;
  for (const Task* task : to_land_) {
    const uint64_t to = io.cache_address(*task);
    batch.rows.insert(batch.rows.end(), {to, io.address(*task), io.transfer_bytes(*task)});
  }
  if (mutant("a_chunk_has_landed_before_it_is_copied")) {
    landing_[batch.number] = to_land_;
    landed(batch.number);
    to_land_.clear();
  }
  landing_[batch.number] = std::exchange(to_land_, {});
  return batch;
}

void Machine::landed(uint64_t number) {
  const auto found = landing_.find(number);
  require(found != landing_.end(), "a batch of chunks lands twice");
  const std::vector<Task*> tasks = std::move(found->second);
  landing_.erase(found);
  for (Task* task : tasks) {
    streams_.give_back(*task);
    if (task->step == Step::ZOMBIE)  // it was cancelled, but others wait for it
      released_late(*task, true);
    else
      read_ended(*task);
  }
}

// ---- reads for peers --------------------------------------------------------------------

void Machine::serve(std::span<const uint64_t> tokens, const Columns& columns,
                    std::span<const double> within_s) {
  const size_t count = tokens.size();
  require(count && columns.generations.size() == count && within_s.size() == count,
          "the columns of rows to serve differ in length");
  Job& job = open(kServeJobs | ++serve_jobs_, OpKind::FETCH, count, 0);
  job.served.assign(tokens.begin(), tokens.end());
  name_rows(job, mutant("serve_before_demand") ? Urgency::DEMAND : Urgency::SERVE, columns);
  for (Task& task : job.tasks) {
    const uint32_t row = task.index;
    const auto slot = static_cast<size_t>(columns.cache[row]);
    require(slot < options_.serve_slots, "a row to serve names an unknown slot");
    task.stream = static_cast<int32_t>(options_.stream_slots + slot);
    require(columns.places[row] >= 0, "a row to serve has no place");
    place_row(task, columns.places[row]);
    const auto most_ns = static_cast<double>(options_.io.read_deadline_ns);
    task.deadline_ns = io.now_ns() + std::llround(std::clamp(within_s[row] * 1e9, 1.0, most_ns));
    if (mutant("serve_reads_wait_for_ever")) task.deadline_ns = 0;
    task.step = Step::IO;
    require(serving_.emplace(tokens[row], &task).second, "a peer's token is given twice");
    io.enqueue(task);
  }
}

// Answer the peer only upon release, when the slot is free: an earlier answer is of no use to it.
void Machine::serve_event(const IoEvent& event) {
  Task& task = *event.task;
  const bool at_outcome = mutant("a_hung_serve_slot_is_free_at_the_outcome");
  const bool is_late = task.step == Step::ZOMBIE;
  if (!event.released) task.step = Step::ZOMBIE;
  if (is_late ? !at_outcome : event.released || at_outcome)
    answer(task, is_late ? Outcome::DEADLINE : event.code, event.error);
  if (event.released) forget_served(task);
}

void Machine::answer(const Task& task, Outcome code, int error) {
  if (task.cancelled && !mutant("a_cancelled_serve_is_answered")) code = Outcome::CANCELLED;
  served_.push_back({task.job->served[task.index], code, error});
}

void Machine::forget_served(Task& task) {
  Job& job = *task.job;
  serving_.erase(job.served[task.index]);
  task.step = Step::DONE;
  if (--job.alive == 0) jobs_.erase(job.op);
}

void Machine::stop_serving(Task& task) {
  if (task.cancelled) return;
  task.cancelled = true;
  if (task.step == Step::ZOMBIE || !io.cancel(task)) return;
  answer(task, Outcome::CANCELLED, 0);
  forget_served(task);
}

void Machine::end_serving(std::span<const uint64_t> tokens) {
  for (const uint64_t token : tokens)
    if (const auto found = serving_.find(token); found != serving_.end())
      stop_serving(*found->second);
}

std::pair<uint64_t, double> Machine::serve_levels() {
  uint64_t bytes = 0;
  double rate = 0;
  for (size_t target = 0; target < options_.io.targets; ++target) {
    bytes += io.bytes_before(target) + io.bytes_to_serve(target) +
             streams_.waiting(target) * options_.io.slot_bytes;
    rate += io.read_rate(target);
  }
  return {bytes, rate};
}

std::vector<std::pair<uint64_t, double>> Machine::read_queues() {
  std::vector<std::pair<uint64_t, double>> lanes;
  const auto add = [&](uint64_t bytes, double rate) {
    lanes.emplace_back(bytes, rate > 0 ? static_cast<double>(bytes) / rate : 0.0);
  };
  for (size_t target = 0; target < options_.io.targets; ++target)
    add(io.bytes_before(target) + streams_.waiting(target) * options_.io.slot_bytes,
        io.read_rate(target));
  for (const PeerLane& peer : io.peers) add(peer.queued_bytes(), peer.state.bytes_per_s);
  return lanes;
}

// ---- the set ----------------------------------------------------------------------------

void Machine::name_holder(Task& task, int32_t cache, int64_t place) {
  const uint32_t member = cache >= 0 ? cache_member(cache) : member_of(place);
  require(cache < 0 || place < 0 || member_of(place) == member,
          "a row's slot and place name different members");
  require(set_.has_value(), "a row names a member, but this rank is in no set");
  task.holder = set_->holder(task.group, member);
}

void Machine::start_elsewhere(Task& task) {
  if (task.job->kind == OpKind::STORE || task.job->kind == OpKind::WRITE) {
    decide(task, Outcome::OK);
    return;
  }
  task.step = Step::MEMBER;
  set_->wait(task, io.now_ns());
}

bool Machine::take_set_events() {
  const auto events = std::exchange(set_->events, {});
  for (const SetEvent& event : events) set_event(event);
  return !events.empty();
}

void Machine::set_event(const SetEvent& event) {
  Task& task = *event.task;
  switch (event.kind) {
    case SetEvent::Kind::HELD:
      if (task.job->kind == OpKind::FETCH)
        decide(task, Outcome::OK);
      else
        ready_to_copy(task);
      break;
    case SetEvent::Kind::FAILED:
      // If the holder read from a place, the holder's own outcome reports the fault.
      decide(task, task.place < 0 ? Outcome::STALE : Outcome::CANCELLED);
      break;
    case SetEvent::Kind::DEADLINE:
      decide(task, Outcome::DEADLINE);
      break;
    case SetEvent::Kind::RETURNED:
      released_late(task, false);
      break;
    case SetEvent::Kind::OVERDUE:
      streams_.mark_hung(task);
      break;
  }
}

void Machine::note_fill(const Task& task, FillState state) {
  if (!set_) return;
  if (task.holder != kEveryMember)
    set_->set_fill(task, state);
  else if (state == FillState::FILLING)
    set_->set_fill(task, FillState::EMPTY);
}

// Return whether the other ranks wait for an announcement of this rank's read.
bool Machine::is_shared_read(const Task& task) const {
  return task.holder != kEveryMember && task.cache < 0 && !task.announced && set_->holds(task);
}

bool Machine::is_sampled(const Task& task) const {
  return set_ && task.job->kind == OpKind::STORE && task.holder == kEveryMember &&
         set_->shares(task.group);
}

void Machine::keep_crc(const Task& task, int64_t crc) {
  require(crc >= 0, "a chunk that the members compare has no CRC");
  task.job->crcs.resize(task.job->tasks.size());
  task.job->crcs[task.index] = static_cast<uint32_t>(crc);
}

uint64_t Machine::payload_address(const Task& task) const {
  const uint64_t slot =
      is_elsewhere(task) ? set_->address(task, options_.io.slot_bytes) : io.address(task);
  return slot + options_.io.header_bytes;
}

int64_t Machine::next_deadline_ns() {
  const int64_t next_ns = std::min(io.next_deadline_ns(), streams_.next_deadline_ns());
  return set_ ? std::min(next_ns, set_->next_deadline_ns()) : next_ns;
}

}  // namespace nvmeof
