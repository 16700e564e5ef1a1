# SPDX-License-Identifier: Apache-2.0
"""The rig of `bench copy` and `bench peers`: real loads of tiny sizes, and wrong bytes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.rig import Rig, Settings, measure_arm

from vllm_nvmeof_offload.units import KIB, MIB

TINY = Settings(
    (0.5, 4),
    tier_bytes=MIB,
    chunk_bytes=64 * KIB,
    block_bytes=16 * KIB,
    pause_s=0.0,
)


def test_settings_split_the_tier_as_the_product_does() -> None:
    settings = Settings((0.25, 8))
    assert (settings.cache_slots, settings.stream_slots) == (128, 42)
    assert (settings.chunks(0.25), settings.chunks_max) == (32, 1024)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_every_arm_moves_the_bytes_that_were_written(tmp_path: Path, engine: str) -> None:
    with contextlib.closing(Rig(tmp_path, replace(TINY, io_engine=engine))) as rig:
        rig.write_all()
        for arm in ("ours", "two_phase", "read"):
            for count in map(TINY.chunks, TINY.sizes):
                seconds, cpu_s = measure_arm(rig, arm, count)
                assert seconds > 0 and cpu_s >= 0
        rig._written = rig._written.copy()
        rig._written[0] ^= 0xFF
        with pytest.raises(BenchError, match="differ from the written bytes"):
            measure_arm(rig, "ours", TINY.chunks(0.5))
