# SPDX-License-Identifier: Apache-2.0
"""Lives that end by SIGKILL: `python -m tests.faults.kill_zygote`, one JSON job per line of stdin.

The zygote imports everything once and forks for each job, so that a life costs milliseconds. No
engine exists in the zygote, because threads and rings do not survive a fork. A life opens the
pool, adopts, reads every adopted slot, and then writes, overwrites, reads and resets until it is
killed. It prints a line before each action and a line after each acknowledgement, before anything
else happens. The zygote prints the last line of a life, `dead STATUS`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import SlotIdentity

from .kit import ENGINES, Bench, adopted, make_spec

PLACES = 6
WRITE_SHARE = 0.7
RESET_SHARE = 0.01


def key(number: int, generation: int) -> bytes:
    """Each write has a unique key, so that no chunk may be returned in another's place. All keys
    of a pool are of one length and of one group.
    """
    return f"{number:04}:{generation:08}\0\0\0\0".encode()


def emit(*words: object) -> None:
    """Print one line with one system call, so that the kill loses all of the line or nothing."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Life:
    """One process's life from the opening of the pool to the kill."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._dice = random.Random(job["seed"])
        self._generation = int(job["generation"])
        spec = make_spec(*map(Path, job["targets"]), slots=8, payload_bytes=job["payload_bytes"])
        #: The negative control: one of four slots is acknowledged but never written.
        self._sabotage = bool(job.get("sabotage"))
        self._pool = Pool.open(spec)
        emit("open", self._pool.engine_index)
        self._bench = Bench(job["engine"], self._pool, PLACES)
        self._stored: dict[int, SlotIdentity] = {}
        #: token → (staging slot, pool slot, identity, whether it is a read)
        self._busy: dict[int, tuple[int, int, SlotIdentity, bool]] = {}

    def adopt(self) -> None:
        for number, identity in adopted(self._pool).items():
            assert identity.key == key(number, identity.generation)
            (completion,) = self._bench.run(self._bench.read(number, 0, identity))
            assert completion.outcome is not None
            ok = completion.outcome.ok
            assert not ok or self._bench.right(0, identity), f"wrong bytes in slot {number}"
            emit("found", number, identity.generation, completion.outcome.kind.value)
            if ok:
                self._stored[number] = identity
        emit("adopted")

    def go_on(self) -> None:
        """Never returns."""
        while True:
            if self._dice.random() < RESET_SHARE:
                self._reset()
            free = set(range(PLACES)) - {place for place, *_ in self._busy.values()}
            for place in free:
                self._start(place)
            self._reap(self._bench.wait(bool))

    def _start(self, place: int) -> None:
        busy = {number for _, number, *_ in self._busy.values()}
        number = self._dice.choice([s for s in range(self._pool.slots) if s not in busy])
        if number in self._stored and self._dice.random() > WRITE_SHARE:
            identity = self._stored[number]
            op = self._bench.read(number, place, identity)
        else:
            self._generation += 1
            identity = SlotIdentity(key(number, self._generation), self._generation)
            self._stored.pop(number, None)
            emit("begin", number, self._generation)
            if self._sabotage and number % 4 == 0:
                emit("done", number, self._generation)
                return
            op = self._bench.write(number, place, identity)
        self._busy[op.token] = (place, number, identity, number in self._stored)
        self._bench.submit(op)

    def _reap(self, completions: list[Any]) -> None:
        for completion in completions:
            assert completion.outcome is not None
            assert completion.outcome.ok, completion
            place, number, identity, is_read = self._busy.pop(completion.token)
            if is_read:
                assert self._bench.right(place, identity), f"wrong bytes in slot {number}"
            else:
                self._stored[number] = identity
                emit("done", number, identity.generation)

    def _reset(self) -> None:
        if self._busy:
            count = len(self._busy)
            self._reap(self._bench.wait(lambda found: len(found) == count))
        named = self._dice.random() < 0.8
        emit("resetting", int(named), 0)
        outcomes = self._bench.reset(named)
        assert all(outcome.ok for outcome in outcomes), outcomes
        emit("reset", int(named), 0)
        self._stored.clear()


def main() -> None:
    assert ENGINES
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                emit("pid", os.getpid())
                life = Life(json.loads(line))
                life.adopt()
                life.go_on()
            except BaseException:  # noqa: BLE001 - the parent receives every error
                emit("error", json.dumps(traceback.format_exc()))
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        emit("dead", status)


if __name__ == "__main__":
    main()
