# SPDX-License-Identifier: Apache-2.0
"""What O_DIRECT asks of buffers and offsets here, by statx(STATX_DIOALIGN), Linux 6.1.

This touches the target, so it is for `doctor` alone.
"""

from __future__ import annotations

import ctypes
import struct
import tempfile
from dataclasses import asdict, dataclass

__all__ = ["DirectAlignment", "direct_alignment"]

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MEMORY_AT, _OFFSET_AT = 152, 156

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """Both in bytes; both 0: the file system has no O_DIRECT."""

    memory_bytes: int
    offset_bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def direct_alignment(directory: str) -> DirectAlignment | None:
    """For a new file in `directory`; None: the kernel or the file system does not tell.

    Raises:
        OSError: no file can be made there.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        found = ctypes.create_string_buffer(_STATX_BYTES)
        try:
            call = _libc.statx
        except AttributeError:
            return None
        if call(file.fileno(), b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found) != 0:
            return None
    if not struct.unpack_from("=I", found)[0] & _STATX_DIOALIGN:
        return None
    return DirectAlignment(
        struct.unpack_from("=I", found, _MEMORY_AT)[0],
        struct.unpack_from("=I", found, _OFFSET_AT)[0],
    )
