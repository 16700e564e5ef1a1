# SPDX-License-Identifier: Apache-2.0
"""Pulls by RDMA in the guest: loads, and the tests of peers with NIXL in place of its stand-in.

The guest's processor is emulated: imports take tens of seconds, and a process's first agent some
seconds. So all processes are forked from one that has imported everything. It has had no agent: UCX
finds out only once which processes are on one host.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import IO, ClassVar

import pytest

from tests.fabric.nvmet import RdmaLinks
from tests.fabric.pair import LOADED_BYTES, Helper, Load, Loader
from tests.faults.peers import kit, serving
from vllm_nvmeof_offload.peers import clients, server
from vllm_nvmeof_offload.peers.transport import load_nixl

PEERS = Path(kit.__file__).parent
#: The link over which chunks are pulled, and its ends.
LINK, LENDING, PULLING = 1, "far1", "near1"
MODULES = ("verbs", "test_peers")
#: All of `verbs`, and what a pull can end in.
CHOSEN = "verbs.py or another-stale or flipped or lent_slots or slow_peer or killed or stopped"
TESTS = 11
#: Of serving processes, one for each `Serving` of these tests.
SERVERS = 14
HELPED_LOADS_MAX = 10
#: How many times as long peers may take on the emulated processor.
SLOWER = 6.0
_CLONE_NEWIPC = 0x08000000
_FORK = get_context("fork")


@dataclass
class Found:
    """loads: with a helper, with a cut link, with the link back, and with the helper killed.
    tests: seconds and failure, or nothing, of each of the `chosen`."""

    loads: dict[str, Load]
    tests: dict[str, tuple[float, str]]
    chosen: int = TESTS


class Server(_FORK.Process):  # type: ignore[name-defined, misc]
    """A serving process, as `kit.start` returns it, that waits for what it shall serve."""

    _ours: ClassVar[list[IO[str]]] = []

    def __init__(self) -> None:
        super().__init__(target=self._serve, daemon=True)
        (asked, to_it), (from_it, told) = os.pipe(), os.pipe()
        self.stdin, self.stdout = open(to_it, "w"), open(from_it)  # noqa: SIM115
        self._ours += self.stdin, self.stdout
        self._theirs = asked, told
        self.start()
        for one in self._theirs:
            os.close(one)

    def _serve(self) -> None:
        for one in self._ours:
            os.close(one.fileno())
        for number, one in enumerate(self._theirs):
            os.dup2(one, number)
            os.close(one)
        sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
        if asked := sys.stdin.readline():
            serving.serve(json.loads(asked))
        os._exit(0)  # without the libraries' destructors (docs/troubleshooting.md)

    def send_signal(self, sig: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, sig)

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        return self.exitcode


def _seem_a_host(device: str) -> None:
    """Use this RDMA device, also in processes forked later, in a new IPC namespace: within one UCX
    would copy through shared memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.unshare(_CLONE_NEWIPC), os.strerror(ctypes.get_errno())
    os.environ["UCX_NET_DEVICES"] = f"r{device}:1"


def _slow_down() -> None:
    """Give peers more time, because the processor is emulated."""
    clients.STALLED_S *= SLOWER
    clients._GREETING_S *= SLOWER
    clients.SILENT_S = server.SILENT_S = SLOWER * clients.SILENT_S
    kit.PACE = SLOWER


def _loads(loader: Loader, helper: Helper) -> dict[str, Load]:
    loader.connect(helper.ready)
    found = {"helped": _helped(loader)}
    RdmaLinks.cut(LINK)
    found["cut"] = loader.load(with_peer=True)
    RdmaLinks.mend(LINK)
    found["again"] = _helped(loader)
    helper.__exit__()
    found["killed"] = loader.load(with_peer=True)
    return found


def _helped(loader: Loader) -> Load:
    """Load until the helper brings chunks: sessions end, and a first pull takes long."""
    for _ in range(HELPED_LOADS_MAX):
        while not loader.is_connected():
            time.sleep(0.1)
        load = loader.load(with_peer=True)
        if load.pulled_bytes > LOADED_BYTES / 10:
            break
    return load


class _Results:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[float, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds, failure = self.of.get(report.nodeid, (0.0, ""))
        failure += report.longreprtext if report.failed else ""
        self.of[report.nodeid] = round(seconds + report.duration, 2), failure
        if report.when == "call":
            print(report.nodeid, f"{report.duration:.1f} s", report.capstdout, failure, flush=True)


def pull(directory: Path, deadline_s: float) -> Found:
    """Pull into and from processes with a pool in `directory`, which supports O_DIRECT."""
    load_nixl()
    kit.TRANSPORTS["verbs"] = True
    for module in MODULES:
        import_module(f"tests.faults.peers.{module}")  # which knows this transport
    os.environ["UCX_LOG_LEVEL"] = "error"  # it warns of each pull that an ended agent leaves
    _slow_down()
    _seem_a_host(PULLING)
    with Loader(directory, by_nixl=True, deadline_s=deadline_s) as loader:
        _seem_a_host(LENDING)
        servers = [Server() for _ in range(SERVERS)]
        with Helper(directory, by_nixl=True) as helper:
            loads = _loads(loader, helper)

    def start(asked: str) -> Server:
        server = servers.pop()
        server.stdin.write(asked + "\n")
        server.stdin.flush()
        return server

    kit.Serving.start = staticmethod(start)
    _seem_a_host(PULLING)
    results = _Results()
    options = "-q --assert=plain -p no:cacheprovider -c /dev/null --import-mode=importlib"
    places = f"--rootdir {kit.ROOT} --confcutdir {PEERS} --basetemp {directory}/tests"
    same_modules = "-o consider_namespace_packages=true"
    files = [str(PEERS / f"{module}.py") for module in MODULES]
    chosen = ["-k", f"verbs and ({CHOSEN})", *files]
    pytest.main([*f"{options} {places} {same_modules}".split(), *chosen], [results])
    return Found(loads, results.of)
