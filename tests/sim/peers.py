# SPDX-License-Identifier: Apache-2.0
"""Simulated peers of one rank: good, hasty, lying, slow, silent and dying ones, which read for it;
and those that ask it for chunks: of its own pool and of others' regions, some of which are not
there."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.chunks import number_in
from vllm_nvmeof_offload.errors import CANCELLED, OK, STALE, Outcome, OutcomeKind, io_error
from vllm_nvmeof_offload.peers.base import NO_PEER, PeerEnd, PeerRead, PeerState, Served
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import TAG_BYTES, ChunkBatch, SlotIdentity
from vllm_nvmeof_offload.worker.peer_reads import OwnRegion, Serve, ServeQueue

from .base import STAGING_BASE, Clock, Knobs, Memory, Violation
from .shapes import APART
from .storage import SimIo, identities_of
from .store import Claim, Record

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
    """Stands in for `PeerClients` for one rank."""

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

    # -- PeerClients ------------------------------------------------------------------

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


_NOWHERE = b"nowhere".ljust(16)
_ASKED_LIES = ("region", "slot", "chunk", "generation", "length", "tag")
#: Why nothing is read, although its storage answers.
_REFUSED = (OutcomeKind.STALE, OutcomeKind.CANCELLED)


def region_of(target: int) -> bytes:
    """The uuid of ours on a target."""
    return (b"ours on %d" % target).ljust(16)


def with_serving(knobs: Knobs, seed: int, serve: bool) -> Knobs:
    """`knobs` with peers that ask for chunks, if `serve`."""
    if not serve or not knobs.pool_slots:
        return knobs
    rng = random.Random(f"serving of {seed}")
    return replace(
        knobs,
        serve_slots=rng.randint(1, 8),
        serve_share=rng.choice((0.5, 0.9, 1.0)),
        serve_slots_max=rng.choice((math.inf, 1, 2.5)),
        serves=rng.choice((0.1, 0.5, 1.0)),
        serve_lies=rng.choice((0.0, 0.2)),
        serve_cancels=rng.choice((0.0, 0.1)),
    )


@dataclass(eq=False)
class _Asked:
    read: PeerRead
    slot: int  # in staging
    until_s: float
    lie: str
    resets: int  # before it
    cancelled: bool = False

    def __str__(self) -> str:
        return f"a peer's read of {self.read.identity} into slot {self.slot}"


class SimServing:
    """The server of one rank's peers, over the queue that the product gives it."""

    def __init__(
        self, io: SimIo, memory: Memory, knobs: Knobs, clock: Clock, seed: float, base: int
    ) -> None:
        """base: address of staging."""
        self._io, self._memory, self._knobs, self._clock = io, memory, knobs, clock
        self._rng = random.Random(f"serving of {seed}")
        self._base = base
        self.queue = ServeQueue(lambda: None)
        self._free = list(range(knobs.first_serve_slot, knobs.first_serve_slot + knobs.serve_slots))
        self._asked: dict[int, _Asked] = {}
        self._tokens = 0
        self._resets = 0
        self.tag = io.stamp.tag
        self.counts: Counter[str] = Counter()

    @property
    def serve(self) -> Serve:
        targets, slots = self._knobs.targets, self._knobs.pool_slots
        return Serve(
            self.queue,
            {region_of(t): OwnRegion(t, len(range(t, slots, targets))) for t in range(targets)},
        )

    def reset(self, tag: bytes) -> None:
        """The rank was reset: nothing from before is answered."""
        self.tag = tag
        self._resets += 1

    # -- what peers ask for -----------------------------------------------------------

    def ask(self) -> None:
        """Before a turn of the pipeline's thread."""
        rng, knobs = self._rng, self._knobs
        if not self._io.calm and rng.random() < knobs.serves:
            chunks = self._chunks()
            count = rng.randint(0, len(self._free)) if chunks else 0
            if reads := [self._draw(*rng.choice(chunks)) for _ in range(count)]:
                self.queue.serve(reads)
        if rng.random() < knobs.serve_cancels and self._asked:
            tokens = rng.sample(sorted(self._asked), rng.randint(1, len(self._asked)))
            for token in tokens:
                self._asked[token].cancelled = True
            self.counts["serve_cancels"] += len(tokens)
            self.queue.cancel(tokens)

    def _chunks(self) -> list[tuple[bytes, int, Record]]:
        """Region, slot and content of what a peer may know of."""
        targets = self._knobs.targets
        chunks = [
            (region_of(number % targets), number // targets, record)
            for number, record in self._io.store.data.items()
        ]
        for (_, target), region in self._io.regions.items():
            assert self._io.opener is not None
            data = self._io.opener.files(region).data[region.rank]
            chunks += [
                (region.uuid, number // targets, record)
                for number, record in data.items()
                if number % targets == target
            ]
        return chunks

    def _draw(self, uuid: bytes, slot: int, record: Record) -> PeerRead:
        rng, now_s = self._rng, self._clock()
        tag, identity = self.tag, record.claim.identity
        # By what P knows, not by what a wrong write has put there.
        size = len(self._io.payload_of(identity.generation)) * self._knobs.page_bytes
        lie = rng.choice(_ASKED_LIES) if rng.random() < self._knobs.serve_lies else ""
        if lie == "region":
            uuid = _NOWHERE
        elif lie == "slot":
            slot += self._knobs.pool_slots
        elif lie == "chunk":
            slot = rng.randrange(self._knobs.pool_slots // self._knobs.targets + 1)
        elif lie == "generation":
            identity = SlotIdentity(identity.key, 1 << 60)
        elif lie == "length":
            size += 1
        elif lie == "tag":
            tag = b"of others".ljust(TAG_BYTES)
        self._tokens += 1
        staged = self._free.pop(rng.randrange(len(self._free)))
        within_s = self._knobs.read_deadline_s * rng.choice((0.1, 0.5, 1.0, 3.0)) * rng.random()
        read = PeerRead(
            self._tokens,
            self._base + staged * self._knobs.slot_bytes,
            size,
            identity,
            SlotPlace(uuid, 0, slot),
            tag,
            now_s + within_s,
        )
        until_s = min(read.deadline_s, now_s + self._knobs.read_deadline_s)
        self._io.serve_until_s[staged] = until_s
        self._asked[read.token] = _Asked(read, staged, until_s, lie, self._resets)
        self.counts["serves"] += 1
        return read

    # -- what they get ----------------------------------------------------------------

    def check(self) -> None:
        """After a turn of the pipeline's thread."""
        for end in self.queue.poll():
            if end.token not in self._asked:
                raise Violation("serve", f"token {end.token} has ended before")
            asked = self._asked.pop(end.token)
            if self._io.reads_into(asked.slot):
                raise Violation("serve", f"{asked} has ended, and is being written")
            self._free.append(asked.slot)
            self._check_end(asked, end)
        now_s = self._clock()
        for asked in self._asked.values():
            if asked.until_s <= now_s and not self._io.reads_into(asked.slot):
                raise Violation("serve", f"{asked} waits beyond its deadline")

    def _check_end(self, asked: _Asked, end: Served) -> None:
        outcome = end.outcome
        if outcome is None:
            self.counts["serves_of_unknown_regions"] += 1
            return
        self.counts[f"served_{outcome.kind.value}"] += 1
        if asked.cancelled and outcome.kind not in _REFUSED:
            raise Violation("22", f"{asked} was cancelled and gets {outcome}")
        if asked.resets != self._resets and outcome.kind not in _REFUSED:
            raise Violation("22", f"{asked} is from before a reset and gets {outcome}")
        if not outcome.ok:
            return
        self.counts["served_regions"] += asked.read.place.region_uuid not in self.serve.own
        if asked.lie not in ("", "chunk"):
            raise Violation("serve", f"{asked}, with a wrong {asked.lie}, gets {outcome}")
        pages = asked.read.payload_bytes // self._knobs.page_bytes
        found = self._memory.slots[asked.slot][:pages]
        if found != self._io.payload_of(asked.read.identity.generation):
            raise Violation("6", f"{asked} gets {found}")
