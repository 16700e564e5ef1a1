# SPDX-License-Identifier: Apache-2.0
"""The log of a region: the newest changes to its table, for followers.

The file `log` is a ring of 4 KiB pages. Page s, counted from the region's creation, is at position
`s % pages` and replaces the page of the previous lap. A page's number is never reused. The current
page is rewritten as it fills up. A page's header, little endian::

    0   u32 magic                   24  u32 epoch of the last record
    4   u32 records, at most 63     28  u32 CRC-32C of bytes 0..27
    8   u64 sequence, s             32  zero
    16  u64 lease generation

63 records of 64 bytes follow::

    0   u32 CRC-32C of (u64 sequence, u32 index, bytes 4..63)
    4   u32 epoch                   21  u8  zero
    8   u64 generation              22  u8  kind
    16  u32 slot in the region      23  u8  key length
    20  u8  flags, as in the table  24  40s offload key, zero padded

PUT (1): the table entry of `slot` was written, and the slot's former entry is gone. A key longer
than 40 bytes is omitted, and the reader must scan the table. RESET (3): the superblock that names
`epoch` was written. Kinds 2 and 4 are reserved.

The engine writes the log (native/lanes/log.h). A record is a hint, written after the table entry.
Nothing waits for it, and a lost record costs a hit. A writer that may have lost records continues
one lap later, at the same position. A reader that waits there finds a newer page than expected, and
rereads the whole table. Every server skips a lap when it starts, because the last page may be torn.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from vllm_nvmeof_offload.units import PAGE_BYTES

LOG_MAGIC = 0x474C564E
RECORDS_PER_PAGE = 63
LOG_PAGES_MAX = 1024  # a follower may lag by ten seconds at 6,000 writes per second
#: The largest share of a target's pool that its log may take. A log shorter than `LOG_PAGES_MIN` is
#: omitted, because the table of such a small pool can be read as quickly.
LOG_PART, LOG_PAGES_MIN = 1 / 64, 16

_HEAD = struct.Struct("<IIQQI")
_CRC = struct.Struct("<I")
_POSITION = struct.Struct("<QI")
_RECORD_BYTES = 64
_KIND_AT, _KINDS = 22, (1, 3)  # PUT, RESET
_HEAD_BYTES = 64
_PAGES_AT_ONCE = 256  # the number of pages read at a time
assert _HEAD_BYTES + RECORDS_PER_PAGE * _RECORD_BYTES == PAGE_BYTES


class LogHead(NamedTuple):
    """The header of a page, with the number of its records."""

    sequence: int
    records: int
    lease_generation: int = 0
    epoch: int = 0

    @staticmethod
    def decode(page: bytes | memoryview) -> LogHead | None:
        """Parse the header of a page (at least 64 bytes). Return None if it is not intact."""
        body = bytes(page[: _HEAD.size])
        magic, count, sequence, lease_generation, epoch = _HEAD.unpack(body)
        intact = magic == LOG_MAGIC and _CRC.unpack_from(page, _HEAD.size)[0] == crc32c(body)
        if not intact or count > RECORDS_PER_PAGE:
            return None
        return LogHead(sequence, count, lease_generation, epoch)


def _pages(fd: int, pages: int) -> Iterator[tuple[int, bytes]]:
    """Yield each page of a log with its position, up to the end of the file."""
    with mmap.mmap(-1, _PAGES_AT_ONCE * PAGE_BYTES) as raw:  # aligned for O_DIRECT
        for first in range(0, pages, _PAGES_AT_ONCE):
            size = min(_PAGES_AT_ONCE, pages - first) * PAGE_BYTES
            with memoryview(raw) as view, view[:size] as some:
                count = os.preadv(fd, [some], first * PAGE_BYTES)
            for at in range(count // PAGE_BYTES):
                yield first + at, raw[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]


def newest_head(fd: int, pages: int) -> LogHead | None:
    """Return the header of the newest page, or None. Raises OSError if the log cannot be read."""
    newest: LogHead | None = None
    for position, page in _pages(fd, pages):
        head = LogHead.decode(page)
        is_newer = head is not None and (newest is None or head.sequence > newest.sequence)
        if head is not None and is_newer and head.sequence % pages == position:
            newest = head
    return newest


def damaged_pages(fd: int, pages: int) -> int:
    """Return the number of pages that were written but are not intact. Raises as `newest_head`."""
    return sum(_is_damaged(page) for _, page in _pages(fd, pages))


def _is_damaged(page: bytes) -> bool:
    head = LogHead.decode(page)
    if head is None:
        return any(page[:_HEAD_BYTES])
    starts = range(_HEAD_BYTES, PAGE_BYTES, _RECORD_BYTES)[: head.records]
    records = (page[at : at + _RECORD_BYTES] for at in starts)
    return not all(_is_intact(raw, head.sequence, index) for index, raw in enumerate(records))


def _is_intact(raw: bytes, sequence: int, index: int) -> bool:
    """Return whether a record is intact and was written at this position."""
    (crc,), body = _CRC.unpack_from(raw), raw[_CRC.size :]
    return raw[_KIND_AT] in _KINDS and crc == crc32c(_POSITION.pack(sequence, index) + body)


def next_sequence(fd: int, pages: int) -> int:
    """Return the number of a starting server's first page: one lap after the current page."""
    newest = newest_head(fd, pages)
    if newest is None:
        return pages
    return newest.sequence + (newest.records == RECORDS_PER_PAGE) + pages


def log_pages_of(pool_bytes: int) -> int:
    """Return the number of pages in the log if the pool has this size on one target."""
    pages = min(int(pool_bytes * LOG_PART) // PAGE_BYTES, LOG_PAGES_MAX)
    return pages if pages >= LOG_PAGES_MIN else 0


def with_log(slots_bytes: int) -> int:
    """Return the smallest `pool_bytes` on one target that leaves this many bytes for slots."""
    return slots_bytes + PAGE_BYTES * log_pages_of(math.ceil(slots_bytes / (1 - LOG_PART)))


class LogFile(NamedTuple):
    """A log to write from page `next` on. `pages` is 0 if there is none; `fd` is -1 on a lost
    target."""

    fd: int
    pages: int
    next: int
    lease_generation: int = 0
