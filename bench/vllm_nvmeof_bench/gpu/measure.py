# SPDX-License-Identifier: Apache-2.0
"""The cases: arms in turn, round by round, so that a slow moment meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm_nvmeof_bench.gpu.samples import Sample
from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.gpu.world import World
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.units import KIB

__all__ = ["ARMS", "measure"]

ARMS = ("dma", "dma_overlap", "kernel", "auto")
_CHECKED = ((4 * KIB, 100), (24 * KIB + 16, 50), (512 * KIB, 8))


def measure(
    world: World, settings: Settings, tell: Callable[[str], None] = lambda what: None
) -> list[Sample]:
    """Raises: RuntimeError: an arm moved wrong bytes."""
    for arm in ARMS:
        for size, count in _CHECKED:
            if not world.check(arm, size, count):
                raise RuntimeError(f"{arm}: wrong bytes with {count} blocks of {size}")
    samples: list[Sample] = []
    for number in range(-1, settings.rounds):  # the first round warms up
        tell(f"round {max(0, number) + 1} of {settings.rounds}")
        for case in (_transfers, _few_small, _both_ways, _submits):
            samples += [one for one in case(world, settings, number) if number >= 0]
    return samples


def _transfers(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    """One transfer of many blocks, and one contiguous copy of the same bytes."""
    for size in settings.sizes:
        count = settings.count_of(size)
        for direction in Direction:
            whole = {direction: world.pieces(size * count, 1)}
            took_s = world.seconds_of("dma", whole)
            yield _rate("transfer", "contiguous", direction.value, size, count, number, took_s)
            work = {direction: world.pieces(size, count, number + 1)}
            for arm in ARMS:
                took_s = world.seconds_of(arm, work)
                yield _rate("transfer", arm, direction.value, size, count, number, took_s)


def _few_small(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    for size in settings.small_sizes:
        for count in settings.counts:
            for direction in Direction:
                work = {direction: world.pieces(size, count, number + 1)}
                for arm in ARMS:
                    took_s = world.seconds_of(arm, work)
                    yield _rate("few", arm, direction.value, size, count, number, took_s)


def _both_ways(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    """Stores from one half of both memories, loads into the other."""
    size = settings.both_size
    count = max(1, min(settings.blocks, settings.bytes_max // size) // 2)
    halves = {
        Direction.STORE: world.pieces(size, count, number + 1),
        Direction.LOAD: world.pieces(size, count, number + 2, first=size * count),
    }
    for arm in ARMS:
        took_s = world.seconds_of(arm, halves)
        yield _rate("both", arm, "both", size, 2 * count, number, took_s)
        for direction, pieces in halves.items():
            took_s = world.seconds_of(arm, {direction: pieces})
            yield _rate("both", arm, direction.value, size, count, number, took_s)


def _submits(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    size, count = settings.submit_size, settings.count_of(settings.submit_size)
    took_us = world.submit_us(size, count)
    yield Sample("submit", "dma", "store", size, count, number, round(took_us, 2))


def _rate(
    case: str, arm: str, direction: str, size: int, count: int, number: int, took_s: float
) -> Sample:
    rate = round(size * count / took_s / 1e9, 3)
    return Sample(case, arm, direction, size, count, number, rate)
