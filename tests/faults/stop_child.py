# SPDX-License-Identifier: Apache-2.0
"""A process that is stopped and continued: `python -m tests.faults.stop_child JSON`.

Keeps operations with deadlines in flight until its stdin ends. Checks that each operation gives
one outcome and one release, that OK means the right bytes, and that a buffer is not reused before
its release; then checks that every operation works, and prints the counts.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, DEADLINE, OK, STALE
from vllm_nvmeof_offload.io.base import Completion
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import SlotIdentity

from .kit import Bench, make_spec, name

PLACES = 8
SLOTS = 16


class Traffic:
    """Random reads and writes and their outcomes."""

    def __init__(self, bench: Bench, seed: int, deadline_s: float) -> None:
        self._bench = bench
        self._dice = random.Random(seed)
        self._deadline_s = deadline_s
        self._generation = 1
        #: pool slot → the one right identity; None after a write that missed its deadline.
        self.stored: dict[int, SlotIdentity | None] = {n: name(n) for n in range(SLOTS)}
        #: pool slot → the identity of the last write that was submitted.
        self._tried = {n: name(n) for n in range(SLOTS)}
        #: token → (staging slot, pool slot, identity, whether it is a write)
        self._busy: dict[int, tuple[int, int, SlotIdentity, bool]] = {}
        self._deadlines: dict[int, float] = {}  # of what is waited for
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Start an operation in every free staging slot."""
        places = {place for place, *_ in self._busy.values()}
        for place in set(range(PLACES)) - places:
            taken = {number for _, number, *_ in self._busy.values()}
            number = self._dice.choice([n for n in range(SLOTS) if n not in taken])
            is_write = self._dice.random() < 0.5
            if is_write:
                self._generation += 1
                identity = self._tried[number] = name(number, self._generation)
                op = self._bench.write(number, place, identity)
            else:
                identity = self._tried[number]
                op = self._bench.read(number, place, identity)
            self._deadlines[op.token] = time.monotonic() + self._deadline_s
            self._busy[op.token] = (place, number, identity, is_write)
            self._bench.submit(op)

    def give_up(self) -> None:
        """Give up what is past its deadline, as the machine does."""
        now_s = time.monotonic()
        late = [token for token, deadline_s in self._deadlines.items() if deadline_s <= now_s]
        withdrawn = self._bench.engine.cancel(late) if late else []
        for token in late:
            del self._deadlines[token]
            self.counts[str(DEADLINE)] += 1
            _, number, _, is_write = self._busy[token]
            if is_write:
                self.stored[number] = None
        for token in withdrawn:
            del self._busy[token]

    def reap(self, completions: list[Completion]) -> None:
        for completion in completions:
            place, number, identity, is_write = self._busy.pop(completion.token)
            if self._deadlines.pop(completion.token, None) is None:
                self.counts["late"] += 1
                continue
            sure = is_write or self.stored[number] is not None
            other = () if sure else (STALE, CHECKSUM_MISMATCH)
            assert completion.outcome in (OK, *other), completion
            self.counts[str(completion.outcome)] += 1
            if is_write:
                self.stored[number] = identity
            elif completion.outcome == OK:
                assert self._bench.right(place, identity), "wrong bytes"

    def end(self) -> None:
        """Wait until every operation has ended, and check that new ones work."""
        while self._busy:
            self.reap(self._bench.wait(bool))
        for number, identity in self.stored.items():
            op = self._bench.read(number, 0, identity or name(number, self._generation + 1))
            (completion,) = self._bench.run(op)
            wanted = (OK,) if identity else (STALE, CHECKSUM_MISMATCH)
            assert completion.outcome in wanted, completion
            assert identity is None or self._bench.right(0, identity)
        assert self._bench.engine.poll() == []


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    targets = [Path(target) for target in job["targets"]]
    pool = Pool.open(make_spec(*targets, slots=SLOTS // len(targets)))
    bench = Bench(job["engine"], pool, PLACES)
    bench.store((slot, name(slot)) for slot in range(SLOTS))
    traffic = Traffic(bench, job["seed"], job["deadline_s"])
    print("ready", flush=True)
    reported = 0
    while sys.stdin not in select.select([sys.stdin], [], [], 0)[0]:
        traffic.start()
        select.select([bench.engine.fileno()], [], [], job["deadline_s"])
        traffic.reap(bench.engine.poll())
        traffic.give_up()
        # Count only successes: on a slow disk most operations miss their deadlines.
        if traffic.counts[str(OK)] >= reported + 8:
            reported = traffic.counts[str(OK)]
            print(reported, flush=True)
    traffic.end()
    assert bench.close()
    print(json.dumps(traffic.counts))


if __name__ == "__main__":
    main()
