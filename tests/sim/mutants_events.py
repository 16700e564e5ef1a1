# SPDX-License-Identifier: Apache-2.0
"""Mutants of the events that routers receive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from vllm_nvmeof_offload.manager.index import Index, State
from vllm_nvmeof_offload.manager.kv_events import KvEventLog

from .mutants import Patch, mutant


@mutant
def failures_are_not_reported() -> list[Patch]:
    real = KvEventLog.moved

    def moved(self: Any, key: bytes, before: State | None, after: State | None) -> None:
        if after is not State.DOOMED:
            real(self, key, before, after)

    return [(KvEventLog, "moved", moved)]


@mutant
def reset_is_not_reported() -> list[Patch]:
    return [(KvEventLog, "all_leave", lambda self, index: None)]


@mutant
def reset_forgets_the_pools_copies() -> list[Patch]:
    real = KvEventLog.all_leave

    def all_leave(self: Any, index: Index) -> None:
        only_cached = lambda _key: (0, None)  # noqa: E731
        view = SimpleNamespace(cached=index.cached, pooled=index.pooled, slots=only_cached)
        real(self, cast(Index, view))

    return [(KvEventLog, "all_leave", all_leave)]


@mutant
def fetch_is_reported_at_its_start() -> list[Patch]:
    real = KvEventLog.moved

    def moved(self: Any, key: bytes, before: State | None, after: State | None) -> None:
        early = {State.FETCHING: State.BOTH}
        real(self, key, early.get(before, before), early.get(after, after))  # type: ignore[arg-type]

    return [(KvEventLog, "moved", moved)]
