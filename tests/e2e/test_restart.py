# SPDX-License-Identifier: Apache-2.0
"""Two targets, one of them filled; SIGKILL during writes, and the start after the kill.

A router receives the KV events of both servers and always agrees with their tiers. The second
server's own endpoint agrees with vLLM's `/metrics`, and explains a request.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner
from vllm_nvmeof_bench.servers.client import Metrics
from vllm_nvmeof_bench.servers.server import (
    MODEL_NAME,
    ReservedPort,
    Server,
    ServerError,
    ServerSpec,
)

from tests.e2e import servers as rig
from tests.e2e.router import CPU, STORAGE, Router
from tests.process import wait_until
from tests.small_disk import tmpfs
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.metrics import PREFIX

SLOTS = 35  # on each of two targets; a prompt needs 15, so the pool evicts as well


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
                rig.post(server, "/reset_prefix_cache", reset_external="true")
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


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Endpoint:
    """The endpoint of a server's only engine, whose `metrics_listen` is this address."""

    def __init__(self, server: Server, listen: str) -> None:
        self._server, self._url = server, f"http://{listen}"

    def agrees(self) -> None:
        """Wait until vLLM's `/metrics`, a message behind, has the same series and values."""
        wait_until("equal metrics", lambda: _equal(samples(self._url), self._theirs()), 30)
        theirs = self._theirs()
        assert len(theirs) > 100
        assert {dict(labels)["model_name"] for _, labels in theirs} == {MODEL_NAME}

    def _theirs(self) -> Samples:
        return samples(self._server.url)

    def explains_a_load(self, prompt_tokens: int, loaded: int) -> None:
        """The last request loaded so many tokens, all or most of them from the pool."""
        (record,) = self._explained("--last")
        assert self._explained(record["request"]) == [record]
        short = record["request"].rpartition("-")[0]
        assert self._explained(short) == [record], "the id in the answer is shorter"
        (start,) = record["starts"]
        assert (start["tokens"], start["gpu_tokens"]) == (prompt_tokens, 0)
        assert start["loaded_tokens"] == start["found_tokens"] == loaded
        assert start["computed_tokens"] == prompt_tokens - loaded
        load = start["load"]
        assert load["cpu_tokens"] + load["pool_tokens"] == loaded
        assert load["pool_tokens"] > loaded / 2
        assert load["seconds"] > 0
        text = self._explain("--last")
        assert max(map(len, text.splitlines())) <= 80
        assert f"loaded {loaded:,} tokens" in " ".join(text.split())

    def logs_a_request(self, prompt: Sequence[int]) -> None:
        """A request that asks for its record finds it in the log."""
        params = {"nvmeof": {"explain": True}, "max_load_tokens": 0}
        body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 1}
        answer = httpx.post(
            f"{self._server.url}/v1/completions",
            json={**body, "kv_transfer_params": params},
            timeout=120,
            trust_env=False,
        )
        answer.raise_for_status()
        name = answer.json()["id"]
        wait_until("its record in the log", lambda: bool(self._logged(name)), 30)
        (record,) = self._logged(name)
        assert record["starts"][0]["loaded_tokens"] == 0
        assert "the request limits its loads: max_load_tokens=0" in record["starts"][0]["why"]

    def _logged(self, name: str) -> list[dict[str, Any]]:
        lines = self._server.log_path.read_text().splitlines()
        texts = [
            line.partition(": request ")[2] or line.partition("] request ")[2] for line in lines
        ]
        found = [json.loads(text) for text in texts if text.startswith("{")]
        return [one for one in found if one["request"].startswith(name)]

    def _explained(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._explain(*arguments, "--json"))
        return found

    def _explain(self, *arguments: str) -> str:
        done = CliRunner().invoke(app, ["explain", *arguments, "--url", self._url])
        assert done.exit_code == 0, done.output
        return done.output


def samples(url: str) -> Samples:
    """This package's series at `url`/metrics."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX) and not sample.name.endswith("_created")
    }


def _equal(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> bool:
    """Whether both have the same series with the same values; vLLM adds up increases."""
    return ours.keys() == theirs.keys() and all(
        math.isclose(value, theirs[key], rel_tol=1e-9, abs_tol=1e-9) for key, value in ours.items()
    )
