# SPDX-License-Identifier: Apache-2.0
"""Put the benchmarks of a checkout, in `bench/`, on the import path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("vllm_nvmeof_bench") is None:
    sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
