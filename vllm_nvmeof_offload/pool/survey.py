# SPDX-License-Identifier: Apache-2.0
"""A read-only survey of targets: the superblock, owner, size, last use and readers of each rank
directory, including damaged pools and pools of other formats."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.errors import PoolError, PoolFormatError, as_pool_error
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.pool.folder import open_private
from vllm_nvmeof_offload.pool.format import (
    DIGEST_HEX_DIGITS,
    LEASE_FILE,
    SLAB_FILE,
    SUPERBLOCK_FILE,
    Keyspace,
    Superblock,
    newest_of,
    read_superblock_page,
    share_tag,
)
from vllm_nvmeof_offload.pool.takeover import OwnerState, Takeover
from vllm_nvmeof_offload.units import slot_stride_bytes

FACTS_FILE = "keyspace.json"
#: A keyspace that no server has used for two weeks is reported. A canary deployment ends earlier,
#: and the chunks of a model that is served only once a month are easily recomputed.
UNUSED_S = 14 * 86400.0
_KEYSPACE = re.compile(rf"[0-9a-f]{{{DIGEST_HEX_DIGITS}}}")
_ENGINE = re.compile(r"engine-(0|[1-9][0-9]{0,8})")
_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,8})")
_FACTS_BYTES_MAX = 1 << 20
_PREFIX_MIN = 4
_BE_OWNER = "run as the user that owns it"


@dataclass(frozen=True, slots=True, order=True)
class RankDirectory:
    """A directory `target/keyspace/engine-K/rank-R`, identified only by its name."""

    target: Path
    keyspace: str
    engine: int
    rank: int

    @property
    def path(self) -> Path:
        return self.target / self.name

    @property
    def name(self) -> str:
        """The path below the target, which is the same for all parts of one pool."""
        return f"{self.keyspace}/engine-{self.engine}/rank-{self.rank}"


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The state of one rank directory on disk.

    `superblock` is None if it is missing, damaged or another region's; `problem` is then the
    reason, and otherwise empty. `epoch` is the pool's, from all of its surveyed parts; chunks of
    other epochs are ignored. `tag` is the share tag of that epoch, empty if unknown. `adopts` is
    False if a start with the keyspace's own weights would adopt nothing. `disk_bytes` is the
    allocated space. `last_use_s` is Unix time; a running server renews it every few seconds.
    `readers` are local processes that have the slab open to read it; only root sees other users'
    processes.
    """

    directory: RankDirectory
    superblock: Superblock | None
    problem: str
    epoch: int
    tag: bytes
    adopts: bool
    owner: OwnerState
    disk_bytes: int
    last_use_s: float | None
    readers: tuple[int, ...] = ()

    @property
    def path(self) -> Path:
        return self.directory.path


def find(targets: Iterable[Path], ours: bool = False) -> list[RankDirectory]:
    """Return every rank directory on `targets`, sorted by name, without following links. `ours`
    omits other users' directories. Raises PoolError if a target is not a directory or cannot be
    listed."""
    uid = os.geteuid() if ours else None
    found: list[RankDirectory] = []
    for target in targets:
        if not target.is_dir():
            raise PoolError(f"target {target} is not a directory; name one with --target")
        for keyspace in _folders(target, _KEYSPACE, uid):
            for engine in _folders(keyspace, _ENGINE, uid):
                for rank in _folders(engine, _RANK, uid):
                    numbers = (int(path.name.partition("-")[2]) for path in (engine, rank))
                    found.append(RankDirectory(target, keyspace.name, *numbers))
    return sorted(found)


def _folders(parent: Path, pattern: re.Pattern[str], uid: int | None) -> list[Path]:
    with as_pool_error(f"cannot list {parent}", _BE_OWNER), os.scandir(parent) as entries:
        return [
            parent / entry.name
            for entry in entries
            if pattern.fullmatch(entry.name)
            and entry.is_dir(follow_symlinks=False)
            and uid in (None, entry.stat(follow_symlinks=False).st_uid)
        ]


def select(targets: Sequence[Path], which: str) -> list[RankDirectory]:
    """Return the rank directories that `which` names: a keyspace (or its first digits), or the path
    of a keyspace's, engine's or rank's directory, which need not be on `targets`. Raises PoolError
    if it names nothing, or more than one keyspace."""
    if "/" in which or which in (".", ".."):
        return _under(Path(os.path.abspath(which)))
    found = find(targets)
    hits = {one.keyspace for one in found if one.keyspace.startswith(which)}
    if len(hits) == 1 and len(which) >= _PREFIX_MIN:
        return [one for one in found if one.keyspace in hits]
    places = ", ".join(map(str, targets)) or "no target"
    if len(hits) > 1 and len(which) >= _PREFIX_MIN:
        raise PoolError(f"{which!r} matches {len(hits)} keyspaces on {places}: give more digits")
    raise PoolError(
        f"{which!r} names no keyspace on {places}: give {_PREFIX_MIN} to {DIGEST_HEX_DIGITS} of "
        f"its digits (`vllm-nvmeof pool ls` shows them), or a directory's path with a / in it"
    )


def _under(path: Path) -> list[RankDirectory]:
    above = [path, *path.parents][:3]
    keyspace = next((one for one in above if _KEYSPACE.fullmatch(one.name)), None)
    if keyspace is None:
        raise PoolError(
            f"{path} is not the directory of a keyspace, engine or rank: these are named "
            f"TARGET/KEYSPACE/engine-K/rank-R"
        )
    found = [one for one in find([keyspace.parent]) if one.path.is_relative_to(path)]
    if not found:
        raise PoolError(f"{path} holds no pool; `vllm-nvmeof pool ls` lists all pools")
    return found


def survey(directories: Sequence[RankDirectory]) -> list[Surveyed]:
    """Survey `directories`. If owners may be on other hosts, wait until each has shown or missed a
    beat. Raises PoolError if a directory cannot be read."""
    with as_pool_error("cannot read the lease of a region", _BE_OWNER):
        owners = Takeover().observe([directory.path for directory in directories])
    surveyed = [_survey_one(*one) for one in zip(directories, owners, strict=True)]
    # A reset that reached only some targets invalidated the chunks on all targets.
    parts: dict[tuple[str, bytes], list[Superblock]] = {}
    for one in surveyed:
        if one.superblock is not None:
            parts.setdefault((one.directory.name, one.superblock.uuid), []).append(one.superblock)
    for i, one in enumerate(surveyed):
        if one.superblock is not None:
            newest = newest_of(parts[one.directory.name, one.superblock.uuid])
            if newest is not None:
                adopts = newest.tag == share_tag(newest.keyspace)
                surveyed[i] = replace(one, epoch=newest.epoch, tag=newest.tag, adopts=adopts)
    readers = _readers()
    return [replace(one, readers=readers.get(_file_of(one.path), ())) for one in surveyed]


def unused_keyspaces(parts: Sequence[Surveyed], now_s: float) -> dict[str, float]:
    """Return, by keyspace, the seconds since a server or a tool used one of the surveyed regions.
    Keyspaces with a live owner, a reader or an unknown age are omitted. `now_s` is Unix time."""
    ages: dict[str, float] = {}
    for one in parts:
        used = one.last_use_s is None or one.owner.kind == "live" or one.readers
        age = -1.0 if used else now_s - (one.last_use_s or 0.0)
        ages[one.directory.keyspace] = min(age, ages.get(one.directory.keyspace, age))
    return {keyspace: age for keyspace, age in ages.items() if age >= 0}


def _readers(proc: Path = Path("/proc")) -> dict[tuple[int, int] | None, tuple[int, ...]]:
    """Return, by device and inode of a slab, the processes that have it open only for reading."""
    found: dict[tuple[int, int] | None, set[int]] = {}
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's process, or it has ended
            for fd in (process / "fd").iterdir():
                slab = _slab_read_by(process, fd)
                if slab is not None:
                    found.setdefault(slab, set()).add(int(process.name))
    return {slab: tuple(sorted(pids)) for slab, pids in found.items()}


def _slab_read_by(process: Path, fd: Path) -> tuple[int, int] | None:
    """Return the device and inode of the slab that the descriptor reads, or None."""
    try:
        if os.path.basename(os.readlink(fd)) != SLAB_FILE:
            return None
        status, facts = fd.stat(), (process / "fdinfo" / fd.name).read_text()
    except OSError:  # it was just closed
        return None
    flags = re.search(r"^flags:\s*([0-7]+)$", facts, re.MULTILINE)
    reads = flags is not None and int(flags[1], 8) & os.O_ACCMODE == os.O_RDONLY
    return (status.st_dev, status.st_ino) if reads else None


def _file_of(directory: Path) -> tuple[int, int] | None:
    try:
        status = (directory / SLAB_FILE).stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _survey_one(directory: RankDirectory, owner: OwnerState) -> Surveyed:
    path = directory.path
    problem = ""
    superblock: Superblock | None = None
    with as_pool_error(f"cannot read {path}", _BE_OWNER):
        try:
            page = read_superblock_page(path)
            superblock = None if page is None else Superblock.decode(page)
            problem = _misfit(directory, superblock)
        except PoolFormatError as error:
            problem = str(error)
        return Surveyed(
            directory,
            None if problem else superblock,
            problem,
            epoch=0,
            tag=b"",
            adopts=False,
            owner=owner,
            disk_bytes=disk_bytes(path),
            last_use_s=_last_use(path),
        )


def _misfit(directory: RankDirectory, superblock: Superblock | None) -> str:
    """Return the reason why a start would not use this superblock; empty if it would."""
    if superblock is None:
        return "there is none"
    if superblock.keyspace != directory.keyspace:
        return f"it belongs to keyspace {superblock.keyspace}, which is not this directory's"
    if superblock.rank != directory.rank:
        return f"it belongs to rank {superblock.rank}, which is not this directory's"
    sound = (
        superblock.slots > 0
        and superblock.payload_bytes > 0
        and superblock.slot_bytes == slot_stride_bytes(superblock.payload_bytes)
        and superblock.target_index < superblock.target_count
        and _fits_its_groups(superblock)
    )
    return "" if sound else "its geometry is impossible"


def _fits_its_groups(superblock: Superblock) -> bool:
    groups = superblock.groups
    return (
        len({group.group_id for group in groups}) == len(groups)
        and max(group.payload_bytes for group in groups) == superblock.payload_bytes
        and all(
            group.set_size > 0
            and group.payload_bytes
            == group.block_bytes * (1 if group.kind is GroupKind.STATE else group.blocks_per_chunk)
            for group in groups
        )
    )


def _last_use(path: Path) -> float | None:
    """Return the time at which the lease was last written: by a renewal, or by its release."""
    for name in (LEASE_FILE, SUPERBLOCK_FILE):
        try:
            return (path / name).stat().st_mtime
        except FileNotFoundError:
            continue
    return None


def disk_bytes(path: Path, counts: Callable[[str], bool] = lambda _: True) -> int:
    """Return the bytes allocated to regular files under `path` whose names `counts` accepts."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in filter(counts, names):
            try:
                found = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:  # a probe's file, or a superblock being replaced
                continue
            if stat.S_ISREG(found.st_mode):
                total += found.st_blocks * 512
    return total


def read_facts(space: Path) -> dict[str, Any] | None:
    """Return a keyspace directory's facts, or None if they are lost or their digest differs."""
    try:
        with open(open_private(space / FACTS_FILE, os.O_RDONLY), "rb") as file:
            facts = json.loads(file.read(_FACTS_BYTES_MAX))
        same = isinstance(facts, dict) and Keyspace.exactly(facts).digest == space.name
    except (OSError, ValueError, RecursionError):
        return None
    return facts if same else None


def model_name(space: Path) -> str:
    """Return the model's name for display, or "?"."""
    return str((read_facts(space) or {}).get("model", "?"))
