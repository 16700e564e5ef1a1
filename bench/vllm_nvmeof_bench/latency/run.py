# SPDX-License-Identifier: Apache-2.0
"""One run: at every point and in every round, both arms on both targets, in a drawn order.

So what is compared was measured within seconds of each other. Sizes follow each other, each
with its own files and pools. The throttle, if there is one, is set before each measurement and
taken off after it; this process and its children are in its group from the start.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.home import home_in
from vllm_nvmeof_bench.latency.arms import FioJobs, OurJobs
from vllm_nvmeof_bench.latency.samples import Sample
from vllm_nvmeof_bench.latency.settings import ARMS, Place, Point, Settings
from vllm_nvmeof_bench.pool import conditions as pool
from vllm_nvmeof_bench.pool.arms.flat import FioArm, fio_version
from vllm_nvmeof_bench.pool.samples import size_name
from vllm_nvmeof_bench.pool.settings import Settings as PoolSettings
from vllm_nvmeof_bench.throttle import Throttle

__all__ = ["run"]

_REMEDY = "give another --target, or fewer --jobs"
_MB = 1_000_000
#: The throttle's slices: what one has left over is not the next measurement's.
_SLICE_S = 0.15

_Fields = dict[tuple[str, str], FioJobs | OurJobs]


def run(
    settings: Settings,
    places: Sequence[Place],
    keep: Callable[[list[Sample], dict[str, Any]], None],
    on_progress: OnProgress = lambda done, total, what: None,
) -> None:
    """Measure; after each size `keep` gets all samples so far, and the conditions.

    Raises:
        BenchError: no fio, no io_uring, too little space, or an arm failed.
        ThrottleError: a throttle is wanted and cannot be had.
    """
    fio_version()
    with contextlib.ExitStack() as stack:
        homes = {
            place.name: stack.enter_context(
                home_in(place.directory, settings.disk_bytes_max, _REMEDY)
            )
            for place in places
        }
        conditions = _conditions(settings, places, homes)
        throttle = None
        for place in places:
            if place.mb_per_s is not None:
                throttle = stack.enter_context(Throttle(homes[place.name]))
                throttle.add(os.getpid())
                conditions["throttle"] = throttle.kind
        one = _Run(settings, places, homes, throttle, on_progress)
        for payload_bytes in settings.payloads:
            one.size(payload_bytes)
            found = {"engines": sorted(one.engines), "fio_registered": FioArm.registered}
            load = [round(value, 2) for value in os.getloadavg()]
            keep(one.samples, {**conditions, **found, "load_average_at_end": load})


def _conditions(
    settings: Settings, places: Sequence[Place], homes: dict[str, Path]
) -> dict[str, Any]:
    found = pool.at_start(PoolSettings(), homes[places[0].name])
    del found["disk"]
    return {
        **found,
        "settings": {**asdict(settings), "engine": found["settings"]["engine"]},
        "targets": {
            place.name: {**pool.mount_of(homes[place.name]), "throttled_mb_per_s": place.mb_per_s}
            for place in places
        },
    }


class _Run:
    def __init__(
        self,
        settings: Settings,
        places: Sequence[Place],
        homes: dict[str, Path],
        throttle: Throttle | None,
        on_progress: OnProgress,
    ) -> None:
        self.samples: list[Sample] = []
        self.engines: set[str] = set()
        self._settings = settings
        self._places = places
        self._homes = homes
        self._throttle = throttle
        self._on_progress = on_progress
        points = sum(len(settings.points(size)) for size in settings.payloads)
        self._total = points * settings.rounds * len(places) * len(ARMS)

    def size(self, payload_bytes: int) -> None:
        name = size_name(payload_bytes)
        with contextlib.ExitStack() as stack:
            fields: _Fields = {}
            for place in self._places:
                self._tell(f"{name} · writing everything once on {place.name}")
                home = self._homes[place.name] / f"payload-{payload_bytes}"
                home.mkdir()
                fio = FioJobs(home / "fio", self._settings)
                ours = OurJobs(home / "ours", self._settings, payload_bytes)
                stack.callback(ours.close)
                self.engines.update(ours.engines)
                fields[place.name, "fio"], fields[place.name, "ours"] = fio, ours
            for number in range(self._settings.rounds):
                for point in self._settings.points(payload_bytes):
                    self._point(fields, point, number)

    def _point(self, fields: _Fields, point: Point, number: int) -> None:
        seed = f"{self._settings.seed} {point} {number}"
        dice = random.Random(seed)
        size = size_name(point.payload_bytes)
        self._tell(f"{size} · round {number + 1} · {point.case} {point.jobs} × {point.depth}")
        pairs = [(place, arm) for place in self._places for arm in ARMS]
        found = {}
        for place, arm in dice.sample(pairs, len(pairs)):
            self._limit(place.mb_per_s)
            measured = fields[place.name, arm].measure(point, dice.getrandbits(31))
            self._limit(None)
            row = {"target": place.name, "arm": arm, "round": number}
            found[place, arm] = Sample(**row, **asdict(point), **asdict(measured))
        # The file keeps the targets' order: what the second adds to the first.
        self.samples += [found[pair] for pair in pairs]

    def _limit(self, mb_per_s: int | None) -> None:
        if self._throttle is None:
            return
        limit = None if mb_per_s is None else mb_per_s * _MB
        self._throttle.limit(limit, limit)
        if limit is not None:
            time.sleep(_SLICE_S)

    def _tell(self, what: str) -> None:
        self._on_progress(len(self.samples), self._total, what)
