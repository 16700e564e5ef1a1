# SPDX-License-Identifier: Apache-2.0
"""Statistics, the JSON form and settings, on made-up numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_nvmeof_bench.conditions import mount_of
from vllm_nvmeof_bench.pool import Moved, Settings, fio_moved
from vllm_nvmeof_bench.reports.pool import ARMS, CASES, Sample
from vllm_nvmeof_bench.results import BenchError, median_of, percentile

from tests.unit.bench.made_up import rounds
from vllm_nvmeof_offload.units import GIB, KIB, MIB


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
