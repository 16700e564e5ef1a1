# SPDX-License-Identifier: Apache-2.0
"""vLLM's line 'KV Transfer metrics: …', which comes every ten seconds: short enough to be read."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)

from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, PREFIX

__all__ = ["OffloadingStats"]

_GAUGES = {metric.name for metric in GAUGES.values()}


class OffloadingStats(OffloadingConnectorStats):
    """What vLLM's class has; the line has what happened, without what is in `/metrics` alone."""

    def reduce(self) -> dict[str, int | float]:
        """Of the last interval: our counters by their short names, and vLLM's own; no zeros."""
        short: dict[str, int | float] = {}
        for key, value in super().reduce().items():
            name = key.split(":(")[0]
            if not value or name in _GAUGES:
                continue
            short[_said(key) if name.startswith(PREFIX) else key] = round(value, 3)
        return short


def _said(key: str) -> str:
    """`vllm:nvmeof_lookups:('cpu',)` → `lookups cpu`."""
    name, _, labels = key.removeprefix(PREFIX).partition(":")
    assert name in COUNTERS
    values = [part.strip(" '") for part in labels.strip("()").split(",")]
    return " ".join([name, *filter(None, values)])
