# SPDX-License-Identifier: Apache-2.0
"""Damage of a crash to writes that were not durable, and damage to files at rest."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, Superblock

from .disk import Data, Disk, Event, Name

#: Kind of crash → the probability of each fate of an unsynced write.
KINDS: dict[str, dict[str, float]] = {
    "page cache": {"kept": 1.0},
    "nothing": {"lost": 1.0},
    "prefix": {},
    "subset": {"kept": 0.6, "lost": 0.4},
    "torn": {"kept": 0.5, "lost": 0.1, "torn": 0.4},
    "bad disk": {"kept": 0.6, "lost": 0.1, "torn": 0.1, "misdirected": 0.1, "flipped": 0.1},
}


@dataclass
class Damage:
    """Damage chosen by `dice`, and counted."""

    disk: Disk
    dice: random.Random
    slot_bytes: int
    directories: tuple[Path, ...]
    counts: Counter[str] = field(default_factory=Counter)

    def survive(self, journal: list[Event]) -> None:
        """Replay part of the journal; an argument of `Disk.crash`."""
        kind = self.dice.choice(list(KINDS))
        self.counts[f"crash: {kind}"] += 1
        fates = KINDS[kind]
        if not fates:
            journal = journal[: self.dice.randrange(len(journal) + 1)]
            fates = {"kept": 1.0}
        # File systems keep the order of names and of sizes, but not the order of bytes.
        ordered = [event for event in journal if not isinstance(event, Data)]
        cut = len(ordered) if "lost" not in fates else self.dice.randrange(len(ordered) + 1)
        if kind == "nothing":
            cut = 0
        surviving = set(map(id, ordered[:cut]))
        for event in journal:
            if isinstance(event, Data):
                fate = self.dice.choices(list(fates), list(fates.values()))[0]
                self.counts[fate] += 1
                getattr(self, f"_{fate}")(event)
            elif id(event) in surviving:
                event.redo()
            elif isinstance(event, Name):
                self.counts["name lost"] += 1

    def _kept(self, event: Data) -> None:
        event.redo()

    def _lost(self, event: Data) -> None:
        """The write is lost: the earlier bytes stay."""

    def _torn(self, event: Data) -> None:
        unit = self.dice.choice([512, 4096])
        old = event.old.ljust(len(event.new), b"\0")
        sectors = range(0, len(event.new), unit)
        kept = set(self.dice.sample(sectors, self.dice.randrange(len(sectors) + 1)))
        pieces = ((event.new if at in kept else old)[at : at + unit] for at in sectors)
        event.put(b"".join(pieces))

    def _flipped(self, event: Data) -> None:
        event.put(self._flip(event.new))

    def _misdirected(self, event: Data) -> None:
        """The write lands elsewhere: in the same file, or that of another target or pool."""
        places = self.directories
        if event.file.name == "superblock" and event.file.directory not in places:
            return
        if event.file.name == "superblock":
            # A superblock is its whole file. Written to its own file, it would be an older
            # superblock that takes effect again, because a failed reset leaves its write in the
            # journal.
            # Nor may it replace the only record of a reset, as when it rots.
            others = (one for one in places if one != event.file.directory)
            places = tuple(one for one in others if not self._has_the_only_record(one))
        if not places:
            return
        directory = self.dice.choice(places)
        path = directory / event.file.name
        if not path.exists():
            return
        file = self.disk.file(path)
        stride = {"slab": self.slot_bytes, "table": ENTRY_BYTES}.get(event.file.name, 0)
        count = max(file.size() // stride, 1) if stride else 1
        at = self.dice.randrange(count) * stride
        if directory != event.file.directory and event.offset < file.size():
            at = self.dice.choice([at, event.offset])  # the storage took one file for the other
        event.put(event.new, file, at)

    def _flip(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        damaged[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
        return bytes(damaged)

    # ---- at rest --------------------------------------------------------------------------

    def rot(self) -> None:
        """Damage nothing, most often; otherwise inject a few of the faults below."""
        if self.dice.random() < 0.6:
            return
        faults: list[Callable[[Path], None]] = [self._rot_slab] * 3 + [self._rot_table] * 3
        faults += [self._swap_entries, self._cut_table, self._rot_superblock]
        for fault in self.dice.choices(faults, k=self.dice.randrange(1, 4)):
            fault(self.dice.choice(self.directories))

    def _edit(self, path: Path, at: int, change: Callable[[bytes], bytes], length: int = 1) -> None:
        fd = self.disk.file(path).fd
        data = os.pread(fd, length, at)
        if len(data) == length:
            Data(self.disk.file(path), at, b"", b"", 0).put(change(data))
            self.counts[f"rot: {path.name}"] += 1

    def _rot_slab(self, directory: Path) -> None:
        path = directory / "slab"
        if path.exists() and path.stat().st_size:
            self._edit(path, self.dice.randrange(path.stat().st_size), self._flip)

    def _rot_table(self, directory: Path) -> None:
        path = directory / "table"
        if path.exists() and path.stat().st_size:
            self._edit(path, self.dice.randrange(path.stat().st_size), self._flip)

    def _rot_superblock(self, directory: Path) -> None:
        """Damage a superblock, unless it is the only record of a reset: an older one would win."""
        pages = [self.superblock(one) for one in self.directories]
        if None not in pages and not self._has_the_only_record(directory):
            self._edit(directory / "superblock", self.dice.randrange(4096), self._flip)

    def _has_the_only_record(self, directory: Path) -> bool:
        """Whether the other targets' superblocks are of other resets than this one's."""
        page = self.superblock(directory)
        others = [self.superblock(one) for one in self.directories if one != directory]
        known = {one.sequence for one in others if one is not None}
        return page is not None and bool(known) and page.sequence not in known

    def _swap_entries(self, directory: Path) -> None:
        path = directory / "table"
        count = path.stat().st_size // ENTRY_BYTES if path.exists() else 0
        if count < 2:
            return
        file = self.disk.file(path)
        one, two = (at * ENTRY_BYTES for at in self.dice.sample(range(count), 2))
        first, second = (os.pread(file.fd, ENTRY_BYTES, at) for at in (one, two))
        if any(first) and any(second):
            Data(file, one, b"", b"", 0).put(second)
            Data(file, two, b"", b"", 0).put(first)
            self.counts["rot: swapped"] += 1

    def _cut_table(self, directory: Path) -> None:
        path = directory / "table"
        if path.exists():
            os.truncate(path, min(path.stat().st_size, self.dice.choice([0, 64, 200])))
            self.counts["rot: cut"] += 1

    @staticmethod
    def superblock(directory: Path) -> Superblock | None:
        """The intact superblock in the file, as parsed by the test itself."""
        try:
            return Superblock.decode((directory / "superblock").read_bytes())
        except Exception:  # noqa: BLE001 - missing, damaged, foreign: all the same here
            return None
