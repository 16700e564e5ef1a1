# SPDX-License-Identifier: Apache-2.0
"""Judges a parsed configuration on this machine: memory, targets, sizes of slots.

Every refusal is a `ConfigError` that names the key, the value and the remedy.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.units import GIB, format_bytes

if TYPE_CHECKING:
    from vllm_nvmeof_offload.config import OffloadConfig

__all__ = [
    "CHUNK_TOKENS_MAX",
    "POOL_BYTES_DEFAULT_MAX",
    "STREAM_SLOTS_MIN",
    "TargetInfo",
    "check_fits",
    "check_memory",
    "check_targets",
    "chunk_blocks",
    "judge_access",
    "resolve_pool_bytes",
]

POOL_BYTES_DEFAULT_MAX = 100 * GIB
#: One slot to read into while the other is copied from.
STREAM_SLOTS_MIN = 2
CHUNK_TOKENS_MAX = 256


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """One usable target: its directory, file system, device number and free bytes."""

    path: str
    file_system: str
    device: int
    free_bytes: int


def check_targets(config: OffloadConfig) -> list[TargetInfo]:
    """Create each target with mode 0700 if it is missing, and prove that it can be written.

    Does nothing, and returns nothing, where there is no pool (`pool_bytes` 0).

    Raises:
        ConfigError: a target is no directory, or cannot be created or written.
    """
    if config.pool_bytes == 0:
        return []
    return [_check_target(path) for path in config.targets]


def _check_target(path: str) -> TargetInfo:
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ConfigError(
            "targets", path, "not a directory; give a directory on a mounted file system"
        )
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        raise ConfigError(
            "targets",
            path,
            f"cannot be written ({error.strerror}); mount it, give uid {os.geteuid()} write "
            "access, or name another directory (pool_bytes=0 runs without a pool)",
        ) from None
    return TargetInfo(path, _file_system(path), os.stat(path).st_dev, shutil.disk_usage(path).free)


def judge_access(path: str) -> tuple[str, str]:
    """Return in which way other users can meddle with a target, and the remedy; "" for neither.

    Whoever may rename in a directory, or owns it, can put our keyspaces away, though not read
    them. Root can do that everywhere and is not named.
    """
    status = os.stat(path)
    me = os.geteuid()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (me, 0):
        problem = f"belongs to uid {status.st_uid}, while this process runs as uid {me}"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        problem = f"can be written by other users (mode {mode:04o}, without the sticky bit)"
    else:
        return "", ""
    who = "that user" if status.st_uid not in (me, 0) else "they"
    place = shlex.quote(path)
    remedy = f"chown {me} {place} && chmod 0700 {place}, or name another directory"
    return f"{problem}: {who} can remove or rename the pool", remedy


def _file_system(path: str) -> str:
    """Type of the file system that holds `path`, as the kernel's mount table names it."""
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                _, point, type_name, *_ = line.split(" ")
                point = point.encode(errors="surrogateescape").decode("unicode_escape")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, type_name
    except OSError:
        return kind
    return kind


def check_memory(config: OffloadConfig, node_count: int = 1, key: str = "staging_bytes") -> None:
    """Refuse staging that the machine's memory cannot hold; `key` is what the user set.

    Raises:
        ConfigError: the share of one of `node_count` machines exceeds physical memory.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.staging_bytes // node_count > physical:
        raise ConfigError(
            key,
            format_bytes(config.staging_bytes),
            f"this machine has {format_bytes(physical)} of memory; give less than that, and "
            "leave room for the engine",
        )


def resolve_pool_bytes(config: OffloadConfig, held_bytes: int) -> int:
    """Size of the pool in bytes over all ranks and targets; 0: none.

    Without `pool_bytes`: the smaller of 100 GiB and half of what the targets could hold, which
    is what is free there and what the pool holds already (else every restart would halve it).
    Targets on one file system count once.

    held_bytes: on the targets, of pools that this server may use. Other files there are not the
    server's to give away, so `pool.engines.bytes_of_pools` counts pools alone.
    """
    if config.pool_bytes is not None:
        return config.pool_bytes
    free: dict[int, int] = {}
    for target in config.targets:
        place = _existing_parent(target)
        free[os.stat(place).st_dev] = shutil.disk_usage(place).free
    return min(POOL_BYTES_DEFAULT_MAX, (sum(free.values()) + held_bytes) // 2)


def _existing_parent(path: str) -> str:
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def chunk_blocks(config: OffloadConfig, block_bytes: int, block_tokens: int) -> int:
    """Blocks in one chunk: as configured, else enough for `chunk_bytes_min`.

    block_bytes: one rank's bytes of one block; block_tokens: tokens in it. A chunk is what a
    returning or preempted request loses at its end, so that it is bounded in tokens too.
    """
    if config.blocks_per_chunk is not None:
        return config.blocks_per_chunk
    if config.block_size is not None:
        return max(1, config.block_size // block_tokens)
    wanted = -(-config.chunk_bytes_min // max(1, block_bytes))
    return max(1, min(wanted, CHUNK_TOKENS_MAX // block_tokens))


def check_fits(
    config: OffloadConfig,
    slot_bytes: int,
    world_size: int,
    replicas: int = 1,
    held_bytes: int = 0,
) -> None:
    """Refuse staging or a pool that cannot hold the slots every rank needs.

    slot_bytes: header page and padded payload of one rank's part of a chunk. held_bytes: see
    `resolve_pool_bytes`.

    Raises:
        ConfigError: naming the size that would be enough.
    """
    slots = STREAM_SLOTS_MIN + 1
    ranks = world_size * replicas
    if config.staging_bytes // ranks < slots * slot_bytes:
        raise ConfigError(
            "staging_bytes",
            format_bytes(config.staging_bytes),
            f"too small for {slots} slots of {format_bytes(slot_bytes)} on each of {ranks} "
            f"rank(s); give at least {_at_least(slots * slot_bytes * ranks)}, or a smaller "
            "chunk_bytes_min",
        )
    pool_bytes = resolve_pool_bytes(config, held_bytes)
    if pool_bytes and pool_bytes // ranks < slot_bytes:
        explicit = config.pool_bytes is not None
        raise ConfigError(
            "pool_bytes",
            format_bytes(pool_bytes),
            f"smaller than one slot of {format_bytes(slot_bytes)} on each of {ranks} rank(s)"
            f"{'' if explicit else ', which is half of what is free on the targets'}; give at "
            f"least {_at_least(slot_bytes * ranks)}, or 0 for no pool",
        )


def _at_least(count: int) -> str:
    """`count` bytes so that the user can paste it: never rounded down."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= 10 * size:
            return f'"{-(-count // size)}{unit}"'
    return f'"{-(-count // 1024)}KiB"'
