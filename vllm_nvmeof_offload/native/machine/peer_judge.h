// SPDX-License-Identifier: Apache-2.0
// Decides which peers get no reads for now. A peer that delays eight loads in a row rests for 10 s.
// A peer becomes faulty if eight of its reads fail in a row, or if its session is lost or stalls
// three times in 10 s; it then rests for 30 s. If it becomes faulty again before it has worked for
// longer than that rest lasted, its next rest for a fault is twice as long, up to 10 minutes.
//
// Peers are judged when a load has ended, not by the estimate at its start, because later loads may
// delay it. A peer is late if its chunk arrived last, and our targets alone could have finished the
// load earlier, by reading the peers' chunks after their own. Other reads from the targets count
// too: while they keep a target busy, no peer is late. A chunk that this server read because a peer
// failed counts as that peer's.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/op.h"
#include "machine/io_queue.h"
#include "machine/task.h"

namespace nvmeof {

class PeerJudge {
 public:
  explicit PeerJudge(size_t peers) : peers_(peers) {}

  // Record how often the peer's session has been lost or stalled since the start.
  void lost(size_t peer, uint64_t times, int64_t now_ns) {
    Peer& one = peers_[peer];
    const uint64_t known = std::exchange(one.lost, times);
    for (uint64_t time = known; time < times && !rests(peer, now_ns); ++time) {
      const int64_t before_ns = std::exchange(one.lost_ns[one.losses++ % (kLostMax - 1)], now_ns);
      if (one.losses >= kLostMax && now_ns - before_ns <= kLostWithinNs)
        rest_for_fault(one, now_ns);
    }
  }

  void ended(size_t peer, Outcome code, int error, int64_t now_ns) {
    Peer& one = peers_[peer];
    if (rests(peer, now_ns)) return;  // a read that began before its rest
    if (code == Outcome::OK) one.failed = 0;
    if (brought_nothing(code, error) && ++one.failed == kFailedMax) rest_for_fault(one, now_ns);
  }

  bool rests(size_t peer, int64_t now_ns) const { return now_ns < peers_[peer].rests_until_ns; }

  void given(const Task& task, size_t peer, IoQueue& io) {
    Load& load = loads_[task.job->op];
    load.peers |= uint64_t{1} << peer;
    for (size_t number = load.targets.size(); number < io.targets(); ++number)
      load.targets.push_back({io.now_ns(), io.bytes_read(number)});
    load.targets[task.target].is_helped = true;
  }

  void failed(const Task& task) {
    if (mutant("a_chunk_that_comes_home_is_nobodys")) return;
    if (Load* const load = find(task)) load->failed = task.peer;
  }

  // Record that a chunk of a load was read: by the peer that the task was given to, or by this
  // server.
  void read(const Task& task, IoQueue& io) {
    Load* const load = find(task);
    if (!load) return;
    Target& target = load->targets[task.target];
    load->late = Task::kAtNoPeer;
    if (task.is_at_peer()) {
      target.peers_bytes += io.transfer_bytes(task);
      if (is_late(task, *load, io)) load->late = task.peer;
    } else if (!task.came_home()) {
      target.own_ns = io.now_ns();
      target.own_bytes = io.bytes_read(task.target);
    } else if (is_late(task, *load, io)) {
      load->late = load->failed;
    }
  }

  // Judge the peers of a load that has ended. A load with failed chunks is not judged.
  void ended(const Job& job, int64_t now_ns) {
    const auto found = loads_.find(job.op);
    if (found == loads_.end()) return;
    const Load load = std::move(found->second);
    loads_.erase(found);
    if (!job.failed.empty()) return;
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      if (!(load.peers >> peer & 1)) continue;
      Peer& one = peers_[peer];
      const bool is_late = load.late == peer + 1;
      if (is_late && ++one.late == kLateMax) rest(one, now_ns, kSlowRestNs);
      if (!is_late && !mutant("a_late_peer_is_never_forgiven")) one.late = 0;
    }
  }

 private:
  static constexpr unsigned kLateMax = 8, kFailedMax = 8;  // in a row
  static constexpr unsigned kLostMax = 3;
  static constexpr int64_t kLostWithinNs = 10'000'000'000;
  static constexpr int64_t kSlowRestNs = 10'000'000'000;
  static constexpr int64_t kFaultRestNs = 30'000'000'000, kFaultRestMaxNs = 600'000'000'000;
  static constexpr double kTolerance = 1.05;

  struct Peer {
    int64_t rests_until_ns = 0;
    int64_t fault_rest_ns = 0;                    // the length of its last rest for a fault
    uint64_t lost = 0;                            // the last count passed to `lost`
    unsigned late = 0, failed = 0;                // in a row
    unsigned losses = 0;                          // losses since its last rest
    std::array<int64_t, kLostMax - 1> lost_ns{};  // the times of the last losses
  };
  // A load's progress on one of our targets, and the peers' reads on its behalf.
  struct Target {
    int64_t own_ns;  // when it last read for the load; initially, when a peer got the first chunk
    uint64_t own_bytes;  // all bytes that it had read by then, for any purpose
    uint64_t peers_bytes = 0;
    bool is_helped = false;
  };
  struct Load {
    std::vector<Target> targets;
    uint64_t peers = 0;                // a bit for each peer that got a chunk
    uint8_t failed = Task::kAtNoPeer;  // the last peer to fail, as `Task::peer`
    uint8_t late = Task::kAtNoPeer;    // the peer whose chunk was last and late, as `Task::peer`
  };

  static void rest(Peer& peer, int64_t now_ns, int64_t rest_ns) {
    const int64_t until_ns = std::max(peer.rests_until_ns, now_ns + rest_ns);
    peer = {until_ns, peer.fault_rest_ns, peer.lost};
  }

  static void rest_for_fault(Peer& peer, int64_t now_ns) {
    const int64_t last_ns = peer.fault_rest_ns;
    const bool was_well = now_ns - peer.rests_until_ns > last_ns;
    peer.fault_rest_ns =
        last_ns && !was_well ? std::min(2 * last_ns, kFaultRestMaxNs) : kFaultRestNs;
    rest(peer, now_ns, peer.fault_rest_ns);
  }

  // Return whether a failed read counts against the peer. ENOTCONN does not, because `lost` counts
  // it; nor does EBADF, because the region is not open yet.
  static bool brought_nothing(Outcome code, int error) {
    if (code == Outcome::IO_ERROR) return error != ENOTCONN && error != EBADF;
    return code == Outcome::STALE || code == Outcome::CHECKSUM_MISMATCH;
  }

  Load* find(const Task& task) {
    const auto found = loads_.find(task.job->op);
    return found == loads_.end() ? nullptr : &found->second;
  }

  // Return whether the load would have ended by now without peers. The estimate includes all bytes
  // that a target has read or queued since it last read for this load.
  static bool is_late(const Task& task, const Load& load, IoQueue& io) {
    if (mutant("a_slow_peer_is_never_late")) return false;
    const int64_t started_ns = task.job->started_ns;
    double alone_ns = 0;
    for (size_t number = 0; number < load.targets.size(); ++number) {
      const Target& target = load.targets[number];
      auto read_ns = static_cast<double>(target.own_ns - started_ns);
      if (target.is_helped) {
        const double rate = io.read_rate(number);
        if (rate <= 0) return false;
        uint64_t bytes = io.bytes_read(number) - target.own_bytes + io.bytes_before(number);
        if (mutant("peers_are_late_while_a_target_is_busy")) bytes = 0;
        if (!mutant("what_peers_bring_takes_no_time_here")) bytes += target.peers_bytes;
        read_ns += static_cast<double>(bytes) / rate * 1e9;
      }
      alone_ns = std::max(alone_ns, read_ns);
    }
    return static_cast<double>(io.now_ns() - started_ns) > kTolerance * alone_ns;
  }

  std::vector<Peer> peers_;
  std::unordered_map<uint64_t, Load> loads_;  // the loads that peers help with, by op
};

}  // namespace nvmeof
