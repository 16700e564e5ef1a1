# SPDX-License-Identifier: Apache-2.0
"""A custom eviction policy, compared with LRU.

    python examples/04_custom_policy.py

runs the policy on a day of simulated requests, without vLLM, and prints the number of hits.
To use the policy in a server, name it in the configuration:

    PYTHONPATH=examples vllm serve MODEL --kv-offloading-backend nvmeof --kv-transfer-config \
      '{"kv_connector_extra_config": {"eviction_policy": "04_custom_policy:SecondChance"}}'

Policies, one for the CPU tier and one per target, run in the scheduler and must never block.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class SecondChance:
    """First in, first out, but a slot used since its last examination returns to the end of the
    queue.

    `used[slot]` is the time of a slot's last use. The manager updates it at no cost to the policy.
    """

    def __init__(self, used: Sequence[int]) -> None:
        self._used = used
        self._seen = [0] * len(used)  # used[slot] when the slot was last examined
        self._inside = bytearray(len(used))
        self._queued = bytearray(len(used))
        self._queue: deque[int] = deque()

    def admit(self, slot: int) -> None:
        self._inside[slot] = 1
        if not self._queued[slot]:
            self._queued[slot] = 1
            self._seen[slot] = self._used[slot]
            self._queue.append(slot)

    def withdraw(self, slot: int) -> None:
        # A pinned slot keeps its place in the queue: it may be admitted again.
        self._inside[slot] = 0

    def touch(self, slot: int) -> None:
        """Do nothing: `used` already has the time."""

    def peek(self) -> int | None:
        while self._queue:
            slot = self._queue[0]
            if not self._inside[slot]:
                self._queued[self._queue.popleft()] = 0
            elif self._used[slot] != self._seen[slot]:
                self._seen[slot] = self._used[slot]
                self._queue.rotate(-1)
            else:
                return slot
        return None

    def victim(self) -> int | None:
        slot = self.peek()
        if slot is not None:
            self._queued[self._queue.popleft()] = 0
            self.withdraw(slot)
        return slot


def hits(slots: int, day: Sequence[int]) -> int:
    """Return the number of hits of `day`, a sequence of chunks, on `slots` slots."""
    used = [0] * slots
    policy, holds, free, found = SecondChance(used), dict[int, int](), list(range(slots)), 0
    for now, chunk in enumerate(day, 1):
        if chunk in holds:
            found += 1
            used[holds[chunk]] = now
            policy.touch(holds[chunk])
            continue
        if not free:
            victim = policy.victim()
            assert victim is not None
            del holds[next(c for c, slot in holds.items() if slot == victim)]
            free.append(victim)
        slot = free.pop()
        holds[chunk] = slot
        used[slot] = now
        policy.admit(slot)
    return found


def main() -> None:
    rng = random.Random(1)
    day = [min(int(rng.paretovariate(0.6)), 2000) for _ in range(20_000)]
    lru = lru_cache(100)(lambda chunk: chunk)
    for chunk in day:
        lru(chunk)
    for name, found in (("lru", lru.cache_info().hits), ("SecondChance", hits(100, day))):
        print(f"{name:12} {found} of {len(day)} chunks were hits ({found / len(day):.1%})")


if __name__ == "__main__":
    main()
