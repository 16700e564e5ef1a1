# SPDX-License-Identifier: Apache-2.0
"""Simulated peers of one rank: good, hasty, lying, slow, silent and dying ones."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.chunks import number_in
from vllm_nvmeof_offload.errors import CANCELLED, OK, STALE, Outcome, io_error
from vllm_nvmeof_offload.peers.base import NO_PEER, PeerEnd, PeerRead, PeerState
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import ChunkBatch, SlotIdentity

from .base import STAGING_BASE, Clock, Knobs, Violation
from .memory import Memory
from .sets import APART
from .storage import SimIo, identities_of
from .store import Claim

#: Of our own regions: the slots are numbered over all targets.
_OURS = bytes(16)
_ROUNDING_S = 1e-6  # the machine counts nanoseconds
_LIES = ("bytes", "chunk", "torn")


def slot_place(targets: int, place: int) -> SlotPlace:
    return SlotPlace(_OURS, 0, number_in(place, targets))


def with_peers(knobs: Knobs, seed: int, peers: int) -> Knobs:
    """`knobs` with so many peers, and with loads that they can help with."""
    if not peers or not knobs.pool_slots:
        return knobs
    rng = random.Random(f"peers of {seed}")

    def rate(most: float) -> float:
        return most * rng.random() if rng.random() < 0.6 else 0.0

    return replace(
        knobs,
        peers=peers,
        stream_slots=knobs.targets + rng.randint(1, 6),
        land_share=rng.choice((0.0, 0.3, 1.0)),
        peer_lies=rate(0.4),
        peer_slow=rate(0.4),
        peer_silent=rate(0.2),
        peer_dies=rate(0.05),
        peer_never=rng.choice((0.0, 0.0, 0.2)),
    )


@dataclass(eq=False)
class _Pull:
    lane: int
    read: PeerRead
    slot: int  # in staging
    done_s: float
    lie: str = ""
    unwanted: bool = False
    failed: bool = False  # said so, and not released

    def __str__(self) -> str:
        return f"pull of {self.read.identity} by peer {self.lane} (token {self.read.token})"


class SimPeers:
    """Implements `PeerPort` for one rank."""

    def __init__(self, io: SimIo, memory: Memory, knobs: Knobs, clock: Clock, seed: float) -> None:
        self._io = io
        self._memory = memory
        self._knobs = knobs
        self._clock = clock
        self._rng = random.Random(f"peers of {seed}")
        self._states = [NO_PEER] * knobs.peers
        self._pulls: dict[int, _Pull] = {}
        self._asked: Counter[SlotIdentity] = Counter()
        self._dice = random.Random(f"helpers of {seed}")
        #: Of rows that are in one load: the peers that its request named.
        self._helpers: dict[SlotIdentity, int] = {}
        #: Rows of loads that may be asked for, as the rank began them.
        self.rows: Counter[SlotIdentity] = Counter()
        self.counts: Counter[str] = Counter()
        self.calm = False

    def begun(self, batch: ChunkBatch) -> int | None:
        """The rank begins a load of these rows; return the peers that its request names."""
        named = self._dice.random() < 0.3
        helpers = self._dice.randrange(1 << self._knobs.peers) if named else None
        for identity in identities_of(batch):
            self.rows[identity] += 1
            self._helpers.pop(identity, None)
            if self.rows[identity] > 1:
                self._io.asked.pop(identity, None)
            elif helpers is not None:
                self._helpers[identity] = helpers
        return helpers

    # -- PeerPort ---------------------------------------------------------------------

    def state(self, lane: int) -> PeerState:
        rng = self._rng
        if rng.random() < 0.05:
            state = PeerState(
                usable=rng.random() < 0.85,
                credits=rng.choice((0, 1, 2, 4)),
                bytes_per_s=rng.choice((0.0, 1e5, 1e6, 1e7)),
                queued_bytes=rng.choice((0, 0, 5)) * self._knobs.slot_bytes,
            )
            self._states[lane] = state
        return self._states[lane]

    def submit(self, lane: int, reads: Sequence[PeerRead]) -> None:
        now = self._clock()
        for read in reads:
            self._check(lane, read)
            self._asked[read.identity] += 1
            if self.rows[read.identity] == 1:  # its second try is known where it is made
                self._io.asked[read.identity] = 2 * read.deadline_s - now + _ROUNDING_S
            self.counts["peer_reads"] += 1
            slot = (read.address - STAGING_BASE) % APART // self._knobs.slot_bytes
            pull = self._draw(_Pull(lane, read, slot, now))
            self._memory.watches.begin(pull, (), [("head", slot), ("slot", slot)])
            self._pulls[read.token] = pull

    def _check(self, lane: int, read: PeerRead) -> None:
        held = sum(pull.lane == lane for pull in self._pulls.values())
        state = self._states[lane]
        if not state.usable or held >= state.credits:
            raise Violation("16", f"{read} of peer {lane}, which has {held} and {state}")
        if self._asked[read.identity] >= self.rows[read.identity]:
            raise Violation("16", f"{read.identity} is asked of a second peer")
        if not self._helpers.get(read.identity, -1) >> lane & 1:
            raise Violation("16", f"{read} is asked of peer {lane}, which nobody named")
        left_s = read.deadline_s - self._clock()
        if not 0 < left_s <= self._knobs.read_deadline_s / 2 + _ROUNDING_S:
            raise Violation("16", f"{read} has {left_s} s")
        if (read.address - STAGING_BASE) % APART < self._knobs.cache_slots * self._knobs.slot_bytes:
            raise Violation("16", f"{read} is pulled into a cache slot")

    def _draw(self, pull: _Pull) -> _Pull:
        rng, knobs = self._rng, self._knobs
        pull.done_s += knobs.io_s * rng.uniform(0.2, 2.0)
        if self.calm:
            return pull
        if rng.random() < knobs.peer_slow:
            pull.done_s += rng.uniform(0.1, 3.0)
        if rng.random() < knobs.peer_silent:
            pull.done_s = math.inf
        if rng.random() < knobs.peer_lies:
            pull.lie = rng.choice(_LIES)
        return pull

    def cancel(self, tokens: Sequence[int]) -> None:
        now, rng = self._clock(), self._rng
        for token in tokens:
            pull = self._pulls.get(token)
            if pull is None:
                continue  # its end is on its way
            pull.unwanted = True
            self.counts["peer_cancels"] += 1
            if rng.random() >= self._knobs.peer_never or self.calm:
                pull.done_s = min(pull.done_s, now + rng.choice((0.0, 0.01, 0.5)))

    def poll(self) -> list[PeerEnd]:
        now, rng = self._clock(), self._rng
        if not self.calm and rng.random() < self._knobs.peer_dies:
            self._lose(rng.randrange(self._knobs.peers))
        ends: list[PeerEnd] = []
        pulls = list(self._pulls.values())
        rng.shuffle(pulls)
        for pull in pulls:
            token = pull.read.token
            if pull.done_s <= now:
                outcome = self._pulled(pull)
                del self._pulls[token]
                self._memory.watches.end(pull)
                ends.append(PeerEnd(token, outcome, released=True))
            elif pull.failed and not pull.unwanted:
                pull.unwanted = True  # said once
                ends.append(PeerEnd(token, io_error(0), released=False))
        return ends

    # -- the peers --------------------------------------------------------------------

    def _lose(self, lane: int) -> None:
        """The session ends: what was asked fails, and pulls may go on for a while, or for ever."""
        self.counts["peer_losses"] += 1
        self._states[lane] = NO_PEER
        rng = self._rng
        for pull in self._pulls.values():
            if pull.lane != lane or pull.failed:
                continue
            pull.failed = True
            late_s = math.inf if rng.random() < self._knobs.peer_never else rng.uniform(0.0, 1.0)
            pull.done_s = self._clock() + (late_s if rng.random() < 0.5 else 0.0)

    def _pulled(self, pull: _Pull) -> Outcome:
        """What our own check says of the bytes that came."""
        read, knobs, io = pull.read, self._knobs, self._io
        if pull.failed or (pull.unwanted and self._rng.random() < 0.5):
            return CANCELLED
        if read.place.region_uuid != _OURS:
            return STALE  # the peer has not opened that region
        number = read.place.slot
        if pull.lie == "chunk":
            number = self._rng.choice([*io.store.data, number])
        record = io.store.data.get(number)
        pages = read.payload_bytes // knobs.page_bytes
        payload = list((record.payload if record else ()) + (None,) * pages)[:pages]
        if pull.lie in ("bytes", "torn") and pages:
            cut = 0 if pull.lie == "bytes" else self._rng.randrange(pages)
            payload[cut:] = [None] * (pages - cut)
            record = record and replace(record, intact=False)
        self._memory.slots[pull.slot][:pages] = payload
        outcome = io.verify(record, Claim(read.identity, read.tag, read.payload_bytes))
        self.counts["pulled" if outcome.ok else "peer_failures"] += 1
        if outcome.ok and pull.lie != "" and payload != io.payload_of(read.identity.generation):
            raise Violation("6", f"{pull} accepted {payload}")
        return OK if outcome.ok else outcome

    # -- checks -----------------------------------------------------------------------

    @property
    def stuck(self) -> int:
        """The pulls that are never released."""
        return sum(math.isinf(pull.done_s) for pull in self._pulls.values())

    def check(self) -> None:
        """Check after a turn of the pipeline's thread."""
        for pull in self._pulls.values():
            if pull.read.deadline_s < self._clock() and not pull.unwanted:
                raise Violation("16", f"{pull} is past its deadline and waited for")
