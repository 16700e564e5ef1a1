# SPDX-License-Identifier: Apache-2.0
"""The copy benchmark from end to end over the stub: its figures mean nothing, its flow is real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm_nvmeof_bench")

from vllm_nvmeof_bench.gpu.__main__ import conditions, show
from vllm_nvmeof_bench.gpu.measure import ARMS, measure
from vllm_nvmeof_bench.gpu.samples import Sample, dump
from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.gpu.targets import evaluate
from vllm_nvmeof_bench.gpu.world import World

from tests.unit.copies.fake_cuda import FakeCuda
from vllm_nvmeof_offload.units import KIB, MIB

SETTINGS = Settings(
    rounds=1,
    blocks=8,
    bytes_max=4 * MIB,
    sizes=(4 * KIB, 512 * KIB),
    small_sizes=(4 * KIB,),
    counts=(4,),
    both_size=64 * KIB,
    submit_size=4 * KIB,
)


def test_every_case_is_measured_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda = FakeCuda()
    world = World(cuda, 1, SETTINGS.bytes_max)
    samples = measure(world, SETTINGS)
    dump(tmp_path / "build" / "copy.json", samples, conditions(world, SETTINGS))
    world.close()
    assert not cuda.registered and not cuda.allocated and not cuda.events
    content = json.loads((tmp_path / "build" / "copy.json").read_text())
    assert {row["case"] for row in content["samples"]} == {"transfer", "few", "both", "submit"}
    assert {row["arm"] for row in content["samples"]} == {"contiguous", *ARMS}
    show(samples)
    assert "not measured" in capsys.readouterr().out, "there were no loops of compute"


def test_wrong_bytes_stop_the_benchmark() -> None:
    world = World(FakeCuda(ignore=("copy_batch",)), 1, SETTINGS.bytes_max)
    with pytest.raises(RuntimeError, match="wrong bytes"):
        measure(world, SETTINGS)


def _sample(arm: str, value: float, case: str = "transfer", direction: str = "store") -> Sample:
    count = 20 if direction == "both" else 10
    return Sample(case, arm, direction, MIB, count, 0, value)


def test_targets_are_ratios_of_medians_and_the_worst_decides() -> None:
    samples = [
        *(_sample("contiguous", 50.0), _sample("dma", 49.0), _sample("kernel", 30.0)),
        *(_sample("auto", 44.1), _sample("dma", 99.0, "both", "both")),
        *(_sample("dma", 55.0, "both", "store"), _sample("dma", 45.0, "both", "load")),
        _sample("dma", 51.0, "submit"),
    ]
    rows = {row.target.split(" ")[0]: row for row in evaluate(samples)}
    assert (rows["DMA"].measured, rows["DMA"].reached) == (0.98, True)
    assert (rows["auto"].measured, rows["auto"].reached) == (0.9, False)
    assert (rows["both"].measured, rows["both"].reached) == (1.98, True)
    assert (rows["host"].measured, rows["host"].reached) == (51.0, False)
    assert rows["bf16"].reached is None
