# SPDX-License-Identifier: Apache-2.0
"""`checksum_at: gpu`: what a load brings is checked where it is copied to. On the CPU's engine the
copying thread stands in for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.server import Server

from tests.e2e import servers as rig
from tests.e2e.servers import FAILED, LOADED


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checksum-at")


@pytest.fixture(scope="module")
def faults(directory: Path) -> rig.Faults:
    return rig.Faults(directory / "faults.json")


@pytest.fixture(scope="module", params=["native", "faulty"])
def server(
    request: pytest.FixtureRequest, directory: Path, faults: rig.Faults, reference: rig.Reference
) -> Iterator[Server]:
    """With the native lanes, and with the engine between them that injects faults."""
    options: dict[str, object] = {"checksum_at": "gpu"}
    if request.param == "faulty":
        options["fault_injection"] = str(faults.path)
    name = f"checksum-at-{request.param}"
    with rig.start(rig.spec(directory / request.param, **options), name) as server:
        rig.store_all(server, reference)
        yield server
        assert server.running


def _pool(server: Server, directory: Path) -> Path:
    faulty = "fault_injection" in server.spec.offload.extra  # type: ignore[union-attr]
    return directory / ("faulty" if faulty else "native")


def test_returning_prompts_come_from_the_pool(server: Server, reference: rig.Reference) -> None:
    before = rig.metrics(server)
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)
    assert rig.grown(server, before, LOADED, source="pool") > 0
    assert rig.grown(server, before, FAILED) == 0


def test_bytes_flipped_on_disk(server: Server, directory: Path, reference: rig.Reference) -> None:
    before = rig.metrics(server)
    assert rig.damage_slab(_pool(server, directory)) > 100
    assert rig.same(rig.ask_and_settle(server, reference.prompts), reference.answers)
    assert rig.grown(server, before, FAILED, outcome="checksum_mismatch") > 0
    rig.store_all(server, reference)


@pytest.mark.parametrize("server", ["faulty"], indirect=True)
def test_bytes_flipped_behind_the_engines_check(
    server: Server, faults: rig.Faults, reference: rig.Reference
) -> None:
    """Checked at the CPU, these give wrong tokens: the negative control of `test_faults`.

    What is fetched for a request that still waits is checked at the CPU here, too: a busy machine
    makes requests wait, so the prompts come together and all but the first ones do.
    """
    before = rig.metrics(server)
    faults.set(flip_before_copy=True)
    answers = rig.ask_at_once(server, reference.prompts)
    faults.set()
    assert faults.fired("flip_before_copy") > 0
    assert rig.same(answers, reference.answers)
    assert rig.grown(server, before, FAILED, outcome="checksum_mismatch") > 0
