# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` process: start it, wait until it is ready, stop it, kill it.

All processes of the server (API server, EngineCore, workers) are in one process group, so that they
can be killed together. The server listens on a free port on the loopback address, and writes a log
file. It receives SIGTERM if the process that started it dies.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from vllm_nvmeof_bench.servers.engine import engine_environment, engine_memory, vllm_command
from vllm_nvmeof_offload.config import EXPERIMENT, Tuning
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.units import GIB, slot_stride_bytes


class ReservedPort(socket.socket):
    """A TCP port on the loopback address that is not assigned to other processes while this is
    open. A server that sets SO_REUSEADDR can listen on it."""

    def __init__(self) -> None:
        super().__init__()
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("127.0.0.1", 0))
        self.number = int(self.getsockname()[1])


def process_stats(group: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the ID and the fields of /proc/PID/stat, starting with the state, of each process in a
    process group. Field 0 is the state, 11 to 14 are the CPU ticks of the process and its exited
    children, and 17 is the number of threads."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has exited
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                yield int(stat.parent.name), fields


def group_alive(group: int) -> bool:
    """Return whether any process of the group is running. A zombie counts as running, and holds its
    locks, if it has other threads, like a killed process that is waiting for a disk."""
    return any(one[0] not in "ZX" or int(one[17]) > 1 for _, one in process_stats(group))


def group_cpu_s(group: int) -> float:
    """Return the CPU seconds so far of the group's processes and their exited children."""
    ticks = (sum(map(int, fields[11:15])) for _, fields in process_stats(group))
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


#: The model's name in the servers' APIs.
MODEL_NAME = "demo"
BLOCK_TOKENS = 32
STREAM_SLOTS = 16


def on_blocks(tokens: int) -> int:
    """Round `tokens` up to whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


#: Requests SIGTERM (15) on the parent's death (PR_SET_PDEATHSIG is 1), checks that the parent still
#: exists, and executes the server. A `preexec_fn` would be unsafe with threads.
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def launch(
    command: Sequence[str], log_path: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a server in a new process group of this session, with its output in `log_path`.

    Linux schedules sessions as groups (`sched_autogroup_enabled`): with several sessions on two
    cores, runnable threads waited for up to 18 s.
    """
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            process_group=0,
        )


_POLL_S = 0.2
_LOG_TAIL_LINES = 30
_ERRORS_MAX = 4
#: The prefix that vLLM's logger adds to traceback lines, and the last line of a traceback.
_LOG_PREFIX = re.compile(r"^(\([^)]*\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] )?")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")


def split_extra(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the configuration keys, and an experiment's environment variable with the fields of
    `config.Tuning`."""
    keys = {name: value for name, value in extra.items() if name not in Tuning.model_fields}
    fields = {name: value for name, value in extra.items() if name not in keys}
    return keys, {EXPERIMENT: json.dumps(fields)} if fields else {}


class ServerError(OffloadError):
    """An error with the last log lines of a server that did not start, died or did not exit."""


@dataclass(frozen=True)
class OffloadSpec:
    """A server's offloading settings.

    size_gib: `--kv-offloading-size`, GiB of pinned memory over all ranks; None omits the flag.
    extra: keys of `kv_connector_extra_config`, and fields of `config.Tuning`; sizes are in bytes.
    transfer: other keys of `--kv-transfer-config`.
    """

    size_gib: float | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    transfer: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        size, config = [], dict(self.transfer)
        if self.size_gib is not None:
            size = ["--kv-offloading-backend", "nvmeof", "--kv-offloading-size", str(self.size_gib)]
        if keys := split_extra(self.extra)[0]:
            config["kv_connector_extra_config"] = keys
        return [*size, "--kv-transfer-config", json.dumps(config)] if config else size

    @classmethod
    def sized(
        cls, chunks: int, chunk_bytes: int, pool_bytes: int, place: Path, **more: Any
    ) -> Self:
        """Return a spec with a CPU tier of `chunks` chunks of `chunk_bytes`, and stream slots.
        place: the pool's directory. more: further keys of `extra`."""
        extra = {
            "targets": [str(place)],
            "pool_bytes": pool_bytes,
            "chunk_bytes_min": chunk_bytes,
            "stream_slots": STREAM_SLOTS,
            **more,
        }
        return cls((chunks + STREAM_SLOTS) * slot_stride_bytes(chunk_bytes) / GIB, extra)


@dataclass(frozen=True)
class ServerSpec:
    """A server's arguments.

    gpu_blocks: blocks of `block_size` tokens in the GPU cache, which is ordinary memory on a CPU
    build. cores_reserved: cores that vLLM does not use for math. program: the command for `vllm`;
    empty: this Python's.
    """

    model: Path
    max_model_len: int
    gpu_blocks: int
    block_size: int = BLOCK_TOKENS
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 8192
    cores_reserved: int = 1
    offload: OffloadSpec | None = None
    dtype: str = "float32"
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()

    @property
    def gpu_tokens(self) -> int:
        """The capacity of the GPU cache in tokens; vLLM reserves one block."""
        return (self.gpu_blocks - 1) * self.block_size

    def command(self, port: int) -> list[str]:
        fixed: dict[str, object] = {
            "--host": "127.0.0.1",
            "--port": port,
            "--served-model-name": MODEL_NAME,
            "--dtype": self.dtype,
            "--max-model-len": self.max_model_len,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--block-size": self.block_size,
            "--num-gpu-blocks-override": self.gpu_blocks,
        }
        fixed |= {f"--{name.replace('_', '-')}": value for name, value in engine_memory().items()}
        return [
            *(self.program or vllm_command()),
            "serve",
            str(self.model),
            *(str(word) for pair in fixed.items() for word in pair),
            # Compilation would add a minute to the start without changing results.
            "--enforce-eager",
            "--disable-uvicorn-access-log",
            *(self.offload.arguments() if self.offload is not None else ()),
            *self.extra_args,
        ]

    def environment(self) -> dict[str, str]:
        experiment = split_extra(self.offload.extra)[1] if self.offload is not None else {}
        return engine_environment(self.cores_reserved) | experiment | dict(self.env)


class Server:
    """A running server: use it as a context manager, or call `stop`."""

    def __init__(self, spec: ServerSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self.url = f"http://127.0.0.1:{self.port}"
        self.startup_s = 0.0
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        self._process = self._launch()
        _alive.add(self)

    def _launch(self) -> subprocess.Popen[bytes]:
        return launch(self.spec.command(self.port), self.log_path, self.spec.environment())

    @property
    def pid(self) -> int:
        """The ID of the API server's process, and of the process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(
        self, timeout_s: float = 300.0, progress: Callable[[float, str], None] = lambda *_: None
    ) -> Self:
        """Wait until the server answers `/health`; pass the seconds and the stage to `progress`.
        Raise ServerError if the server exits or does not answer in time."""
        deadline = self._started + timeout_s
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if not self.running:
                    self.kill()  # end its remaining processes
                    raise ServerError(self._failure(f"exited with {self._process.returncode}"))
                with suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").status_code == httpx.codes.OK:
                        self.startup_s = time.monotonic() - self._started
                        return self
                progress(time.monotonic() - self._started, self._stage())
                time.sleep(_POLL_S)
        self.kill()
        raise ServerError(self._failure(f"did not answer within {timeout_s:.0f} s"))

    def stop(self, timeout_s: float = 30.0) -> None:
        """Send the server SIGTERM; after `timeout_s`, kill its remaining processes."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        self._reap(timeout_s)

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL, like a crash."""
        self._reap(0.0)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _reap(self, grace_s: float) -> None:
        """Wait until the group has no processes; after `grace_s`, kill them with SIGKILL."""
        deadline = time.monotonic() + grace_s
        while group_alive(self.pid) or self.running:
            if time.monotonic() >= deadline:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
            if time.monotonic() > deadline + 30.0:
                raise ServerError(self._failure("does not exit on SIGKILL"))
        _alive.discard(self)
        self._reserved.close()

    def _stage(self) -> str:
        text = self.log()
        stages = (
            ("init engine", "warm"),
            ("Starting to load model", "loading the model"),
            ("Initializing a V1 LLM engine", "starting the worker"),
            ("non-default args", "starting the engine"),
        )
        return next((name for mark, name in stages if mark in text), "importing vLLM")

    def _failure(self, what: str) -> str:
        """Return an error message with the errors and the last lines of the log."""
        lines = self.log().splitlines()
        bare = (_LOG_PREFIX.sub("", line) for line in lines)
        # The failed process logs the cause first; its parents' errors follow.
        errors = list(dict.fromkeys(line for line in bare if _ERROR.match(line)))
        tail = [f"the end of {self.log_path}:", *lines[-_LOG_TAIL_LINES:]]
        return "\n".join([f"vllm serve {what}", *errors[:_ERRORS_MAX], *tail])


_alive: weakref.WeakSet[Server] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for server in list(_alive):
        with suppress(ServerError):
            server.kill()
