# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof pool …`: looking at pools, checking, repairing and removing them, offline."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vllm_nvmeof_offload.pool.survey import RankDirectory

__all__ = ["pool_app"]

pool_app = typer.Typer(
    help="Pools on disk. Everything is read-only where a server holds a pool's lock.",
    no_args_is_help=True,
)

Targets = Annotated[
    list[Path] | None,
    typer.Option("--target", help="A target directory; repeatable. Default: the configured ones."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
Which = Annotated[
    str,
    typer.Argument(
        metavar="KEYSPACE|DIR",
        help="A keyspace or the start of it, or the directory of a keyspace, engine or rank.",
    ),
]
MaybeWhich = Annotated[
    str | None,
    typer.Argument(metavar="KEYSPACE|DIR", help="Only this one; default: all on the targets."),
]

#: fsck's and scrub's exit code when they could not check.
_NOT_CHECKED = 8


@contextlib.contextmanager
def _plain_errors(code: int = 1) -> Iterator[None]:
    """One line on stderr, and the exit code, for what the world did."""
    from vllm_nvmeof_offload.errors import OffloadError

    try:
        yield
    except OffloadError as error:
        typer.echo(f"vllm-nvmeof: {error}", err=True)
        raise typer.Exit(code) from None


def _targets(given: list[Path] | None) -> list[Path]:
    """The targets, each once; configured ones that do not exist yet hold no pools."""
    from vllm_nvmeof_offload.config import parse_config

    found = given or [path for path in map(Path, parse_config({}).targets) if path.exists()]
    return list(dict.fromkeys(Path(os.path.realpath(path)) for path in found))


def _choose(given: list[Path] | None, which: str | None) -> list[RankDirectory]:
    from vllm_nvmeof_offload.pool.survey import find, select

    targets = _targets(given)
    return find(targets) if which is None else select(targets, which)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


@pool_app.command("ls")
def list_pools(target: Targets = None, as_json: AsJson = False) -> None:
    """List every keyspace, engine and rank: entries, size, last use, who holds it."""
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.commands.pool.show import summaries
    from vllm_nvmeof_offload.pool.survey import survey

    with _plain_errors():
        rows = summaries(survey(_choose(target, None)))
    if as_json:
        _print_json({"pools": rows})
    else:
        show.print_pools(rows)


@pool_app.command()
def du(target: Targets = None, as_json: AsJson = False) -> None:
    """Show the bytes on disk of every keyspace, of other models and format versions too."""
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.commands.pool.show import usage

    with _plain_errors():
        targets = _targets(target)
        found = {"targets": [usage(one) for one in targets]}
    if as_json:
        _print_json(found)
    else:
        show.print_usage(found["targets"])


@pool_app.command()
def inspect(
    which: Which,
    target: Targets = None,
    slot: Annotated[int | None, typer.Option(help="Also this pool slot, read whole.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a pool's superblock, geometry, facts and occupancy, and one of its slots."""
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.commands.pool.show import inspect_rank, inspect_slot
    from vllm_nvmeof_offload.errors import PoolError
    from vllm_nvmeof_offload.pool.survey import read_facts, survey

    with _plain_errors():
        parts = survey(_choose(target, which))
        space = parts[0].directory.target / parts[0].directory.keyspace
        found: dict[str, Any] = {
            "keyspace": space.name,
            "facts": read_facts(space),
            "directories": [inspect_rank(one) for one in parts],
        }
        if slot is not None:
            names = sorted({one.directory.name for one in parts})
            if len(names) > 1:
                raise PoolError(
                    f"--slot {slot}: {which} holds {len(names)} pools ({', '.join(names)}): give "
                    f"the directory of one rank"
                )
            found["slot"] = inspect_slot(parts, slot)
    if as_json:
        _print_json(found)
    else:
        show.print_details(found)


@pool_app.command()
def fsck(
    which: MaybeWhich = None,
    target: Targets = None,
    repair: Annotated[bool, typer.Option("--repair", help="Rebuild the table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check superblocks, and tables against slot headers.

    Exit code, of the worst finding: 0 whole, 1 repaired, 4 damage is left (those chunks are
    computed again), 8 a pool cannot be used or was not checked.
    """
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.commands.pool.check import exit_code, fsck

    with _plain_errors(_NOT_CHECKED), show.progress("headers") as on_progress:
        reports = fsck(_choose(target, which), repair, on_progress)
    if as_json:
        _print_json({"reports": [report.as_json() for report in reports]})
    else:
        show.print_reports(reports, repair)
    raise typer.Exit(exit_code(reports))


@pool_app.command()
def scrub(
    which: MaybeWhich = None,
    target: Targets = None,
    repair: Annotated[bool, typer.Option("--repair", help="Drop entries of damage.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every stored slot whole and verify its checksums. Exit codes as of fsck."""
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.commands.pool.check import exit_code, scrub

    with _plain_errors(_NOT_CHECKED), show.progress("bytes") as on_progress:
        reports = scrub(_choose(target, which), repair, on_progress)
    if as_json:
        _print_json({"reports": [report.as_json() for report in reports]})
    else:
        show.print_reports(reports, repair)
    raise typer.Exit(exit_code(reports))


@pool_app.command("rm")
def remove_pool(
    which: Which,
    target: Targets = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a pool. Refused while a live server holds it; deletes files of ours only."""
    from vllm_nvmeof_offload.commands.pool.edit import check_ours, remove
    from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
    from vllm_nvmeof_offload.pool.survey import model_name, survey
    from vllm_nvmeof_offload.units import format_bytes

    with _plain_errors():
        directories = _choose(target, which)
        check_ours(directories)
        parts = survey(directories)
        for one in parts:
            if one.lock.live:
                raise PoolLockedError(f"{one.path} is in use ({one.lock}): stop that server first")
        if not yes:
            if as_json:
                raise PoolError("--json: a program cannot be asked; give --yes as well")
            for one in parts:
                model = model_name(one.path.parents[1])
                typer.echo(f"{one.path}  {format_bytes(one.disk_bytes)}  model {model!r}", err=True)
            typer.confirm(f"Remove these {len(parts)}?", abort=True, err=True)
        removed = remove(directories)
    if as_json:
        _print_json(
            {
                "removed": [
                    {"directory": str(r.path), "freed_bytes": r.freed_bytes, "left": r.left}
                    for r in removed
                ]
            }
        )
        return
    for one_removed in removed:
        typer.echo(f"removed {one_removed.path}: {format_bytes(one_removed.freed_bytes)} freed")
        if one_removed.left:
            typer.echo(f"  left, not ours: {', '.join(map(repr, one_removed.left))}", err=True)


@pool_app.command()
def prefill(which: MaybeWhich = None, target: Targets = None, as_json: AsJson = False) -> None:
    """Write zeros into slots that were never written, so that first writes run at full speed.

    For pools that a server has made and is not using now. Stored slots are left alone.
    """
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.commands.pool.edit import prefill
    from vllm_nvmeof_offload.units import format_bytes

    with _plain_errors(), show.progress("bytes") as on_progress:
        filled = prefill(_choose(target, which), on_progress)
    if as_json:
        rows = [
            {
                "directory": str(one.path),
                "slots": one.slots,
                "filled": one.filled,
                "written_bytes": one.written_bytes,
            }
            for one in filled
        ]
        _print_json({"prefilled": rows})
        return
    for one in filled:
        size = format_bytes(one.written_bytes)
        typer.echo(f"{one.path}: filled {one.filled} of {one.slots} slots, {size}")
