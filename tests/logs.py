# SPDX-License-Identifier: Apache-2.0
"""A log as another server's engine writes it, and what its pages say, read by the format alone."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from crc32c import crc32c

from vllm_nvmeof_offload.native import ForeignRegion, ForeignWriter, core
from vllm_nvmeof_offload.pool.format import FLAG_SINGLE_COPY
from vllm_nvmeof_offload.pool.log import LogFile, LogHead
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, SlotIdentity
from vllm_nvmeof_offload.units import PAGE_BYTES

LOG_KEY_BYTES_MAX = 40
_RECORD = struct.Struct(f"<IQIBBBB{LOG_KEY_BYTES_MAX}s")


class CountedRegion(ForeignRegion):
    """A follower's region. `overruns` counts how often the log of any region was overrun."""

    overruns = 0

    def follow_log(self, table: ForeignWriter, fd: int, now_ns: int) -> int:
        why = super().follow_log(table, fd, now_ns)
        CountedRegion.overruns += why == self.OVERRUN
        return why


class Kind(enum.IntEnum):
    """The kind of a record."""

    PUT = 1
    RESET = 3
    HINT = 4


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record. key_bytes: the length of the whole key."""

    kind: Kind
    epoch: int
    slot: int = 0
    generation: int = 0
    key: bytes = b""
    key_bytes: int = 0
    flags: int = 0
    member: int = 0

    @staticmethod
    def decode(raw: bytes, sequence: int, index: int) -> LogRecord | None:
        """Parse the record at this position; None if it is damaged or of another position."""
        (crc,), body = struct.unpack_from("<I", raw), raw[4:]
        if crc != crc32c(struct.pack("<QI", sequence, index) + body):
            return None
        epoch, generation, slot, flags, member, kind, key_bytes, key = _RECORD.unpack(body)
        if kind not in frozenset(Kind):
            return None
        kept = key[:key_bytes] if key_bytes <= LOG_KEY_BYTES_MAX else b""
        return LogRecord(Kind(kind), epoch, slot, generation, kept, key_bytes, flags, member)


def decode_page(page: bytes) -> tuple[LogHead, list[LogRecord | None]] | None:
    """Return the head and records of a page (None for a record that is not intact), or None."""
    head = LogHead.decode(page)
    if head is None:
        return None
    starts = range(64, PAGE_BYTES, 64)[: head.records]
    records = [
        LogRecord.decode(page[at : at + 64], head.sequence, index)
        for index, at in enumerate(starts)
    ]
    return head, records


class Log:
    """Each call appends a record, brings it to the file, and returns what its reader must find."""

    def __init__(self, file: LogFile) -> None:
        self._writer = core.LogWriter(file.pages, file.next, file.lease_generation, file.fd)

    def put(
        self, slot: int, identity: SlotIdentity, epoch: int, *, single_copy: bool = False
    ) -> LogRecord:
        key, generation = identity.key, identity.generation
        self._writer.put(slot, key, generation, epoch, single_copy)
        self._writer.flush()
        kept = key if len(key) <= LOG_KEY_BYTES_MAX else b""
        flags = FLAG_SINGLE_COPY if single_copy else 0
        return LogRecord(Kind.PUT, epoch, slot, generation, kept, len(key), flags)

    def reset(self, epoch: int) -> LogRecord:
        self._writer.reset(epoch)
        self._writer.flush()
        return LogRecord(Kind.RESET, epoch)

    def hint(
        self, region: bytes, slot: int, generation: int, times: int, member: int = EVERY_MEMBER
    ) -> LogRecord:
        self._writer.hint(region, slot, member, generation, times)
        self._writer.flush()
        key = region + times.to_bytes(4, "little")
        return LogRecord(Kind.HINT, 0, slot, generation, key, len(key), member=member)

    def replace(self, fd: int) -> None:
        """Go on in another file."""
        self._writer.replace(fd)

    def close(self) -> None:
        self._writer.replace(-1)
