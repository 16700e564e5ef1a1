# SPDX-License-Identifier: Apache-2.0
"""A pipeline over engines that act only when the test makes them.

Orders and faults at random are the simulator's (tests/sim); these are the named cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.errors import (
    OK,
    Outcome,
)
from vllm_nvmeof_offload.io.base import Completion, IoOp
from vllm_nvmeof_offload.protocol import (
    FetchCommand,
    LevelReport,
    LoadChunk,
    LoadCommand,
    OpReport,
    SlotIdentity,
    StoreChunk,
    StoreCommand,
    Urgency,
)
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import HEADER_BYTES
from vllm_nvmeof_offload.worker.io_scheduler import SchedulerConfig
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline

STRIDE = HEADER_BYTES + 4096
PIECES = [np.array([[1 << 30, 0, 4096]], np.uint64)]
READ_S, WRITE_S = 5.0, 30.0


def identity(number: int) -> SlotIdentity:
    return SlotIdentity(b"%d" % number, 1000 + number)


class FakeCopy:
    def __init__(self) -> None:
        self.submitted: list[tuple[int, Direction, list[int], object]] = []
        self.open: set[int] = set()  # tickets that are not finished
        self._done: list[tuple[int, Outcome]] = []

    def record_fence(self) -> object:
        return "fence"

    def submit(self, direction: Direction, pieces: Descriptors, fence: object) -> int:
        ticket = len(self.submitted)
        self.open.add(ticket)
        self.submitted.append((ticket, direction, pieces[:, 1].tolist(), fence))
        return ticket

    def finish(self, ticket: int, outcome: Outcome = OK) -> None:
        self.open.discard(ticket)
        self._done.append((ticket, outcome))

    def poll(self) -> list[tuple[int, Outcome]]:
        done, self._done = self._done, []
        return done

    def close(self) -> None: ...


class FakeIo:
    name = "fake"

    def __init__(self) -> None:
        self.ops: dict[int, IoOp] = {}
        self.offered: list[IoOp] = []
        self.started: list[IoOp] = []
        self.cancelled: list[int] = []
        self.busy = False
        self._completions: list[Completion] = []

    def submit(self, ops: Sequence[IoOp]) -> int:
        self.offered += ops
        if self.busy:
            return 0
        self.ops.update({op.token: op for op in ops})
        self.started += ops
        return len(ops)

    def cancel(self, tokens: Sequence[int]) -> None:
        self.cancelled += tokens

    def complete(
        self,
        token: int,
        outcome: Outcome | None = OK,
        *,
        released: bool = True,
        ended_s: float | None = None,
    ) -> None:
        if released:
            del self.ops[token]
        self._completions.append(Completion(token, outcome, released, ended_s))

    def poll(self) -> list[Completion]:
        completions, self._completions = self._completions, []
        return completions

    def fileno(self) -> int:
        return -1

    def close(self, timeout_s: float = 5.0) -> bool:
        return True


class Bench:
    def __init__(self, stream_slots: int = 1, cache_slots: int = 4, **config: float) -> None:
        self.now_s = 0.0
        #: Queue lengths are sent along with the other reports.
        self.levels: list[LevelReport] = []
        self.copy, self.io = FakeCopy(), FakeIo()
        self.pipeline = TransferPipeline(
            StagingMap(0, STRIDE, cache_slots, stream_slots),
            self.copy,
            self.io,
            SchedulerConfig(read_deadline_s=READ_S, write_deadline_s=WRITE_S, **config),  # type: ignore[arg-type]
            lambda: self.now_s,
        )

    def store(self, op: int, slot: int, number: int) -> None:
        command = StoreCommand(op, (StoreChunk(identity(number), slot),))
        self.pipeline.store(command, PIECES, "fence")
        self.pipeline.step()

    def stored(self, op: int, slot: int, number: int) -> None:
        self.store(op, slot, number)
        self.copy.finish(self.copy.submitted[-1][0])
        self.pipeline.step()
        assert self.reports() == [OpReport(op)]

    def load(self, op: int, number: int, cache: int | None, pool: int | None) -> None:
        command = LoadCommand(op, (LoadChunk(identity(number), cache, pool),))
        self.pipeline.load(command, PIECES, "fence")
        self.pipeline.step()

    def load_chunks(self, op: int, chunks: Sequence[tuple[int, int | None, int | None]]) -> None:
        """Load chunks: (number, cache slot, pool slot). Nothing moves yet."""
        named = tuple(LoadChunk(identity(n), cache, pool) for n, cache, pool in chunks)
        self.pipeline.load(LoadCommand(op, named), PIECES * len(named), "fence")

    def stream(self, op: int, pool_slots: Sequence[int]) -> None:
        """Load chunks through stream slots. Nothing moves yet."""
        self.load_chunks(op, [(slot, None, slot) for slot in pool_slots])

    def fetch(self, op: int, number: int, pool: int, cache: int, *, urgent: bool = False) -> None:
        urgency = Urgency.URGENT if urgent else Urgency.PREFETCH
        self.pipeline.command(FetchCommand(op, identity(number), pool, cache, urgency))

    def turn(self, targets: Sequence[int] = (0,), target_count: int = 1) -> bool:
        """End the oldest operation on each of these targets, and all copies; False if none
        ended.
        """
        oldest = {op.pool_slot % target_count: op.token for op in reversed(self.io.ops.values())}
        tokens = [oldest[target] for target in targets if target in oldest]
        for token in tokens:
            self.io.complete(token)
        self.pipeline.step()
        tickets = list(self.copy.open)
        for ticket in tickets:
            self.copy.finish(ticket)
        self.pipeline.step()
        return bool(tokens or tickets)

    def io_done(self, outcome: Outcome | None = OK, *, released: bool = True) -> None:
        """Complete the oldest operation in flight."""
        self.io.complete(next(iter(self.io.ops)), outcome, released=released)
        self.pipeline.step()

    def reports(self) -> list[object]:
        taken = self.pipeline.take_reports()
        self.levels += [one for one in taken if isinstance(one, LevelReport)]
        return [one for one in taken if not isinstance(one, LevelReport)]

    def finished(self) -> list[tuple[int, tuple[tuple[int, Outcome], ...]]]:
        return [(job.op, job.failures) for job in self.pipeline.take_finished()]
