# SPDX-License-Identifier: Apache-2.0
"""A real worker of made-up latent attention: every rank of a set holds the same KV.

It runs in a thread or, through `serve`, in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.chunks import begin
from vllm_nvmeof_offload.config import EXPERIMENT, Replica, parse_config
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.protocol import (
    ChunkBatch,
    FetchCommand,
    LoadCommand,
    OpReport,
    StoreCommand,
    WriteCommand,
    unpacked,
)
from vllm_nvmeof_offload.units import MIB, slot_stride_bytes
from vllm_nvmeof_offload.worker.build import RankIdentity, build_worker

LAYERS, PAGE, BLOCKS, PER_CHUNK = 3, 3000, 400, 2
CHUNK_BYTES = LAYERS * PAGE * PER_CHUNK
SLOT_BYTES = slot_stride_bytes(CHUNK_BYTES)
CACHE_SLOTS, STREAM_SLOTS = 24, 4


class Options(NamedTuple):
    """The same for all ranks. server: as `Replica.server`."""

    directory: str
    server: str
    ranks: int = 2
    set_size: int = 2
    io_engine: str = "auto"
    read_deadline_ms: int = 5_000


class Taken(NamedTuple):
    """What a worker has reported: (op, codes of the rows, CRCs). An op may come in parts."""

    reports: list[tuple[int, list[int], list[int] | None]]
    counters: dict[Any, float]


class Rank:
    """All calls come from one thread."""

    def __init__(self, options: Options, rank: int) -> None:
        self.cache = [
            np.random.default_rng(layer).integers(0, 256, (BLOCKS, PAGE), np.uint8)
            for layer in range(LAYERS)
        ]
        tensors = [CacheTensor(a.ctypes.data, PAGE, PAGE, BLOCKS) for a in self.cache]
        group = Group(0, GroupKind.FULL, 16 * PER_CHUNK, PER_CHUNK)
        geometry = CacheGeometry([(group, tensors)], [options.set_size])
        settings = parse_config(
            {
                "staging_bytes": options.ranks * (CACHE_SLOTS + STREAM_SLOTS) * SLOT_BYTES,
                "targets": [str(Path(options.directory) / "target")],
                "pool_bytes": options.ranks * 4 * MIB,
                "io_engine": options.io_engine,
                "read_deadline_ms": options.read_deadline_ms,
                "allow_root_file_system": True,
            },
            {EXPERIMENT: json.dumps({"stream_slots": STREAM_SLOTS})},
        )
        identity = RankIdentity(
            Keyspace.of({"test": "set"}),
            rank,
            options.ranks,
            replica=Replica(server=options.server),
        )
        self.parts, self.hello = build_worker(settings, geometry, identity, "cpu")
        self._rows: dict[int, int] = {}  # by op

    def set_size(self) -> int:
        return self.hello.groups[0].set_size

    def store(self, op: int, batch: ChunkBatch, blocks: Sequence[int]) -> None:
        self._transfer(StoreCommand(op, batch), blocks)

    def load(self, op: int, batch: ChunkBatch, blocks: Sequence[int]) -> None:
        self._transfer(LoadCommand(op, batch), blocks)

    def _transfer(self, command: StoreCommand | LoadCommand, blocks: Sequence[int]) -> None:
        self._rows[command.op] = len(command.batch)
        geometry = self.parts.geometry
        self.parts.runner.hand_over(lambda p: begin(p, geometry, command, blocks), command.op)

    def command(self, command: WriteCommand | FetchCommand) -> None:
        self._rows[command.op] = len(command.batch)
        self.parts.runner.hand_over(lambda p: p.command(command))

    def take(self) -> Taken:
        _, reports, counters = self.parts.runner.take()
        found: list[tuple[int, list[int], list[int] | None]] = []
        for one in unpacked(reports):
            if isinstance(one, OpReport):
                rows = self._rows[one.op] if one.indexes is None else len(one.indexes)
                codes = [0] * rows if one.codes is None else one.codes.tolist()
                found.append((one.op, codes, None if one.crcs is None else one.crcs.tolist()))
        return Taken(found, dict(counters))

    def blocks(self, blocks: Sequence[int]) -> bytes:
        return b"".join(layer[list(blocks)].tobytes() for layer in self.cache)

    def clear(self, blocks: Sequence[int]) -> None:
        for layer in self.cache:
            layer[list(blocks)] = 0

    def close(self) -> None:
        parts = self.parts
        if parts.watcher is not None:
            parts.watcher.stop()
        parts.runner.stop()
        assert parts.io.close()
        parts.copy.close()
        parts.runner.leave_set()
        assert parts.pool is not None
        parts.pool.close()
        parts.staging.close()


def serve(connection: Connection, options: Options, rank: int) -> None:
    """Run a rank whose methods are called through the connection, until `close`."""
    one = Rank(options, rank)
    connection.send(one.set_size())
    name = ""
    while name != "close":
        name, arguments = connection.recv()
        connection.send(getattr(one, name)(*arguments))
