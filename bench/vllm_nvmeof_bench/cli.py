# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench …`: a command per benchmark, `report` for results files, and the demo.

Each benchmark is imported only when its command is used, so that other commands start fast.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from vllm_nvmeof_bench import benchmark as benchmarks
from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.report import Report
from vllm_nvmeof_bench.results import name_in, size_name
from vllm_nvmeof_bench.settings import Option, option_of
from vllm_nvmeof_offload.units import parse_bytes

Goals = Annotated[bool, typer.Option("--targets/--no-targets", help="Print the goals.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with code 1 if a goal is missed.")]


class _Benches(TyperGroup):
    """The benchmarks' commands, each built on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*benchmarks.GROUPS, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (written := super().get_command(ctx, cmd_name)) is not None:
            return written
        group = benchmarks.GROUPS.get(cmd_name)
        if group is None:
            return None
        if not group.cases:
            return _bench(cmd_name, group.panel)
        return TyperGroup(
            name=cmd_name,
            commands={name: _bench(name) for name in group.cases},
            help=group.help,
            no_args_is_help=True,
            rich_help_panel=group.panel,
            rich_markup_mode=self.rich_markup_mode,
        )


bench_app = typer.Typer(
    cls=_Benches,
    help="Benchmark servers, the disks and GPU of this machine, and parts of this package.",
    no_args_is_help=True,
)


def _bench(name: str, panel: str | None = None) -> Any:
    return bench_of(name, benchmarks.report_of(name), benchmarks.command(name), panel)


def bench_of(command_name: str, found: Report, command: Command, panel: str | None = None) -> Any:
    """Build a command that measures, writes the results file and prints its report."""

    def run(**given: Any) -> None:
        json_path: Path = given["json_path"]
        command.measure(settings_of(command.settings, given), json_path)
        reached = found.show(json_path, given.get("goals", True))
        raise typer.Exit(int(given.get("check", False) and not reached))

    file = typer.Option("--json", help="JSON file for the samples.")
    options: dict[str, tuple[Any, Any]] = {
        **options_of(command.settings),
        "json_path": (Annotated[Path, file], Path(f"build/bench/{found.name}.json")),
    }
    if found.goals is not None:
        options |= {"goals": (Goals, True), "check": (Check, False)}
    run.__doc__ = command.help
    run.__annotations__ = {name: kind for name, (kind, _) in options.items()}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            for name, (kind, default) in options.items()
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command(command_name, rich_help_panel=panel)(run)
    return typer.main.get_command(app)


def options_of(settings: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options that `settings` declares: field name → (type, default)."""
    found: dict[str, tuple[Any, Any]] = {}
    hints = get_type_hints(settings)
    for one in dataclasses.fields(settings):
        hint, option = hints[one.name], option_of(one)
        if option is not None:
            found[one.name] = _typed(one, hint, option)
        elif dataclasses.is_dataclass(hint):
            found |= options_of(hint)  # type: ignore[arg-type]
    return found


def settings_of(settings: type[Any], given: dict[str, Any]) -> Any:
    """Build settings from the options' values."""
    chosen: dict[str, Any] = {}
    hints = get_type_hints(settings)
    for one in dataclasses.fields(settings):
        if option_of(one) is not None:
            value = given[one.name]
            chosen[one.name] = tuple(value) if isinstance(value, list) else value
        elif dataclasses.is_dataclass(hints[one.name]) and options_of(hints[one.name]):
            chosen[one.name] = settings_of(hints[one.name], given)
    return settings(**chosen)


def _typed(one: dataclasses.Field[Any], hint: Any, option: Option) -> tuple[Any, Any]:
    """Return (type, default) for typer; `read` parses sizes and comma-separated values."""
    if option.argument:
        return Annotated[hint, typer.Argument(help=option.help)], inspect.Parameter.empty
    flag, more = [option.flag] if option.flag else [], {"help": option.help}
    if option.repeated:
        return Annotated[list[str], typer.Option(*flag, show_default=False, **more)], one.default
    several = isinstance(one.default, tuple)
    if not (several or option.in_bytes):
        return Annotated[hint, typer.Option(*flag, min=option.min, **more)], one.default
    kind = parse_bytes if option.in_bytes else get_args(hint)[0]

    def read(text: str) -> Any:
        texts = [part.strip() for part in (text.split(",") if several else [text]) if part.strip()]
        if text == shown or not texts:
            return one.default
        try:
            values = tuple(map(kind, texts))
        except ValueError as error:
            wrong = str(error) if option.in_bytes else f"{text!r}: give numbers such as 1,2,4"
            raise typer.BadParameter(wrong) from None
        return values if several else values[0]

    defaults = one.default if several else (one.default,)
    shown = ",".join(map(_size if option.in_bytes else str, defaults))
    more |= {"parser": read, "metavar": "TEXT", "show_default": bool(shown)}
    return Annotated[Any, typer.Option(*flag, **more)], shown


def _size(count: int) -> str:
    return size_name(count).replace(" ", "")


def demo(
    json_path: Annotated[Path, typer.Option("--json", help="JSON file for the results.")] = Path(
        "build/demo.json"
    ),
    quick: Annotated[bool, typer.Option(help="Take fewer samples.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the pool's directory.")] = False,
    pool: Annotated[
        Path | None, typer.Option(help="Create the pool's directory here, not in build/.")
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Use a random model, with tokens instead of text.")
    ] = False,
) -> None:
    """Demonstrate offloading with a small model: repeated prompts, a preemption and a restart."""
    from vllm_nvmeof_bench.demo.main import run

    raise typer.Exit(run(json_path, quick=quick, keep=keep, pool_dir=pool, random=random))


@bench_app.command(rich_help_panel=benchmarks.SERVERS)
def report(
    path: Annotated[
        Path,
        typer.Argument(
            help="Results file of a benchmark, directory of such files, or Markdown page whose "
            "marked figures are updated from bench/results."
        ),
    ],
    goals: Goals = True,
    page: Annotated[
        Path | None, typer.Option(help="Page to write for a directory. Default: DIR/REPORT.md.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit with code 1 on a missed goal, an unreadable file or an outdated page, which "
            "is then not rewritten.",
        ),
    ] = False,
) -> None:
    """Print the tables of a results file, or write a Markdown page for a directory of such files.

    The page lists damaged files and files of unknown benchmarks, each with the reason.
    """
    if path.is_dir():
        from vllm_nvmeof_bench.page import write

        fine = write(path, page)
    elif path.suffix == ".md":
        from vllm_nvmeof_bench.figures import update

        fine = update(path, check)
    else:
        fine = benchmarks.report_of(name_in(path)).show(path, goals)
    raise typer.Exit(int(check and not fine))
