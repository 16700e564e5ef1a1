# SPDX-License-Identifier: Apache-2.0
"""The output of `vllm-nvmeof pool`: JSON or text on stdout, progress on stderr.

Sizes are in bytes; times are Unix times in seconds.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich import progress as rich_progress

from vllm_nvmeof_offload.commands import plain_console, print_json
from vllm_nvmeof_offload.commands.pool import offline
from vllm_nvmeof_offload.commands.pool.check import Damage, Report, exit_code
from vllm_nvmeof_offload.commands.size.deployment import parse_duration, read_option
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.pool.format import SlotHeader, client_of
from vllm_nvmeof_offload.pool.log import newest_head
from vllm_nvmeof_offload.pool.survey import (
    UNUSED_S,
    RankDirectory,
    Surveyed,
    find,
    model_name,
    read_facts,
    select,
    survey,
    unused_keyspaces,
)
from vllm_nvmeof_offload.pool.takeover import OwnerState
from vllm_nvmeof_offload.units import MIB, format_bytes, printable

_OWNER_KINDS = ("free", "dead", "silent", "live")
_LISTED_MAX = 20
_DAY_S = 86400.0
#: The number of digits printed for a keyspace: enough to name it in a command.
_DIGITS = 12
#: The number of digits printed for a share tag or an owner's UUID.
_TAG_DIGITS = 8


def targets_of(given: Sequence[Path] | None) -> list[Path]:
    """Return `given`, or the configured targets that exist, without duplicates."""
    found = given or [path for path in map(Path, parse_config({}).targets) if path.exists()]
    return list(dict.fromkeys(Path(os.path.realpath(path)) for path in found))


def choose(given: Sequence[Path] | None, which: str | None = None) -> list[RankDirectory]:
    targets = targets_of(given)
    return find(targets) if which is None else select(targets, which)


def listing(targets: Sequence[Path]) -> dict[str, Any]:
    """Return the targets, with free bytes and bytes per keyspace, and the pools with their regions.

    A pool's `unused_s` is the time since a server last used its keyspace; None if it is in use now.
    Raises PoolError if a target cannot be read.
    """
    parts, usages = survey(find(targets)), []
    unused = unused_keyspaces(parts, time.time())
    for target in targets:
        keyspaces: Counter[str] = Counter()
        for one in parts:
            if one.directory.target == target:
                keyspaces[one.directory.keyspace] += one.disk_bytes
        try:
            free_bytes = shutil.disk_usage(target).free
        except OSError as error:
            raise PoolError(f"cannot read {target}: {error.strerror}") from error
        usages.append({"target": str(target), "free_bytes": free_bytes, "keyspaces": keyspaces})
    pools = [{**one, "unused_s": unused.get(one["keyspace"])} for one in summaries(parts)]
    return {"targets": usages, "pools": pools}


def summaries(parts: Iterable[Surveyed]) -> list[dict[str, Any]]:
    pools: dict[str, list[Surveyed]] = {}
    for one in parts:
        pools.setdefault(one.directory.name, []).append(one)
    return [_pool(pools[name]) for name in sorted(pools)]


def _pool(parts: Sequence[Surveyed]) -> dict[str, Any]:
    regions = [region(one) for one in parts]
    directory, tags = parts[0].directory, {one["tag"] for one in regions}
    facts = read_facts(directory.target / directory.keyspace) or {}
    used = [one.last_use_s for one in parts if one.last_use_s is not None]
    # The precedence is live, silent, dead, free.
    owner = max((one.owner for one in parts), key=lambda one: _OWNER_KINDS.index(one.kind))
    return {
        "keyspace": directory.keyspace,
        "model": str(facts.get("model", "?")),
        "vllm": facts.get("vllm"),
        "engine": directory.engine,
        "rank": directory.rank,
        "entries": sum(one["occupancy"].get("live", 0) for one in regions),
        "slots": sum(sum(one["occupancy"].values()) for one in regions),
        "disk_bytes": sum(one.disk_bytes for one in parts),
        "last_use_s": max(used, default=None),
        "lease": _with_text(owner),
        "tag": tags.pop() if len(tags) == 1 else None,
        "adopts": all(one.adopts for one in parts),
        "readers": sorted({pid for one in parts for pid in one.readers}),
        "regions": regions,
    }


def region(one: Surveyed) -> dict[str, Any]:
    """Return the region that one rank of one engine has on one target.

    `owner` is the superblock's UUID. `tag` is the share tag of the chunks, or None if unknown.
    `readers` are processes that opened the chunks. `problem` states why the region is unusable.
    """
    problem, counts = one.problem and f"superblock: {one.problem}", {}
    try:
        counts = occupancy(one)
    except PoolError as error:
        problem = str(error)
    return {
        "directory": str(one.path),
        "owner": one.superblock.uuid.hex() if one.superblock else None,
        "lease": _with_text(one.owner),
        "problem": problem,
        "tag": one.tag.hex() or None,
        "adopts": one.adopts,
        "readers": list(one.readers),
        "disk_bytes": one.disk_bytes,
        "last_use_s": one.last_use_s,
        "occupancy": counts,
    }


def _plain(value: Any) -> Any:
    """Convert to JSON values: bytes to hex, an enum to its name, a dataclass to an object."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _with_text(state: OwnerState) -> dict[str, Any]:
    return {**_plain(state), "text": str(state)}


def occupancy(surveyed: Surveyed) -> dict[str, int]:
    """Count slots by the state of their entry; return {} without a superblock. Raises PoolError."""
    if surveyed.superblock is None:
        return {}
    with offline.open_rank(surveyed) as rank:
        counts = np.bincount(rank.table().states, minlength=len(offline.STATES))
    return dict(zip(offline.STATES, counts.tolist(), strict=True))


def inspect_rank(surveyed: Surveyed) -> dict[str, Any]:
    """Return the region of one rank directory, with its superblock, files and log. `log` has the
    log's `pages` and the header of its newest page; None without a log."""
    found, superblock = region(surveyed), surveyed.superblock
    files, log = {}, None
    for name in ("superblock", "table", "log", "slab"):
        with contextlib.suppress(FileNotFoundError):
            files[name] = os.lstat(surveyed.path / name).st_size
    if superblock and superblock.log_pages:
        with offline.open_log(surveyed) as file:
            head = newest_head(file.fileno(), superblock.log_pages)
        log = {"pages": superblock.log_pages} | (head._asdict() if head else {})
    return found | {
        "superblock": _plain(superblock),
        "epoch_of_pool": surveyed.epoch,
        "file_bytes": files,
        "log": log,
    }


def inspect_slot(surveyed: Surveyed, index: int) -> dict[str, Any]:
    """Return slot `index`: its table entry, its header, and whether its payload matches the header.
    Raises PoolError for a nonexistent slot."""
    with offline.open_rank(surveyed, deep=True) as rank:
        slots = rank.superblock.slots
        if not 0 <= index < slots:
            raise PoolError(f"slot {index}: {surveyed.path} has slots 0 to {slots - 1}")
        entry, header, payload = rank.entry(index), rank.header(index), "not checked: no header"
        if isinstance(header, SlotHeader):
            payload = str(rank.check(index, header.identity, header.stamp.tag))
        elif header is not None:
            payload = f"not read: {header}"
        judgement = rank.judge(index, None)
        sound = "whole" if entry.state == "live" else f"nothing stored: entry {entry.state}"
        return {
            "slot": index,
            "directory": str(surveyed.path),
            "slab_offset": index * rank.superblock.slot_bytes,
            "entry": _plain(entry),
            "header": _plain(header) if isinstance(header, SlotHeader) else None,
            "payload": payload,
            "verdict": judgement.kind if judgement else sound,
        }


@contextlib.contextmanager
def progress() -> Iterator[Callable[[RankDirectory, int, int], None]]:
    console = plain_console(stderr=True)
    tasks: dict[RankDirectory, rich_progress.TaskID] = {}
    columns = (
        *("{task.description}", rich_progress.BarColumn(), "{task.percentage:.0f}%"),
        *(rich_progress.TransferSpeedColumn(), rich_progress.TimeRemainingColumn()),
    )
    with rich_progress.Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def on_progress(directory: RankDirectory, done: int, total: int) -> None:
            if directory not in tasks:
                name = f"{directory.keyspace[:8]} engine {directory.engine} rank {directory.rank}"
                tasks[directory] = bars.add_task(name, total=total)
            bars.update(tasks[directory], completed=done, total=total)

        yield on_progress


def _print(*lines: str) -> None:
    """Print lines without markup, wrapping, or control characters."""
    console = plain_console()
    for line in lines:
        console.print(printable(line), soft_wrap=True)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _weights(row: dict[str, Any]) -> str:
    if row["tag"] is None:
        return "unknown"
    return f"{row['tag'][:_TAG_DIGITS]}{'' if row['adopts'] else ', unnamed'}"


def _block(pool: dict[str, Any], regions: bool) -> Iterator[str]:
    name, size = pool["keyspace"][:_DIGITS], format_bytes(pool["disk_bytes"])
    by = f", vLLM {pool['vllm']}" if pool["vllm"] else ""
    yield f"{name} engine {pool['engine']} rank {pool['rank']}: {pool['model']}{by}"
    used = _time(pool["last_use_s"])
    if pool["unused_s"] is not None and pool["unused_s"] >= UNUSED_S:
        used += f", {pool['unused_s'] // _DAY_S:.0f} days ago"
    yield f"    {pool['entries']} of {pool['slots']} entries, {size}, last use {used}"
    yield from _holders(pool, "    ")
    for one in pool["regions"] if regions else ():
        owner = one["owner"][:_TAG_DIGITS] if one["owner"] else "unknown"
        yield f"    region {one['directory']}"
        yield f"        {format_bytes(one['disk_bytes'])}, owner {owner}"
        yield from _holders(one, "        ")


def _holders(row: dict[str, Any], indent: str) -> Iterator[str]:
    readers = ", ".join(f"pid {pid}" for pid in row["readers"]) or "none"
    yield f"{indent}lease {row['lease']['text']}"
    yield f"{indent}tag {_weights(row)}, readers {readers}"


def print_pools(given: Sequence[Path] | None, regions: bool, as_json: bool) -> None:
    targets = targets_of(given)
    found = listing(targets)
    if as_json:
        print_json(found)
        return
    for target in found["targets"]:
        sizes = target["keyspaces"]
        each = ", ".join(f"{name[:_DIGITS]} {format_bytes(size)}" for name, size in sizes.items())
        total, free = map(format_bytes, (sum(sizes.values()), target["free_bytes"]))
        _print(f"{target['target']}: {total} in pools{each and f' ({each})'}, {free} free")
    if not found["pools"]:
        _print_no_pools(targets)
        return
    for pool in found["pools"]:
        _print("", *_block(pool, regions))
    parts = [one for pool in found["pools"] for one in pool["regions"]]
    _print(*(f"{one['directory']}: {one['problem']}" for one in parts if one["problem"]))
    old = {pool["keyspace"] for pool in found["pools"] if (pool["unused_s"] or 0) >= UNUSED_S}
    if old:
        size = sum(pool["disk_bytes"] for pool in found["pools"] if pool["keyspace"] in old)
        days = f"{UNUSED_S / _DAY_S:.0f}"
        _print("", f"{len(old)} of the keyspaces, {format_bytes(size)}, unused for {days} days:")
        named = "".join(f" --target {shlex.quote(str(target))}" for target in given or ())
        _print(f"    vllm-nvmeof pool rm --unused-for {days}d{named}")


def _print_no_pools(targets: Sequence[Path]) -> None:
    if not targets:
        configured = ", ".join(parse_config({}).targets)
        _print(f"no pools: {configured} does not exist; name the targets with --target")
    else:
        _print(f"no pools on {', '.join(map(str, targets))}")


def print_details(
    given: Sequence[Path] | None, which: str, slot: int | None, as_json: bool
) -> None:
    parts = survey(choose(given, which))
    space = parts[0].directory.target / parts[0].directory.keyspace
    facts, ranks = read_facts(space), [inspect_rank(one) for one in parts]
    found: dict[str, Any] = {"keyspace": space.name, "facts": facts, "directories": ranks}
    if slot is not None:
        if len(parts) > 1:
            names = ", ".join(str(one.path) for one in parts)
            raise PoolError(
                f"--slot {slot}: {which} holds {len(parts)} directories with separate slots: "
                f"give one of {names}"
            )
        found["slot"] = inspect_slot(parts[0], slot)
    if as_json:
        print_json(found)
        return
    found["facts"] = facts or "keyspace.json is missing or belongs to another digest"
    _print(*_lines(found))


def _lines(part: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in part.items():
        below = value if isinstance(value, list) else [value]
        if below and isinstance(below[0], dict) and "text" not in below[0]:
            for one in below:
                yield f"{indent}{name}:"
                yield from _lines(one, f"{indent}  ")
        elif name == "last_use_s":
            yield f"{indent}last_use: {_time(value)}"
        else:
            text = value["text"] if isinstance(value, dict) else value
            yield f"{indent}{name}: {'none' if text in (None, [], '') else text}"


def print_reports(reports: Sequence[Report], as_json: bool) -> int:
    if as_json:
        print_json({"reports": [report.as_json() for report in reports]})
        return exit_code(reports)
    if not reports:
        _print("no pools")
    for report in reports:
        found = report.as_json()
        line = f"{found['directory']}: {found['verdict']}, {report.checked} entries checked"
        if report.direct is not None and report.seconds > 0:
            speed = report.read_bytes / MIB / report.seconds
            how = "O_DIRECT" if report.direct else "buffered: may come from the page cache"
            line += f", {format_bytes(report.read_bytes)} at {speed:.0f} MiB/s ({how})"
        _print(line)
        if found["live"]:
            _print(f"  in use ({report.surveyed.owner}): read only")
        for kind, count in report.counts.items():
            found_here = (one["slot"] for one in report.findings if one["kind"] == kind)
            slots = [str(slot) for slot in found_here if slot is not None]
            more = ", …" if count > _LISTED_MAX else ""
            where = f": {count}, slots {', '.join(slots[:_LISTED_MAX])}{more}" if slots else ""
            _print(f"  {kind}{where}")
        if report.worst is Damage.DAMAGE and not report.repair and not found["live"]:
            _print("  --repair drops or rebuilds these entries; dropped chunks are recomputed")
        if report.worst is Damage.UNUSABLE:
            remedy = f"`vllm-nvmeof pool rm {report.surveyed.path}` frees its space"
            try:
                offline.check_ours([report.surveyed.path])
            except PoolError:
                remedy = "these files have no superblock of ours: inspect and delete them by hand"
            _print(f"  {remedy}")
    return exit_code(reports)


def remove_unused(given: Sequence[Path] | None, unused_for: str, yes: bool, as_json: bool) -> None:
    """Run `pool rm --unused-for`: remove the keyspaces that no server has used for `unused_for`.

    Keyspaces with files that may not be ours are reported and kept. Raises ConfigError for an
    invalid duration, and the errors of `offline.remove`.
    """
    unused_s = read_option("--unused-for", unused_for, parse_duration, gt=0)
    targets = targets_of(given)
    ages = unused_keyspaces(parts := survey(find(targets)), time.time())
    chosen: list[Surveyed] = []
    for keyspace in (keyspace for keyspace, age in ages.items() if age >= unused_s):
        of_keyspace = [one for one in parts if one.directory.keyspace == keyspace]
        try:
            offline.check_ours(one.path for one in of_keyspace)
            chosen += of_keyspace
        except PoolError as error:
            typer.echo(f"left: {printable(str(error))}", err=True)
    if chosen:
        _remove(chosen, yes, as_json)
    elif as_json:
        print_json({"removed": []})
    else:
        where = ", ".join(map(str, targets)) or "any configured target"
        _print(f"nothing to remove: no keyspace on {where} has been unused for {unused_for}")


def remove(
    directories: Sequence[RankDirectory], yes: bool, as_json: bool, salt: str | None = None
) -> int:
    """Run `pool rm`: ask for confirmation unless `yes`, remove, print the result. With a `salt`,
    remove only its chunks. Return the exit code."""
    offline.check_ours(directory.path for directory in directories)
    parts = survey(directories)
    for part in parts:
        if part.owner.kind == "live":
            raise PoolLockedError(f"{part.path} is in use ({part.owner}): stop that server first")
    if salt is not None:
        return _remove_salt(parts, yes, as_json, salt)
    _remove(parts, yes, as_json)
    return 0


def _remove_salt(parts: Sequence[Surveyed], yes: bool, as_json: bool, salt: str) -> int:
    if not salt:
        raise PoolError("--salt is empty; give a cache_salt")
    _confirm(parts, yes, as_json, "the chunks of this salt from ")
    with progress() as on_progress:
        directories = [part.directory for part in parts]
        removed = offline.remove_client(directories, client_of(salt), on_progress)
    unknown = sum(one.unknown for one in removed)
    if as_json:
        print_json({"removed": [asdict(one) for one in removed], "unknown": unknown})
        return bool(unknown)
    for one in removed:
        typer.echo(f"overwrote {one.removed} slots in {one.directory}")
    if unknown:
        typer.echo(
            f"{unknown} other slots hold chunks with an unknown salt, because their keys have "
            "more than 42 bytes, or they are damaged. Some may "
            "have this salt. `vllm-nvmeof pool rm` without --salt removes all chunks",
            err=True,
        )
    return bool(unknown)


def _remove(parts: Sequence[Surveyed], yes: bool, as_json: bool) -> None:
    _confirm(parts, yes, as_json)
    removed = offline.remove([part.directory for part in parts])
    if as_json:
        print_json({"removed": [asdict(one) for one in removed]})
        return
    for one in removed:
        typer.echo(f"removed {one.directory}: {format_bytes(one.freed_bytes)} freed")
        if one.left:
            typer.echo(f"  kept, not ours: {', '.join(map(repr, one.left))}", err=True)


def _confirm(parts: Sequence[Surveyed], yes: bool, as_json: bool, what: str = "") -> None:
    if not yes:
        if as_json:
            raise PoolError("--json: cannot ask for confirmation; give --yes as well")
        for part in parts:
            size, model = format_bytes(part.disk_bytes), model_name(part.path.parents[1])
            used = f"last use {_time(part.last_use_s)}"
            typer.echo(f"{part.path}  {size}  {used}  model {model!r}", err=True)
        where = "this directory" if len(parts) == 1 else f"these {len(parts)} directories"
        typer.confirm(f"Remove {what}{where}?", abort=True, err=True)


def prefill(directories: Sequence[RankDirectory], as_json: bool) -> None:
    with progress() as on_progress:
        filled = offline.prefill(directories, on_progress)
    if as_json:
        print_json({"prefilled": [asdict(one) for one in filled]})
        return
    if not filled:
        _print("no pools")
    for one in filled:
        size = format_bytes(one.written_bytes)
        typer.echo(f"{one.directory}: filled {one.filled} of {one.slots} slots, {size}")
