# SPDX-License-Identifier: Apache-2.0
"""Under which conditions the samples were taken. No dates and no absolute paths."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.pool import conditions as pool
from vllm_nvmeof_bench.pool.settings import Settings as PoolSettings
from vllm_nvmeof_bench.tier.settings import Settings

__all__ = ["at_end", "at_start"]

_PATHS = frozenset({"models"})


def at_start(settings: Settings, directory: Path) -> dict[str, Any]:
    """Versions, machine and disk as `bench pool` has them, and these settings."""
    found = pool.at_start(PoolSettings(), directory)
    own = {key: value for key, value in asdict(settings).items() if key not in _PATHS}
    return {**found, "settings": own, "parts": {}}


def at_end(conditions: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Add what each part really ran with, and the load average now."""
    load = [round(value, 2) for value in os.getloadavg()]
    return {**conditions, "parts": dict(parts), "load_average_at_end": load}
