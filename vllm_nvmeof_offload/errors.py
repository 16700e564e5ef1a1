# SPDX-License-Identifier: Apache-2.0
"""Exceptions for what the world did, and the closed set of outcomes of one operation.

    OffloadError
    ├── ConfigError          a configuration value that cannot work (key, value, remedy)
    ├── PoolError            a pool directory that cannot be used
    │   ├── PoolFormatError      superblock, header or table that is not ours or not intact
    │   └── PoolLockedError      another live owner holds the directory
    ├── EngineError          an I/O or copy engine that cannot be built here
    └── IntegrationError     this vLLM is not one that we know how to work with

Broken invariants are `AssertionError`s: they are mistakes of ours, not of the world.
"""

from __future__ import annotations

import enum
import errno as _errno
import os
from dataclasses import dataclass

__all__ = [
    "CANCELLED",
    "CHECKSUM_MISMATCH",
    "DEADLINE",
    "OK",
    "STALE",
    "ConfigError",
    "EngineError",
    "IntegrationError",
    "OffloadError",
    "Outcome",
    "OutcomeKind",
    "PoolError",
    "PoolFormatError",
    "PoolLockedError",
    "Scope",
    "io_error",
]


class OffloadError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(OffloadError):
    """A configuration value that cannot work.

    The message names the key, the value and the remedy, in this order.
    """

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
    """What became of one operation on one chunk."""

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
    """Outcome of one operation; `errno` is 0 unless `kind` is IO_ERROR."""

    kind: OutcomeKind
    errno: int = 0
    retryable: bool = False
    scope: Scope = Scope.SLOT

    @property
    def ok(self) -> bool:
        return self.kind is OutcomeKind.OK

    def __str__(self) -> str:
        if self.kind is OutcomeKind.IO_ERROR:
            name = _errno.errorcode.get(self.errno, str(self.errno))
            return f"io_error({name}: {os.strerror(self.errno)})"
        return str(self.kind.value)


OK = Outcome(OutcomeKind.OK)
CHECKSUM_MISMATCH = Outcome(OutcomeKind.CHECKSUM_MISMATCH)
STALE = Outcome(OutcomeKind.STALE)
DEADLINE = Outcome(OutcomeKind.DEADLINE, scope=Scope.TARGET)
CANCELLED = Outcome(OutcomeKind.CANCELLED)

_RETRYABLE = frozenset({_errno.EAGAIN, _errno.EINTR, _errno.EIO, _errno.ETIMEDOUT})
_TARGET_SCOPE = frozenset(
    {_errno.ENODEV, _errno.ENXIO, _errno.EROFS, _errno.ENOTCONN, _errno.ESTALE, _errno.EBADF}
)


def io_error(number: int) -> Outcome:
    """Classify an errno (positive) into an IO_ERROR outcome."""
    scope = Scope.TARGET if number in _TARGET_SCOPE else Scope.SLOT
    return Outcome(OutcomeKind.IO_ERROR, number, number in _RETRYABLE, scope)
