# SPDX-License-Identifier: Apache-2.0
"""The record of recent requests: which tokens were found, loaded and computed for each, and why.
Pure.

A request is recorded when vLLM allocates its GPU blocks, and again after each preemption; its load
adds the outcome. The scheduler's thread writes; any thread can read. The number of records and the
size of each are bounded.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

RECORDS_MAX = 1000  # each takes 0.6 KB, or 3 KB with `_STARTS_MAX` starts: at most 3 MB in all
_STARTS_MAX = 8  # the maximum number of starts in a record: the first and the last ones
_ID_CHARS_MAX = 256
_LIMITS_CHARS_MAX = 200


@dataclass(slots=True)
class LoadRecord:
    """A load: its tokens by tier and, after its end, its outcome.

    `seconds` is the time that the request waited, as in `LoadTimes`; None until the load has ended.
    `failed_tokens` were computed instead; `failed_chunks` counts chunks by outcome.
    `saved_seconds` is the estimated time to compute the tokens that arrived, minus `seconds`; None
    if the prefill rate is unknown.
    """

    cpu_tokens: int = 0
    pool_tokens: int = 0
    shared_tokens: int = 0
    seconds: float | None = None
    was_cut_off: bool = False
    failed_tokens: int = 0
    failed_chunks: dict[str, int] = field(default_factory=dict)
    saved_seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class Start:
    """A request at the moment when it got its GPU blocks.

    Of its `tokens`, `gpu_tokens` were in GPU memory and the next `found_tokens` in the tiers, of
    which `loaded_tokens` were loaded. `declined_tokens` were found but computed, because loading
    was expected to take `expected_load_seconds` and computing `expected_compute_seconds`; both are
    0 without an estimate. `no_boundary_tokens` were found without windows or states to resume from.
    `limits` are the request's own limits on loads.
    """

    unix_seconds: float = field(default_factory=time.time)
    tokens: int
    gpu_tokens: int
    found_tokens: int
    loaded_tokens: int
    chunk_tokens: int
    declined_tokens: int = 0
    no_boundary_tokens: int = 0
    expected_load_seconds: float = 0.0
    expected_compute_seconds: float = 0.0
    limits: str = ""
    load: LoadRecord | None = None

    def describe(self) -> dict[str, Any]:
        """Return the fields, the number of computed tokens, and the reasons, ready for JSON."""
        failed = self.load.failed_tokens if self.load else 0
        computed = self.tokens - self.gpu_tokens - self.loaded_tokens + failed
        return {**asdict(self), "computed_tokens": computed, "why": list(self._reasons())}

    def _reasons(self) -> Iterator[str]:
        left, load = self.tokens - self.gpu_tokens, self.load
        if self.limits:
            yield f"the request limits its loads: {self.limits}"
        if not self.found_tokens and left <= self.chunk_tokens:
            yield f"{left} tokens are left, and a chunk has {self.chunk_tokens}"
        elif not self.found_tokens and not self.limits:
            yield "no tier has the first chunk that is not in GPU memory"
        if self.declined_tokens:
            yield (
                f"{self.declined_tokens:,} tokens were found but computed: loading was expected to "
                f"take {self.expected_load_seconds:.3f} s, computing "
                f"{self.expected_compute_seconds:.3f} s"
            )
        elif self.found_tokens and not self.loaded_tokens:
            yield "vLLM took the matched tokens from another source, such as another connector"
        if self.no_boundary_tokens:
            yield (
                f"{self.no_boundary_tokens:,} more tokens were found, but no windows or states to "
                "resume from"
            )
        if load is None:
            return
        if load.was_cut_off:
            yield "the load was cut off, because computing would have been faster by then"
        if load.failed_tokens:
            chunks = ", ".join(f"{count} {kind}" for kind, count in load.failed_chunks.items())
            lost = f"{load.failed_tokens:,} tokens failed to load and were recomputed"
            yield f"{lost} (chunks: {chunks})"
        if load.saved_seconds is not None and load.saved_seconds < 0:
            yield f"computing would have been {-load.saved_seconds:.3f} s faster"


class RequestLog:
    """The last `RECORDS_MAX` requests that got GPU blocks, by id; the newest is last."""

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self._records_max = records_max
        self._starts: OrderedDict[str, list[Start]] = OrderedDict()
        self._lock = threading.Lock()  # held for microseconds

    def started(self, request_id: str, start: Start) -> None:
        request_id = request_id[:_ID_CHARS_MAX]
        start.limits = start.limits[:_LIMITS_CHARS_MAX]
        with self._lock:
            first, *others = [*self._starts.pop(request_id, []), start]
            self._starts[request_id] = [first, *others[1 - _STARTS_MAX :]]
            if len(self._starts) > self._records_max:
                self._starts.popitem(last=False)

    def find(self, request_id: str | None) -> list[dict[str, Any]]:
        """Return the records of a request, oldest first, or the newest record if the id is None.
        vLLM appends a number and random digits to the id shown in its answer, and puts a number and
        "_" in front if there are several answers (`n`). If no record has exactly the given id, the
        records of these longer ids are returned."""
        name = (request_id or "")[:_ID_CHARS_MAX]
        with self._lock:
            exact = self._starts.get(name) if name else None
            records = [(name, exact)] if exact else list(self._starts.items())
        if request_id is None:
            records = records[-1:]
        elif not exact:
            records = [one for one in records if _whole(one[0]).startswith(f"{name}-")]
        return [
            {"request": name, "starts": [start.describe() for start in starts]}
            for name, starts in records
        ]


def _whole(request_id: str) -> str:
    """Return the id without the number that vLLM adds in front to distinguish several answers."""
    number, _, rest = request_id.partition("_")
    return rest if number.isdecimal() else request_id
