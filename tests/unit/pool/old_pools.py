# SPDX-License-Identifier: Apache-2.0
"""Writes pools of format 1, byte for byte as the releases did that had it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES

from .kit import PAYLOAD_BYTES, SLOT_BYTES, STORED, payload

SLOTS = 16  # over all targets
UUID = bytes(range(100, 116))


def signed(page: bytes) -> bytes:
    body = page.ljust(HEADER_BYTES - 4, b"\0")
    return body + struct.pack("<I", crc32c(body))


def entry(number: int, identity: SlotIdentity, epoch: int, flags: int) -> bytes:
    key = identity.key
    body = struct.pack("<IQBB46s", epoch, identity.generation, flags, len(key), key)
    return struct.pack("<I", crc32c(struct.pack("<I", number) + body)) + body


FACTS = Keyspace.exactly({"model": "old", "slot_layout": 2})


@dataclass(frozen=True)
class OldPool:
    """A pool of rank 0 of one. names_places: False as the first release wrote it."""

    keyspace: Keyspace = FACTS
    names_places: bool = True
    epoch: int = 3
    adoptable: bool = True

    def write(self, *targets: Path) -> list[Path]:
        """Write `STORED`; return the rank's directories."""
        directories = []
        for index, target in enumerate(targets):
            directory = target / self.keyspace.digest / "engine-0" / "rank-0"
            directory.mkdir(parents=True)
            facts = json.dumps(json.loads(self.keyspace.canonical))
            (directory.parents[1] / "keyspace.json").write_text(facts)
            count = SLOTS // len(targets)
            numbers = range(index, SLOTS, len(targets))
            slab = [self._slot(number) for number in numbers]
            (directory / "slab").write_bytes(b"".join(slab))
            (directory / "table").write_bytes(b"".join(map(self._entry, numbers)))
            shape = SLOT_BYTES, PAYLOAD_BYTES, count, index, len(targets), 0, 1, self.epoch
            head = b"vNVMeSB\0", 1, UUID, self.keyspace.digest.encode()
            page = struct.pack("<8sI16s32sQQQIIIIIB", *head, *shape, self.adoptable)
            (directory / "superblock").write_bytes(signed(page))
            directories.append(directory)
        return directories

    def _entry(self, number: int) -> bytes:
        if number not in STORED:
            return bytes(64)
        return entry(number, STORED[number], self.epoch, self.adoptable)

    def _slot(self, number: int) -> bytes:
        if number not in STORED:
            return bytes(SLOT_BYTES)
        identity = STORED[number]
        content = payload(identity)
        head = b"vNVMeKV\0", 1, self.adoptable, len(identity.key), self.epoch
        what = identity.generation, PAYLOAD_BYTES, crc32c(content), identity.key
        place = (UUID, number, 0) if self.names_places else (bytes(16), 0, 0)
        page = struct.pack("<8sHBBIQQI46s46x16sIH", *head, *what, *place)
        return (signed(page) + content).ljust(SLOT_BYTES, b"\0")
