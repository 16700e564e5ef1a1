# SPDX-License-Identifier: Apache-2.0
"""One direction of a GPU's copies: its stream, and the tickets that the GPU works on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.bell import Bell
from vllm_nvmeof_offload.copy.fences import Fence
from vllm_nvmeof_offload.copy.kernel import Table
from vllm_nvmeof_offload.errors import OK, Outcome

__all__ = ["Flight", "Lane", "Ticket"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """What was submitted, its pieces coalesced."""

    number: int
    direction: Direction
    pieces: Descriptors
    fence: Fence


@dataclass(slots=True)
class Flight:
    """One ticket that the GPU works on. recorded: `event` marks its end."""

    ticket: int
    event: int
    outcome: Outcome = OK
    recorded: bool = True
    rung: bool = False
    tables: list[Table] = field(default_factory=list)


@dataclass(slots=True)
class Lane:
    """One direction."""

    stream: int
    bell: Bell | None
    flights: deque[Flight] = field(default_factory=deque)
    #: Polled as finished; their events may be used again as soon as the bell has rung.
    finished: deque[Flight] = field(default_factory=deque)
