# SPDX-License-Identifier: Apache-2.0
"""Operations under way, as seen between the manager and the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.chunks import identity_of
from vllm_nvmeof_offload.errors import CANCELLED, STALE, Outcome, outcome_of
from vllm_nvmeof_offload.protocol import RELEASED, ChunkBatch, OpReport, SlotIdentity

from .base import Violation


@dataclass
class SentOp:
    """An op seen from outside: what its rows name, and how many ranks owe what on each."""

    kind: str
    issued_s: float
    identities: tuple[SlotIdentity, ...] = ()
    cache: dict[int, int] = field(default_factory=dict)  # row → cache slot, until its release
    places: dict[int, int] = field(default_factory=dict)
    outcomes: list[int] = field(default_factory=list)  # by row: ranks that owe it
    releases: list[int] = field(default_factory=list)
    failures: dict[int, Outcome] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, issued_s: float, batch: ChunkBatch | None, ranks: int) -> SentOp:
        """batch: None for a reset or an attach, which has one row."""
        if batch is None:
            return cls(kind, issued_s, outcomes=[ranks], releases=[ranks])
        return cls(
            kind,
            issued_s,
            tuple(identity_of(batch, row) for row in range(len(batch))),
            {row: slot for row, slot in enumerate(batch.cache.tolist()) if slot >= 0},
            {row: place for row, place in enumerate(batch.places.tolist()) if place >= 0},
            [ranks] * len(batch),
            [ranks] * len(batch),
        )

    @property
    def owes_outcomes(self) -> bool:
        return any(self.outcomes)

    def rows_of(self, report: OpReport) -> Iterator[tuple[int, Outcome | None, bool]]:
        """(row, outcome, released) of each row of a report; None: only a release."""
        rows = range(len(self.outcomes)) if report.indexes is None else report.indexes.tolist()
        for at, row in enumerate(rows):
            code = 0 if report.codes is None else int(report.codes[at])
            number = 0 if report.errnos is None else int(report.errnos[at])
            released = report.released is None or bool(report.released[at])
            yield row, None if code == RELEASED else outcome_of(code, number), released

    def released(self, row: int) -> None:
        """A rank has released the row, which gives up its slots when all of them have."""
        if self.releases[row] <= self.outcomes[row]:
            raise Violation("13", f"{self}: row {row} is released before its outcome")
        self.releases[row] -= 1
        if not self.releases[row]:
            self.cache.pop(row, None)
            self.places.pop(row, None)

    def is_gone(self, row: int) -> bool:
        """Whether the row of a load names neither slot nor place. Asked before its release."""
        return self.kind == "load" and row not in self.cache and row not in self.places

    def fills(self, row: int) -> bool:
        """Whether the row reads the pool into a cache slot. Asked before its release."""
        return self.kind in ("load", "fetch") and row in self.cache and row in self.places

    def blames(self, row: int, outcome: Outcome, in_pool: set[int]) -> bool:
        """Whether a rank's failure proves that the chunk is bad, so that it may be removed.

        in_pool: generations that were only in the pool, or being read from it. An op that did
        not read the pool has proved nothing about those generations.
        """
        if self.kind == "store":
            return True
        if self.kind not in ("load", "fetch") or outcome == CANCELLED or self.is_gone(row):
            return False
        waited = self.identities[row].generation in in_pool and row not in self.places
        return outcome != STALE or not waited
