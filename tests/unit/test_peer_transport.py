# SPDX-License-Identifier: Apache-2.0
"""How chunks come from a peer: what is found out about NIXL and the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_nvmeof_offload.peers import transport
from vllm_nvmeof_offload.peers.transport import has_rdma, why_no_pulls

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("state", "in_use"), [("4: ACTIVE", True), ("1: DOWN", False), ("2: INIT", False)]
)
def test_a_port_that_is_not_active_is_no_rdma(tmp_path: Path, state: str, in_use: bool) -> None:
    assert not has_rdma(str(tmp_path))
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    assert not has_rdma(str(tmp_path))
    (port / "state").write_text(state + "\n")
    assert has_rdma(str(tmp_path)) == in_use


#: What stands for NIXL.
AGENT = "from tests.faults.peers.stand_in import Agent; nixl_agent, nixl_agent_config = Agent, dict"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('no such CUDA')", "no such CUDA"),
        ("import os; os.abort()", "exits with -6"),
        (f"{AGENT}\nAgent.create_backend = None", "makes no agent (TypeError"),
        (AGENT, ""),
    ],
    ids=["raises", "aborts", "refuses", "works"],
)
def test_a_library_that_does_not_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    (tmp_path / "nixl.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(transport, "has_rdma", lambda: True)
    found = why_no_pulls()
    assert says in found
    assert bool(found) == bool(says)
    assert "\n" not in found


def test_the_environment_is_set_before_the_library_is_loaded(tmp_path: Path) -> None:
    name = "UCX_RCACHE_MAX_UNRELEASED"
    (tmp_path / "nixl.py").write_text(f"import os; seen = os.environ.get({name!r})")
    script = "from vllm_nvmeof_offload.peers.transport import load_nixl; print(load_nixl().seen)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop(name, None)
    assert printed(script, environment) == "1024"


def printed(script: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_without_rdma_nothing_imports_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "has_rdma", lambda: False)
    monkeypatch.setattr(transport.subprocess, "run", None)
    assert "RDMA" in why_no_pulls()


#: With RDMA the agent is made, without it NIXL refuses; either way it listens nowhere. The process
#: ends without the libraries' destructors (docs/troubleshooting.md).
MAKE_AGENT = """
import ctypes, os
from tests.listening import listening
from vllm_nvmeof_offload.peers.base import SlotMemory
from vllm_nvmeof_offload.peers.transport import NixlTransport, TransportError
memory = ctypes.create_string_buffer(8192)
before = dict(os.environ)
try:
    made = NixlTransport(SlotMemory(ctypes.addressof(memory), 8192, 1))
except TransportError:
    pass
changed = {key for key in set(before) ^ set(os.environ)}
print(listening(), changed - {"UCX_RCACHE_MAX_UNRELEASED", "NIXL_LOG_LEVEL"}, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
def test_an_agent_listens_nowhere_and_leaves_the_environment_as_it_is() -> None:
    assert printed(MAKE_AGENT, dict(os.environ)).splitlines()[-1] == "[] set()"
