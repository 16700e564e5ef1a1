// SPDX-License-Identifier: Apache-2.0
// Reads that peers make for us: what each peer is known to have and to take, and what we have asked
// of it. The machine decides which chunks those are; Python carries them there and back.
//
// A peer has a read until its outcome, which is OK, proven here, or a failure that says nothing but
// that the read goes home. At half of what is left of the read's deadline it is a failure of
// itself. Until the release a pull may write into the buffer: what is decided and not released is
// a zombie, which has a slot and no task, and still counts for what the peer takes.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "lane_choice.h"
#include "task.h"

namespace nvmeof {

// As Python knows it.
struct PeerState {
  bool usable = false;
  size_t reads_max = 0;   // that it has of ours at a time; its credits
  size_t bytes_max = 0;   // likewise
  double bytes_per_s = 0;  // of its storage or of the way here, the lower one; 0: not known
  uint64_t queued_bytes = 0;  // there, before ours
};

// What one of its tokens is.
struct PeerRead {
  Task* task = nullptr;  // null: a zombie
  size_t peer = 0;
  int32_t slot = -1;  // of a zombie
  size_t bytes = 0;
  int64_t until_ns = 0;  // when the peer's try ends
  bool offered = false;  // Python has it
  bool is_overdue = false;
};

class PeerLanes {
 public:
  // Tokens of peers have this bit, which no other token has.
  static constexpr uint64_t kTokenBit = uint64_t{1} << 62;

  explicit PeerLanes(size_t peers)
      : overdue(peers), cancels(peers), states_(peers), held_(peers) {}

  size_t size() const { return states_.size(); }
  size_t usable() const;
  void set(size_t peer, const PeerState& state) { states_.at(peer) = state; }
  // Of a read of so many bytes. rate: of a peer of which none is known.
  LaneEstimate estimate(size_t peer, size_t bytes, double rate) const;
  double rate(size_t peer) const { return states_[peer].bytes_per_s; }
  uint64_t queued_bytes(size_t peer) const;
  // Whether it may be waited for: it takes one now, or ends one that is waited for anyhow.
  bool is_awaited(size_t peer) const;

  uint64_t add(Task& task, size_t peer, size_t bytes, int64_t until_ns);
  // Null: it has ended.
  PeerRead* find(uint64_t token);
  PeerRead take(uint64_t token);
  // Its task goes on without it, or has ended.
  void abandon(PeerRead& read, int32_t slot);
  // What Python has not seen of this peer; it has now.
  std::vector<uint64_t> offer(size_t peer);
  // The same, which Python will not see: the peer is not usable any more.
  std::vector<uint64_t> take_back(size_t peer);
  std::vector<uint64_t> expire(int64_t now_ns);
  int64_t next_deadline_ns() const { return next_ns_; }
  size_t in_flight() const { return reads_.size(); }

  // By peer: tokens that Python has although no load waits for them any more.
  std::vector<std::vector<uint64_t>> overdue, cancels;

 private:
  struct Held {
    size_t reads = 0, bytes = 0, awaited = 0;
    std::vector<uint64_t> fresh;  // that Python has not seen
  };
  bool has_room(size_t peer, size_t bytes) const;

  std::vector<PeerState> states_;
  std::vector<Held> held_;
  std::unordered_map<uint64_t, PeerRead> reads_;
  uint64_t count_ = 0;
  int64_t next_ns_ = INT64_MAX;  // no try ends earlier
};

}  // namespace nvmeof
