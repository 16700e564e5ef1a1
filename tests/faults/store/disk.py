# SPDX-License-Identifier: Apache-2.0
"""Real small files under a journal: the damage of a crash is chosen after the crash.

While a `Disk` is active, every change that the package makes to slabs, tables and superblocks
below its root is made in the files and recorded in a journal until it is durable: fsync of the
file makes its bytes and size durable, fsync of the directory its names. `crash` undoes the whole
journal and replays the changes that survive; `Damage` chooses them, and damages files at rest.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from vllm_nvmeof_offload.pool import slab
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, Superblock
from vllm_nvmeof_offload.pool.pool import Background

_WATCHED = frozenset({"slab", "table", "superblock", "superblock.new"})


class Crash(BaseException):
    """The machine stops here. No `except` clause of the package may catch it."""


@dataclass(eq=False)
class File:
    """One inode. fd: the test's descriptor, usable even after a rename or an unlink."""

    fd: int
    name: str
    directory: Path

    def size(self) -> int:
        return os.fstat(self.fd).st_size


@dataclass(eq=False)
class Data:
    """`new` replaced `old` at `offset`; the file had `size` bytes before."""

    file: File
    offset: int
    old: bytes
    new: bytes
    size: int

    def undo(self) -> None:
        self.put(self.old)
        if self.offset + len(self.new) > self.size:
            _REAL["ftruncate"](self.file.fd, self.size)

    def redo(self) -> None:
        self.put(self.new)

    def put(self, data: bytes, file: File | None = None, offset: int | None = None) -> None:
        target = file or self.file
        at = self.offset if offset is None else offset
        assert _REAL["pwrite"](target.fd, data, at) == len(data)


@dataclass(eq=False)
class Size:
    """The file's size changed; `tail` was cut off."""

    file: File
    old: int
    new: int
    tail: bytes

    def undo(self) -> None:
        _REAL["ftruncate"](self.file.fd, self.old)
        _REAL["pwrite"](self.file.fd, self.tail, self.old - len(self.tail))

    def redo(self) -> None:
        _REAL["ftruncate"](self.file.fd, self.new)


@dataclass(eq=False)
class Name:
    """A file got the name `place` (a rename) or lost it: `before` and `after` are further names
    of the two files, None where there is no file.
    """

    place: Path
    before: Path | None
    after: Path | None

    @property
    def directory(self) -> Path:
        return self.place.parent

    def undo(self) -> None:
        self._name(self.before)

    def redo(self) -> None:
        self._name(self.after)

    def _name(self, file: Path | None) -> None:
        if self.place.exists():
            _REAL["unlink"](self.place)
        if file is not None:
            os.link(file, self.place)


Event = Data | Size | Name
_PATCHED = ("pwrite", "pwritev", "write", "ftruncate", "fsync", "fdatasync", "rename", "unlink")
_REAL: dict[str, Callable[..., int]] = {name: getattr(os, name) for name in _PATCHED}


@dataclass(eq=False)
class Disk:
    """The journal of all watched files below `root`.

    crash_after: changes that succeed before `Crash`. fail: (file name or "sync", errno)
    makes the next `fail_count` changes of such a file, or fsyncs, fail.
    lies: fsync makes nothing durable (a negative control).
    """

    root: Path
    lies: bool = False
    journal: list[Event] = field(default_factory=list)
    crash_after: int | None = None
    fail: tuple[str, int] | None = None
    fail_count: int = 0
    dead: bool = False
    _files: dict[int, File] = field(default_factory=dict)
    _stashed: int = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch this process's system calls; one thread at a time changes watched files."""
        patches = [mock.patch.object(os, name, getattr(self, f"_{name}")) for name in _PATCHED]
        patches.append(mock.patch.object(slab, "reserve", self._reserve))
        in_order = lambda _background, _lane, call: call()  # noqa: E731
        patches.append(mock.patch.object(Background, "run", in_order))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
            for file in self._files.values():
                os.close(file.fd)

    def crash(self, survive: Callable[[list[Event]], None]) -> None:
        """Undo every change that is not durable; `survive` replays the ones it chooses."""
        self.dead, self.crash_after, self.fail = False, None, None
        journal, self.journal = self.journal, []
        for event in reversed(journal):
            event.undo()
        survive(journal)

    def sync(self) -> None:
        """Make every change durable."""
        self.journal.clear()

    def file(self, path: Path) -> File:
        """The file that currently has this name."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            file = self._file(fd)
            assert file is not None
            return file
        finally:
            os.close(fd)

    def _file(self, fd: int) -> File | None:
        number = os.fstat(fd).st_ino
        if number not in self._files:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if path.name not in _WATCHED or self.root not in path.parents:
                return None
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            self._files[number] = File(own, path.name.removesuffix(".new"), path.parent)
        return self._files[number]

    def _change(self, name: str) -> bool:
        """Call before each change. False: the machine has stopped.

        Raises:
            Crash: the machine stops now. OSError: the change fails, as `fail` demands.
        """
        if self.dead:
            return False
        if self.fail is not None and self.fail[0] == name and self.fail_count > 0:
            self.fail_count -= 1
            raise OSError(self.fail[1], os.strerror(self.fail[1]))
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after < 0:
                self.dead = True
                raise Crash
        return True

    def _data(self, fd: int, data: bytes, offset: int) -> int | None:
        """Journal a write. None: the file is not watched."""
        file = self._file(fd)
        if file is None:
            return None
        if self._change(file.name):
            old = os.pread(file.fd, len(data), offset)
            self.journal.append(Data(file, offset, old, data, file.size()))
            assert _REAL["pwrite"](file.fd, data, offset) == len(data)
        return len(data)

    def _pwrite(self, fd: int, data: bytes, offset: int) -> int:
        done = self._data(fd, bytes(data), offset)
        return _REAL["pwrite"](fd, data, offset) if done is None else done

    def _pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        done = self._data(fd, b"".join(buffers), offset)
        return _REAL["pwritev"](fd, buffers, offset) if done is None else done

    def _write(self, fd: int, data: bytes) -> int:
        # Watched files are written once, from their start.
        done = self._data(fd, bytes(data), 0)
        return _REAL["write"](fd, data) if done is None else done

    def _ftruncate(self, fd: int, size: int) -> None:
        file = self._file(fd)
        if file is None:
            _REAL["ftruncate"](fd, size)
        elif self._change(file.name) and size != file.size():
            old = file.size()
            tail = os.pread(file.fd, max(old - size, 0), size)
            self.journal.append(Size(file, old, size, tail))
            _REAL["ftruncate"](file.fd, size)

    def _reserve(self, fd: int, size: int) -> None:
        if os.fstat(fd).st_size < size:
            self._ftruncate(fd, size)

    def _fsync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        file = None if path.is_dir() else self._file(fd)
        if (file is None and not path.is_dir()) or not self._change("sync") or self.lies:
            return
        self.journal = [
            event
            for event in self.journal
            if not (event.directory == path if isinstance(event, Name) else event.file is file)
        ]

    _fdatasync = _fsync

    def _rename(self, old: Path, new: Path, **more: object) -> None:
        if Path(old).name not in _WATCHED:
            _REAL["rename"](old, new, **more)
        elif self._change("superblock"):
            place = _lasting(Path(new))
            event = Name(place, self._stash(place), self._stash(Path(old)))
            self.journal.append(event)
            _REAL["rename"](old, new)

    def _unlink(self, path: Path, **more: object) -> None:
        # Losing the temporary file does no harm.
        if Path(path).name not in _WATCHED - {"superblock.new"} or not os.path.lexists(path):
            _REAL["unlink"](path, **more)
        elif self._change("superblock"):
            place = _lasting(Path(path))
            self.journal.append(Name(place, self._stash(place), None))
            _REAL["unlink"](path)

    def _stash(self, path: Path) -> Path | None:
        if not path.exists():
            return None
        self._stashed += 1
        place = self.root / f"stash-{self._stashed}"
        os.link(path, place)
        return place


def _lasting(path: Path) -> Path:
    """The path, where it leads through a descriptor: a crash closes that."""
    return path.parent.resolve() / path.name


# -- damage of a crash, and at rest ---------------------------------------------------

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
