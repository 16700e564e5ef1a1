# SPDX-License-Identifier: Apache-2.0
"""Reads beside writes, measured over an arm whose writes end late."""

from __future__ import annotations

import random
from collections.abc import Sequence

from vllm_nvmeof_bench.pool import Beside, Job, Mover, Settings

from vllm_nvmeof_offload.units import KIB, MIB


class SlowToWrite(Mover):
    """Reads end at the next poll; a write ends at every poll before the first read, and then only
    at the second poll after `reads` reads.
    """

    def __init__(self, reads: int) -> None:
        self._reads_left = reads
        self._polls_left = 2
        self._reading: list[int] = []
        self._writing: list[int] = []
        self._begun = False

    def run(self, jobs: Sequence[Job]) -> None:
        pass

    def submit(self, token: int, is_read: bool, block: int) -> None:
        (self._reading if is_read else self._writing).append(token)
        self._begun = self._begun or is_read

    def poll(self, timeout_s: float) -> list[int]:
        ended, self._reading = self._reading, []
        self._reads_left -= len(ended)
        if self._begun and not ended and self._reads_left <= 0:
            self._polls_left -= 1
        if not self._begun or self._polls_left <= 0:
            ended, self._writing = ended + self._writing[:1], self._writing[1:]
        return ended


def test_reads_that_end_before_any_write_does_leave_no_empty_sample() -> None:
    """The timed part goes on to the first write: zero reads give no rate."""
    settings = Settings(
        blocks=(64 * KIB,),
        bytes_per_round=2 * MIB,
        queued_bytes=256 * KIB,
        episode_bytes=MIB,
        read_gap_s=0.0,
    )
    mover = SlowToWrite(reads=3)
    found = Beside(mover, settings, 64 * KIB, random.Random(1)).run(3)
    assert found["read_beside_writes"].payload_bytes == 3 * 64 * KIB
    assert found["writes_beside_read"].payload_bytes >= 64 * KIB
