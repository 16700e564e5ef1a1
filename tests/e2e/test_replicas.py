# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel replicas behind one API server: separate directories, and no mixing.

They do not share, but in one test; tests/e2e/test_share.py is about servers that do.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.client import Metrics
from vllm_nvmeof_bench.servers.server import Server, ServerError, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import FAILED, HITS, LOADED
from vllm_nvmeof_offload.pool.lease import lease_of, read_lease

OPTION = "--data-parallel-size"


@pytest.fixture(scope="module")
def reference() -> rig.Reference:
    return rig.split_reference()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas") / "pool"


@pytest.fixture(scope="module")
def spec(place: Path) -> ServerSpec:
    spec = rig.split_spec(place, OPTION, share="off")
    return replace(spec, extra_args=(*spec.extra_args, "--api-server-count", "1"))


@pytest.fixture(scope="module")
def server(spec: ServerSpec, reference: rig.Reference) -> Iterator[Server]:
    with rig.start(spec, "replicas") as server:
        yield server


def settle(server: Server) -> None:
    """Make each replica step until all its writes are reported."""

    def idle(now: Metrics) -> bool:
        for replica in (0, 1):
            rig.split_ask(server, [[5, 6, 7]], replica=replica)
        return rig.all_written(now)

    rig.wait_for(server, "the last write", idle)


def test_each_has_a_directory_and_half_of_the_pool(
    server: Server, spec: ServerSpec, place: Path
) -> None:
    settle(server)
    now = rig.metrics(server)
    slots = [now.value("vllm:nvmeof_slots", kind="pool", engine=str(r)) for r in (0, 1)]
    assert slots[0] == slots[1] > 0
    assert spec.offload is not None
    slabs = sorted(place.glob("*/engine-*/rank-*/slab"))
    assert [slab.parts[-3:-1] for slab in slabs] == [(f"engine-{r}", "rank-0") for r in (0, 1)]
    total = sum(slab.stat().st_size for slab in slabs)
    configured = spec.offload.extra["pool_bytes"]
    assert 0.95 * configured < total <= configured
    pages = [read_lease(lease_of(slab.parent)) for slab in slabs]
    pids = {page.pid for page in pages if page is not None}
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, 0)
    log = server.log()
    assert "2 data-parallel replicas share" in log
    assert all(f"replica {r}: CPU tier of " in log for r in (0, 1))


def test_each_finds_only_its_own_chunks(server: Server, reference: rig.Reference) -> None:
    rig.forget_all(server)
    for source in ("", "cpu", "pool"):
        for replica in (0, 1):
            before = rig.metrics(server)
            answers = rig.split_ask(server, reference.prompts[:1], replica=replica)
            assert rig.same(answers, reference.answers[:1])
            found = rig.grown(server, before, HITS, engine=str(replica))
            loaded = rig.grown(server, before, LOADED, source=source, engine=str(replica))
            wanted = rig.whole(reference.prompts[0]) if source else 0
            assert found == wanted, "no hit at first, although the other replica has the chunks"
            assert not source or loaded == wanted
        if source == "cpu":
            for replica in (0, 1):
                for number in range(1, len(reference.prompts)):
                    one = slice(number, number + 1)
                    answers = rig.split_ask(server, reference.prompts[one], replica=replica)
                    assert rig.same(answers, reference.answers[one])
                    settle(server)  # so that the next one's chunks find room
        settle(server)
        rig.forget_gpu(server)
    assert rig.metrics(server).value(FAILED) == 0


def test_with_sharing_one_loads_what_the_other_has_stored(
    tmp_path: Path, reference: rig.Reference
) -> None:
    spec = rig.split_spec(tmp_path / "pool", OPTION, share="host", weights_never_change=True)
    spec = replace(spec, extra_args=(*spec.extra_args, "--api-server-count", "1"))
    with rig.start(spec, "replicas-share") as server:
        for number in range(len(reference.prompts)):
            one = slice(number, number + 1)
            answers = rig.split_ask(server, reference.prompts[one], replica=0)
            assert rig.same(answers, reference.answers[one])
            settle(server)  # so that the next one's chunks find room
        settle(server)  # the gauges of the last writes come with a step after their reports
        before = rig.metrics(server)
        stored = before.value("vllm:nvmeof_slots_used", kind="pool", engine="0")
        assert stored > 0

        def knows(now: Metrics) -> bool:
            for replica in (0, 1):
                rig.split_ask(server, [[5, 6, 7]], replica=replica)  # figures come with a step
            written = now.value("vllm:nvmeof_slots_used", kind="pool", engine="0")
            return now.value("vllm:nvmeof_shared_entries", engine="1") >= written >= stored

        rig.wait_for(server, "what the other replica has", knows)
        assert rig.same(rig.split_ask(server, reference.prompts, replica=1), reference.answers)
        found = rig.grown(server, before, LOADED, source="shared", engine="1")
        assert found >= 0.95 * stored * rig.CHUNK_TOKENS
        settle(server)
        now = rig.metrics(server)
        assert now.value("vllm:nvmeof_borrowed_chunks_total", engine="0") == 0
        assert now.value("vllm:nvmeof_slots_used", kind="pool", engine="1") <= 0.05 * stored
        assert now.value(FAILED) == 0


@pytest.mark.soak
def test_after_sigkill_each_finds_its_directory_again(
    server: Server, spec: ServerSpec, reference: rig.Reference
) -> None:
    for replica in (0, 1):  # `make soak` runs this test without the tests before it
        rig.split_ask(server, reference.prompts, replica=replica)
    settle(server)
    server.kill()
    with rig.start(spec, "replicas-after") as successor:
        for replica in (0, 1):
            before = rig.metrics(successor)
            answers = rig.split_ask(successor, reference.prompts, replica=replica)
            assert rig.same(answers, reference.answers)
            name = str(replica)
            assert rig.grown(successor, before, LOADED, source="pool", engine=name) > 0


@pytest.mark.soak
def test_without_our_plugin_replicas_are_refused(spec: ServerSpec) -> None:
    with pytest.raises(ServerError) as refusal:
        rig.start(rig.without_plugin(spec), "replicas-refused")
    log = (rig.BUILD / "logs" / "replicas-refused.log").read_text()
    assert "data_parallel_size=2: our plugin did not run" in log, refusal.value


@pytest.mark.soak  # the same text comes from tests/unit/adapter/test_supported.py in seconds
def test_another_number_of_replicas_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    spec = rig.split_spec(tmp_path / "pool", "--data-parallel-size", replicas=3)
    done = subprocess.run(
        spec.command(port=1),
        env=spec.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm: error: replicas=3: data_parallel_size is 2")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "pool").exists()


@pytest.mark.soak
def test_two_servers_that_start_at_once_on_one_target(
    tmp_path: Path, reference: rig.Reference
) -> None:
    target = tmp_path / "pool"
    spec = replace(rig.split_spec(target, OPTION, share="off"), extra_args=())
    logs = rig.BUILD / "logs"
    with (
        Server(spec, logs / "beside-one.log") as one,
        Server(spec, logs / "beside-two.log") as two,
    ):
        for server in (one.wait_ready(), two.wait_ready()):
            before = rig.metrics(server)
            assert rig.same(rig.split_ask(server, reference.prompts[:1]), reference.answers[:1])
            assert rig.grown(server, before, HITS) == 0, "no chunk of the other server"
            rig.forget_gpu(server)
            assert rig.same(rig.split_ask(server, reference.prompts[:1]), reference.answers[:1])
            assert rig.grown(server, before, HITS) == rig.whole(reference.prompts[0])
            rig.settle(server)
        one.kill()
        two.kill()
    engines = sorted(path.name for path in target.glob("*/engine-*"))
    assert engines == ["engine-0", "engine-1"]
    with rig.start(spec, "beside-after") as server:
        before = rig.metrics(server)
        assert rig.same(rig.split_ask(server, reference.prompts[:1]), reference.answers[:1])
        assert rig.grown(server, before, LOADED, source="pool") == rig.whole(reference.prompts[0])
