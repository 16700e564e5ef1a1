# SPDX-License-Identifier: Apache-2.0
"""What a PCIe link runs at against what it can do, in words."""

from __future__ import annotations

from vllm_nvmeof_offload.fabric.topology import PcieLink

__all__ = ["is_below", "now", "shape"]


def is_below(link: PcieLink) -> bool:
    """Slower or narrower than it can be; what is not known is not."""
    slower = link.speed is not None and link.speed_max is not None and link.speed < link.speed_max
    thinner = link.width is not None and link.width_max is not None and link.width < link.width_max
    return slower or thinner


def now(link: PcieLink) -> str:
    return shape(link.speed, link.width)


def shape(speed: float | None, width: int | None) -> str:
    """Such as `32 GT/s x16`."""
    lanes = "x?" if width is None else f"x{width}"
    return f"{'unknown' if speed is None else f'{speed:g}'} GT/s {lanes}"
