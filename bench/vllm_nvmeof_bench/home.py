# SPDX-License-Identifier: Apache-2.0
"""The environment of a run: a temporary directory, a progress bar, no garbage collection."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_offload.units import format_bytes


@contextlib.contextmanager
def home_in(directory: Path, bytes_max: int, remedy: str = "give another --dir") -> Iterator[Path]:
    """Create a directory inside `directory`, and delete it with its contents at the end. Raise
    BenchError if `directory` cannot be used or has less than `bytes_max` free."""
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        home = Path(tempfile.mkdtemp(prefix="vllm-nvmeof-bench-", dir=directory)).resolve()
    except OSError as error:
        raise BenchError(f"{directory}: cannot be used ({error.strerror})") from None
    with _sigterm_as_interrupt():
        try:
            free = shutil.disk_usage(home).free
            if free < bytes_max:
                raise BenchError(
                    f"{directory} has {format_bytes(free)} free; this run needs up to "
                    f"{format_bytes(bytes_max)}: {remedy}"
                )
            yield home
        finally:
            shutil.rmtree(home, ignore_errors=True)
            if made:
                with contextlib.suppress(OSError):
                    directory.rmdir()


def drop_logs(logs: Path, names: Iterable[str]) -> None:
    """Delete the logs of the servers `names`. Delete the directory `logs` only if it is then empty,
    because it can contain the user's own files."""
    for name in names:
        with contextlib.suppress(OSError):
            (logs / f"{name}.log").unlink()
    with contextlib.suppress(OSError):
        logs.rmdir()


def sync_file_system(directory: Path) -> None:
    """Write the dirty pages of `directory`'s file system to the device."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


@contextlib.contextmanager
def quiet_interpreter() -> Iterator[None]:
    """Disable garbage collection during a measurement."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


#: A callback with the number of measurements done, their total, and the next one's description.
OnProgress = Callable[[int, int, str], None]


def unheard(done: int, total: int, what: str) -> None:
    """Ignore all progress."""


@contextmanager
def progress(logged: Callable[[str], bool] = lambda what: True) -> Iterator[OnProgress]:
    """Show a bar. Redraw it only between measurements: a refresh thread would disturb them.

    logged: returns whether to print a step's text if stderr is not a terminal.
    """
    text = TextColumn("{task.description}")
    columns = text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what, refresh=True)
            if not console.is_terminal and logged(what):
                bar.console.print(f"{done}/{total} {what}", highlight=False)

        yield report
