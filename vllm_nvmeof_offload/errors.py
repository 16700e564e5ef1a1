# SPDX-License-Identifier: Apache-2.0
"""Exceptions for external events, and the closed set of outcomes that an operation can have.

    OffloadError
    ├── ConfigError          a configuration value that cannot work (key, value, remedy)
    │   └── CombinedConfigError  several such errors, one per line
    ├── PoolError            a pool directory that cannot be used
    │   ├── PoolFormatError      superblock, header or table that is not ours or not intact
    │   │   └── UnknownFormatError   an intact superblock in a format that this program cannot use
    │   └── PoolLockedError      another live owner holds the directory
    ├── EngineError          an I/O or copy engine that cannot be built here
    └── IntegrationError     the running vLLM is not supported

A broken invariant is an `AssertionError`: a programming error, not an external event.
"""

from __future__ import annotations

import contextlib
import enum
import errno as _errno
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class OffloadError(Exception):
    """The base of every exception that this package raises on purpose."""


class ConfigError(OffloadError):
    """A configuration value that cannot work. The message contains key, value and remedy."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key}={value!r}: {remedy}")
        self.key = key
        self.value = value
        self.remedy = remedy


class CombinedConfigError(ConfigError):
    """Several configuration errors; key, value and remedy are those of the first."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.key, first.value, first.remedy)
        self.args = ("\n".join(map(str, errors)),)
        self.errors = tuple(errors)


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise the errors, if any: a single error as it is, several as a CombinedConfigError."""
    if errors:
        raise errors[0] if len(errors) == 1 else CombinedConfigError(errors)


def errors_of(error: ConfigError) -> tuple[ConfigError, ...]:
    return error.errors if isinstance(error, CombinedConfigError) else (error,)


def install_extra(extra: str) -> str:
    """Return the command that installs the packages of an extra. The command names the packages
    instead of the extra, because this package is in no package index."""
    import importlib.metadata  # here, because it imports sockets, which the core does not need

    try:
        found = importlib.metadata.requires("vllm-nvmeof-offload") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout in PYTHONPATH
        return f"install what pyproject.toml lists for {extra}"
    parts = (line.replace('"', "'").split(";") for line in found)
    wanted = [part[0].strip() for part in parts if part[-1].strip() == f"extra == '{extra}'"]
    return f"pip install {shlex.join(wanted)}"


class PoolError(OffloadError):
    """A pool directory that cannot be used."""


@contextlib.contextmanager
def as_pool_error(what: str, remedy: str = "") -> Iterator[None]:
    """Turn an OSError in the with-block into a PoolError that contains `what`, the error and the
    remedy."""
    try:
        yield
    except OSError as error:
        raise PoolError(f"{what}: {error}{remedy and '; '}{remedy}") from error


class PoolFormatError(PoolError):
    """Bytes on disk that are not ours or are damaged."""


class UnknownFormatError(PoolFormatError):
    """An intact superblock in another format; the message contains the format's number."""


class PoolLockedError(PoolError):
    """Another live owner holds the directory."""


class EngineError(OffloadError):
    """An I/O or copy engine that cannot be built on this machine."""


class IntegrationError(OffloadError):
    """The running vLLM is not supported by this package."""


class OutcomeKind(enum.Enum):
    OK = "ok"
    IO_ERROR = "io_error"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    STALE = "stale"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Scope(enum.Enum):
    SLOT = "slot"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one operation. `errno` is 0 unless `kind` is IO_ERROR (see `ERRORS`)."""

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


#: The kinds in the order of their numbers in columns and in the native core.
_KINDS = tuple(OutcomeKind)
_PLAIN = (OK, None, CHECKSUM_MISMATCH, STALE, DEADLINE, CANCELLED)


def code_of(kind: OutcomeKind) -> int:
    return _KINDS.index(kind)


def outcome_of(code: int, number: int) -> Outcome:
    """Return the outcome of a row with this `code`; `number` is the errno of an I/O error."""
    return _PLAIN[code] or io_error(number)


#: Errno of a slab read or write → (retryable, scope). 0: no bytes were moved, and no errno was set.
#: Retryable means that, according to the kernel's block layer, the same operation may succeed a
#: moment later; a device that refused an operation refuses it again.
ERRORS = {
    0: (False, Scope.TARGET),  # the namespace is disabled, or the file was cut short
    _errno.EIO: (True, Scope.SLOT),  # path, device or file system failed
    _errno.ENODATA: (False, Scope.SLOT),  # the medium has lost these blocks
    _errno.EILSEQ: (False, Scope.SLOT),  # the blocks fail their protection check
    _errno.ENOSPC: (False, Scope.SLOT),  # no space left for this slot
    _errno.EREMOTEIO: (False, Scope.TARGET),  # the controller refuses: not ready, or past the end
    _errno.EBADE: (False, Scope.TARGET),  # another host holds a reservation
    _errno.EOPNOTSUPP: (False, Scope.TARGET),  # the controller does not support the command
    _errno.ENOLINK: (True, Scope.TARGET),  # the path was lost
    _errno.ETIMEDOUT: (True, Scope.TARGET),  # the device did not answer in time
    _errno.EAGAIN: (True, Scope.SLOT),  # the kernel is busy
    _errno.EINTR: (True, Scope.SLOT),  # interrupted
    _errno.ENODEV: (False, Scope.TARGET),  # the device is gone
    _errno.ENXIO: (False, Scope.TARGET),  # the device is gone
    _errno.ESHUTDOWN: (False, Scope.TARGET),  # the device is being removed
    _errno.ENOTCONN: (False, Scope.TARGET),  # the file system's server is unreachable
    _errno.EROFS: (False, Scope.TARGET),  # the file system has become read-only
    _errno.ESTALE: (False, Scope.TARGET),  # the file was replaced
    _errno.EBADF: (False, Scope.TARGET),  # the target's files are closed
}


def io_error(number: int) -> Outcome:
    """Classify an errno (positive, or 0) by `ERRORS`."""
    return Outcome(OutcomeKind.IO_ERROR, number, *ERRORS.get(number, (False, Scope.SLOT)))
