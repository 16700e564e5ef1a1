# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus, from Debian's package, that scrapes the metrics that servers have exported.

Nothing is installed: the package is unpacked into the user's cache, once per machine.
"""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from vllm_nvmeof_bench.servers.server import ReservedPort

from tests.fabric.rig.packages import RigUnavailableError, apt_in, locked, run_tool, unpack

__all__ = ["Exporter", "Prometheus", "RigUnavailableError", "tool"]

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


class Exporter:
    """Serves saved `/metrics` texts, one per scrape in order; the last one is repeated."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)
        self._served = 0
        exporter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exporter._next().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def _next(self) -> str:
        text = self._texts[min(self._served, len(self._texts) - 1)]
        self._served += 1
        return text

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


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
