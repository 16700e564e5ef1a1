# SPDX-License-Identifier: Apache-2.0
"""Every arm that this machine has moves real bytes, once, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm_nvmeof_bench.pool import FLAT_KINDS, PipelineMover, Settings, run
from vllm_nvmeof_bench.reports.pool import KINDS
from vllm_nvmeof_bench.results import BenchError

from tests.wait import wait_until

PROBE = Path(__file__).with_name("smoke_probe.py")
ROOT = Path(__file__).parents[3]
FLAT_CASES = {case for kind in FLAT_KINDS for case in KINDS[kind]}
ALL_CASES = {case for cases in KINDS.values() for case in cases}


def environment() -> dict[str, str]:
    paths = [str(ROOT / "bench"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("bench")
    done = subprocess.run(
        [sys.executable, str(PROBE), str(directory / "disk")],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=directory,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (directory / "disk").exists(), "the run cleans up"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_every_available_arm_has_a_sample_of_each_of_its_cases(found: dict[str, Any]) -> None:
    arms = found["conditions"]["arms"]
    assert arms["ours_threads"]["available"]
    counts = Counter((row["arm"], row["case"]) for row in found["samples"])
    expected = {
        (name, case)
        for name, arm in arms.items()
        if arm["available"]
        for case in (FLAT_CASES if name in ("fio", "ring", "ring_slots") else ALL_CASES)
    }
    assert set(counts) == expected
    assert set(counts.values()) == {2}
    for row in found["samples"]:
        assert row["mib_per_s"] > 0
        assert row["cpu_s_per_gib"] is None or row["cpu_s_per_gib"] >= 0


def test_an_arm_that_cannot_run_names_the_reason(found: dict[str, Any]) -> None:
    for arm in found["conditions"]["arms"].values():
        assert arm["available"] or arm["reason"]


def test_every_round_measures_every_arm_once(found: dict[str, Any]) -> None:
    def order(number: int) -> list[str]:
        parts = [what.split(" · ") for what in found["order"] if what.count(" · ") == 3]
        return [arm for _, turn, kind, arm in parts if (turn, kind) == (f"round {number}", "mixed")]

    first, second = order(1), order(2)
    assert len(first) == len(set(first)) >= 1
    assert sorted(second) == sorted(first)


def test_conditions_hold_no_absolute_path(found: dict[str, Any]) -> None:
    text = json.dumps(found["conditions"])
    assert '"/' not in text
    assert str(Path.home()) + "/" not in text


def test_an_interrupted_run_deletes_what_it_wrote(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from vllm_nvmeof_offload.cli import app; app()"]
    command += ["bench", "pool", "--dir", "disk", "--json", "out.json", "--arms", "ours_threads"]
    command += ["--rounds", "1000", "--bytes-per-round", "2MiB", "--blocks", "64KiB"]
    child = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )

    def writes() -> bool:
        assert child.poll() is None
        return any(tmp_path.glob("disk/*/block-65536/pool/*"))

    try:
        wait_until("a file of the pool", writes)
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 130, errors
    assert "interrupted" in errors
    assert not (tmp_path / "disk").exists()
    assert not (tmp_path / "out.json").exists()


def test_the_first_writes_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(mover: PipelineMover) -> None:
        mover.submit(0, False, 0)
        mover.poll(0)
        raise KeyboardInterrupt

    monkeypatch.setattr(PipelineMover, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Settings(directory=tmp_path, arms=("ours_threads",), blocks=(64 << 10,)))
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="give another --dir"):
        run(Settings(directory=tmp_path, arms=("ours_threads",), bytes_per_round=1 << 60))
    assert list(tmp_path.iterdir()) == []
