# SPDX-License-Identifier: Apache-2.0
"""Pools, one line each or one in detail, as plain JSON values.

Sizes are in bytes, times in seconds (Unix time).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_nvmeof_offload.commands.pool.offline import OfflineRank, open_rank
from vllm_nvmeof_offload.commands.pool.scrub import SlotReader
from vllm_nvmeof_offload.errors import OK, Outcome, PoolError
from vllm_nvmeof_offload.pool.layout import SlotHeader
from vllm_nvmeof_offload.pool.survey import find, model_name, survey

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_nvmeof_offload.pool.survey import Surveyed
    from vllm_nvmeof_offload.protocol import SlotIdentity

__all__ = ["inspect_rank", "inspect_slot", "occupancy", "summaries", "usage"]

_LOCK_KINDS = ("none", "stale", "old", "live")


def summaries(parts: Sequence[Surveyed]) -> list[dict[str, Any]]:
    """One row a pool (keyspace, engine, rank), its parts on all targets taken together.

    Raises:
        PoolError: the files of one cannot be opened.
    """
    pools: dict[str, list[Surveyed]] = {}
    for one in parts:
        pools.setdefault(one.directory.name, []).append(one)
    return [_summary(pools[name]) for name in sorted(pools)]


def _summary(parts: list[Surveyed]) -> dict[str, Any]:
    directory = parts[0].directory
    # The part that a live server holds says the most, then one that a dead one left.
    lock = max((one.lock for one in parts), key=lambda one: _LOCK_KINDS.index(one.kind))
    used = [one.last_use_s for one in parts if one.last_use_s is not None]
    counts = [occupancy(one) for one in parts]
    return {
        "keyspace": directory.keyspace,
        "model": model_name(directory.path.parents[1]),
        "engine": directory.engine,
        "rank": directory.rank,
        "directories": [str(one.path) for one in parts],
        "entries": sum(count.get("live", 0) for count in counts),
        "slots": sum(one.superblock.slots for one in parts if one.superblock is not None),
        "disk_bytes": sum(one.disk_bytes for one in parts),
        "last_use_s": max(used, default=None),
        "lock": asdict(lock),
        "problems": {str(one.path): one.problem for one in parts if one.problem},
    }


def usage(target: Path) -> dict[str, Any]:
    """What each keyspace takes on one target.

    Raises:
        PoolError: the target cannot be read.
    """
    spaces: dict[str, list[Surveyed]] = {}
    for one in survey(find([target])):
        spaces.setdefault(one.directory.keyspace, []).append(one)
    try:
        status = os.statvfs(target)
    except OSError as error:
        raise PoolError(f"cannot read {target}: {error.strerror}") from error
    return {
        "target": str(target),
        "free_bytes": status.f_bavail * status.f_frsize,
        "keyspaces": [
            {
                "keyspace": name,
                "model": model_name(target / name),
                "pools": len(parts),
                "live": sum(one.lock.live for one in parts),
                "disk_bytes": sum(one.disk_bytes for one in parts),
                "problems": {str(one.path): one.problem for one in parts if one.problem},
            }
            for name, parts in sorted(spaces.items())
        ],
    }


def occupancy(surveyed: Surveyed) -> dict[str, int]:
    """Slots by the state of their table entry; empty without a superblock.

    Raises:
        PoolError: the files cannot be opened.
    """
    if surveyed.superblock is None:
        return {}
    with open_rank(surveyed) as rank:
        table = rank.table()
    counts = {
        "live": int(table.live.sum()),
        "void": int(table.void.sum()),
        "damaged": int(table.damaged.sum()),
        "missing": int(table.missing.sum()),
    }
    return {**counts, "empty": surveyed.superblock.slots - sum(counts.values())}


def inspect_rank(surveyed: Surveyed) -> dict[str, Any]:
    """What one rank directory says of itself."""
    files = {}
    for name in ("superblock", "table", "slab"):
        with contextlib.suppress(FileNotFoundError):
            files[name] = os.lstat(surveyed.path / name).st_size
    block = surveyed.superblock
    return {
        "directory": str(surveyed.path),
        "lock": asdict(surveyed.lock),
        "problem": surveyed.problem,
        "superblock": asdict(block) | {"uuid": block.uuid.hex()} if block else None,
        "epoch_of_pool": surveyed.epoch,
        "adoptable": surveyed.adoptable,
        "file_bytes": files,
        "disk_bytes": surveyed.disk_bytes,
        "last_use_s": surveyed.last_use_s,
        "occupancy": occupancy(surveyed),
    }


def inspect_slot(parts: Sequence[Surveyed], pool_slot: int) -> dict[str, Any]:
    """One pool slot: its table entry, its header, and whether its payload proves it.

    parts: all directories of one rank's pool that are at hand.

    Raises:
        PoolError: the slot is beyond the pool's end, or lies on a target that is not at hand.
    """
    usable = [(one, one.superblock) for one in parts if one.superblock is not None]
    if not usable:
        raise PoolError(f"{parts[0].path / 'superblock'}: {parts[0].problem}")
    first = usable[0][1]
    count = first.target_count
    if not 0 <= pool_slot < first.slots * count:
        raise PoolError(f"slot {pool_slot}: this pool has slots 0 to {first.slots * count - 1}")
    index, target = divmod(pool_slot, count)
    for surveyed, block in usable:
        if block.target_index == target:
            with open_rank(surveyed) as rank:
                return _slot(rank, index)
    raise PoolError(
        f"slot {pool_slot} lies on target {target} of {count}, which is not among those given; "
        f"name its directory with --target"
    )


def _slot(rank: OfflineRank, index: int) -> dict[str, Any]:
    entry = rank.entry(index)
    header = rank.header(index)
    found: dict[str, Any] = {
        "slot": rank.pool_slot(index),
        "directory": str(rank.surveyed.path),
        "slab_offset": index * rank.superblock.slot_bytes,
        "entry": {"state": entry.state, **_identity(entry.identity)},
        "header": None,
        "payload": "not checked: no intact header",
    }
    if entry.stamp is not None:
        found["entry"] |= asdict(entry.stamp)
    if isinstance(header, Outcome):
        found["payload"] = f"not read: {header}"
    if isinstance(header, SlotHeader):
        found["header"] = {
            **_identity(header.identity),
            **asdict(header.stamp),
            "pool_uuid": header.place.pool_uuid.hex(),
            "rank": header.place.rank,
            "slot": header.place.pool_slot,
            "payload_bytes": header.payload_bytes,
            "payload_crc32c": f"{header.payload_crc:08x}",
        }
        with contextlib.closing(SlotReader(rank)) as reader:
            found["payload"] = str(reader.check(index, header.identity))
    judgement = rank.judge(index, None)
    if judgement is not None:
        found["verdict"] = judgement.kind
    elif entry.state != "live":
        found["verdict"] = f"nothing stored: entry {entry.state}"
    else:
        ok = found["payload"] == str(OK)
        found["verdict"] = "whole" if ok else f"slot is damaged: {found['payload']}"
    return found


def _identity(identity: SlotIdentity | None) -> dict[str, str]:
    if identity is None:
        return {}
    return {"key": identity.key.hex(), "generation": f"{identity.generation:016x}"}
