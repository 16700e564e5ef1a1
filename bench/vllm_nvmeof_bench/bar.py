# SPDX-License-Identifier: Apache-2.0
"""The earlier name of `progress`, until every benchmark uses that one."""

from __future__ import annotations

from vllm_nvmeof_bench.progress import OnProgress, progress

__all__ = ["OnProgress", "progress"]
