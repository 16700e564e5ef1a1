# SPDX-License-Identifier: Apache-2.0
"""One rank's memory: GPU blocks and pinned slots hold tags, and every access is watched.

A tag names exactly what was computed: (weights epoch, hash of the token prefix up to there).
An engine that may touch a cell holds a watch on it from `submit` until its completion was
polled; whoever else touches the cell meanwhile breaks a rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .base import Violation

Tag = tuple[int, int]
Cell = tuple[str, int]  # ("gpu", block), ("slot", staging slot), ("head", staging slot)

_RULE = {"gpu": "4", "slot": "1", "head": "1"}


class Watches:
    """Who reads and who writes which cell just now."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._readers: Counter[Cell] = Counter()
        self._writers: dict[Cell, object] = {}
        self._held: dict[object, tuple[tuple[Cell, ...], tuple[Cell, ...]]] = {}

    def begin(self, owner: object, reads: Iterable[Cell], writes: Iterable[Cell]) -> None:
        reads, writes = tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes))
        for cell in reads:
            self.check(cell, owner, writing=False)
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

    def check(self, cell: Cell, who: object, *, writing: bool) -> None:
        """`who` is about to touch `cell`, now or until further notice."""
        other = self._writers.get(cell)
        if other is None and writing and self._readers.get(cell):
            other = "a reader"
        if other is not None:
            verb = "written" if writing else "read"
            raise Violation(
                _RULE[cell[0]], f"rank {self._rank}: {cell} {verb} by {who} while in use by {other}"
            )

    def busy(self, cell: Cell, *, writing: bool = False) -> bool:
        """Does anybody use the cell; with `writing`, write it?"""
        return cell in self._writers or (not writing and cell in self._readers)


class Memory:
    """Tags by place. Slots are cache slots first, stream slots behind them, as in staging."""

    def __init__(self, rank: int, gpu_blocks: int, slots: int, blocks_per_chunk: int) -> None:
        self.watches = Watches(rank)
        self.gpu: list[Tag | None] = [None] * gpu_blocks
        self.slots: list[list[Tag | None]] = [[None] * blocks_per_chunk for _ in range(slots)]
        #: Rule 3: when the model's stream has written, or last reads, each block.
        self.written_at_s = [0.0] * gpu_blocks
        self.read_until_s = [0.0] * gpu_blocks
