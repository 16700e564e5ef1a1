# SPDX-License-Identifier: Apache-2.0
"""The progress of a benchmark: a bar on a terminal, lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

#: The arguments: measurements done, measurements in total, and a text for the next one.
OnProgress = Callable[[int, int, str], None]


def unheard(done: int, total: int, what: str) -> None:
    """Ignore progress."""


@contextmanager
def progress(logged: Callable[[str], bool] = lambda what: True) -> Iterator[OnProgress]:
    """Show a bar. It is redrawn only between measurements: a refresh thread would affect them.

    logged: a function of a step's text: whether to print it if stderr is not a terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what, refresh=True)
            if not console.is_terminal and logged(what):
                bar.console.print(f"{done}/{total} {what}", highlight=False)

        yield report
