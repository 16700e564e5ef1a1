# SPDX-License-Identifier: Apache-2.0
"""The cases of copies: arms in turn, round by round, so that a slow moment meets all of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from vllm_nvmeof_bench.gpu.samples import Sample
from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.gpu.world import World
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.select import Backend
from vllm_nvmeof_offload.units import KIB

__all__ = ["ARMS", "measure"]

#: Of ours; where vLLM's copy code can be had it is one more.
ARMS = ("dma", "dma_overlap", "kernel", "auto")
_CHECKED = ((4 * KIB, 100), (24 * KIB + 16, 50), (512 * KIB, 8))


def measure(
    world: World, settings: Settings, tell: Callable[[int, int, str], None] = lambda *at: None
) -> list[Sample]:
    """Samples of the arms that did not fail; those of one that fails later are dropped as well.

    Raises: BenchError: an arm moved wrong bytes, or every arm failed.
    """
    for arm in list(world.arms):
        for size, count in _CHECKED:
            if world.attempt(arm, functools.partial(world.check, arm, size, count)) is False:
                raise BenchError(f"{arm}: wrong bytes with {count} blocks of {size}")
    samples: list[Sample] = []
    cases = [case for part, case in _CASES.items() if part in settings.parts]
    rounds = range(-1, settings.rounds)  # the first one warms up
    for step, number in enumerate(rounds):
        tell(step, len(rounds), f"copies, round {max(0, number) + 1} of {settings.rounds}")
        for case in cases:
            samples += [one for one in case(world, settings, number) if number >= 0]
    if not world.arms:
        failed = "; ".join(f"{arm}: {error}" for arm, error in world.failed.items())
        raise BenchError(f"every way to copy failed: {failed}")
    return [one for one in samples if one.arm not in world.failed]


def _transfers(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    """One transfer of many blocks, and one contiguous copy of the same bytes."""
    for size in settings.sizes:
        count = settings.count_of(size)
        for direction in Direction:
            whole = {direction: world.contiguous(size * count)}
            took_s = _seconds(world, "dma", whole)
            if took_s is not None:
                yield _rate("transfer", "contiguous", direction.value, size, count, number, took_s)
            yield from _arms(world, "transfer", direction, size, count, number)


def _few_small(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    for size in settings.small_sizes:
        for count in settings.counts:
            for direction in Direction:
                yield from _arms(world, "few", direction, size, count, number)


def _models(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    for size in settings.model_sizes:
        for direction in Direction:
            yield from _arms(world, "model", direction, size, settings.count_of(size), number)


def _arms(
    world: World, case: str, direction: Direction, size: int, count: int, number: int
) -> Iterator[Sample]:
    work = {direction: world.pieces(size, count, number + 1)}
    for arm in list(world.arms):
        took_s = _seconds(world, arm, work)
        if took_s is not None:
            yield _rate(case, arm, direction.value, size, count, number, took_s)


def _both_ways(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    """Stores from one part of both memories, loads into the rest; half and half, then mixes."""
    size = settings.both_size
    count = max(2, min(settings.blocks, settings.bytes_max // size))
    for percent in (50, *settings.mix_percent):
        loads = min(count - 1, max(1, count * percent // 100))
        parts = {
            Direction.STORE: world.pieces(size, count - loads, number + 1),
            Direction.LOAD: world.pieces(size, loads, number + 2, first=size * (count - loads)),
        }
        case, what = ("both", "both") if percent == 50 else ("mix", f"load {percent}%")
        asked = [(what, count, parts)]
        if percent == 50:
            asked += [(one.value, len(rows), {one: rows}) for one, rows in parts.items()]
        for arm, (name, blocks, work) in itertools.product(list(world.arms), asked):
            took_s = _seconds(world, arm, work)
            if took_s is not None:
                yield _rate(case, arm, name, size, blocks, number, took_s)


def _submits(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    size, count = settings.submit_size, settings.count_of(settings.submit_size)
    for direction, backend in itertools.product(Direction, (Backend.DMA, Backend.KERNEL)):
        call = functools.partial(world.submit_us, size, count, direction, backend)
        took_us = world.attempt(backend.value, call)
        if took_us is not None:
            found = round(took_us, 2)
            yield Sample("submit", backend.value, direction.value, size, count, number, found)


def _seconds(world: World, arm: str, work: dict[Direction, Descriptors]) -> float | None:
    """None: the arm failed, now or before."""
    return world.attempt(arm, functools.partial(world.seconds_of, arm, work))


def _rate(
    case: str, arm: str, direction: str, size: int, count: int, number: int, took_s: float
) -> Sample:
    rate = round(size * count / took_s / 1e9, 3)
    return Sample(case, arm, direction, size, count, number, rate)


_CASES: dict[str, Callable[[World, Settings, int], Iterator[Sample]]] = {
    "transfer": _transfers,
    "few": _few_small,
    "model": _models,
    "both": _both_ways,
    "submit": _submits,
}
