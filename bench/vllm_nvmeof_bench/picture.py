# SPDX-License-Identifier: Apache-2.0
"""The earlier name of `plots`, until every benchmark uses that one."""

from __future__ import annotations

from vllm_nvmeof_bench.plots import pyplot, save

__all__ = ["pyplot", "save"]
