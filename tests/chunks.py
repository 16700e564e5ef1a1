# SPDX-License-Identifier: Apache-2.0
"""Chunks in columns, for tests: batches are built from rows, and reports are read by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.errors import OK, Outcome, outcome_of
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.native import CacheGeometry as NativeGeometry
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    NOWHERE,
    OURS,
    RELEASED,
    AdoptedEntries,
    ChunkBatch,
    LoadCommand,
    OpReport,
    SlotIdentity,
    StoreCommand,
    owned_by,
    place_of,
    slot_of,
    target_of,
)
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline

#: Identity, cache slot, place; None: the row has none.
Row = tuple[SlotIdentity, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Reported:
    """A report on one row. outcome None: only the release that follows an earlier outcome."""

    op: int
    row: int = 0
    outcome: Outcome | None = OK
    released: bool = True


def place_in(number: int, targets: int = 1, owner: int = OURS) -> int:
    """The place of a slot by its number, of which each target has one after the other."""
    return owned_by(owner, place_of(number % targets, number // targets))


def number_in(place: int, targets: int = 1) -> int:
    """The number of which `place_in` makes this place, whoever's it is."""
    return slot_of(place) * targets + target_of(place)


def cache_slot(row: int, member: int = EVERY_MEMBER) -> int:
    """The value in the column `cache` for a member's slot in a row of the CPU tier."""
    return row if member == EVERY_MEMBER else member + 1 << 24 | row


def row_of(cache: int) -> int:
    return cache & 0xFFFFFF


def cache_member(cache: int) -> int:
    return (cache >> 24) - 1 & 0xFF


def identity_of(batch: ChunkBatch, row: int) -> SlotIdentity:
    length = len(batch.keys) // len(batch)
    key = batch.keys[row * length : (row + 1) * length]
    return SlotIdentity(key, int(batch.generations[row]))


def batch_of(*rows: Row, group: int = 0) -> ChunkBatch:
    """A batch of these rows, of one group. Their keys are of equal length."""
    assert len({len(identity.key) for identity, _, _ in rows}) == 1
    return ChunkBatch.of(
        b"".join(identity.key for identity, _, _ in rows),
        np.array([identity.generation for identity, _, _ in rows], np.uint64),
        np.array([-1 if cache is None else cache for _, cache, _ in rows], np.int32),
        np.array([NOWHERE if place is None else place for _, _, place in rows], np.int64),
        np.full(len(rows), group, np.uint8),
    )


class Pieces(NamedTuple):
    """rows: uint64[m, 3] of (KV cache address, offset in the payload, bytes). first: uint32[n + 1];
    chunk i has the rows `first[i]` to `first[i + 1] - 1`."""

    rows: np.ndarray
    first: np.ndarray


def pieces_of(group: ChunkGeometry, blocks: np.ndarray, first: int = 0, chunks: int = 1) -> Pieces:
    """A load's pieces of consecutive chunks. first: position of the first block in its chunk."""
    geometry = NativeGeometry([group.columns])
    return Pieces(*geometry.pieces(False, blocks, [len(blocks)], [first], bytes(chunks)))


def geometry_of(tensors: Sequence[CacheTensor], blocks_per_chunk: int = 1) -> CacheGeometry:
    """A KV cache with one group, of full attention."""
    group = Group(0, GroupKind.FULL, 16 * blocks_per_chunk, blocks_per_chunk)
    return CacheGeometry([(group, tensors)])


def begin(
    pipeline: TransferPipeline,
    geometry: CacheGeometry,
    command: StoreCommand | LoadCommand,
    blocks: Sequence[int],
    fence: object = None,
    *,
    first: int = 0,
) -> None:
    """Begin a store or load of one group's chunks. first: the first block's place in its chunk."""
    is_store, group = isinstance(command, StoreCommand), int(command.batch.groups[0])
    groups = range(len(geometry.by_group))
    sizes = [len(blocks) if group == one else 0 for one in groups]
    firsts = [first if group == one else 0 for one in groups]
    helpers: Mapping[int, int] = MappingProxyType({})
    if isinstance(command, LoadCommand) and command.helpers is not None:
        helpers = {command.op: command.helpers}
    ids = np.array(blocks, np.int32)
    transfers = [(command.op, is_store, command.batch, ids, sizes, firsts)]
    pipeline.transfer(geometry, transfers, fence, helpers)


def rows_of(report: OpReport, size: int = 1) -> list[Reported]:
    """The content of a report. size: how many rows its op has."""
    indexes = list(range(size)) if report.indexes is None else report.indexes.tolist()
    default = [0] * len(indexes)
    codes = default if report.codes is None else report.codes.tolist()
    errnos = default if report.errnos is None else report.errnos.tolist()
    released = [1] * len(indexes) if report.released is None else report.released.tolist()
    return [
        Reported(report.op, row, None if code == RELEASED else outcome_of(code, number), bool(free))
        for row, code, number, free in zip(indexes, codes, errnos, released, strict=True)
    ]


def entries_of(adopted: AdoptedEntries, targets: int = 1) -> dict[int, SlotIdentity]:
    """Adopted entries by pool slot as `place_in` numbers them, in the order in which they came."""
    keys = [row.tobytes() for row in adopted.key_rows()]
    rows = zip(adopted.places.tolist(), adopted.generations.tolist(), keys, strict=True)
    entries = {
        slot_of(place) * targets + target_of(place): SlotIdentity(key, generation)
        for place, generation, key in rows
    }
    assert len(entries) == len(adopted), "a place is adopted twice"
    return entries
