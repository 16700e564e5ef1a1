# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof pool …`: lists, checks, repairs, fills and removes pools, without a server."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_nvmeof_offload.commands import plain_errors, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_nvmeof_offload.commands.pool.check import Report
    from vllm_nvmeof_offload.commands.pool.offline import Progress
    from vllm_nvmeof_offload.pool.survey import RankDirectory

pool_app = typer.Typer(
    help="Look at pools on disk, check and edit them. A pool that a server holds is only read.",
    no_args_is_help=True,
)

Targets = Annotated[
    list[Path] | None,
    typer.Option("--target", help="A target directory; repeatable. Default: the configured ones."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Which = Annotated[
    str,
    typer.Argument(
        metavar="KEYSPACE|DIR",
        help="A keyspace or its first digits, or the directory of a keyspace, engine or rank.",
    ),
]
MaybeWhich = Annotated[
    str | None,
    typer.Argument(
        metavar="KEYSPACE|DIR",
        help="A keyspace or its first digits, or a directory. Default: all on the targets.",
    ),
]

#: The exit code of fsck and scrub when they could not check.
_NOT_CHECKED = 8


def _targets(given: list[Path] | None) -> list[Path]:
    """The targets, each once; configured ones that do not exist yet hold no pools."""
    from vllm_nvmeof_offload.config import parse_config

    found = given or [path for path in map(Path, parse_config({}).targets) if path.exists()]
    return list(dict.fromkeys(Path(os.path.realpath(path)) for path in found))


def _choose(given: list[Path] | None, which: str | None) -> list[RankDirectory]:
    from vllm_nvmeof_offload.pool.survey import find, select

    targets = _targets(given)
    return find(targets) if which is None else select(targets, which)


@pool_app.command("ls")
def list_pools(target: Targets = None, as_json: AsJson = False) -> None:
    """List every keyspace, engine and rank: entries, size, last use, the process that holds it."""
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.pool.survey import survey

    with plain_errors():
        rows = show.summaries(survey(_choose(target, None)))
    if as_json:
        print_json({"pools": rows})
    else:
        show.print_pools(rows)


@pool_app.command()
def du(target: Targets = None, as_json: AsJson = False) -> None:
    """Show the bytes on disk of every keyspace, including other models and format versions."""
    from vllm_nvmeof_offload.commands.pool import show

    with plain_errors():
        found = [show.usage(one) for one in _targets(target)]
    if as_json:
        print_json({"targets": found})
    else:
        show.print_usage(found)


@pool_app.command()
def inspect(
    which: Which,
    target: Targets = None,
    slot: Annotated[
        int | None, typer.Option(help="Also read this pool slot whole and show it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a pool's superblock, geometry, facts and occupancy, and one of its slots."""
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.errors import PoolError
    from vllm_nvmeof_offload.pool.survey import read_facts, survey

    with plain_errors():
        parts = survey(_choose(target, which))
        space = parts[0].directory.target / parts[0].directory.keyspace
        found: dict[str, Any] = {
            "keyspace": space.name,
            "facts": read_facts(space),
            "directories": [show.inspect_rank(one) for one in parts],
        }
        if slot is not None:
            names = sorted({one.directory.name for one in parts})
            if len(names) > 1:
                raise PoolError(
                    f"--slot {slot}: {which} holds {len(names)} pools ({', '.join(names)}): give "
                    f"the directory of one rank"
                )
            found["slot"] = show.inspect_slot(parts, slot)
    if as_json:
        print_json(found)
    else:
        show.print_details(found)


@pool_app.command("fsck")
def run_fsck(
    which: MaybeWhich = None,
    target: Targets = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Rebuild wrong table entries from slot headers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check superblocks, and tables against slot headers.

    Exit code, by the worst finding: 0 whole, 1 repaired, 4 damage is left (the damaged chunks
    are computed again), 8 a pool cannot be used or was not checked.
    """
    from vllm_nvmeof_offload.commands.pool.check import fsck

    _run(lambda report_to: fsck(_choose(target, which), repair, report_to), "headers", as_json)


@pool_app.command("scrub")
def run_scrub(
    which: MaybeWhich = None,
    target: Targets = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop the table entries of damaged slots.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every stored slot whole and verify its checksums.

    Exit code, by the worst finding: 0 whole, 1 repaired, 4 damage is left (the damaged chunks
    are computed again), 8 a pool cannot be used or was not checked.
    """
    from vllm_nvmeof_offload.commands.pool.check import scrub

    _run(lambda report_to: scrub(_choose(target, which), repair, report_to), "bytes", as_json)


def _run(check: Callable[[Progress], list[Report]], unit: str, as_json: bool) -> None:
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.commands.pool.check import exit_code

    with plain_errors(_NOT_CHECKED), show.progress(unit) as on_progress:
        reports = check(on_progress)
    if as_json:
        print_json({"reports": [report.as_json() for report in reports]})
    else:
        show.print_reports(reports)
    raise typer.Exit(exit_code(reports))


@pool_app.command("rm")
def remove_pool(
    which: Which,
    target: Targets = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a pool. Refused while a live server holds it; deletes only files of this program."""
    from vllm_nvmeof_offload.commands.pool.edit import check_ours, remove
    from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
    from vllm_nvmeof_offload.pool.survey import model_name, survey
    from vllm_nvmeof_offload.units import format_bytes

    with plain_errors():
        directories = _choose(target, which)
        check_ours(directory.path for directory in directories)
        parts = survey(directories)
        for part in parts:
            if part.lock.live:
                raise PoolLockedError(
                    f"{part.path} is in use ({part.lock}): stop that server first"
                )
        if not yes:
            if as_json:
                raise PoolError("--json: a program cannot be asked; give --yes as well")
            for part in parts:
                size, model = format_bytes(part.disk_bytes), model_name(part.path.parents[1])
                typer.echo(f"{part.path}  {size}  model {model!r}", err=True)
            typer.confirm(f"Remove these {len(parts)}?", abort=True, err=True)
        removed = remove(directories)
    if as_json:
        print_json({"removed": [asdict(one) for one in removed]})
        return
    for one in removed:
        typer.echo(f"removed {one.directory}: {format_bytes(one.freed_bytes)} freed")
        if one.left:
            typer.echo(f"  left, not ours: {', '.join(map(repr, one.left))}", err=True)


@pool_app.command("prefill")
def prefill_pools(
    which: MaybeWhich = None, target: Targets = None, as_json: AsJson = False
) -> None:
    """Write zeros into slots that were never written, so that first writes run at full speed.

    For pools that a server has created and no server is using. Stored slots are not touched.
    """
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.commands.pool.edit import prefill
    from vllm_nvmeof_offload.units import format_bytes

    with plain_errors(), show.progress("bytes") as on_progress:
        filled = prefill(_choose(target, which), on_progress)
    if as_json:
        print_json({"prefilled": [asdict(one) for one in filled]})
        return
    for one in filled:
        size = format_bytes(one.written_bytes)
        typer.echo(f"{one.directory}: filled {one.filled} of {one.slots} slots, {size}")
