# SPDX-License-Identifier: Apache-2.0
"""What is measured: two targets, jobs × depth, two sizes. Fixed before a run starts.

A *point* is a size, a number of jobs and a depth. At each, on each target, two arms:

    fio    `jobs` processes with io_uring, registered buffers and files, O_DIRECT
    ours   `jobs` processes, each with the product's engine on a pool of its own, as ranks have

A job does random reads (or writes) in 64 MiB of its own, written before, and keeps `depth` of
them in flight: as one ends the next is handed over. A latency is from handing over to being
told. Of ours that is the Python caller's: sealing, checksums, proof of identity, the ring's
thread and the wake-up are in it. At 4 KiB our slot is 8 KiB, a header page and the payload; at
the slot's size both move the slot's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_offload.units import KIB, MIB, slot_stride_bytes

__all__ = ["ARMS", "CASES", "STAND_IN", "Place", "Point", "Settings", "places_of"]

ARMS = ("fio", "ours")
CASES = ("read", "write")
#: What a throttled directory is called, wherever its figures are.
STAND_IN = "throttled-stand-in"
_PAYLOAD_MIN = 4 * KIB


@dataclass(frozen=True)
class Place:
    """A target. mb_per_s: what its disk is throttled to; None: as it is."""

    name: str
    directory: Path
    mb_per_s: int | None = None


@dataclass(frozen=True)
class Point:
    """Where one measurement is taken; payload_bytes is what a slot holds."""

    case: str
    payload_bytes: int
    jobs: int
    depth: int

    @property
    def io_bytes(self) -> int:
        """What fio moves at once: 4 KiB as it is, else a whole slot as ours."""
        if self.payload_bytes <= _PAYLOAD_MIN:
            return self.payload_bytes
        return slot_stride_bytes(self.payload_bytes)


@dataclass(frozen=True)
class Settings:
    """One run. slot_bytes: the payload of the pool's slot. ramp_s: before what is counted."""

    cases: tuple[str, ...] = ("read",)
    jobs: tuple[int, ...] = (1, 2, 4)
    depths: tuple[int, ...] = (1, 4, 16)
    slot_bytes: int = 512 * KIB
    rounds: int = 5
    run_s: float = 0.5
    ramp_s: float = 0.1
    job_bytes: int = 64 * MIB
    seed: int = 1

    def __post_init__(self) -> None:
        for case in self.cases:
            if case not in CASES:
                raise BenchError(f"no case {case!r}; there are {', '.join(CASES)}")
        if not self.cases or not self.jobs or not self.depths:
            raise BenchError("nothing to measure: give at least one case, jobs and depth")
        if min(*self.jobs, *self.depths, self.rounds) < 1 or self.run_s <= 0:
            raise BenchError("jobs, depths and rounds are at least 1, the run longer than 0 s")
        if self.slot_bytes < _PAYLOAD_MIN or self.slot_bytes % _PAYLOAD_MIN:
            raise BenchError(f"slot of {self.slot_bytes} bytes: a multiple of 4 KiB, for O_DIRECT")
        if self.slots(self.slot_bytes) < 2 * max(self.depths):
            raise BenchError(
                f"{max(self.depths)} slots of {self.slot_bytes} bytes in flight need more than "
                f"the {self.job_bytes} bytes of a job: give a smaller --depths or --slot"
            )

    @property
    def payloads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((_PAYLOAD_MIN, self.slot_bytes)))

    def points(self, payload_bytes: int) -> list[Point]:
        return [
            Point(case, payload_bytes, jobs, depth)
            for case in self.cases
            for jobs in self.jobs
            for depth in self.depths
        ]

    def slots(self, payload_bytes: int) -> int:
        """Slots of one job's pool."""
        return self.job_bytes // slot_stride_bytes(payload_bytes)

    @property
    def disk_bytes_max(self) -> int:
        """The most that lies on one target: a pool and a file a job, and the pools' tables."""
        return max(self.jobs) * (2 * self.job_bytes + 8 * MIB)


def places_of(texts: list[str], throttle_mb_per_s: int | None) -> tuple[Place, Place]:
    """The two targets of `--target NAME=DIRECTORY`, twice, or once with a throttle.

    Given once, the second is a throttled stand-in in the same directory. Given twice, a throttle
    is the second's, whose name then says so.

    Raises:
        BenchError: not of that form, or not two targets.
    """
    given = [_place(text) for text in texts]
    if len(given) == 1:
        mb_per_s = throttle_mb_per_s or 100
        stand_in = Place(f"{STAND_IN}-{mb_per_s}-MB/s", given[0].directory, mb_per_s)
        return given[0], stand_in
    if len(given) != 2 or given[0].name == given[1].name:
        raise BenchError("give one or two targets of different names: --target NAME=DIRECTORY")
    first, second = given
    if throttle_mb_per_s:
        name = f"{second.name}-{STAND_IN}-{throttle_mb_per_s}-MB/s"
        second = Place(name, second.directory, throttle_mb_per_s)
    return first, second


def _place(text: str) -> Place:
    name, equals, directory = text.partition("=")
    if not equals or not name or not directory:
        raise BenchError(f"--target {text!r}: give NAME=DIRECTORY")
    return Place(name, Path(directory))
