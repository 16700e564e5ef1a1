# SPDX-License-Identifier: Apache-2.0
"""A manager core with a clock, and ranks whose reports the test decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.protocol import (
    AdoptedEntries,
    OpReport,
    RankHello,
    WriteCommand,
)

Entries = Sequence[tuple[int, int, bytes]]


def keys_of(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def hello(rank: int, cache: int, pool: int, entries: Entries, **changes: object) -> RankHello:
    adopted = AdoptedEntries(
        np.array([e[0] for e in entries], np.int64),
        np.array([e[1] for e in entries], np.uint64),
        tuple(e[2] for e in entries),
    )
    shape = {"engine_index": 0, "keyspace": "k", "target_count": 1, **changes}
    return RankHello(
        rank=rank,
        cache_slots=cache,
        pool_slots=pool,
        slot_bytes=8192,
        adopted=adopted,
        **shape,  # type: ignore[arg-type]
    )


class Bench:
    """A core with a clock, and ranks whose reports the test decides."""

    def __init__(
        self, cache: int = 4, pool: int = 8, ranks: int = 1, targets: int = 1, **config: object
    ) -> None:
        self.now_s = 0.0
        self.ranks = ranks
        #: Seconds in which the model has computed prompts.
        self.prompts_s = 0.0
        agreement = agree([hello(r, cache, pool, (), target_count=targets) for r in range(ranks)])
        assert agreement.notes == ()
        self.core = ManagerCore(
            CoreConfig(world_size=ranks, **config),  # type: ignore[arg-type]
            agreement,
            lambda: self.now_s,
            first_generation=100,
            prompts_s=lambda: self.prompts_s,
        )

    def done(self, op: int, *failures: tuple[int, Outcome]) -> None:
        self.core.report([OpReport(op, failures)] * self.ranks)

    def store(self, *numbers: int) -> None:
        """Store chunks and report them as copied."""
        plan = self.core.prepare_store(keys_of(*numbers))
        assert plan.command is not None
        self.done(plan.command.op)

    def writes(self) -> list[WriteCommand]:
        commands = self.core.take_commands()
        return [command for command in commands if isinstance(command, WriteCommand)]

    def write_all(self) -> None:
        while commands := self.writes():
            for command in commands:
                self.done(command.op)

    def hits(self, numbers: Iterable[int]) -> list[int]:
        return [n for n in numbers if self.core.lookup(b"%d" % n) is not None]
