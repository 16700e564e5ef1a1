# SPDX-License-Identifier: Apache-2.0
"""Starting and ending servers: for the engine of the installed vLLM, and a small HTTP server in
its place."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, fields
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_nvmeof_bench.demo.workload import model_shape
from vllm_nvmeof_bench.servers import engine
from vllm_nvmeof_bench.servers.server import (
    OffloadSpec,
    ReservedPort,
    Server,
    ServerError,
    ServerSpec,
    group_alive,
)

from tests.e2e.servers import llm_options
from tests.e2e.shapes.rig import Plan
from tests.process import wait_until

#: Answers /health; a child of it ignores SIGTERM, as a stuck worker would.
_SCRIPT = """
import http.server, signal, subprocess, sys
child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
print("child", subprocess.Popen([sys.executable, "-c", child]).pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
_BROKEN = "print('no such model'); raise SystemExit(3)"
_PARENT = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit.demo.test_servers import FakeSpec
from vllm_nvmeof_bench.servers.server import Server
server = Server(FakeSpec(Path("m"), 64, 8), Path(sys.argv[2])).wait_ready(30)
print(server.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@dataclass(frozen=True)
class FakeSpec(ServerSpec):
    """A server that runs `script` instead of vLLM."""

    script: str = _SCRIPT

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", self.script, str(port)]


def running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def child_of(server: Server) -> int:
    return int(server.log().split("child", 1)[1].split()[0])


def test_a_server_answers_and_all_its_processes_end(tmp_path: Path) -> None:
    stages: list[str] = []
    with Server(FakeSpec(tmp_path, 64, 8), tmp_path / "log") as server:
        server.wait_ready(30, progress=lambda _, stage: stages.append(stage))
        assert server.running
        assert server.startup_s > 0
        child = child_of(server)
        assert running(child)
        server.stop(timeout_s=0.5)  # the child ignores SIGTERM
    assert not server.running
    assert not running(child)
    assert set(stages) <= {"importing vLLM"}


def test_kill_ends_all_its_processes_and_a_new_one_starts(tmp_path: Path) -> None:
    spec = FakeSpec(tmp_path, 64, 8)
    with Server(spec, tmp_path / "log").wait_ready(30) as server:
        child = child_of(server)
        server.kill()
        assert not running(child)
    with Server(spec, tmp_path / "log").wait_ready(30) as again:
        again.kill()


def test_a_server_that_ends_reports_the_reason(tmp_path: Path) -> None:
    spec = FakeSpec(tmp_path, 64, 8, script=_BROKEN)
    with (
        Server(spec, tmp_path / "log") as server,
        pytest.raises(ServerError, match=r"exited with 3[\s\S]*no such model"),
    ):
        server.wait_ready(30)


_TRACEBACKS = """
for name, error in (("Worker", "PoolError: no space"), ("EngineCore", "RuntimeError: see above")):
    for _ in range(2):
        print(f"({name} pid=7) ERROR 11-22 11:12:44 [core.py:1] Traceback (most recent call last):")
        print(f"({name} pid=7) ERROR 11-22 11:12:44 [core.py:1] vllm_nvmeof_offload.{error}")
print("at the end\\n" * 40)
raise SystemExit(1)
"""


def test_the_errors_of_all_processes_are_named_first(tmp_path: Path) -> None:
    spec = FakeSpec(tmp_path, 64, 8, script=_TRACEBACKS)
    with Server(spec, tmp_path / "log") as server, pytest.raises(ServerError) as failed:
        server.wait_ready(30)
    assert str(failed.value).splitlines()[:4] == [
        "vllm serve exited with 1",
        "vllm_nvmeof_offload.PoolError: no space",
        "vllm_nvmeof_offload.RuntimeError: see above",
        f"the end of {server.log_path}:",
    ]


def test_a_reserved_port_is_given_out_once() -> None:
    reserved = ReservedPort()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", reserved.number))
    with socket.create_server(("127.0.0.1", reserved.number)):
        pass  # sets SO_REUSEADDR, as what the port is reserved for does
    reserved.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", reserved.number))


def test_a_process_of_which_only_the_first_thread_has_ended_is_alive() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.unit.first_thread"],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        wait_until("its first thread's end", lambda: not running(process.pid))
        assert group_alive(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
    assert not group_alive(process.pid)


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    spec = FakeSpec(tmp_path, 64, 8, script="import time; time.sleep(600)")
    with Server(spec, tmp_path / "log") as server:
        assert (os.getpgid(server.pid), os.getsid(server.pid)) == (server.pid, os.getsid(0))
        with pytest.raises(ServerError, match="did not answer within 1 s"):
            server.wait_ready(1)
        assert not server.running


def test_the_server_gets_sigterm_when_its_starter_dies(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    command = [sys.executable, "-c", _PARENT, str(Path(__file__).parents[3]), str(log_path)]
    parent = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert parent.returncode == -9, parent.stderr
    pid = int(parent.stdout)
    child = int(log_path.read_text().split("child", 1)[1].split()[0])
    try:
        wait_until("the server's end", lambda: not running(pid), limit_s=30)
    finally:
        subprocess.run(["kill", "-9", str(child)], check=False)


def test_the_environment_lets_python_keep_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env = ServerSpec(tmp_path, 64, 8, env={"X": "y"}).environment()
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["X"] == "y"


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def answer(name: str) -> str:
        assert name == "vllm"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", answer)


@pytest.mark.parametrize(
    ("version", "is_cpu"), [("0.32.0+cpu", True), ("0.33.0", False), (None, False)]
)
def test_the_version_names_the_engine(
    monkeypatch: pytest.MonkeyPatch, version: str | None, is_cpu: bool
) -> None:
    installed(monkeypatch, version)
    assert engine.has_cpu_engine() is is_cpu


def test_a_build_for_gpus_gets_no_cpu_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")  # as the Makefile says it to everything
    installed(monkeypatch, "0.33.0")
    env = ServerSpec(tmp_path, 64, 8, env={"X": "y"}).environment()
    assert not {name for name in env if name.startswith(("VLLM_TARGET", "VLLM_CPU"))}
    assert (env["TRITON_F32_DEFAULT"], env["HF_HUB_OFFLINE"], env["X"]) == ("ieee", "1", "y")


def test_a_build_for_cpus_gets_its_memory_and_its_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    installed(monkeypatch, "0.32.0+cpu")
    env = ServerSpec(tmp_path, 64, 8, cores_reserved=3).environment()
    assert (env["VLLM_TARGET_DEVICE"], env["VLLM_CPU_NUM_OF_RESERVED_CPU"]) == ("cpu", "3")
    assert "TRITON_F32_DEFAULT" not in env


def test_a_vllm_without_a_script_is_started_by_its_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = ServerSpec(tmp_path, 64, 8).command(80)
    assert command[:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    (tmp_path / "vllm").touch()
    command = ServerSpec(tmp_path, 64, 8).command(80)
    assert command[:2] == [str(tmp_path / "vllm"), "serve"]


def test_a_gpu_gets_a_model_that_takes_it_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.32.0+cpu")
    small = model_shape()
    installed(monkeypatch, "0.33.0")
    large = model_shape()
    assert large.parameters > 10 * small.parameters
    assert large.kv_bytes_per_token == small.kv_bytes_per_token, "the tiers' sizes are the same"


def _options(command: list[str]) -> dict[str, object]:
    """The options of a command line, named as the arguments of `LLM`."""
    pairs = itertools.pairwise(command)
    return {name[2:].replace("-", "_"): value for name, value in pairs if name.startswith("--")}


@pytest.mark.parametrize("version", ["0.33.0", "0.32.0+cpu"])
def test_engines_on_a_gpu_do_not_measure_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    installed(monkeypatch, version)
    spec = ServerSpec(tmp_path, 64, 8, offload=OffloadSpec(0.25))
    wanted = engine.engine_memory()
    assert set(wanted) == (
        {"kv_cache_memory_bytes", "gpu_memory_utilization"} if version == "0.33.0" else set()
    )
    for found in (_options(spec.command(80)), llm_options(spec), Plan("llama").arguments()):
        about_memory = {name: found[name] for name in found if "memory" in name}
        assert about_memory.keys() == wanted.keys()
        assert all(float(str(about_memory[name])) == wanted[name] for name in wanted)
        assert "num_gpu_blocks_override" in found, "vLLM would take the 2 GiB for real"


def test_vllm_knows_the_arguments_about_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils").EngineArgs
    installed(monkeypatch, "0.33.0")
    assert engine.engine_memory().keys() <= {one.name for one in fields(arguments)}


class OnCuda:
    """vLLM's platform, answering as one of CUDA with an H100."""

    def __init__(self, real: object) -> None:
        self._real = real

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def is_cuda(self) -> bool:
        return True

    def get_device_capability(self, device_id: int = 0) -> object:
        from vllm.platforms.interface import DeviceCapability

        return DeviceCapability(9, 0)


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is installed here")
def test_vllm_s_sampler_on_a_gpu_does_without_flashinfer_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    monkeypatch.setattr(sampler, "current_platform", OnCuda(sampler.current_platform))
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        sampler.flashinfer_sampler_supported()
    installed(monkeypatch, "0.33.0")
    for name, value in engine.engine_environment().items():
        monkeypatch.setenv(name, value)
    assert sampler.flashinfer_sampler_supported() is False


def test_where_flashinfer_is_installed_vllm_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    installed(monkeypatch, "0.33.0")
    monkeypatch.setattr(engine, "find_spec", lambda name: object())
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in engine.engine_environment()
    installed(monkeypatch, "0.32.0+cpu")
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in engine.engine_environment()
