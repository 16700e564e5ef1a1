# SPDX-License-Identifier: Apache-2.0
"""A manager core with a clock, and ranks whose reports the test decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vllm_nvmeof_offload.errors import Outcome, code_of
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore, Source, StorePlan
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.native import Foreign
from vllm_nvmeof_offload.protocol import (
    RELEASED,
    AdoptedEntries,
    ChunkBatch,
    Command,
    FetchCommand,
    LoadCommand,
    OpReport,
    RankHello,
    WriteCommand,
    place_of,
)

if TYPE_CHECKING:
    from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager

#: (pool slot of the only target, generation, number of the key).
Entries = Sequence[tuple[int, int, int]]
KEY_BYTES = 12
SLOT_BYTES = 8192
DAY_S = 86_400.0
GROUPS = (Group(0, GroupKind.FULL, 1),)


def key(number: int) -> bytes:
    return b"%08d" % number + bytes(4)  # group 0


def keys_of(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def numbers_of(keys: bytes) -> list[int]:
    """The numbers of joined keys."""
    return [int(keys[at : at + 8]) for at in range(0, len(keys), KEY_BYTES)]


def report(
    op: int,
    *failures: tuple[int, Outcome],
    rows: Sequence[int] = (),
    released: bool = True,
    seconds: float = 0.0,
) -> OpReport:
    """A report on these rows; none: on all that the op has, none of which failed.

    released: whether the failed ones are.
    """
    if not rows:
        assert not failures
        return OpReport(op, seconds=seconds)
    by_row = dict(failures)
    codes = [code_of(by_row[row].kind) if row in by_row else 0 for row in rows]
    errnos = [by_row[row].errno if row in by_row else 0 for row in rows]
    free = None if released else np.array([row not in by_row for row in rows], np.uint8)
    return OpReport(
        op,
        np.array(rows, np.uint32),
        np.array(codes, np.uint8),
        np.array(errnos, np.int16),
        free,
        seconds,
    )


def release(op: int, *rows: int) -> OpReport:
    """The late release of these rows."""
    return OpReport(op, np.array(rows, np.uint32), np.full(len(rows), RELEASED, np.uint8))


#: The share tag of every start.
TAG = bytes(range(16))


def hello(rank: int, cache: int, pool: int, entries: Entries, **changes: object) -> RankHello:
    adopted = AdoptedEntries(
        np.array([place_of(0, e[0]) for e in entries], np.int64),
        np.array([e[1] for e in entries], np.uint64),
        b"".join(key(e[2]) for e in entries),
    )
    shape = {"engine_index": 0, "keyspace": "k", "target_count": 1, "tag": TAG}
    return RankHello(
        rank=rank,
        cache_slots=cache,
        pool_slots=pool,
        adopted=adopted,
        **{**shape, "slot_bytes": SLOT_BYTES, **changes},  # type: ignore[arg-type]
    )


class Core(ManagerCore):
    """A core that remembers what it has sent. batches: by op; others: commands without batches."""

    batches: dict[int, ChunkBatch]
    others: list[Command]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.batches, self.others = {}, []

    def prepare_store(self, keys: Sequence[bytes], *more: Any, **again: Any) -> StorePlan:
        plan = super().prepare_store(keys, *more, **again)
        if plan.command is not None:
            self.batches[plan.command.op] = plan.command.batch
        return plan

    def prepare_load(
        self, keys: Sequence[bytes], limit_s: float | None = None, **more: Any
    ) -> LoadCommand:
        command = super().prepare_load(keys, limit_s, **more)
        self.batches[command.op] = command.batch
        return command

    def take_commands(self) -> list[Command]:
        commands = super().take_commands()
        sent = (c for c in commands if isinstance(c, WriteCommand | FetchCommand))
        self.batches.update({command.op: command.batch for command in sent})
        self.others += [c for c in commands if not isinstance(c, WriteCommand | FetchCommand)]
        return commands


class Bench:
    """A core with a clock, and ranks whose reports the test decides."""

    def __init__(
        self,
        cache: int = 4,
        pool: int = 8,
        ranks: int = 1,
        targets: int = 1,
        tokens_per_chunk: int = 1,
        slot_bytes: int = SLOT_BYTES,
        foreign: Foreign | None = None,
        entries: Entries = (),
        sessions: bytes = b"",
        wall_s: float = 0.0,
        **config: object,
    ) -> None:
        """entries, sessions: what an earlier process has left. wall_s: what the wall clock shows at
        first, without a day."""
        self.now_s = 0.0
        self.ranks = ranks
        #: Seconds in which the model has computed prompts.
        self.prompts_s = 0.0
        more = {"target_count": targets, "slot_bytes": slot_bytes, "sessions": sessions}
        agreement = agree([hello(r, cache, pool, entries, **more) for r in range(ranks)])
        assert agreement.notes == ()
        groups = (Group(0, GroupKind.FULL, tokens_per_chunk),)
        self.core = Core(
            CoreConfig(ranks, KEY_BYTES, groups, **config),  # type: ignore[arg-type]
            agreement,
            lambda: self.now_s,
            wall_clock=lambda: DAY_S + wall_s + self.now_s,
            first_generation=100,
            prompts_s=lambda: self.prompts_s,
            foreign=foreign,
        )

    def report(
        self,
        op: int,
        *failures: tuple[int, Outcome],
        rows: Sequence[int] = (),
        released: bool = True,
        seconds: float = 0.0,
        rank_count: int = 1,
    ) -> None:
        """That many ranks report on `rows`; none: on all rows."""
        known = self.core.batches.get(op, (0,))  # a reset has one row
        rows = rows or range(len(known))
        one = report(op, *failures, rows=rows, released=released, seconds=seconds)
        self.core.report([one] * rank_count)

    def done(self, op: int, *failures: tuple[int, Outcome]) -> None:
        """Every rank reports on all rows, and releases them."""
        self.report(op, *failures, rank_count=self.ranks)

    def stored(self, *numbers: int) -> list[int]:
        """Plan a store; return the chunks that it stores, which are not reported."""
        command = self.core.prepare_store(keys_of(*numbers)).command
        return [] if command is None else numbers_of(command.batch.keys)

    def store(self, *numbers: int) -> None:
        """Store chunks and report them as copied."""
        plan = self.core.prepare_store(keys_of(*numbers))
        assert plan.command is not None
        self.done(plan.command.op)

    def load(self, *numbers: int) -> LoadCommand:
        """Plan a load, which is not reported."""
        return self.core.prepare_load(keys_of(*numbers))

    def write(self) -> WriteCommand:
        """Send the writes that are due, of which there are some."""
        (command,) = self.writes()
        return command

    def writes(self) -> list[WriteCommand]:
        commands = self.core.take_commands()
        return [command for command in commands if isinstance(command, WriteCommand)]

    def write_all(self) -> list[int]:
        """Complete all writes; return the written chunks in their order."""
        numbers = []
        while commands := self.writes():
            for command in commands:
                numbers += numbers_of(command.batch.keys)
                self.done(command.op)
        return numbers

    def source(self, number: int) -> Source | None:
        return self.core.lookup(key(number))

    def hits(self, numbers: Iterable[int]) -> list[int]:
        return [n for n in numbers if self.source(n) is not None]


def attached(manager: NVMeoFOffloadingManager, one: RankHello, *more: Any) -> Bench:
    """A bench that drives the core that the manager makes with this hello. more: of `attach`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_nvmeof_offload.vllm_adapter.manager.ManagerCore", Core)
        manager.attach([one], *more)
    assert isinstance(manager.core, Core)
    bench = Bench()
    bench.core = manager.core
    return bench
