# SPDX-License-Identifier: Apache-2.0
"""Simulated peers of one rank that ask it for chunks: of its own pool and of others' regions, some
of which are not there."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace

from vllm_nvmeof_offload.errors import OutcomeKind
from vllm_nvmeof_offload.peers.base import PeerRead, Served
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import TAG_BYTES, SlotIdentity
from vllm_nvmeof_offload.worker.peer_reads import OwnRegion, Serve, ServeQueue

from .base import Clock, Knobs, Violation
from .memory import Memory
from .storage import SimIo
from .store import Record

_NOWHERE = b"nowhere".ljust(16)
_LIES = ("region", "slot", "chunk", "generation", "length", "tag")
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
        lie = rng.choice(_LIES) if rng.random() < self._knobs.serve_lies else ""
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
