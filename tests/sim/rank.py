# SPDX-License-Identifier: Apache-2.0
"""One simulated rank: the real pipeline below an adapter that behaves like vLLM's worker."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.protocol import (
    CancelCommand,
    Command,
    LoadCommand,
    RankHello,
    Report,
    ResetCommand,
    StoreCommand,
    WriteCommand,
    slot_of,
    target_of,
)
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.worker.peer_reads import Peers
from vllm_nvmeof_offload.worker.pipeline import (
    FinishedJob,
    Transfer,
    TransferLimits,
    TransferPipeline,
)

from .base import BLOCK_BYTES, GPU_BASE, Clock, Knobs, Memory, Tag, Trace, Violation
from .copying import SimCopy, SimLanding
from .owners import Owners, SimHealth, SimOpener, is_foreign
from .peers import SimPeers, SimServing, slot_place
from .shapes import RankSet, block_tokens, holds, needed_from, own, set_sizes, split_cache
from .storage import SimIo
from .store import START_TAG, RankStore


@dataclass(frozen=True)
class TransferJob:
    """A vLLM job. blocks: by group; firsts: of each group, the index of its first block."""

    request: int
    command: StoreCommand | LoadCommand
    blocks: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]

    @property
    def all_blocks(self) -> list[int]:
        return [block for blocks in self.blocks for block in blocks]


@dataclass(frozen=True)
class Work:
    """One request's part of a forward pass: tokens computed before and after it.

    tables: its blocks by group; None: it has none at this position any more.
    """

    tables: tuple[tuple[int | None, ...], ...]
    hashes: tuple[int, ...]
    before: int
    after: int


@dataclass
class Metadata:
    """One engine step, scheduler → ranks."""

    step: int
    epoch: int
    commands: list[Command] = field(default_factory=list)
    stores: dict[int, TransferJob] = field(default_factory=dict)
    loads: dict[int, TransferJob] = field(default_factory=dict)
    flush: set[int] = field(default_factory=set)
    work: list[Work] = field(default_factory=list)


@dataclass
class Output:
    """One rank's part of a step's output."""

    finished: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    invalid_blocks: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)  # requests to be computed from their start
    reports: list[Report] = field(default_factory=list)


class SimRank:
    """Engines, memory and pipeline, with the calls that the vLLM adapters make."""

    wait_max_s = 0.6

    def __init__(
        self,
        rank: int,
        knobs: Knobs,
        clock: Clock,
        rng: random.Random,
        trace: Trace,
        store: RankStore,
        expected: dict[int, list[Tag]],
        meanwhile: Callable[[], None],
        of_set: RankSet | None = None,
        owners: Owners | None = None,
    ) -> None:
        """owners: the other engines on our targets; None: there are none."""
        self.rank = rank
        self._knobs = knobs
        self._clock = clock
        self._rng = rng
        self._trace = trace
        self._meanwhile = meanwhile
        self.memory = Memory(rank, knobs)
        self._pages = knobs.pages[rank]
        sizes = [pages * knobs.page_bytes for pages in self._pages[: len(knobs.groups)]]
        self.geometry = CacheGeometry(
            [
                (
                    group,
                    [CacheTensor(GPU_BASE, BLOCK_BYTES, size, knobs.gpu_blocks)] if size else [],
                )
                for group, size in zip(knobs.groups, sizes, strict=True)
            ]
        )
        members = None if of_set is None else of_set.join(self.memory)
        memories = [self.memory] if of_set is None else of_set.memories
        member = rank % knobs.set_size
        self.copy = SimCopy(memories, member, knobs, clock, rng)
        self.opener = None if owners is None else SimOpener(owners, rank, knobs, clock, rng)
        # As a pool is opened, before anything is read or written: the stamp is that of this start.
        self.adopted = store.adopt(member)
        self.io = SimIo(store, self.memory, knobs, clock, rng, expected, rank, self.opener)
        self.peers: SimPeers | None = None
        seams = self._open_peers()
        base = RankSet.base_address(member)
        self.serving: SimServing | None = None
        if knobs.serve_slots:
            self.serving = SimServing(self.io, self.memory, knobs, clock, rng.random(), base)
        slots = knobs.slot_bytes, knobs.cache_slots, knobs.stream_slots
        self.pipeline = TransferPipeline(
            StagingMap(base, *slots, members, knobs.serve_slots),
            self.copy,
            self.io,
            self._limits(),
            clock,
            opener=self.opener,
            peers=seams,
            serve=self.serving and self.serving.serve,
        )
        self._sizes = [block_tokens(group) for group in knobs.groups]
        self._inbox: deque[Callable[[], None]] = deque()
        self._open: set[int] = set()
        self._finished: list[FinishedJob] = []
        self._reports: list[Report] = []
        self._deferred: dict[int, TransferJob] = {}
        self._loads: dict[int, TransferJob] = {}
        self._stores: dict[int, StoreCommand] = {}
        self._writes: set[int] = set()
        #: By op of a reset: it voids every generation up to this one.
        self.void_limits: dict[int, int] = {}

    def _open_peers(self) -> Peers | None:
        knobs = self._knobs
        if not knobs.peers:
            return None
        seed = self._rng.random()
        self.peers = SimPeers(self.io, self.memory, knobs, self._clock, seed)
        self.landing = SimLanding(self.memory, knobs, self._clock, seed)
        place = partial(slot_place, knobs.targets)
        return Peers(self.peers, knobs.peers, place, self.landing, chunks_min=1)

    def _limits(self) -> TransferLimits:
        knobs = self._knobs
        return TransferLimits(
            self.rank,
            knobs.targets,
            knobs.reads_max,
            knobs.writes_max,
            knobs.read_deadline_s,
            knobs.write_deadline_s,
            group_bytes=self.geometry.group_bytes,
            read_bytes_in_flight_max=knobs.read_bytes_max,
            write_bytes_in_flight_max=knobs.write_bytes_max,
            write_bytes_beside_reads_max=knobs.write_bytes_beside_reads_max,
            serve_share=knobs.serve_share,
            serve_bytes_in_flight_max=knobs.serve_bytes_max,
            copies_check=knobs.copies_check,
            health=self.opener and tuple(SimHealth() for _ in range(knobs.targets)),
        )

    def hello(self, engine_index: int = 0) -> RankHello:
        adopted, knobs = self.adopted, self._knobs
        for place, generation in zip(
            adopted.places.tolist(), adopted.generations.tolist(), strict=True
        ):
            self.io.committed[slot_of(place) * knobs.targets + target_of(place)] = generation
        return RankHello(
            self.rank,
            engine_index,
            "keyspace",
            knobs.cache_slots,
            knobs.pool_slots,
            knobs.targets,
            knobs.slot_bytes,
            tuple(
                replace(group, set_size=size)
                for group, size in zip(self.geometry.groups, set_sizes(knobs), strict=True)
            ),
            adopted,
            START_TAG,
            sessions=self.io.store.sessions if not self.rank else b"",
        )

    # -- the pipeline's thread --------------------------------------------------------

    def pump(self) -> None:
        """One turn of the pipeline's thread."""
        while self._inbox:
            self._inbox.popleft()()
        if self.serving is not None:
            self.serving.ask()
        self.pipeline.step()
        self.io.check()
        if self.serving is not None:
            self.serving.check()
        if self.peers is not None:
            self.peers.check()
        finished = self.pipeline.take_finished()
        self._finished += finished
        self._reports += self.pipeline.take_reports()
        self._open.difference_update(job.op for job in finished)

    # -- one engine step --------------------------------------------------------------

    def execute(self, metadata: Metadata) -> Output:
        stores = dict(metadata.stores)
        for op in sorted(metadata.flush):
            if op in stores:
                self._deferred[op] = stores.pop(op)
        for op, job in self._deferred.items():
            self._submit(op, job)
        self._deferred.clear()
        if metadata.flush:
            self.wait(metadata.flush)
        for command in metadata.commands:
            self._hand_over(lambda c=command: self._apply(c))
        self._maybe_pump()
        self._forward(metadata)
        self._maybe_pump()
        for op, job in metadata.loads.items():
            self._loads[op] = job
            self._submit(op, job)
        self._deferred = stores
        self._maybe_pump()
        return self._output()

    def _apply(self, command: Command) -> None:
        if isinstance(command, WriteCommand):
            generations = command.batch.generations.tolist()
            self._writes.update(generations)
            # A chunk that was borrowed again has its generation again.
            self.io.overtaken.difference_update(filter(is_foreign, generations))
        elif isinstance(command, ResetCommand):
            self.io.overtaken |= self._writes
            self.io.void_limit = self.void_limits[command.op]
            if self.serving is not None:
                self.serving.reset(command.tag)
        elif isinstance(command, CancelCommand):
            self.io.cancels()
        self.pipeline.command(command)

    def _cancel(self, op: int) -> None:
        self.io.cancels()
        self.pipeline.cancel(op)

    def wait(self, ops: set[int]) -> None:
        """Wait as vLLM's worker does: for stores until they are copied; loads are cancelled and
        waited for until no DMA runs."""
        for op in ops & self._loads.keys():
            self._hand_over(lambda o=op: self._cancel(o))
        limit_s = self._clock() + self.wait_max_s
        while ops & self._open:
            if self._clock() > limit_s:
                raise Violation("4", f"rank {self.rank}: wait{sorted(ops)} is stuck")
            self._clock.advance(self._rng.uniform(0.0, 0.01))
            self._meanwhile()
            self.pump()
        self._check_waited(ops)

    def _check_waited(self, ops: set[int]) -> None:
        """Rule 4: no DMA of these jobs is running."""
        watches = self.memory.watches
        for op in ops:
            if op in self._loads:
                for block in self._loads[op].all_blocks:
                    watches.check(("gpu", block), f"the model after wait({op})", writing=False)
            elif op in self._stores:
                for slot in self._stores[op].batch.cache.tolist():
                    row, member = split_cache(slot)
                    mine = holds(self.rank, member, self._knobs)
                    if mine and watches.busy(("slot", row), writing=True):
                        raise Violation("4", f"wait({op}) returned before the copy")

    def _submit(self, op: int, job: TransferJob) -> None:
        fence = self.copy.record_fence()
        self.copy.expect(set(job.all_blocks), fence)
        self._open.add(op)
        command, sizes = job.command, [len(blocks) for blocks in job.blocks]
        blocks = np.array(job.all_blocks, np.int32), sizes, job.firsts
        transfer = op, isinstance(command, StoreCommand), command.batch, *blocks
        if isinstance(command, StoreCommand):
            self._stores[op] = command
            self._hand_over(lambda: self.pipeline.transfer(self.geometry, [transfer], fence))
        else:
            for pages, ids in zip(self._pages, job.blocks, strict=False):
                for block in ids:
                    self.memory.pages_of[block] = pages
            if self.peers is not None:
                command = command._replace(helpers=self.peers.begun(command.batch))
            helpers = {} if command.helpers is None else {op: command.helpers}
            self._hand_over(lambda: self._load(transfer, fence, helpers))

    def _load(self, transfer: Transfer, fence: object, helpers: Mapping[int, int]) -> None:
        self.io.begins(transfer[2])
        self.pipeline.transfer(self.geometry, [transfer], fence, helpers)

    def _hand_over(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)

    def _maybe_pump(self) -> None:
        if self._rng.random() < 0.4:
            self.pump()

    def _output(self) -> Output:
        output = Output(reports=self._reports)
        for job in self._finished:
            output.finished.append(job.op)
            self._stores.pop(job.op, None)
            load = self._loads.pop(job.op, None)
            if load is not None:
                output.received.append(load.request)
                self.io.check_failures(load.command.batch, job.failures)
                if job.failures and not self._knobs.reports_blocks:
                    output.failed.add(load.request)
                elif job.failures:
                    (group,), (first,) = self.geometry.by_group, load.firsts
                    blocks = np.array(load.all_blocks, np.int32)
                    by_chunk = group.split(blocks, first, len(load.command.batch))
                    for row, _ in job.failures:
                        output.invalid_blocks.update(by_chunk[row].tolist())
        self._finished, self._reports = [], []
        return output

    # -- the model --------------------------------------------------------------------

    def _forward(self, metadata: Metadata) -> None:
        """Check the KV of every token attended to, and write the KV of the new tokens."""
        if not metadata.work:
            return
        now = self._clock()
        copy, memory = self.copy, self.memory
        ahead_s = copy.stream_end_s - now - 2 * self._knobs.compute_s
        if ahead_s > 0:  # the host waits for the last step but one
            self._clock.advance(ahead_s)
        begin_s = max(now, copy.stream_end_s)
        copy.stream_end_s = begin_s + self._knobs.compute_s * self._rng.uniform(0.2, 1.5)
        for work in metadata.work:  # in order, because a later one may share a block
            for group, table in enumerate(work.tables):
                self._attend(work, group, metadata.epoch)
                for index in self._written(group, work):
                    block = table[index]
                    assert block is not None
                    memory.watches.check(("gpu", block), "the forward pass", writing=True)
                    last = min(work.after, (index + 1) * self._sizes[group]) - 1
                    pages = memory.pages_of[block] = self._pages[group]
                    tag = own((metadata.epoch, work.hashes[last], group), self.rank, self._knobs)
                    memory.gpu[block][:pages] = [tag] * pages
                    memory.written_at_s[block] = copy.stream_end_s
                    memory.read_until_s[block] = copy.stream_end_s

    def _written(self, group: int, work: Work) -> range:
        """The blocks that a step writes: of states only that of the last token."""
        size = self._sizes[group]
        first, end = work.before // size, -(-work.after // size)
        return range(end - 1 if self._knobs.groups[group].kind is GroupKind.STATE else first, end)

    def _attend(self, work: Work, group: int, epoch: int) -> None:
        """No token is computed whose prefix, window or state is not there."""
        size, table = self._sizes[group], work.tables[group]
        first = needed_from(self._knobs.groups[group], work.before) // size
        for index in range(first, -(-work.before // size)):
            block = table[index]
            if block is None:
                raise Violation("tokens", f"group {group} has no block at position {index}: {work}")
            self.memory.watches.check(("gpu", block), "the forward pass", writing=False)
            begin = min(work.before, (index + 1) * size) - 1
            end = min(len(work.hashes), (index + 1) * size)
            if self._knobs.groups[group].kind is GroupKind.STATE:
                end = begin + 1  # a state of more tokens is of no use
            prefixes = work.hashes[begin:end]
            right = [own((epoch, prefix, group), self.rank, self._knobs) for prefix in prefixes]
            for tag in self.memory.gpu[block][: self._pages[group]]:
                if tag not in right:
                    raise Violation(
                        "tokens",
                        f"rank {self.rank}: block {block} (position {index} of group {group}) "
                        f"holds {tag}, not one of {right}",
                    )
            self.memory.read_until_s[block] = self.copy.stream_end_s
