# SPDX-License-Identifier: Apache-2.0
"""One rank's memory: GPU blocks and pinned slots hold tags, and every access is checked.

A tag names exactly what was computed: (weights epoch, hash of the token prefix that ends there,
group position). Each page of a block has the block's tag.
An engine that may access a cell holds a watch on it from `submit` until the completion was
polled; any other access to the cell during that time breaks a rule.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

from .base import Knobs, Violation

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
