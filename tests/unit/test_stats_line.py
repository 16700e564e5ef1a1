# SPDX-License-Identifier: Apache-2.0
"""vLLM's periodic log line shows only counters that changed."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the line is vLLM's")

from vllm_nvmeof_offload.connector import OffloadingStats
from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES


def test_the_line_shows_only_nonzero_counters() -> None:
    stats = OffloadingStats()
    stats.increase_counter(COUNTERS["lookups"].name, 3, ("cpu",))
    stats.increase_counter(COUNTERS["lookups"].name, 0, ("miss",))
    stats.increase_counter(COUNTERS["transfer_seconds"].name, 0.12345, ("load", "pool"))
    stats.set_gauge(GAUGES["entries"].name, 12)
    stats.set_gauge(GAUGES["target_verdict"].name, 1, ("0",))
    stats.increase_counter("vllm:kv_offload_load_bytes", 7)
    assert stats.reduce() == {
        "lookups cpu": 3,
        "transfer_seconds load pool": 0.123,
        "vllm:kv_offload_load_bytes": 7,
    }
