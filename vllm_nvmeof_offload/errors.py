# SPDX-License-Identifier: Apache-2.0
"""Exceptions for what the world did, and the closed set of outcomes of one operation.

    OffloadError
    ├── ConfigError          a configuration value that cannot work (key, value, remedy)
    ├── PoolError            a pool directory that cannot be used
    │   ├── PoolFormatError      superblock, header or table that is not ours or not intact
    │   └── PoolLockedError      another live owner holds the directory
    ├── EngineError          an I/O or copy engine that cannot be built here
    └── IntegrationError     this vLLM is not one that we know how to work with

A broken invariant is an `AssertionError`: a mistake of ours, not an event of the world.
"""

from __future__ import annotations

import enum
import errno as _errno
import os
from dataclasses import dataclass


class OffloadError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(OffloadError):
    """A configuration value that cannot work: the message has key, value and remedy."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key}={value!r}: {remedy}")
        self.key = key
        self.value = value
        self.remedy = remedy


class PoolError(OffloadError):
    """A pool directory that cannot be used."""


class PoolFormatError(PoolError):
    """Bytes on disk that are not ours, or not intact."""


class PoolLockedError(PoolError):
    """Another live owner holds the directory."""


class EngineError(OffloadError):
    """An I/O or copy engine that cannot be built on this machine."""


class IntegrationError(OffloadError):
    """The running vLLM is not one that this package knows how to work with."""


class OutcomeKind(enum.Enum):
    """The result of one operation on one chunk."""

    OK = "ok"
    IO_ERROR = "io_error"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    STALE = "stale"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Scope(enum.Enum):
    """How far an I/O error reaches."""

    SLOT = "slot"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one operation; `errno` is 0 unless `kind` is IO_ERROR (see `ERRORS`)."""

    kind: OutcomeKind
    errno: int = 0
    retryable: bool = False
    scope: Scope = Scope.SLOT

    @property
    def ok(self) -> bool:
        return self.kind is OutcomeKind.OK

    def __str__(self) -> str:
        if self.kind is OutcomeKind.IO_ERROR:
            if not self.errno:
                return "io_error(no bytes were moved)"
            name = _errno.errorcode.get(self.errno, str(self.errno))
            return f"io_error({name}: {os.strerror(self.errno)})"
        return str(self.kind.value)


OK = Outcome(OutcomeKind.OK)
CHECKSUM_MISMATCH = Outcome(OutcomeKind.CHECKSUM_MISMATCH)
STALE = Outcome(OutcomeKind.STALE)
DEADLINE = Outcome(OutcomeKind.DEADLINE, scope=Scope.TARGET)
CANCELLED = Outcome(OutcomeKind.CANCELLED)


@dataclass(frozen=True, slots=True)
class ErrorMeaning:
    """The meaning of an errno of a slab's read or write, and what follows.

    retryable: the same operation may succeed a moment later, as the kernel's block layer judges:
    an operation that the device itself refused stays refused.
    """

    meaning: str
    retryable: bool
    scope: Scope


_OTHER = ErrorMeaning("the operation failed", False, Scope.SLOT)

#: errno → row. 0 stands for a transfer of no bytes that gave no errno.
ERRORS = {
    0: ErrorMeaning("the namespace is disabled, or the file was cut short", False, Scope.TARGET),
    _errno.EIO: ErrorMeaning("path, device or file system failed", True, Scope.SLOT),
    _errno.ENODATA: ErrorMeaning("the medium has lost these blocks", False, Scope.SLOT),
    _errno.EILSEQ: ErrorMeaning("the blocks fail their protection check", False, Scope.SLOT),
    _errno.ENOSPC: ErrorMeaning("no space left behind this place", False, Scope.SLOT),
    _errno.EREMOTEIO: ErrorMeaning(
        "the controller refuses: not ready, or beyond the namespace's end", False, Scope.TARGET
    ),
    _errno.EBADE: ErrorMeaning("another host holds a reservation", False, Scope.TARGET),
    _errno.EOPNOTSUPP: ErrorMeaning(
        "the controller does not know the command", False, Scope.TARGET
    ),
    _errno.ENOLINK: ErrorMeaning("the path was lost", True, Scope.TARGET),
    _errno.ETIMEDOUT: ErrorMeaning("the device did not answer in time", True, Scope.TARGET),
    _errno.EAGAIN: ErrorMeaning("the kernel is busy", True, Scope.SLOT),
    _errno.EINTR: ErrorMeaning("interrupted", True, Scope.SLOT),
    _errno.ENODEV: ErrorMeaning("the device is not there any more", False, Scope.TARGET),
    _errno.ENXIO: ErrorMeaning("the device is not there any more", False, Scope.TARGET),
    _errno.ESHUTDOWN: ErrorMeaning("the device is being taken away", False, Scope.TARGET),
    _errno.ENOTCONN: ErrorMeaning("the file system's server is gone", False, Scope.TARGET),
    _errno.EROFS: ErrorMeaning("the file system has become read-only", False, Scope.TARGET),
    _errno.ESTALE: ErrorMeaning("the file is another one by now", False, Scope.TARGET),
    _errno.EBADF: ErrorMeaning("the target's files are closed", False, Scope.TARGET),
}


def io_error(number: int) -> Outcome:
    """Classify an errno (positive; 0: no bytes were moved, and no errno was given)."""
    row = ERRORS.get(number, _OTHER)
    return Outcome(OutcomeKind.IO_ERROR, number, row.retryable, row.scope)
