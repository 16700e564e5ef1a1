# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench …`: the face of the benchmarks, which lie in `vllm_nvmeof_bench`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "Check",
    "Json",
    "Plot",
    "Targets",
    "add_report",
    "bench_app",
    "import_bench",
    "names",
    "parse_size",
    "plain_errors",
]

bench_app = typer.Typer(
    help="Benchmarks on this machine: ours beside fio, a bare ring loop and vLLM's own fs tier.",
    no_args_is_help=True,
)

_PACKAGE = "vllm_nvmeof_bench"
_JSON = Path("build/bench/pool.json")

Json = Annotated[Path, typer.Option("--json", help="Where the samples go.")]
Written = Annotated[Path, typer.Argument(help="A file that the benchmark wrote.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw them: a PNG file; needs matplotlib.")]
Targets = Annotated[bool, typer.Option("--targets/--no-targets", help="Print the targets.")]
Check = Annotated[bool, typer.Option("--check", help="Exit code 1 if a target is missed.")]


def import_bench(name: str) -> Any:
    """A module of the benchmarks; one plain line if they are not installed."""
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != _PACKAGE:
            raise
    typer.echo(
        f"vllm-nvmeof: the benchmarks ({_PACKAGE}) are not installed: install this package's "
        f"wheel, or set PYTHONPATH=bench in a checkout",
        err=True,
    )
    raise typer.Exit(1)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """One line on stderr, and exit code 1, for what the world did."""
    from vllm_nvmeof_offload.errors import OffloadError

    error_type: type[Exception] = import_bench("pool.settings").BenchError
    try:
        yield
    except (error_type, OffloadError) as error:
        typer.echo(f"vllm-nvmeof: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("vllm-nvmeof: interrupted; what was written is deleted", err=True)
        raise typer.Exit(130) from None


def names(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """What a comma-separated option names; nothing: all that is known."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) or known


def _sizes(text: str, known: tuple[int, ...]) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part.strip()]
    return tuple(parse_size(part, "--blocks") for part in parts) or known


def parse_size(text: str, option: str) -> int:
    """Bytes that an option gives, such as 64KiB; a usage error else."""
    from vllm_nvmeof_offload.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def add_report(name: str, default: Path) -> None:
    """Adds the command NAME-report: what `bench NAME` wrote, printed or drawn again.

    default: the file that it reads unless it is told another.
    """
    help_text = f"Print the tables of a file of `bench {name}` again, or draw it; measure nothing."

    @bench_app.command(f"{name}-report", help=help_text)
    def report(
        json_path: Written = default,
        plot: Plot = None,
        targets: Targets = True,
        check: Check = False,
    ) -> None:
        with plain_errors():
            reached = import_bench("show").show_file(name, json_path, plot, targets)
        raise typer.Exit(int(check and not reached))


@bench_app.command()
def pool(
    directory: Annotated[
        Path, typer.Option("--dir", help="The disk to measure: a directory on it.")
    ] = Path("build/bench/disk"),
    json_path: Json = _JSON,
    rounds: Annotated[int, typer.Option(help="Samples of everything.", min=1)] = 5,
    blocks: Annotated[
        str, typer.Option(help="Block sizes, such as 64KiB,2MiB. Default: 64 KiB to 4 MiB.")
    ] = "",
    arms: Annotated[
        str, typer.Option(help="Of ours,ours_threads,fio,ring,vllm_fs. Default: all.")
    ] = "",
    cases: Annotated[str, typer.Option(help="Such as batch_read,single_write. Default: all.")] = "",
    bytes_per_round: Annotated[str, typer.Option(help="Moved by a batch.")] = "1GiB",
    depth: Annotated[int, typer.Option(help="Blocks in flight of fio and the ring.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the random bytes and the blocks read.")] = 1,
    plot: Plot = None,
    targets: Targets = True,
    check: Check = False,
) -> None:
    """Measure the pool's I/O beside its rivals, interleaved in one run on one disk.

    Takes about 8 minutes and up to 3 GiB of the disk, which is left as it was. Nothing else
    should run meanwhile: the load average before and after is printed and kept.
    """
    with plain_errors():
        known = import_bench("pool.settings")
        settings = known.Settings(
            arms=names(arms, known.ARMS),
            cases=names(cases, known.CASES),
            blocks=_sizes(blocks, known.BLOCKS),
            rounds=rounds,
            bytes_per_round=parse_size(bytes_per_round, "--bytes-per-round"),
            depth=depth,
            seed=seed,
        )
        import_bench("pool.command").measure(settings, directory, json_path, targets)
        reached = import_bench("show").show_file("pool", json_path, plot, targets)
    raise typer.Exit(int(check and not reached))


add_report("pool", _JSON)
