# SPDX-License-Identifier: Apache-2.0
"""Two targets, one of them full; SIGKILL in the middle of writes, and the start after it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import faults_rig as rig

SLOTS = 35  # on each of two targets, of which a prompt needs 15: the pool evicts as well


@pytest.fixture(scope="module")
def reference() -> rig.Reference:
    return rig.reference()


@pytest.fixture(scope="module")
def small_file_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real file system that is full once the pool has been made."""
    directory = tmp_path_factory.mktemp("full")
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    size = f"size={SLOTS * rig.SLOT_BYTES + 256 * 1024}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_sigkill_during_writes_on_a_full_file_system(
    small_file_system: Path, tmp_path: Path, reference: rig.Reference
) -> None:
    faults = rig.Faults(tmp_path / "faults.json")
    targets = [str(small_file_system / "pool"), str(tmp_path / "pool")]
    spec = rig.spec(small_file_system, targets=targets, fault_injection=str(faults.path))
    with rig.start(spec, "restart-before") as server:
        slots = rig.wait_for(server, "figures", rig.has_figures).value("vllm:nvmeof_pool_slots")
        assert 0 < slots < rig.POOL_SLOTS, "capacity is what is there"
        assert "no space for" in server.log()
        assert rig.same(rig.ask(server, reference.prompts), reference.answers)
        now = rig.wait_for(
            server, "evictions", lambda m: m.value("vllm:nvmeof_evictions_total", tier="pool") > 0
        )
        assert now.value("vllm:nvmeof_written_chunks_total") > 0
        faults.set(write_delay_ms=2000)
        rig.ask(server, reference.prompts[:2])
        rig.wait_for(
            server, "writes under way", lambda m: m.value("vllm:nvmeof_writes_pending") > 0
        )
        server.kill()
    faults.set()
    # Found again by a server that was told of us in another way.
    with rig.start(rig.without_plugin(spec), "restart-after") as server:
        adopted = rig.wait_for(server, "figures", rig.has_figures).value("vllm:nvmeof_entries")
        assert 0 < adopted <= slots
        before = rig.metrics(server)
        last = reference.prompts[-1:]
        assert rig.same(rig.ask(server, last), reference.answers[-1:])
        assert rig.grown(server, before, "vllm:nvmeof_loaded_tokens_total", source="pool") > 0
        assert rig.same(rig.ask(server, reference.prompts), reference.answers)
        assert rig.metrics(server).value("vllm:nvmeof_failed_chunks_total") == 0
