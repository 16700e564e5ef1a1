# SPDX-License-Identifier: Apache-2.0
"""One engine's log lines: its start, and what failed. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import OutcomeKind
from vllm_nvmeof_offload.manager.core import ManagerCore
from vllm_nvmeof_offload.manager.handshake import Capacity
from vllm_nvmeof_offload.metrics import Counts, Series
from vllm_nvmeof_offload.protocol import RankHello
from vllm_nvmeof_offload.units import format_bytes


def start_line(hellos: Sequence[RankHello], core: ManagerCore) -> str:
    """One log line on all ranks together; a value that differs is given with its ranks."""
    first, ranks, capacity = hellos[0], len(hellos), core.capacity
    tokens_per_chunk = core.config.tokens_per_chunk
    adopted = int(core.counters["adopted_chunks"])
    size = capacity.slot_bytes
    pinned = sum((hello.cache_slots + hello.stream_slots) * hello.slot_bytes for hello in hellos)
    replica = f"replica {first.replica}: " if first.replica is not None else ""
    tier = (
        f"{replica}CPU tier of {capacity.cache_slots * tokens_per_chunk:,} tokens "
        f"({capacity.cache_slots} cache slots of {format_bytes(size)}) and {first.stream_slots} "
        f"stream slots in {format_bytes(pinned)} of pinned memory on "
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
    )
    parts = [
        tier,
        _pool(first, capacity, tokens_per_chunk, ranks),
        f"engine {_by_rank(hellos, 'io_engine')}",
        f"copies by {_by_rank(hellos, 'copy_engine')}",
        f"evicts by {core.config.eviction_policy}",
        f"{adopted} chunks adopted ({adopted * tokens_per_chunk:,} tokens)",
        f"keyspace {first.keyspace}",
    ]
    lines = {line: None for hello in hellos for line in hello.fallbacks}
    parts += [f"FALLBACK {line}" for line in lines]
    reasons = {reason: None for hello in hellos for reason in hello.volatile}
    if reasons:
        parts.append(f"NOTHING IS ADOPTED: {'; '.join(reasons)}")
    return "; ".join(parts)


def _pool(first: RankHello, capacity: Capacity, tokens_per_chunk: int, ranks: int) -> str:
    slots = capacity.pool_slots_total
    if not slots:
        return "no pool: what leaves the CPU tier is gone"
    size = format_bytes(slots * capacity.slot_bytes * ranks)
    return (
        f"pool of {slots * tokens_per_chunk:,} tokens ({slots} slots, "
        f"{size} over all ranks) in engine-{first.engine_index} on {', '.join(first.targets)}"
    )


def _by_rank(hellos: Sequence[RankHello], name: str) -> str:
    """The value that all ranks have, or each rank's."""
    values: dict[int, str] = {hello.rank: getattr(hello, name) for hello in hellos}
    if len(set(values.values())) == 1:
        return values[hellos[0].rank]
    return ", ".join(f"{value} on rank {rank}" for rank, value in values.items())


PERIOD_S = 60.0

#: Operation → what failed, and the consequence.
_FAILED = {
    "store": ("copied from the GPU", "they are not offloaded"),
    "load": ("loaded", "their tokens are computed again"),
    "fetch": ("fetched ahead of need", "a request that needs them computes them again"),
    "write": ("written", "they stay in the CPU tier only"),
    "reset": ("voided on disk", "what this server stores is not found by another start"),
}


class FailureLog:
    """Logs failed operations: the first of a kind at once, then at most one line per minute.

    A kind is an operation with an outcome on a target. Each line has the number of chunks since
    the last line of its kind, so that none is left out. targets: their directories. Cancelled
    operations are not logged.
    """

    def __init__(
        self, core: ManagerCore, targets: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core, self._clock = core, clock
        self._targets = {str(number): path for number, path in enumerate(targets)}
        self._logged = Counts()
        self._logged_s: dict[Series, float] = {}

    def log_new(self) -> None:
        """Log what is new and due; call after every step's reports."""
        for kind, outcome in self._core.last_failures.items():
            new = self._core.counters[kind] - self._logged[kind]
            if not new or outcome.kind is OutcomeKind.CANCELLED:
                continue
            now_s = self._clock()
            if now_s - self._logged_s.get(kind, float("-inf")) < PERIOD_S:
                continue
            self._logged_s[kind] = now_s
            self._logged[kind] += new
            operation, target = kind[1], kind[3]
            place = "" if target == "none" else f" on target {self._targets.get(target, target)}"
            what = "1 chunk" if new == 1 else f"{new} chunks"
            failed, consequence = _FAILED[operation]
            logger.warning(
                "%s could not be %s%s: %s; %s", what, failed, place, outcome, consequence
            )
