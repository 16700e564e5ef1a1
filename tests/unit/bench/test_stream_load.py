# SPDX-License-Identifier: Apache-2.0
"""The part "load" with tiny sizes: real files, no throttle; and copies as slow as they should."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.stream import ARMS, PacedCopyEngine, Settings, run, steps

from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.units import KIB, MIB

TINY = Settings(
    parts=("load",),
    rounds=2,
    throttle_mb_per_s=0,
    tier_bytes=MIB,
    chunk_bytes=64 * KIB,
    block_bytes=16 * KIB,
    sizes=(0.5, 4),
    pause_s=0.0,
)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_every_arm_moves_real_bytes_once_per_round_and_leaves_nothing(
    tmp_path: Path, engine: str
) -> None:
    settings = replace(TINY, io_engine=engine, directory=tmp_path / "disk")
    reported: list[tuple[int, int, str]] = []
    parts = []
    samples, conditions = run(
        settings,
        lambda *progress: reported.append(progress),
        lambda found, _: parts.append(len(found)),
    )
    measured = [(one.round, one.at, one.arm) for one in samples]
    expected = {(r, at, arm) for r in range(2) for at in (0.5, 4.0) for arm in ARMS["load"]}
    assert set(measured) == expected
    assert len(measured) == len(expected) == steps(settings) == parts[-1]
    assert all(one.seconds > 0 and one.cpu_s is not None for one in samples)
    assert {one.payload_bytes for one in samples} == {MIB // 2, 4 * MIB}
    assert reported[-1] == (steps(settings), steps(settings), "done")
    assert conditions["parts"]["load"]["throttle"] == "none"
    assert '"/' not in json.dumps(conditions), "no absolute path"
    assert list(tmp_path.iterdir()) == [], "the run cleans up"


def test_too_little_space_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="give another --dir"):
        run(replace(TINY, tier_bytes=1 << 60, directory=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_paced_copy_ends_when_its_bytes_would_have_passed() -> None:
    source, destination = np.arange(MIB, dtype=np.uint8), np.zeros(MIB, np.uint8)
    half = MIB // 2
    pieces = [
        np.array([[destination.ctypes.data + at, source.ctypes.data + at, half]], np.uint64)
        for at in (0, half)
    ]
    done = Event()
    engine = PacedCopyEngine(on_done=done.set)
    try:
        engine.bytes_per_s = 20 * MIB
        begin_s = time.perf_counter()
        tickets = [engine.submit(Direction.LOAD, part, None) for part in pieces]
        finished: list[int] = []
        while len(finished) < 2:
            assert done.wait(10)
            done.clear()
            finished += [ticket for ticket, outcome in engine.poll() if outcome.ok]
        assert time.perf_counter() - begin_s >= 0.05
    finally:
        engine.close()
    assert finished == tickets
    assert np.array_equal(destination, source)
