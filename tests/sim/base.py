# SPDX-License-Identifier: Apache-2.0
"""Base of the simulator: violation, clock, trace, the knobs that are drawn from a seed, and a
rank's memory: GPU blocks and pinned slots hold tags, and every access is checked. A tag names
exactly what was computed: (weights epoch, hash of the token prefix that ends there, group
position). Each page of a block has the block's tag. An engine that may access a cell holds a watch
on it from `submit` until the completion was polled; any other access to the cell during that time
breaks a rule."""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.units import HEADER_BYTES

BLOCK_BYTES = 4096
GPU_BASE = 1 << 40
STAGING_BASE = 1 << 20
_UNBOUNDED = 1 << 62


PROFILES = ("plain", "plain", "calm", "hangs", "restarts", "pool", "stuck", "demotion", "waiting")
#: Of these no seed draws one.
#: The number of the only client, whose salt every request has.
CLIENT = 7
CHOSEN_BY_NAME = ("borrowing", "flushes", "leases", "retaining")


class Violation(AssertionError):  # noqa: N818 - the protocol's word
    """A rule of docs/protocol.md was broken. `rule`: its number, or a word if it has none."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"rule {rule}: {text}")
        self.rule = rule


class Clock:
    """Virtual seconds. on_advance: called with each new time; None: nobody is."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.on_advance: Callable[[float], None] | None = None

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        if self.on_advance is not None:
            self.on_advance(self.now_s)


class Trace:
    """The last events. They are formatted and printed only when a rule breaks."""

    def __init__(self, clock: Clock, length: int = 60) -> None:
        self._clock = clock
        self._events: deque[tuple[float, tuple[object, ...]]] = deque(maxlen=length)

    def __call__(self, *what: object) -> None:
        self._events.append((self._clock.now_s, what))

    def __str__(self) -> str:
        return "\n".join(f"  {t:9.4f}  {' '.join(map(str, what))}" for t, what in self._events)


@dataclass(frozen=True)
class Knobs:
    """One simulated deployment and its faults. Probabilities are per operation or per tick."""

    profile: str
    ranks: int
    blocks_per_chunk: int
    block_tokens: int
    gpu_blocks: int
    cache_slots: int
    stream_slots: int
    pool_slots: int
    targets: int
    lag: int  # engine steps between a step and the use of the step's output
    defer_shared_loads: bool
    weights_never_change: bool
    land_share: float
    reads_max: int
    writes_max: int
    writes_beside_reads_max: int  # of a target, while it reads; in whole slots
    engine_depth: int  # operations the I/O engine holds, hung ones included
    ticks: int
    copy_s: float
    io_s: float
    compute_s: float
    copy_fails: float
    read_fails: float
    write_fails: float
    read_corrupts: float
    write_lies: float  # share of writes lost, torn, misdirected or flipped but reported OK
    hangs: float
    never: float  # share of hangs that are never released
    hanging_target: int | None  # None: any target may hang
    full_slot: float  # share of pool slots whose writes fail with ENOSPC
    busy: float
    abort: float
    reset: float
    crash: float
    retains: float = 0.0  # share of requests that retain their chunks, or drop a session
    store_threshold: int = 1
    write_policy: str = "through"
    by_priority: bool = False  # vLLM's scheduling policy
    admission: bool = False
    prefill_rate: float = 0.0  # tokens per second that admission has measured
    reload_share: float = 0.25
    prefetch_share: float = 0.25
    loses: float = 0.0  # share of crashes after which one rank has lost some of its pool
    drafts: int = 0  # most tokens that a step drafts per request that generates
    slow_target: int = -1  # a target that takes four times as long; -1: none
    read_deadline_s: float = 0.3
    write_deadline_s: float = 2.0
    report_deadline_s: float = 20.0
    read_slots_max: float = math.inf  # bytes in flight at a target, in whole slots
    write_slots_max: float = math.inf
    shape: str = ""  # this and what follows: see `shapes.shaped`
    groups: tuple[Group, ...] = ()
    pages_per_block: int = 1
    pages: tuple[tuple[int, ...], ...] = ()  # of a block, by rank and group
    boundary_tokens: int = 0  # between two lasting boundaries; 0: the prompt's end only
    set_size: int = 1  # this and what follows: see `sets.with_sets`
    equal_min: int = 8
    sample_every: int = 1024
    unequal: bool = False  # the ranks of a set hold different bytes
    permit_gaps: float = 0.0  # share of looks at which a region's write permit runs out
    permit_lost: float = 0.0  # share of these after which the lease is lost
    owners: int = 0  # other engines; this and what follows: see `owners.with_owners`
    owner_slots: int = 0  # of a region of each rank, over all targets
    owner_turns: float = 0.0  # share of ticks in which one serves a turn, and stores its chunks
    owner_resets: float = 0.0
    owner_leaves: float = 0.0  # one dies, or its directory is removed
    owner_damage: float = 0.0  # a slot is damaged, or a slab is cut short
    owner_lies: float = 0.0  # share of superblocks, records and rows that say something wrong
    owner_late: float = 0.0  # share of its writes that land later
    scans: float = 0.0  # share of ticks in which the follower scans an owner
    region_fails: float = 0.0  # share of reads that fail because of the region's files
    attach_fails: float = 0.0
    attach_s: float = 0.0
    peers: int = 0  # that read for each rank; this and what follows: see `peers.with_peers`
    peer_lies: float = 0.0  # share of pulls with other bytes, another chunk, or half of it
    peer_slow: float = 0.0
    peer_silent: float = 0.0
    peer_dies: float = 0.0  # a session is lost, at a look
    peer_never: float = 0.0  # share of lost or cancelled pulls that are never released
    serve_slots: int = 0  # this and what follows: see `serving.with_serving`
    serve_share: float = 1.0
    serve_slots_max: float = math.inf  # bytes in flight at a target for peers, in whole slots
    serves: float = 0.0  # share of turns in which peers ask for chunks
    serve_lies: float = 0.0  # share of what they ask for that cannot be there
    serve_cancels: float = 0.0
    copies_check: bool = False  # this and what follows: see `copying.with_checks`
    full_checks: float = 0.0  # share of reads that are checked whole, although copies would do it
    flushed_loads: float = 0.0  # share of ticks in which vLLM waits for one of its loads
    names: float = 0.0  # share of resets at which weights change noticed, or get a name

    @property
    def chunk_tokens(self) -> int:
        """Of full attention."""
        return self.blocks_per_chunk * self.block_tokens

    @property
    def slot_bytes(self) -> int:
        return HEADER_BYTES + self.blocks_per_chunk * BLOCK_BYTES

    @property
    def first_serve_slot(self) -> int:
        """Of staging."""
        return self.cache_slots + self.stream_slots

    @property
    def read_bytes_max(self) -> int:
        return self._bytes(self.read_slots_max)

    @property
    def serve_bytes_max(self) -> int:
        return self._bytes(self.serve_slots_max)

    @property
    def write_bytes_max(self) -> int:
        return self._bytes(self.write_slots_max)

    @property
    def write_bytes_beside_reads_max(self) -> int:
        return self._bytes(self.writes_beside_reads_max)

    def _bytes(self, slots: float) -> int:
        return _UNBOUNDED if math.isinf(slots) else int(slots * self.slot_bytes)

    @property
    def full_only(self) -> bool:
        """One group of full attention."""
        return [group.kind for group in self.groups] == [GroupKind.FULL]

    @property
    def reports_blocks(self) -> bool:
        """vLLM computes on from the first failed block, which is right for full attention only."""
        return self.full_only

    @property
    def page_bytes(self) -> int:
        return BLOCK_BYTES // self.pages_per_block

    @property
    def slot_pages(self) -> int:
        return self.blocks_per_chunk * self.pages_per_block

    @property
    def request_tokens_max(self) -> int:
        """Two thirds of what GPU memory has room for, if every group kept every token."""
        sizes = [group.tokens_per_chunk // group.blocks_per_chunk for group in self.groups]
        unit = math.lcm(*sizes)
        blocks = self.gpu_blocks - 2 * len(sizes)
        return blocks * unit * 2 // (3 * sum(unit // size for size in sizes))

    @staticmethod
    def draw(rng: random.Random, profile: str | None = None) -> Knobs:
        """Draw small tiers, so that every slot is contended, and any mix of faults or none."""
        profile = profile or rng.choice(PROFILES)
        blocks_per_chunk = rng.choice((1, 2, 2, 3))
        faulty = profile != "calm"

        def rate(most: float, *, on: bool = True) -> float:
            return most * rng.random() if on and rng.random() < 0.6 else 0.0

        knobs = Knobs(
            profile=profile,
            ranks=rng.choice((1, 1, 2, 2, 3, 4)),
            blocks_per_chunk=blocks_per_chunk,
            block_tokens=rng.choice((2, 4)),
            gpu_blocks=rng.randint(10, 24) * blocks_per_chunk // 2 + 8,
            cache_slots=rng.randint(3, 24),
            stream_slots=rng.randint(1, 4),
            pool_slots=rng.choice((0, *range(4, 40))),
            targets=rng.choice((1, 1, 2, 3)),
            lag=rng.choice((0, 0, 1)),
            defer_shared_loads=rng.random() < 0.5,
            weights_never_change=rng.random() < 0.3,
            land_share=rng.choice((0.0, 0.3, 0.5, 1.0)),
            reads_max=rng.choice((1, 2, 8)),
            writes_max=rng.choice((1, 2, 8)),
            writes_beside_reads_max=rng.choice((1, 2)),
            engine_depth=rng.choice((3, 12)),
            ticks=rng.randint(150, 350),
            copy_s=rng.choice((0.0005, 0.01, 0.05)),
            io_s=rng.choice((0.001, 0.02, 0.1)),
            compute_s=rng.choice((0.002, 0.02)),
            copy_fails=rate(0.02, on=faulty),
            read_fails=rate(0.15, on=faulty),
            write_fails=rate(0.15, on=faulty),
            read_corrupts=rate(0.1, on=faulty),
            write_lies=rate(0.15, on=faulty),
            hangs=rate(0.08, on=faulty and rng.random() < 0.5),
            never=rng.choice((0.0, 0.0, 0.3)),
            hanging_target=None,
            full_slot=rate(0.3, on=faulty),
            busy=rate(0.5),
            abort=rate(0.03),
            reset=rate(0.015),
            crash=rate(0.01),
        )
        return replace(knobs, **{**_waiting(rng), **_focus(profile, rng)})


def _waiting(rng: random.Random) -> dict[str, Any]:
    """Draw the knobs of holds and prefetches for waiting requests."""
    return {
        "by_priority": rng.random() < 0.3,
        "admission": rng.random() < 0.5,
        "prefill_rate": rng.choice((0.0, 30.0, 300.0, 3000.0)),
        "reload_share": rng.choice((0.0, 0.25, 0.25, 0.6)),
        "prefetch_share": rng.choice((0.0, 0.25, 0.25, 0.6)),
    }


def _focus(profile: str, rng: random.Random) -> dict[str, Any]:
    """Make the events that a profile tests frequent."""
    if profile in ("plain", "calm", "demotion"):
        return _policies(profile, rng)
    if profile == "hangs":
        return {
            "hangs": rng.uniform(0.05, 0.3),
            "never": rng.choice((0.0, 0.3, 0.7)),
            "targets": rng.choice((1, 2, 3)),
            "engine_depth": rng.choice((3, 3, 12)),
            "land_share": rng.choice((0.0, 0.5, 1.0)),
            "defer_shared_loads": rng.random() < 0.25,
            "full_slot": 0.0,
            "write_fails": 0.0,
            "stream_slots": rng.randint(1, 2),
            "cache_slots": rng.randint(4, 10),
            "pool_slots": rng.randint(16, 40),
            "gpu_blocks": rng.randint(12, 18),
            "reset": rng.choice((0.0, 0.01)),
            "crash": rng.choice((0.0, 0.005)),
            "copy_s": rng.choice((0.0005, 0.01)),
            "ticks": 500,
        }
    if profile == "flushes":
        return _flushes(rng)
    if profile == "borrowing":  # chosen by name only, with owners: see `owners.with_owners`
        return {"ticks": 2000, "pool_slots": rng.randint(4, 8), "hangs": 0.0, "io_s": 0.001}
    if profile == "stuck":  # one target never completes an operation; the others do
        return {
            "hangs": rng.uniform(0.2, 0.9),
            "never": 1.0,
            "hanging_target": 0,
            "targets": rng.choice((2, 3)),
            "engine_depth": 3,
            "reads_max": 8,
            "writes_max": 8,
            "land_share": rng.choice((0.5, 1.0)),
            "defer_shared_loads": False,
            "full_slot": 0.0,
            "write_fails": 0.0,
            "cache_slots": rng.randint(4, 10),
            "pool_slots": rng.randint(16, 40),
            "gpu_blocks": rng.randint(12, 18),
            "reset": rng.choice((0.0, 0.01)),
            "crash": rng.choice((0.0, 0.005)),
            "ticks": 400,
        }
    if profile == "waiting":
        return _crowded(rng)
    if profile == "restarts":
        return {
            "reset": 0.012,
            "crash": 0.012,
            "write_lies": 0.3,
            "full_slot": 0.0,
            "pool_slots": rng.randint(4, 12),
        }
    if profile == "pool":
        return _pooled(rng)
    if profile == "retaining":  # chosen by name only
        crash = rng.choice((0.0, 0.01, 0.02))
        return {**_pooled(rng), "retains": 0.4, "cache_slots": rng.randint(16, 32), "crash": crash}
    return {}


def _pooled(rng: random.Random) -> dict[str, Any]:
    """A pool larger than the CPU tier, which few failures make smaller."""
    return {
        "cache_slots": rng.randint(5, 12),
        "pool_slots": rng.randint(20, 40),
        "gpu_blocks": rng.randint(12, 18),
        "reset": rng.choice((0.0, 0.01)),
        "crash": rng.choice((0.0, 0.01)),
        "full_slot": 0.0,
        "copy_s": rng.choice((0.0005, 0.01)),
        "ticks": 500,
    }


def _flushes(rng: random.Random) -> dict[str, Any]:
    """Chosen by name only: vLLM waits for loads that hang for longer than the wait's bound."""
    return {
        **_focus("hangs", rng),
        "reset": rng.uniform(0.01, 0.05),
        "read_deadline_s": 2.0,
        "crash": 0.0,
        "admission": False,
    }


def _crowded(rng: random.Random) -> dict[str, Any]:
    """Many requests for few GPU blocks, and a pool larger than the CPU tier."""
    return {
        "gpu_blocks": rng.randint(12, 18),
        "cache_slots": rng.randint(8, 20),
        "pool_slots": rng.randint(30, 60),
        "reload_share": rng.choice((0.25, 0.4, 0.6)),
        "prefetch_share": rng.choice((0.25, 0.4, 0.6)),
        "admission": rng.random() < 0.3,
        "land_share": rng.choice((0.0, 0.3)),
        "stream_slots": rng.randint(2, 4),
        "write_fails": 0.0,
        "full_slot": 0.0,
        "busy": 0.0,
        "reset": rng.choice((0.0, 0.0, 0.01)),
        "crash": 0.0,
        "abort": rng.choice((0.0, 0.03)),
        "copy_s": 0.0005,
        "io_s": rng.choice((0.001, 0.02)),
        "compute_s": 0.002,
        "ticks": 500,
        "drafts": rng.choice((0, 2, 5)),
    }


def _policies(profile: str, rng: random.Random) -> dict[str, Any]:
    """Draw the operator's choices. In other profiles they would make the tested events rare."""
    if profile != "demotion":
        return {
            "store_threshold": rng.choice((1, 1, 2, 3)),
            "write_policy": rng.choice(("through",) * 5 + ("off",)),
        }
    return {
        "write_policy": "on_eviction",
        "targets": rng.choice((1, 2, 3)),
        "slow_target": 0,
        "store_threshold": rng.choice((1, 1, 2)),
        "cache_slots": rng.randint(4, 24),
        "pool_slots": rng.randint(8, 40),
        "land_share": rng.choice((0.0, 0.5, 1.0)),
        "gpu_blocks": rng.randint(12, 24),
        "full_slot": 0.0,
        "copy_s": rng.choice((0.0005, 0.01)),
        "ticks": 400,
    }


Tag = tuple[int, int, int]
Cell = tuple[str, int]  # ("gpu", block), ("slot", staging slot), ("head", staging slot)

_RULE = {"gpu": "4", "slot": "1", "head": "1"}


def crc_of(pages: Sequence[Tag | None]) -> int:
    """The checksum of a payload: of its pages' tags."""
    return zlib.crc32(repr(list(pages)).encode())


class Watches:
    """The current readers and writers of each cell."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._readers: Counter[Cell] = Counter()
        self._writers: dict[Cell, object] = {}
        self._held: dict[object, tuple[tuple[Cell, ...], tuple[Cell, ...]]] = {}
        #: Slots with bytes that nobody has checked → the CRC that their header names.
        self.unproven: dict[Cell, int] = {}

    def begin(
        self, owner: object, reads: Iterable[Cell], writes: Iterable[Cell], *, checks: bool = False
    ) -> None:
        """checks: the owner checks what it reads."""
        reads, writes = tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes))
        for cell in reads:
            self.check(cell, owner, writing=False)
            if cell in self.unproven and not (checks and cell not in self._readers):
                raise Violation("6", f"rank {self._rank}: {cell} is unproven and read by {owner}")
        for cell in writes:
            self.unproven.pop(cell, None)
        for cell in writes:
            self.check(cell, owner, writing=True)
        self._readers.update(reads)
        self._writers.update(dict.fromkeys(writes, owner))
        self._held[owner] = (reads, writes)

    def end(self, owner: object) -> None:
        reads, writes = self._held.pop(owner)
        for cell in reads:
            self._readers[cell] -= 1
            if not self._readers[cell]:
                del self._readers[cell]
        for cell in writes:
            del self._writers[cell]

    def prove(self, cell: Cell, crc: int) -> bool:
        """Note the CRC that whoever checks the slot has found; return whether it is right."""
        right = self.unproven.get(cell, crc) == crc
        if right:
            self.unproven.pop(cell, None)
        return right

    def check(self, cell: Cell, who: object, *, writing: bool) -> None:
        """Check that `who` may access `cell`."""
        other = self._writers.get(cell)
        if other is None and writing and self._readers.get(cell):
            other = "a reader"
        if other is not None:
            verb = "written" if writing else "read"
            raise Violation(
                _RULE[cell[0]], f"rank {self._rank}: {cell} {verb} by {who} while in use by {other}"
            )

    def busy(self, cell: Cell, *, writing: bool = False) -> bool:
        """Whether the cell is in use; with `writing`, whether it is being written."""
        return cell in self._writers or (not writing and cell in self._readers)


class Memory:
    """Tags per cell. Cache slots come first, then stream slots and serve slots, as in staging."""

    def __init__(self, rank: int, knobs: Knobs) -> None:
        gpu_blocks, pages = knobs.gpu_blocks, knobs.pages_per_block
        slots = knobs.first_serve_slot + knobs.serve_slots
        self.watches = Watches(rank)
        #: By block and page. The pages behind those of the block's group are another group's.
        self.gpu: list[list[Tag | None]] = [[None] * pages for _ in range(gpu_blocks)]
        self.pages_of = [pages] * gpu_blocks  # of the group that has the block
        #: By slot and page, without regard to where the payload's blocks begin.
        self.slots: list[list[Tag | None]] = [[None] * knobs.slot_pages for _ in range(slots)]
        #: Rule 3: the time when the model's stream has written, or last reads, each block.
        self.written_at_s = [0.0] * gpu_blocks
        self.read_until_s = [0.0] * gpu_blocks
