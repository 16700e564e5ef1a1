# SPDX-License-Identifier: Apache-2.0
"""Sizes, alignment, and numbers formatted for display.

Sizes in this package are in bytes. Durations are in seconds, unless a name ends in another unit.
"""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

#: The O_DIRECT alignment, which suits every known NVMe namespace and file system. A device that
#: needs more is refused when its target is opened.
PAGE_BYTES = 4096
#: The size of the header page before each slot's payload, in staging and in the pool.
HEADER_BYTES = PAGE_BYTES

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def align_up(value: int, alignment: int = PAGE_BYTES) -> int:
    return -(-value // alignment) * alignment


def slot_stride_bytes(payload_bytes: int) -> int:
    """Return the size of a slot in staging and in a slab: header page and padded payload."""
    return HEADER_BYTES + align_up(payload_bytes)


def printable(text: str) -> str:
    """Escape unprintable characters in another process's text, for logs and terminals."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def parse_bytes(value: float | str) -> int:
    """Parse a size such as `1073741824`, `"1GiB"` or `"1.5 GB"` into bytes, or raise ValueError."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    if isinstance(value, int | float):
        if value < 0:
            raise ValueError(f"{value!r} is negative")
        return int(value)
    match = _SIZE.match(value)
    if match is None or match.group(2).lower() not in _UNITS:
        raise ValueError(
            f"{value!r} is not a size; write bytes or a number with KiB, MiB, GiB, TiB"
        )
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


def format_bytes(count: float, form: str = ".1f") -> str:
    """Format a byte count for display, such as `1.5 GiB`. `form` is a format specification."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:{form}} {unit}"
    return f"{count:.0f} B"


def human_bytes(count: float) -> str:
    """Format a byte count with four digits, to distinguish similar sizes: `1.254 MiB`."""
    return format_bytes(count, ".4g")


def human_seconds(seconds: float) -> str:
    """Format a duration as `12.34 s`, or as `5.67 ms` below a tenth of a second."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
