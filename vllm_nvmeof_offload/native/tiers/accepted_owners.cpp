// SPDX-License-Identifier: Apache-2.0
#include "tiers/accepted_owners.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/op.h"

namespace nvmeof {

namespace {

constexpr double kRefusedS = 30.0, kDistrustedS = 30.0;
constexpr size_t kRefusedMax = 4096;
// After at least kTrialsMin reads, at most one in kFailedShare may fail. The counts are halved at
// kTrialsMax, so that old successes do not outweigh new failures.
constexpr uint32_t kTrialsMin = 64, kTrialsMax = 1024, kFailedShare = 50;

// Return whether the directory and its state are the same. The number of rows is not compared.
bool is_same(const OwnerRecord& one, const OwnerRecord& other) {
  return one.version == other.version && one.tag == other.tag && one.pool_uuid == other.pool_uuid &&
         one.engine_index == other.engine_index && one.state == other.state;
}

}  // namespace

void Foreign::set_tag(const std::array<uint8_t, kTagBytes>& tag) {
  if (tag_ == decltype(tag_){} || !mutant("a_foreign_entry_survives_new_weights")) tag_ = tag;
}

double Foreign::now_s() const {
  if (set_now_s_) return *set_now_s_;
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

bool Foreign::accepts(uint32_t number) const {
  if (tag_ == decltype(tag_){} || number == 0 || number > kOwnersMax) return false;
  const OwnerRecord record = owner(number);
  if (!record.is_readable() && !mutant("a_foreign_entry_survives_its_acceptance")) return false;
  if (record.tag != tag_ && !mutant("other_weights_are_accepted")) return false;
  if (record.version < floor_ && !mutant("a_foreign_entry_survives_a_reset")) return false;
  if (const auto sent = attached_.find(number);
      sent != attached_.end() && sent->second.pool_uuid != record.pool_uuid)
    return false;
  const auto found = distrusted_.find(number);
  if (found == distrusted_.end()) return true;
  const Distrust& distrust = found->second;
  if (distrust.attach_failed && is_same(distrust.record, record)) return false;
  return now_s() >= distrust.until_s || mutant("an_owner_of_many_failures_is_believed");
}

void Foreign::change_tag(const std::array<uint8_t, kTagBytes>& tag) {
  set_tag(tag);
  since_ = Since::EVER;
}

void Foreign::reset() {
  floor_ = ask_anew(std::exchange(since_, Since::NOW));
  refused_.clear();
  refusals_.clear();
}

void Foreign::refuse(const ForeignRow& row) {
  const double now = now_s();
  const auto [entry, is_new] = refused_.try_emplace(row);
  entry->second = now + kRefusedS;
  if (is_new) refusals_.push_back(row);
  while (refusals_.size() > kRefusedMax || refused_.at(refusals_.front()) <= now) {
    refused_.erase(refusals_.front());
    refusals_.pop_front();
  }
}

bool Foreign::is_refused(const ForeignRow& row) const {
  if (refused_.empty() || mutant("a_refused_pair_comes_back")) return false;
  const auto found = refused_.find(row);
  return found != refused_.end() && now_s() < found->second;
}

void Foreign::ended(const ForeignRow& row, bool ok) {
  const uint32_t number = owner_of(row.place);
  Trial& trial = trials_[number];
  ++trial.ended;
  trial.failed += !ok;
  if (trial.ended >= kTrialsMin && trial.failed * kFailedShare > trial.ended) {
    distrusted_[number].until_s = now_s() + kDistrustedS;
    trial = {};
  } else if (trial.ended >= kTrialsMax) {
    trial = {trial.ended / 2, trial.failed / 2};
  }
}

void Foreign::use(uint32_t number) {
  const auto [entry, is_new] = attached_.try_emplace(number);
  if (!is_new) return;
  entry->second = owner(number);
  unsent_.push_back(number);
}

std::vector<Attachment> Foreign::take_attachments() {
  std::vector<Attachment> attachments;
  for (const uint32_t number : std::exchange(unsent_, {}))
    attachments.push_back({number, attached_.at(number)});
  return attachments;
}

std::vector<uint32_t> Foreign::take_detachments() {
  std::vector<uint32_t> gone;
  std::erase_if(attached_, [&](const auto& entry) {
    const auto& [number, was] = entry;
    if (std::ranges::find(unsent_, number) != unsent_.end()) return false;
    const OwnerRecord record = owner(number);
    const bool is_gone = record.state == OwnerState::NONE || record.pool_uuid != was.pool_uuid;
    if (is_gone) gone.push_back(number);
    return is_gone;
  });
  return gone;
}

void Foreign::attach_failed(uint32_t number) {
  const auto found = attached_.find(number);
  if (found == attached_.end()) return;  // already detached
  Distrust& distrust = distrusted_[number];
  distrust.attach_failed = true;
  distrust.record = found->second;
}

}  // namespace nvmeof
