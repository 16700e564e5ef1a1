# SPDX-License-Identifier: Apache-2.0
"""Pools as plain JSON values, and the same as tables on stdout, with progress on stderr.

Sizes are in bytes, times in seconds (Unix time).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rich.progress
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_nvmeof_offload.commands import print_json, table
from vllm_nvmeof_offload.commands.pool import offline
from vllm_nvmeof_offload.commands.pool.check import Damage, Report, exit_code
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.errors import OK, Outcome, PoolError, PoolLockedError
from vllm_nvmeof_offload.pool.format import SlotHeader, Superblock
from vllm_nvmeof_offload.pool.lease import LeaseState
from vllm_nvmeof_offload.pool.log import newest_head
from vllm_nvmeof_offload.pool.survey import (
    RankDirectory,
    Surveyed,
    find,
    model_name,
    read_facts,
    select,
    survey,
)
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import MIB, format_bytes

_LOCK_KINDS = ("none", "stale", "foreign", "live")
_LISTED_MAX = 20
#: Digits of a keyspace in tables: enough to name it in a command.
_DIGITS = 12
#: Digits of a share tag, or of an owner's uuid, in tables.
_TAG_DIGITS = 8


def targets_of(given: Sequence[Path] | None) -> list[Path]:
    """The targets, each once; configured ones that do not exist yet hold no pools."""
    found = given or [path for path in map(Path, parse_config({}).targets) if path.exists()]
    return list(dict.fromkeys(Path(os.path.realpath(path)) for path in found))


def choose(given: Sequence[Path] | None, which: str | None = None) -> list[RankDirectory]:
    """The rank directories that `which` names on the targets; all of them without it."""
    targets = targets_of(given)
    return find(targets) if which is None else select(targets, which)


def _grouped(parts: Iterable[Surveyed], attribute: str) -> list[list[Surveyed]]:
    """Parts whose directories have the same `attribute`, in its order."""
    found: dict[str, list[Surveyed]] = {}
    for one in parts:
        found.setdefault(getattr(one.directory, attribute), []).append(one)
    return [found[value] for value in sorted(found)]


def _row(parts: list[Surveyed], **more: Any) -> dict[str, Any]:
    space = parts[0].directory.target / parts[0].directory.keyspace
    return {
        "keyspace": space.name,
        "model": model_name(space),
        **more,
        "disk_bytes": sum(one.disk_bytes for one in parts),
        "problems": {str(one.path): one.problem for one in parts if one.problem},
    }


def summaries(parts: Sequence[Surveyed]) -> list[dict[str, Any]]:
    """One row per pool (keyspace, engine, rank), with its parts on all targets."""
    rows = []
    for pool in _grouped(parts, "name"):
        # A part that a live server holds counts first, then one that a dead server left.
        lock = max((one.lock for one in pool), key=lambda one: _LOCK_KINDS.index(one.kind))
        used = [one.last_use_s for one in pool if one.last_use_s is not None]
        rows.append(
            _row(
                pool,
                engine=pool[0].directory.engine,
                rank=pool[0].directory.rank,
                directories=[str(one.path) for one in pool],
                entries=sum(occupancy(one).get("live", 0) for one in pool),
                slots=sum(one.superblock.slots for one in pool if one.superblock is not None),
                last_use_s=max(used, default=None),
                lock=asdict(lock),
                tag=_tag(pool),
                adopts=all(one.adopts for one in pool),
                readers=readers_of(pool),
            )
        )
    return rows


def _tag(pool: Sequence[Surveyed]) -> str | None:
    """The share tag of a pool's chunks in hex; None: unknown, or its parts differ."""
    tags = {one.tag for one in pool}
    return tags.pop().hex() or None if len(tags) == 1 else None


def readers_of(parts: Sequence[Surveyed]) -> list[int]:
    """The processes that have opened chunks of these parts to borrow them."""
    return sorted({pid for one in parts for pid in one.readers})


def usage(target: Path) -> dict[str, Any]:
    """The bytes that each keyspace takes on one target; PoolError if it cannot be read."""
    spaces = _grouped(survey(find([target])), "keyspace")
    try:
        free_bytes = shutil.disk_usage(target).free
    except OSError as error:
        raise PoolError(f"cannot read {target}: {error.strerror}") from error
    keyspaces = [
        _row(
            parts,
            pools=len(parts),
            live=sum(one.lock.live for one in parts),
            regions=[region(one) for one in parts],
        )
        for parts in spaces
    ]
    return {"target": str(target), "free_bytes": free_bytes, "keyspaces": keyspaces}


def region(surveyed: Surveyed) -> dict[str, Any]:
    """What one rank of one engine has on one target, for those who may borrow from it."""
    block = surveyed.superblock
    return {
        "engine": surveyed.directory.engine,
        "rank": surveyed.directory.rank,
        "owner": block.uuid.hex() if block else None,
        "lock": asdict(surveyed.lock),
        "lease": _lease(surveyed.lease),
        "tag": _tag([surveyed]),
        "adopts": surveyed.adopts,
        "readers": readers_of([surveyed]),
    }


def _lease(state: LeaseState | None) -> dict[str, Any] | None:
    """The lease of a region and its page; None: it has none. text: for people."""
    if state is None:
        return None
    page = asdict(state.page) | {"owner": state.page.owner.hex()}
    return {"kind": state.kind, "unchanged_s": state.unchanged_s, **page, "text": str(state)}


def occupancy(surveyed: Surveyed) -> dict[str, int]:
    """Slots by the state of their table entry, {} without a superblock; PoolError if unreadable."""
    if surveyed.superblock is None:
        return {}
    with offline.open_rank(surveyed) as rank:
        table = rank.table()
    counts = {state: int(getattr(table, state).sum()) for state in offline.STATES}
    return {**counts, "empty": surveyed.superblock.slots - sum(counts.values())}


def inspect_rank(surveyed: Surveyed) -> dict[str, Any]:
    """The superblock, lock, files and occupancy of one rank directory."""
    files = {}
    for name in ("superblock", "table", "log", "slab"):
        with contextlib.suppress(FileNotFoundError):
            files[name] = os.lstat(surveyed.path / name).st_size
    block = surveyed.superblock
    return {
        "directory": str(surveyed.path),
        "lock": asdict(surveyed.lock),
        "lease": _lease(surveyed.lease),
        "problem": surveyed.problem,
        "superblock": _shown(block) if block else None,
        "epoch_of_pool": surveyed.epoch,
        "adopts": surveyed.adopts,
        "readers": readers_of([surveyed]),
        "file_bytes": files,
        "disk_bytes": surveyed.disk_bytes,
        "last_use_s": surveyed.last_use_s,
        "log": log_head(surveyed),
        "occupancy": occupancy(surveyed),
    }


def log_head(surveyed: Surveyed) -> dict[str, int] | None:
    """The header of the log's newest page, with its `pages`; None: there is no log."""
    pages = surveyed.superblock.log_pages if surveyed.superblock else 0
    if not pages:
        return None
    with offline.open_log(surveyed) as fd:
        head = newest_head(fd, pages)
    return {"pages": pages} | (head._asdict() if head else {})


#: Fields of the superblock that are shown only where they are used.
_RESERVED = frozenset(
    {
        *("lease_generation", "table_offset", "log_offset", "slab_offset", "log_pages"),
        *("shared", "target_uuid", "mac"),
    }
)


def _shown(block: Superblock) -> dict[str, Any]:
    fields = asdict(block)
    for name in _RESERVED:
        value = fields[name]
        if not (any(value) if isinstance(value, bytes) else value):
            del fields[name]
    for group in fields["groups"]:
        group["kind"] = group["kind"].name.lower()
    return {k: v.hex() if isinstance(v, bytes) else v for k, v in fields.items()}


def inspect_slot(surveyed: Surveyed, index: int) -> dict[str, Any]:
    """One slot of a directory: its table entry, its header, and whether its payload matches them.

    PoolError for a slot that the directory does not have.
    """
    with offline.open_rank(surveyed) as rank:
        slots = rank.superblock.slots
        if not 0 <= index < slots:
            raise PoolError(f"slot {index}: {surveyed.path} has slots 0 to {slots - 1}")
        return _slot(rank, index)


def _slot(rank: offline.OfflineRank, index: int) -> dict[str, Any]:
    entry = rank.entry(index)
    header = rank.header(index)
    found: dict[str, Any] = {
        "slot": index,
        "directory": str(rank.surveyed.path),
        "slab_offset": index * rank.superblock.slot_bytes,
        "entry": {"state": entry.state},
        "header": None,
        "payload": "not checked: no intact header",
    }
    if entry.identity is not None:
        found["entry"] |= _identity(entry.identity) | {"epoch": entry.epoch}
        found["entry"]["single_copy"] = entry.single_copy
    if isinstance(header, Outcome):
        found["payload"] = f"not read: {header}"
    if isinstance(header, SlotHeader):
        found["header"] = {
            **_identity(header.identity),
            "epoch": header.stamp.epoch,
            "tag": header.stamp.tag.hex(),
            "region_uuid": header.place.region_uuid.hex(),
            "rank": header.place.rank,
            "slot": header.place.slot,
            "single_copy": header.single_copy,
            "payload_bytes": header.payload_bytes,
            "payload_crc32c": f"{header.payload_crc:08x}",
        }
        with contextlib.closing(offline.SlotReader(rank)) as reader:
            found["payload"] = str(reader.check(index, header.identity, header.stamp.tag))
    judgement = rank.judge(index, None)
    if judgement is not None:
        found["verdict"] = judgement.kind
    elif entry.state != "live":
        found["verdict"] = f"nothing stored: entry {entry.state}"
    else:
        ok = found["payload"] == str(OK)
        found["verdict"] = "whole" if ok else f"slot is damaged: {found['payload']}"
    return found


def _identity(identity: SlotIdentity) -> dict[str, str]:
    return {"key": identity.key.hex(), "generation": f"{identity.generation:016x}"}


class _Speed(rich.progress.ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._scale, self._unit = (MIB, "MiB") if unit == "bytes" else (1, unit)

    def render(self, task: rich.progress.Task) -> Text:
        speed = (task.finished_speed or task.speed or 0.0) / self._scale
        return Text(f"{speed:.0f} {self._unit}/s")


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Callable[[RankDirectory, int, int], None]]:
    """Yield a callback that draws one bar per directory on stderr, if that is a terminal."""
    console = Console(stderr=True)
    tasks: dict[RankDirectory, rich.progress.TaskID] = {}
    percent = rich.progress.TextColumn("{task.percentage:.0f}%")
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        percent,
        _Speed(unit),
    )
    hidden = not console.is_terminal
    with rich.progress.Progress(
        *columns, rich.progress.TimeRemainingColumn(), console=console, disable=hidden
    ) as bars:

        def on_progress(directory: RankDirectory, done: int, total: int) -> None:
            if directory not in tasks:
                name = f"{directory.keyspace[:8]} engine {directory.engine} rank {directory.rank}"
                tasks[directory] = bars.add_task(name, total=total)
            bars.update(tasks[directory], completed=done, total=total)

        yield on_progress


def _print(*parts: str | Table) -> None:
    """Print text as it is: nothing that comes from disk is read as markup or wrapped."""
    console = Console()
    for part in parts:
        if isinstance(part, str):
            console.print(Text(part), soft_wrap=True)
        else:
            console.print(part)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = table(headings, rows)
    for column in made.columns:
        if column.header == "keyspace":
            column.no_wrap, column.min_width = True, _DIGITS
    return made


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _holder(lock: dict[str, Any]) -> str:
    kind, holder = lock["kind"], lock["holder"]
    if kind == "none":
        return "none"
    if not holder:
        return f"{kind}: a process on this host"
    age_s = lock["heartbeat_age_s"]
    age = f", {age_s:.0f} s ago" if age_s is not None else ""
    return f"{kind}: pid {holder['pid']} on {holder['host']}{age}"


def _weights(row: dict[str, Any]) -> str:
    """The share tag; only servers whose own tag is the same borrow."""
    if row["tag"] is None:
        return "unknown"
    return f"{row['tag'][:_TAG_DIGITS]}{'' if row['adopts'] else ', unnamed'}"


def _pids(row: dict[str, Any]) -> str:
    return ", ".join(f"pid {pid}" for pid in row["readers"]) or "none"


def print_pools(given: Sequence[Path] | None, as_json: bool) -> None:
    """`pool ls`."""
    rows = summaries(survey(choose(given)))
    if as_json:
        print_json({"pools": rows})
        return
    if not rows:
        _print("no pools")
        return
    names = ("keyspace", "model", "engine", "rank", "entries", "size")
    headings = (*names, "last use", "lock", "tag", "readers")
    cells = (
        (
            row["keyspace"][:_DIGITS],
            row["model"],
            str(row["engine"]),
            str(row["rank"]),
            f"{row['entries']} of {row['slots']}",
            format_bytes(row["disk_bytes"]),
            _time(row["last_use_s"]),
            _holder(row["lock"]),
            _weights(row),
            _pids(row),
        )
        for row in rows
    )
    _print(_table(headings, cells))
    for row in rows:
        _print(*(f"{path}: superblock: {why}" for path, why in row["problems"].items()))


def print_usage(given: Sequence[Path] | None, as_json: bool) -> None:
    """`pool du`."""
    targets = [usage(one) for one in targets_of(given)]
    if as_json:
        print_json({"targets": targets})
        return
    if not targets:
        _print("no pools")
    for target in targets:
        total = sum(space["disk_bytes"] for space in target["keyspaces"])
        free = format_bytes(target["free_bytes"])
        _print(f"{target['target']}: {format_bytes(total)} in pools, {free} free")
        cells = [
            (
                format_bytes(space["disk_bytes"]),
                space["keyspace"][:_DIGITS],
                space["model"],
                str(space["pools"]),
                str(space["live"]),
                "; ".join(sorted(set(space["problems"].values()))) or "ours",
            )
            for space in target["keyspaces"]
        ]
        if cells:
            _print(_table(("size", "keyspace", "model", "pools", "in use", "format"), cells))
            _print(_regions(target["keyspaces"]))


def _regions(spaces: Iterable[dict[str, Any]]) -> Table:
    """The regions of these keyspaces on one target: who has what, and who reads it."""
    rows = ((space["keyspace"], one) for space in spaces for one in space["regions"])
    cells = [
        (
            keyspace[:_DIGITS],
            f"engine-{one['engine']}/rank-{one['rank']}",
            one["owner"][:_TAG_DIGITS] if one["owner"] else "unknown",
            _holder(one["lock"]),
            one["lease"]["text"] if one["lease"] else "none",
            _weights(one),
            _pids(one),
        )
        for keyspace, one in rows
    ]
    names = ("keyspace", "region", "owner", "lock", "lease", "tag", "readers")
    return _table(names, cells)


def print_details(
    given: Sequence[Path] | None, which: str, slot: int | None, as_json: bool
) -> None:
    """`pool inspect`."""
    parts = survey(choose(given, which))
    space = parts[0].directory.target / parts[0].directory.keyspace
    facts = read_facts(space)
    ranks = [inspect_rank(one) for one in parts]
    found: dict[str, Any] = {"keyspace": space.name, "facts": facts, "directories": ranks}
    if slot is not None:
        if len(parts) > 1:
            names = ", ".join(str(one.path) for one in parts)
            raise PoolError(
                f"--slot {slot}: {which} holds {len(parts)} directories with slots of their own: "
                f"give one of {names}"
            )
        found["slot"] = inspect_slot(parts[0], slot)
    if as_json:
        print_json(found)
        return
    _print(f"keyspace {space.name}")
    if facts is None:
        _print("  facts: keyspace.json is missing, or belongs to another digest")
    for name, value in (facts or {}).items():
        _print(f"  {name}: {value if isinstance(value, str) else json.dumps(value)}")
    for one in ranks:
        _print_rank(one)
    if "slot" in found:
        _print_slot(found["slot"])


def _print_rank(one: dict[str, Any]) -> None:
    _print("", one["directory"])
    _print(f"  lock: {_holder(one['lock'])}; last use {_time(one['last_use_s'])}")
    if one["lease"]:
        _print(f"  lease: {one['lease']['text']}")
    _print(f"  readers: {_pids(one)}")
    _print(f"  on disk: {format_bytes(one['disk_bytes'])}")
    if one["problem"]:
        _print(f"  superblock: {one['problem']}")
        return
    for name, value in one["superblock"].items():
        _print(f"  {name}: {value}")
    if one["log"]:
        _print("  log: " + ", ".join(f"{name} {value}" for name, value in one["log"].items()))
    if not one["adopts"]:
        _print("  the next start adopts none of its entries")
    counts = ", ".join(f"{count} {state}" for state, count in one["occupancy"].items())
    _print(f"  slots: {counts}")


def _print_slot(slot: dict[str, Any]) -> None:
    _print("", f"slot {slot['slot']}, at byte {slot['slab_offset']} of {slot['directory']}")
    for name in ("entry", "header"):
        part = slot[name]
        words = " ".join(f"{key}={value}" for key, value in part.items()) if part else "none"
        _print(f"  {name}: {words}")
    _print(f"  payload: {slot['payload']}", f"  {slot['verdict']}")


def print_reports(reports: Sequence[Report], as_json: bool) -> int:
    """Print what fsck or scrub has found; return the exit code."""
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
            _print(f"  in use ({report.surveyed.lock}): read only")
        for kind, count in report.counts.items():
            found_here = (one["slot"] for one in report.findings if one["kind"] == kind)
            slots = [str(slot) for slot in found_here if slot is not None]
            more = ", …" if count > _LISTED_MAX else ""
            where = f": {count}, slots {', '.join(slots[:_LISTED_MAX])}{more}" if slots else ""
            _print(f"  {kind}{where}")
        if report.worst is Damage.DAMAGE and not report.repair and not found["live"]:
            _print("  --repair drops or rebuilds these entries; their chunks are computed again")
        if report.worst is Damage.UNUSABLE:
            remedy = f"`vllm-nvmeof pool rm {report.surveyed.path}` frees its space"
            try:
                offline.check_ours([report.surveyed.path])
            except PoolError:
                remedy = "no superblock proves that these files are ours: look, and delete by hand"
            _print(f"  {remedy}")
    return exit_code(reports)


def remove(directories: Sequence[RankDirectory], yes: bool, as_json: bool) -> None:
    """`pool rm`: ask unless `yes`, remove, print."""
    offline.check_ours(directory.path for directory in directories)
    parts = survey(directories)
    for part in parts:
        if part.lock.live:
            raise PoolLockedError(f"{part.path} is in use ({part.lock}): stop that server first")
    if not yes:
        if as_json:
            raise PoolError("--json: a program cannot be asked; give --yes as well")
        for part in parts:
            size, model = format_bytes(part.disk_bytes), model_name(part.path.parents[1])
            typer.echo(f"{part.path}  {size}  model {model!r}", err=True)
        typer.confirm(f"Remove these {len(parts)}?", abort=True, err=True)
    removed = offline.remove(directories)
    if as_json:
        print_json({"removed": [asdict(one) for one in removed]})
        return
    for one in removed:
        typer.echo(f"removed {one.directory}: {format_bytes(one.freed_bytes)} freed")
        if one.left:
            typer.echo(f"  left, not ours: {', '.join(map(repr, one.left))}", err=True)


def prefill(directories: Sequence[RankDirectory], as_json: bool) -> None:
    """`pool prefill`."""
    with progress("bytes") as on_progress:
        filled = offline.prefill(directories, on_progress)
    if as_json:
        print_json({"prefilled": [asdict(one) for one in filled]})
        return
    for one in filled:
        size = format_bytes(one.written_bytes)
        typer.echo(f"{one.directory}: filled {one.filled} of {one.slots} slots, {size}")
