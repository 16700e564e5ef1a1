# SPDX-License-Identifier: Apache-2.0
"""In a checkout the benchmarks lie in `bench/`, which need not be on the path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("vllm_nvmeof_bench") is None:
    sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
