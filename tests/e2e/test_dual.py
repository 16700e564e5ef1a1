# SPDX-License-Identifier: Apache-2.0
"""A server that also loads through another server's storage link: the same tokens if either dies.

P computes, stores and loads again; D reads for it. Each has a slow storage link of its own. The
tests go on from one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.client import Metrics
from vllm_nvmeof_bench.servers.server import ReservedPort, Server, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import FAILED
from vllm_nvmeof_offload.units import GIB

#: A prompt takes a quarter of a second by one link.
LINK_BYTES_PER_S = 8_000_000
#: Of P: a quarter streams, and the others hold three prompts of twelve. D has as many, or serves.
SLOTS, SERVE_SLOTS = 64, 24
ROUNDS_MAX = 5


def spec(pool: Path, faults: rig.Faults, **extra: object) -> ServerSpec:
    more = {"fault_injection": str(faults.path), **extra}
    made = rig.spec(pool, **more)
    assert made.offload is not None
    return replace(made, offload=replace(made.offload, size_gib=SLOTS * rig.SLOT_BYTES / GIB))


class Rig:
    """P, and D, which may be killed and started again. They have a share secret."""

    def __init__(self, directory: Path, address: str) -> None:
        pool, secret = directory / "pool", directory / "secret"
        secret.touch(0o600)
        secret.write_text("a secret of both servers\n")
        self._faults = [rig.Faults(directory / f"{name}.json") for name in "pd"]
        p, d = self._faults
        both = {"share_secret_file": str(secret)}
        serves = {"peer_listen": address, "serve_bytes": SERVE_SLOTS * rig.SLOT_BYTES}
        self.address = address
        self._spec = spec(pool, d, **serves, **both)
        self.p = rig.start(spec(pool, p, peers=address, **both), "dual-p")
        self.start_d()

    def start_d(self) -> None:
        self.d = rig.start(self._spec, "dual-d")

    def throttle(self) -> None:
        for one in self._faults:
            one.set(bytes_per_s=LINK_BYTES_PER_S)

    def stop(self) -> None:
        self.d.stop()
        self.p.stop()


@pytest.fixture(scope="module")
def dual(tmp_path_factory: pytest.TempPathFactory, reference: rig.Reference) -> Iterator[Rig]:
    with ReservedPort() as port:
        one = Rig(tmp_path_factory.mktemp("dual"), f"127.0.0.1:{port.number}")
        rig.store_all(one.p, reference)
        one.throttle()
        yield one
        one.stop()


def pulled_by(now: Metrics) -> float:
    """Bytes that peers have read for this server."""
    return now.value("vllm:nvmeof_peer_bytes_total", direction="pulled")


def served(now: Metrics) -> float:
    """Bytes that this server has read for peers."""
    return now.value("vllm:nvmeof_peer_bytes_total", direction="served")


def came_since(server: Server, before: Metrics) -> tuple[float, float]:
    """Bytes that came through peers since then, and those that the server read itself."""
    name = "vllm:nvmeof_transfer_bytes_total"
    read = rig.grown(server, before, name, direction="load", stage="pool")
    return pulled_by(rig.metrics(server)) - pulled_by(before), read


def load_all(
    dual: Rig, reference: rig.Reference, helpers: Sequence[str] | None = None
) -> tuple[float, float]:
    """Ask for all again; return the bytes that came through D and those that P read itself."""
    rig.forget_gpu(dual.p)
    before = rig.metrics(dual.p)
    answers = rig.ask(dual.p, reference.prompts, helpers=helpers)
    assert rig.same(answers, reference.answers)
    return came_since(dual.p, before)


def load_until_pulled(
    dual: Rig, reference: rig.Reference, helpers: Sequence[str] | None = None
) -> None:
    """P greets a peer that is new, or was lost, within seconds; each round takes some."""
    for _ in range(ROUNDS_MAX):
        pulled, _ = load_all(dual, reference, helpers)
        if pulled:
            return
    raise AssertionError("nothing comes through D")


def failed_loads(dual: Rig) -> float:
    """Fetches ahead of need are cancelled when a load comes first."""
    return rig.metrics(dual.p).value(FAILED, operation="load")


def test_chunks_come_through_the_peer_too(dual: Rig, reference: rig.Reference) -> None:
    load_until_pulled(dual, reference)
    before = rig.metrics(dual.d)
    pulled, read = load_all(dual, reference)
    assert pulled > 0.2 * (pulled + read), "D takes its part of what is loaded"
    assert read > 0.2 * (pulled + read), "and P keeps its own"
    rig.wait_for(dual.d, "what it served", lambda m: served(m) > served(before))
    assert failed_loads(dual) == 0


def test_only_the_helpers_that_a_request_names_read_for_it(
    dual: Rig, reference: rig.Reference
) -> None:
    pulled, read = load_all(dual, reference, helpers=["127.0.0.1:1"])
    assert (pulled, read > 0) == (0, True)
    load_until_pulled(dual, reference, helpers=[dual.address])


def test_what_a_peer_has_brought_stays_in_the_cpu_tier(dual: Rig, reference: rig.Reference) -> None:
    """The second load is of the same bytes, without a read."""
    load_until_pulled(dual, reference)  # whose last prompts the tier holds now, and not the first
    prompts, wanted = reference.prompts[:1], reference.answers[:1]
    came = []
    for _ in range(2):
        rig.forget_gpu(dual.p)
        before = rig.metrics(dual.p)
        assert rig.same(rig.ask(dual.p, prompts), wanted)
        came.append(came_since(dual.p, before))
    (pulled, _), again = came
    assert pulled > 0
    assert sum(again) < pulled, "what the peer brought is there"


def test_a_peer_that_is_killed_costs_no_request_and_no_token(
    dual: Rig, reference: rig.Reference
) -> None:
    """It is killed while P loads, comes again, and reads for P again."""
    for _ in range(2):
        rig.forget_gpu(dual.p)
        loads = ThreadPoolExecutor(1)
        before = pulled_by(rig.metrics(dual.p))
        answers = loads.submit(rig.ask_at_once, dual.p, reference.prompts)
        rig.wait_for(dual.p, "a load through D", lambda m, x=before: pulled_by(m) > x)
        dual.d.kill()
        assert rig.same(answers.result(), reference.answers)
        pulled, read = load_all(dual, reference)
        assert pulled == 0
        assert read > 0
        dual.start_d()
        load_until_pulled(dual, reference)
    events = "vllm:nvmeof_peer_events_total"
    assert rig.metrics(dual.p).value(events, event="session_lost") >= 1
    assert failed_loads(dual) == 0


def test_after_new_weights_nothing_comes_from_a_peer_of_the_old_ones(
    dual: Rig, reference: rig.Reference
) -> None:
    """A reset draws a name for the weights that D does not have."""
    rig.forget_all(dual.p)
    rig.store_all(dual.p, reference)
    pulled, read = load_all(dual, reference)
    assert pulled == 0
    assert read > 0
