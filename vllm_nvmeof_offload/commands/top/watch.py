# SPDX-License-Identifier: Apache-2.0
"""The loop of `vllm-nvmeof top`: read several servers, draw, and apply keys."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from vllm_nvmeof_offload.commands import print_json
from vllm_nvmeof_offload.commands.exit_codes import FAILED
from vllm_nvmeof_offload.commands.scrape import Metrics, ScrapeError, scrape_ours
from vllm_nvmeof_offload.commands.top import screen
from vllm_nvmeof_offload.commands.top.reading import Reading, read
from vllm_nvmeof_offload.units import printable

_REDRAW_S = 0.5


class Watched:
    """A server that is read again and again. `reading` is replaced as a whole.

    It keeps the last values, with an `error`, while the server does not answer.
    """

    def __init__(self, url: str) -> None:
        self.reading: Reading = {"url": url}
        self._before: tuple[float, Metrics] | None = None

    def update(self) -> Reading:
        url = str(self.reading["url"])
        try:
            now, at_s = scrape_ours(url), time.monotonic()
            then_s, before = self._before or (at_s, None)
            self.reading = read(url, before, now, at_s - then_s)
            self._before = at_s, now
        except ScrapeError as error:
            self.reading = {**self.reading, "error": printable(str(error))}
        except (LookupError, TypeError, ValueError) as error:  # labels or values of another version
            why = printable(f"{url}: metrics of another version of this package ({error!r})")
            self.reading = {**self.reading, "error": why}
        return self.reading

    def follow(self, interval_s: float) -> None:
        """Update until the process ends."""
        while True:
            time.sleep(interval_s)
            self.update()


def run(urls: Sequence[str], interval_s: float, once: bool, as_json: bool) -> int:
    """Show servers until q is pressed, or print one reading of each; return the exit code.

    Raises:
        ScrapeError: no server answers with metrics of this package.
    """
    watched = [Watched(url) for url in urls]
    first = [one.update() for one in watched]
    if all("error" in reading for reading in first):
        raise ScrapeError("\n".join(reading["error"] for reading in first))
    console = Console()
    if not (once or as_json) and console.is_terminal:
        for one in watched:
            threading.Thread(target=one.follow, args=(interval_s,), daemon=True).start()
        _live(console, watched)
        return 0
    time.sleep(interval_s)
    readings = [one.update() for one in watched]
    if as_json:
        print_json(readings)
    else:
        overview = [screen.servers(readings)] if len(readings) > 1 else []
        console.print(*overview, *map(screen.server, readings), sep="\n")
    return FAILED if any("error" in reading for reading in readings) else 0


def _live(console: Console, watched: Sequence[Watched]) -> None:
    views = {str(number): name for number, name in enumerate(screen.VIEWS, 1)}
    if len(watched) > 1:
        views = {"0": "servers", **views, "n": "next"}
    help_line = Text(
        "  ".join(f"{key} {does}" for key, does in {**views, "q": "quit"}.items()), "dim"
    )
    view, number = next(iter(views)), 0
    with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            readings = [one.reading for one in watched]
            shown: RenderableType = screen.servers(readings)
            if view != "0":
                shown = screen.server(readings[number], [views[view]])
            live.update(Group(help_line, shown), refresh=True)
            key = wait(_REDRAW_S)
            if key == "q":
                return
            if key == "n":
                number = (number + 1) % len(watched)
            elif key in views:
                view = key


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key; it returns "" after its seconds, q at the end."""
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor) if sys.stdin.isatty() else None

    def wait(seconds: float) -> str:
        # Without a terminal there are no keys, and the end of a file would end the loop.
        if not select.select([descriptor] if saved else [], [], [], seconds)[0]:
            return ""
        return os.read(descriptor, 1).decode(errors="replace") or "q"

    try:
        if saved:
            tty.setcbreak(descriptor)
        yield wait
    finally:
        if saved:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)
