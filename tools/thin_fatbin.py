# SPDX-License-Identifier: Apache-2.0
"""Zero the machine code for other GPUs in a library that nvcc built for several of them.

A fat binary is a header and entries, one per architecture, with machine code or PTX. The driver
uses the entry for its GPU. Zeroed code compresses to almost nothing, and offsets do not change.
Driver 580.159 on an H200 loads a library thinned in this way (`tools/gpu.py smoke`).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

_MAGIC = struct.pack("<I", 0xBA55ED50)
#: A fat binary's header: magic, version, bytes of this header, bytes after it.
_HEADER = struct.Struct("<IHHQ")
#: An entry's header: kind, version, bytes of this header, bytes of the payload.
_ENTRY = struct.Struct("<HHIQ")
_ARCH_AT, _ENTRY_BYTES_MIN, _ENTRY_BYTES_MAX = 28, 32, 4096
_MACHINE_CODE = 2


@dataclass(frozen=True)
class _Entry:
    kind: int
    arch: int
    start: int
    size: int


def thin(library: bytearray, arch: str) -> tuple[int, int]:
    """Zero code for GPUs other than `arch` (such as sm_90); return the bytes kept and zeroed. A fat
    binary without machine code for `arch` is unchanged, because its PTX can be compiled."""
    matched = re.fullmatch(r"sm_(\d+)", arch)
    if matched is None:
        raise ValueError(f"{arch} is not an architecture such as sm_90")
    wanted = int(matched[1])
    kept = zeroed = at = 0
    while (at := library.find(_MAGIC, at)) >= 0:
        entries, end = _entries(library, at)
        has_code = any(one.kind == _MACHINE_CODE and one.arch == wanted for one in entries)
        for one in entries:
            if has_code and not (one.kind == _MACHINE_CODE and one.arch == wanted):
                library[one.start : one.start + one.size] = bytes(one.size)
                zeroed += one.size
            else:
                kept += one.size
        at = end
    return kept, zeroed


def _entries(library: bytearray, at: int) -> tuple[list[_Entry], int]:
    """Return the entries of the fat binary at `at`, and its end; no entries if there is none."""
    if at + _HEADER.size > len(library):
        return [], at + len(_MAGIC)
    _, version, header_bytes, size = _HEADER.unpack_from(library, at)
    place, end = at + _HEADER.size, at + _HEADER.size + size
    if version != 1 or header_bytes != _HEADER.size or end > len(library):
        return [], at + len(_MAGIC)
    entries = []
    while place < end:
        kind, _, entry_bytes, payload_bytes = _ENTRY.unpack_from(library, place)
        start = place + entry_bytes
        known = _ENTRY_BYTES_MIN <= entry_bytes <= _ENTRY_BYTES_MAX
        if not known or start + payload_bytes > end:
            raise ValueError(f"the fat binary at byte {at} has an unknown kind of entry")
        (number,) = struct.unpack_from("<I", library, place + _ARCH_AT)
        entries.append(_Entry(kind, number, start, payload_bytes))
        place = start + payload_bytes
    return entries, end
