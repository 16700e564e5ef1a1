# SPDX-License-Identifier: Apache-2.0
"""What brings sessions back from the pool in time, and what is in the way.

The worst case: everything is in the pool, nothing in GPU memory or in the CPU tier, and all of
`concurrency` sessions come back at the same moment, spread evenly over drives, links and GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import KvSizes

__all__ = ["Hop", "Reload", "plan_reload", "sessions_in_time"]


@dataclass(frozen=True, slots=True)
class Hop:
    """One thing that all bytes pass. needed: how many of it the objective asks for."""

    name: str
    bytes_per_s: float
    needed: int


@dataclass(frozen=True, slots=True)
class Reload:
    """All of the returning sessions, loaded at once."""

    session_bytes: int
    needed_bytes_per_s: float
    hops: tuple[Hop, ...]
    seconds: float
    sessions_in_time: int

    @property
    def bottleneck(self) -> Hop:
        return min(self.hops, key=lambda hop: hop.bytes_per_s)


def plan_reload(sizes: KvSizes, deployment: Deployment, drives: int) -> Reload:
    """Load `concurrency` sessions from `drives` drives within the TTFT objective."""
    session = sizes.loaded_bytes(deployment.context_tokens)
    needed = deployment.concurrency * session / deployment.ttft_seconds
    hops = _hops(deployment, drives, needed)
    rate = min(hop.bytes_per_s for hop in hops)
    return Reload(
        session_bytes=session,
        needed_bytes_per_s=needed,
        hops=hops,
        seconds=deployment.concurrency * session / rate,
        sessions_in_time=sessions_in_time(session, rate, deployment.ttft_seconds),
    )


def sessions_in_time(session_bytes: int, bytes_per_s: float, seconds: float) -> int:
    """Sessions that load within `seconds`; 0 where a session has nothing to load."""
    return math.floor(bytes_per_s * seconds / session_bytes) if session_bytes else 0


def _hops(deployment: Deployment, drives: int, needed: float) -> tuple[Hop, ...]:
    link, gpu_link = deployment.parsed_link, deployment.parsed_gpu_link
    efficiency = deployment.link_efficiency
    one_link = link.bytes_per_s * efficiency
    one_gpu = gpu_link.total_bytes_per_s * efficiency
    one_drive = deployment.drive_read_bytes_per_s
    return (
        Hop("drives", drives * one_drive, math.ceil(needed / one_drive)),
        Hop("links", link.count * one_link, math.ceil(needed / one_link)),
        Hop("GPU links", deployment.gpus * one_gpu, math.ceil(needed / one_gpu)),
    )
