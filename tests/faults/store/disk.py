# SPDX-License-Identifier: Apache-2.0
"""Real small files under a journal: the damage of a crash is chosen after the crash.

While a `Disk` is active, every change that the package makes to slabs, tables and superblocks
below its root is made in the files and recorded in a journal until it is durable: fsync of the
file makes its bytes and size durable, fsync of the directory its names. `crash` undoes the whole
journal and replays the changes that survive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from vllm_nvmeof_offload.pool import slab
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
