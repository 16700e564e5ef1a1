# SPDX-License-Identifier: Apache-2.0
"""How chunks come from a peer: what is found out about NIXL and the machine."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_nvmeof_offload.peers.transport import has_rdma, memory_of, why_no_nixl


@pytest.mark.parametrize(
    ("state", "in_use"), [("4: ACTIVE", True), ("1: DOWN", False), ("2: INIT", False)]
)
def test_a_port_that_is_not_active_is_no_rdma(tmp_path: Path, state: str, in_use: bool) -> None:
    assert not has_rdma(tmp_path)
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    assert not has_rdma(tmp_path)
    (port / "state").write_text(state + "\n")
    assert has_rdma(tmp_path) == in_use


def test_memory_is_read_where_it_is_and_nowhere_else() -> None:
    ours = ctypes.create_string_buffer(b"sixteen bytes ..", 16)
    assert memory_of(os.getpid(), ctypes.addressof(ours), 16) == ours.raw
    assert memory_of(os.getpid(), 4096, 16) == b""
    assert memory_of(0x3FFFFFFF, ctypes.addressof(ours), 16) == b""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('no such CUDA')", "no such CUDA"),
        ("import os; os.abort()", "ends with -6"),
        ("", ""),
    ],
    ids=["raises", "aborts", "loads"],
)
def test_a_library_that_does_not_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    (tmp_path / "nixl.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = why_no_nixl()
    assert says in found
    assert bool(found) == bool(says)
    assert "\n" not in found


@pytest.mark.parametrize(("transports", "after"), [("", None), ("rc,cma", "rc,cma")])
def test_the_environment_is_set_before_the_library_is_loaded(
    tmp_path: Path, transports: str, after: str | None
) -> None:
    """An empty list of transports makes the first transfer fail."""
    names = "UCX_TLS", "UCX_RCACHE_MAX_UNRELEASED"
    (tmp_path / "nixl.py").write_text(f"import os; seen = [os.environ.get(n) for n in {names}]")
    script = "from vllm_nvmeof_offload.peers.transport import load_nixl; print(load_nixl().seen)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "UCX_TLS": transports}
    environment.pop("UCX_RCACHE_MAX_UNRELEASED", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([after, "1024"])
