# SPDX-License-Identifier: Apache-2.0
"""File, tables, picture and command line of `bench stream`, on made-up samples."""

from __future__ import annotations

import pytest
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.stream import Settings

from vllm_nvmeof_offload.units import MIB


def test_settings_split_the_tier_as_the_product_does() -> None:
    settings = Settings(tier_bytes=64 * MIB)
    assert (settings.cache_slots, settings.stream_slots) == (128, 42)
    assert settings.chunks(0.25) == 32
    assert settings.chunks_max == 1024
    assert ("paced", 2) in settings.cases
    assert not [case for case, _ in Settings(throttle_mb_per_s=0).cases if case == "paced"]
    with pytest.raises(BenchError, match="rounds"):
        Settings(rounds=0)
