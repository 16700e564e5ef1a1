# SPDX-License-Identifier: Apache-2.0
"""Operations under way as whoever stands between manager and ranks sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.protocol import SlotIdentity


@dataclass
class SentOp:
    """An op as the outside sees it: what it names, and how many ranks have spoken."""

    kind: str
    issued_s: float
    identities: tuple[SlotIdentity, ...] = ()
    cache: dict[int, SlotIdentity] = field(default_factory=dict)
    pool: dict[int, SlotIdentity] = field(default_factory=dict)
    outcomes: int = 0
    releases: int = 0
    failures: dict[int, Outcome] = field(default_factory=dict)
