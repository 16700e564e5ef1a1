# SPDX-License-Identifier: Apache-2.0
"""`bench pool`: goals on made-up samples, statistics, and real runs of every available arm; the
rig of `bench copy` and `bench peers`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_nvmeof_bench.conditions import mount_of
from vllm_nvmeof_bench.pool import (
    FLAT_KINDS,
    Beside,
    Job,
    Moved,
    Mover,
    PipelineMover,
    Settings,
    fio_moved,
    run,
)
from vllm_nvmeof_bench.reports.pool import ARMS, CASES, KINDS, Sample, goals
from vllm_nvmeof_bench.results import BenchError, Goal, median_of, missed, percentile
from vllm_nvmeof_bench.rig import Rig, measure_arm
from vllm_nvmeof_bench.rig import Settings as RigSettings

from tests.process import wait_until
from tests.unit.bench.made_up import ROUNDS, everything, rounds
from vllm_nvmeof_offload.units import GIB, KIB, MIB

BLOCKS = (64 * KIB, 512 * KIB, 2 * MIB)


def row(rows: list[Goal], start: str) -> Goal:
    (found,) = (one for one in rows if one.name.startswith(start))
    return found


def test_every_goal_is_listed_and_reached_by_good_samples() -> None:
    rows = goals(everything(BLOCKS), {})
    assert len(rows) == 13
    assert all(one.reached is True for one in rows), missed(rows)
    assert {one.n for one in rows} == {ROUNDS}


def test_the_worst_block_against_the_best_rival_decides() -> None:
    samples = [one for one in everything(BLOCKS) if one.block_bytes != 512 * KIB]
    for arm, value in (("ours", 900.0), ("fio", 950.0), ("ring", 500.0), ("ours_threads", 1000.0)):
        samples += rounds(arm, "batch_read", 512 * KIB, [value] * 3)
    found = row(goals(samples, {}), "batch read ≥ 512 KiB / best")
    assert found.measured == pytest.approx(0.9)
    assert found.where == "512 KiB, ours_threads"
    assert found.reached is False


def test_small_blocks_do_not_count_against_the_device() -> None:
    samples = everything((2 * MIB,)) + rounds("ours", "batch_read", 64 * KIB, [1.0])
    assert row(goals(samples, {}), "batch read ≥ 512 KiB / best").reached is True


def test_a_ring_with_our_slots_is_a_goal_of_its_own() -> None:
    samples = [one for one in everything(BLOCKS) if one.block_bytes != 512 * KIB]
    for arm, value in (("ours", 900.0), ("ring", 1000.0), ("ring_slots", 950.0)):
        samples += rounds(arm, "batch_write", 512 * KIB, [value] * 3)
    found = row(goals(samples, {}), "batch write ≥ 512 KiB / ring with our slots")
    assert found.measured == pytest.approx(900 / 950)
    assert found.where == "512 KiB, ring_slots"
    assert found.reached is True


def test_medians_decide_not_single_rounds() -> None:
    samples = without(everything(BLOCKS), "ours", "single_write", 2 * MIB)
    samples += rounds("ours", "single_write", 2 * MIB, [1.0, 1350.0, 1360.0])
    found = row(goals(samples, {}), "one 128 MiB job of 2 MiB blocks, write")
    assert found.measured == pytest.approx(3.0)
    assert found.reached is True


@pytest.mark.parametrize("arm", ["fio", "ring", "ours_threads", "ours"])
def test_without_a_rival_the_best_rival_is_unknown(arm: str) -> None:
    samples = [one for one in everything(BLOCKS) if one.arm != arm]
    found = row(goals(samples, {}), "batch write ≥ 512 KiB / best")
    assert found.measured is None
    assert found.reached is None


def test_an_unmeasured_goal_is_neither_reached_nor_missed() -> None:
    rows = goals([], {})
    assert len(rows) == 13
    assert all(one.reached is None and one.n == 0 for one in rows)
    assert missed(rows) == []


def test_a_time_is_judged_by_an_upper_bound() -> None:
    samples = without(everything(BLOCKS), "ours", "read_beside_writes", 2 * MIB)
    samples += rounds("ours", "read_beside_writes", 2 * MIB, [1.0] * 3, None, 30_000.0)
    rows = goals(samples, {})
    p99 = row(rows, "p99 of a read during writes")
    assert (p99.measured, p99.required, p99.reached) == (0.75, "≤ 0.5", False)
    assert missed(rows) == [p99]


def test_cpu_time_is_compared_per_gib() -> None:
    rows = goals(everything(BLOCKS), {})
    assert row(rows, "CPU s/GiB, 2 MiB batch write").measured == pytest.approx(0.01 / 0.4)


def without(samples: list[Sample], arm: str, case: str, block: int) -> list[Sample]:
    return [one for one in samples if (one.arm, one.case, one.block_bytes) != (arm, case, block)]


def test_percentiles_are_measured_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([1.0, 2.0], 1.0) == 2.0


def test_a_sample_counts_payload_per_second_and_cpu_per_gib() -> None:
    sample = Moved(GIB // 2, 0.25, 0.02, 10.04, None).sample("ours", "batch_read", 2 * MIB, 4)
    assert sample == Sample("ours", "batch_read", 2 * MIB, 4, 2048.0, 0.04, 10.0, None)


def test_medians_are_over_rounds_of_one_arm_case_and_block() -> None:
    samples = [
        *rounds("ours", "batch_read", 64 * KIB, [1.0, 9.0, 3.0]),
        *rounds("ours", "batch_read", 2 * MIB, [100.0] * 3),
        *rounds("fio", "batch_read", 64 * KIB, [50.0] * 3, cpu_s_per_gib=None),
    ]
    small = {"case": "batch_read", "block_bytes": 64 * KIB}
    assert median_of(samples, "mib_per_s", arm="ours", **small) == 3.0
    assert median_of(samples, "cpu_s_per_gib", arm="fio", **small) is None
    assert median_of(samples, "mib_per_s", arm="ring", **small) is None


def test_settings_refuse_what_cannot_be_measured() -> None:
    with pytest.raises(BenchError, match="no arm 'uring'"):
        Settings(arms=("uring",))
    with pytest.raises(BenchError, match="no case 'read'"):
        Settings(cases=("read",))
    with pytest.raises(BenchError, match="multiples of 4 KiB"):
        Settings(blocks=(5000,))
    with pytest.raises(BenchError, match="fewer than 8 blocks"):
        Settings(bytes_per_round=4 * MIB)


def test_each_arm_measures_its_cases() -> None:
    settings = Settings()
    assert settings.kinds("fio", 2 * MIB) == ("batch_write", "batch_read", "mixed")
    assert "beside" in settings.kinds("ours", 2 * MIB)
    assert "beside" not in settings.kinds("ours", MIB)
    assert Settings(cases=("writes_alone",)).kinds("vllm_fs", 2 * MIB) == ("writes_alone",)
    assert Settings(cases=("writes_alone",)).kinds("ring", 2 * MIB) == ()
    assert set(settings.arms) == set(ARMS)
    assert len(CASES) == 8


def test_the_default_run_stays_within_five_gib() -> None:
    assert Settings().disk_bytes_max < 5 * GIB


def test_fios_json_becomes_figures() -> None:
    report = {
        "jobs": [
            {
                "usr_cpu": 2.0,
                "sys_cpu": 8.0,
                "job_runtime": 500,
                "mixed": {
                    "io_bytes": GIB,
                    "bw_bytes": 2 * GIB,
                    "clat_ns": {"percentile": {"50.000000": 2000, "99.000000": 5000}},
                },
            }
        ]
    }
    assert fio_moved(report) == Moved(GIB, 0.5, 0.05, 2.0, 5.0)


def test_conditions_name_the_disk_without_paths(tmp_path: Path) -> None:
    found = mount_of(tmp_path)
    assert found["file_system"]
    assert "/" not in found["device"]


class SlowToWrite(Mover):
    """Reads end at the next poll; a write ends at every poll before the first read, and then only
    at the second poll after `reads` reads.
    """

    def __init__(self, reads: int) -> None:
        self._reads_left = reads
        self._polls_left = 2
        self._reading: list[int] = []
        self._writing: list[int] = []
        self._begun = False

    def run(self, jobs: Sequence[Job]) -> None:
        pass

    def submit(self, token: int, is_read: bool, block: int) -> None:
        (self._reading if is_read else self._writing).append(token)
        self._begun = self._begun or is_read

    def poll(self, timeout_s: float) -> list[int]:
        ended, self._reading = self._reading, []
        self._reads_left -= len(ended)
        if self._begun and not ended and self._reads_left <= 0:
            self._polls_left -= 1
        if not self._begun or self._polls_left <= 0:
            ended, self._writing = ended + self._writing[:1], self._writing[1:]
        return ended


def test_reads_that_end_before_any_write_does_leave_no_empty_sample() -> None:
    """The timed part goes on to the first write: zero reads give no rate."""
    settings = Settings(
        blocks=(64 * KIB,),
        bytes_per_round=2 * MIB,
        queued_bytes=256 * KIB,
        episode_bytes=MIB,
        read_gap_s=0.0,
    )
    mover = SlowToWrite(reads=3)
    found = Beside(mover, settings, 64 * KIB, random.Random(1)).run(3)
    assert found["read_beside_writes"].payload_bytes == 3 * 64 * KIB
    assert found["writes_beside_read"].payload_bytes >= 64 * KIB


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


# The rig of `bench copy` and `bench peers`: real loads of tiny sizes, and wrong bytes.


TINY = RigSettings(
    (0.5, 4),
    tier_bytes=MIB,
    chunk_bytes=64 * KIB,
    block_bytes=16 * KIB,
    pause_s=0.0,
)


def test_settings_split_the_tier_as_the_product_does() -> None:
    settings = RigSettings((0.25, 8))
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
