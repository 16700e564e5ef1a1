# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus, from Debian's package, that scrapes the metrics that servers have exported.

Nothing is installed: the package is unpacked into the user's cache, once per machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from vllm_nvmeof_bench.servers.server import ReservedPort

from tests.fabric.rig.packages import RigUnavailableError, apt_in, locked, run_tool, unpack

__all__ = ["Prometheus", "RigUnavailableError", "tool"]

_READY_S = 60.0


def tool(name: str) -> Path:
    """The path of `prometheus` or `promtool`, from the system or from Debian's package.

    Raises:
        RigUnavailableError: with the reason and the remedy.
    """
    own = shutil.which(name)
    if own is not None:
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(cache) / "vllm-nvmeof" / "prometheus"
    with locked(place):
        found = place / "root" / "usr" / "bin" / name
        if not found.exists():
            if shutil.which("apt-get") is None:
                raise RigUnavailableError(
                    "there is no apt-get here to download Prometheus: install it"
                )
            archives = place / "apt" / "archives"
            run_tool(["apt-get", *apt_in(place), "-qq", "download", "prometheus"], archives)
            (archive,) = archives.glob("prometheus_*.deb")
            unpack(archive, place / "root")
            shutil.rmtree(place / "apt")
    return found


class Prometheus:
    """Scrapes `address` every second, on the loopback address, with these alert rules."""

    def __init__(self, directory: Path, address: str, rules: Path) -> None:
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
            f"rule_files: ['{rules}']\n"
            "scrape_configs:\n"
            f"  - {{job_name: vllm, static_configs: [{{targets: ['{address}']}}]}}\n"
        )
        self._reserved = ReservedPort()
        port = self._reserved.number
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(tool("prometheus")),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._http = httpx.Client(base_url=self.url, timeout=10, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(20)
        self._reserved.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query; AssertionError if it is refused."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer.get("error"))
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        """The rules and how their last evaluation went."""
        self.wait_for("count_over_time(up[1m]) >= 2")
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """Wait until the query returns a series."""
        deadline, never = time.monotonic() + _READY_S, threading.Event()
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()
            with suppress(httpx.TransportError, ValueError):
                if found := self.query(expression):
                    return found
            never.wait(0.1)
        raise AssertionError(f"{expression} returns nothing\n{self._log.read_text()[-2000:]}")
