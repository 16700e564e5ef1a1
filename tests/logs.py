# SPDX-License-Identifier: Apache-2.0
"""A log as another server's engine writes it."""

from __future__ import annotations

from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.format import FLAG_SINGLE_COPY
from vllm_nvmeof_offload.pool.log import LOG_KEY_BYTES_MAX, Kind, LogFile, LogRecord
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, SlotIdentity


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
