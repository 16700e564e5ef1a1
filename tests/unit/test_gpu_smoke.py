# SPDX-License-Identifier: Apache-2.0
"""The first stage on a GPU, over the stub of its driver: its figures mean nothing here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm_nvmeof_bench")

from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda
from tests.unit.gpu_tools import tool
from vllm_nvmeof_offload.units import KIB, MIB

gpu_smoke = tool("gpu_smoke")


@pytest.fixture
def working() -> Iterator[FakeCuda]:
    """A stub that runs by itself, as a GPU does."""
    cuda, stopping = FakeCuda(), threading.Event()

    def work() -> None:
        while not stopping.is_set():
            if not cuda.step():
                stopping.wait(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    yield cuda
    stopping.set()
    thread.join()


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_copies_of_every_arm_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    cuda, smoke = FakeCuda(), gpu_smoke.Smoke()
    gpu_smoke.report_world(smoke, cuda, 1, 2 * MIB, (4 * KIB,))
    lines = printed(capsys)
    assert not smoke.failed and not cuda.registered and not cuda.allocated
    assert lines[0]["gpu"] == "stub" and lines[1]["seconds"].keys() >= {"populate", "register"}
    rates = {line["arm"]: line["gb_per_s"] for line in lines[2:]}
    assert rates.keys() == {"dma", "dma_overlap", "kernel", "auto"}
    assert all(rate > 0 for arm in rates.values() for rate in arm.values())
    assert all(arm.keys() == {"store", "load", "both"} for arm in rates.values())


def test_an_arm_that_fails_is_named_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cuda, smoke = FakeCuda(ignore=("copy_batch",)), gpu_smoke.Smoke()
    gpu_smoke.report_world(smoke, cuda, 1, 2 * MIB, (4 * KIB,))
    lines = printed(capsys)
    assert smoke.failed
    failed = {line["step"]: line["failed"] for line in lines if "failed" in line}
    wrong = "ArithmeticError: the bytes that were copied back differ"
    assert failed["dma, 4096 bytes"] == failed["dma_overlap, 4096 bytes"] == wrong
    assert "kernel" in {line["arm"] for line in lines if "arm" in line}


def test_the_wait_behind_another_fence_is_measured(
    working: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = threading.Event()
    timer = threading.Timer(0.05, forward.set)

    def compute() -> None:
        working.on_model(lambda: forward.wait(20) and None)
        timer.start()

    gpu_smoke.report_fence(gpu_smoke.Smoke(), working, lambda: MODEL_STREAM, compute)
    timer.join()
    (line,) = printed(capsys)
    assert 0 < line["load_behind_a_pending_fence_ms"] < 1e3 * gpu_smoke.FENCE_S_MAX
    assert not working.registered and not working.allocated and not working.events
