# SPDX-License-Identifier: Apache-2.0
"""Two targets, one of them filled; SIGKILL during writes, and the start after the kill.

A router receives the KV events of both servers and always agrees with their tiers. The second
server's own endpoint agrees with vLLM's `/metrics`, and explains a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.client import Metrics
from vllm_nvmeof_bench.servers.server import ReservedPort, Server, ServerError, ServerSpec

from tests.e2e import faults_rig as rig
from tests.e2e import life_rig
from tests.e2e.endpoint_rig import Endpoint
from tests.e2e.router import CPU, STORAGE, Router
from tests.small_disk import tmpfs

SLOTS = 35  # on each of two targets; a prompt needs 15, so the pool evicts as well


@pytest.fixture(scope="module")
def reference() -> rig.Reference:
    return rig.reference()


@pytest.fixture(scope="module")
def small_file_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real file system that is all but full once the pool is there."""
    size_bytes = SLOTS * rig.SLOT_BYTES + 256 * 1024
    with tmpfs(tmp_path_factory.mktemp("full"), size_bytes) as directory:
        yield directory


def router_agrees(server: Server, router: Router) -> None:
    """Wait until the KV events match the server's chunks in each tier."""

    def agrees(now: Metrics) -> bool:
        in_cpu, in_pool, in_either = router.counts()
        return (
            now.value("vllm:nvmeof_slots_used", kind="cache") == in_cpu
            and now.value("vllm:nvmeof_slots_used", kind="pool") == in_pool
            and now.value("vllm:nvmeof_entries") == in_either
        )

    rig.wait_for(server, "a router that agrees", agrees)


@dataclass(frozen=True)
class Lives:
    """Two servers over one pool, and a router per server."""

    spec: ServerSpec
    faults: rig.Faults

    def first(self, reference: rig.Reference) -> float:
        """The first server overfills both tiers and is killed during writes; returns pool slots."""
        with Router() as router:
            spec = replace(self.spec, extra_args=router.arguments)
            with rig.start(spec, "restart-before") as server:
                now = rig.metrics(server)
                slots = now.value("vllm:nvmeof_slots", kind="pool")
                assert 0 < slots < rig.POOL_SLOTS
                assert rig.same(rig.ask_and_settle(server, reference.prompts), reference.answers)
                now = rig.wait_for(server, "evictions", _has_evicted)
                assert now.value("vllm:nvmeof_written_chunks_total") > 0
                router_agrees(server, router)
                assert router.removed[CPU] and router.removed[STORAGE]
                # Longer than the time until the next poll, even on a slow machine.
                self.faults.set(write_delay_ms=10_000)
                rig.ask(server, reference.prompts[:2])
                rig.wait_for(
                    server,
                    "writes under way",
                    lambda m: m.value("vllm:nvmeof_writes_pending", state="sent") > 0,
                )
                server.kill()
        self.faults.set()
        return slots

    def second(self, reference: rig.Reference, slots: float) -> None:
        """The second server finds the first one's chunks, with the backend configured otherwise."""
        with Router() as router, ReservedPort() as port:
            offload, listen = self.spec.offload, f"127.0.0.1:{port.number}"
            assert offload is not None
            offload = replace(offload, extra={**offload.extra, "metrics_listen": listen})
            spec = rig.without_plugin(replace(self.spec, offload=offload))
            spec = replace(spec, extra_args=router.arguments)
            with rig.start(spec, "restart-after", unforked=True) as server:
                endpoint = Endpoint(server, listen)
                adopted = rig.metrics(server).value("vllm:nvmeof_entries")
                assert 0 < adopted <= slots
                router_agrees(server, router)
                assert len(router.has[STORAGE]) == adopted, "adopted chunks are reported"
                before = rig.metrics(server)
                last = reference.prompts[-1:]
                assert rig.same(rig.ask(server, last), reference.answers[-1:])
                assert rig.grown(server, before, "vllm:nvmeof_loaded_tokens_total", source="pool")
                loaded = int(rig.grown(server, before, "vllm:nvmeof_loaded_tokens_total"))
                endpoint.explains_a_load(len(last[0]), loaded)
                endpoint.logs_a_request(last[0])
                assert rig.same(rig.ask(server, reference.prompts), reference.answers)
                endpoint.agrees()
                assert rig.metrics(server).value("vllm:nvmeof_failed_chunks_total") == 0
                life_rig.post(server, "/reset_prefix_cache", reset_external="true")
                router_agrees(server, router)
                assert router.counts() == (0, 0, 0)


def _has_evicted(now: Metrics) -> bool:
    return now.value("vllm:nvmeof_evictions_total", tier="pool") > 0


def test_sigkill_during_writes_on_a_full_file_system(
    small_file_system: Path, tmp_path: Path, reference: rig.Reference
) -> None:
    faults = rig.Faults(tmp_path / "faults.json")
    targets = [str(small_file_system / "pool"), str(tmp_path / "pool")]
    options = {"targets": targets, "fault_injection": str(faults.path)}
    with pytest.raises(ServerError) as refused:
        rig.start(rig.spec(small_file_system, **options), "restart-refused")
    most = re.search(r"give at most (\d+ MiB)", str(refused.value))
    assert most is not None
    spec = rig.spec(small_file_system, **options, pool_bytes=most[1])
    lives = Lives(spec, faults)
    lives.second(reference, lives.first(reference))
