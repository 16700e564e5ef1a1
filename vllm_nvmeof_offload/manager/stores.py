# SPDX-License-Identifier: Apache-2.0
"""The rules that decide which chunks are stored, and for how long. Pure.

A chunk is stored only after it has been offered often enough (`StoreThreshold`).

A window or state is useful only at a boundary, so only some of those offered are stored
(`BoundaryStores`). *Lasting* boundaries are the end of a prompt, the end of a prefix that vLLM
found to be shared, and one per `every_tokens` tokens. Chunks at the frontier of the computation are
stored *provisionally*, only in the CPU tier, so that the next turn, or the request itself after a
preemption, can resume from them. A later frontier supersedes these chunks. When the request ends or
is preempted, the last ones become lasting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.groups import Group, GroupKind, group_ids_of
from vllm_nvmeof_offload.manager.boundary import SPARSE, unit_tokens

#: Keys are forgotten in batches, because finding a dictionary's first key is slow.
_FORGET_BATCH = 1024


class StoreThreshold:
    """A counter of chunks' sightings, as for vLLM's `store_threshold`. A chunk is stored at its
    n-th sighting.

    A sighting is one offer to store a chunk (`prepare_store`). vLLM makes one per request for each
    of its chunks, whether it computed the chunk or found it in GPU memory. Look-ups and a request's
    repeated offers do not count, and a reset forgets nothing. At most `keys_max` + 1023 keys are
    counted; the least recently seen are forgotten. A threshold of 1 needs no table.
    """

    def __init__(self, threshold: int, keys_max: int) -> None:
        assert threshold >= 1
        self._threshold = threshold
        self._keys_max = keys_max
        # The least recently seen key is first. The garbage collector ignores bytes and ints.
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def see(
        self, keys: Sequence[bytes], again: Collection[bytes] = ()
    ) -> npt.NDArray[np.uint8] | None:
        """Count one offer for each of `keys`, except those in `again`, which the request has
        offered before. Return whether each key is due, or None if all are."""
        if self._threshold == 1:
            return None
        counts = self._counts
        for key in keys:
            counts[key] = min(counts.pop(key, 0) + (key not in again), self._threshold)
        due = np.fromiter((counts[key] >= self._threshold for key in keys), np.uint8, len(keys))
        if len(counts) >= self._keys_max + _FORGET_BATCH:
            for key in list(islice(counts, len(counts) - self._keys_max)):
                del counts[key]
        return due


@dataclass(frozen=True, slots=True)
class Offer:
    """The chunks to store for one request. `ends` are the request's tokens up to each chunk's end,
    and `positions` are the positions of the chunks' groups."""

    keys: list[bytes]
    ends: npt.NDArray[np.int64]
    provisional: npt.NDArray[np.bool_]
    positions: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Request:
    """The state of a request. `boundary` is the last one stored. By group position, `provisional`
    lists the (end, key) of chunks that no later boundary has superseded, oldest first, and `latest`
    is the end of the last chunk stored."""

    boundary: int = 0
    provisional: dict[int, deque[tuple[int, bytes]]] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)


class BoundaryStores:
    """The choice of what to store, for all requests. `supersede` and `keep` are methods of the
    core. `groups` must include windows or states. `every_tokens` is the distance between lasting
    boundaries, a multiple of every group's chunk size. A prompt or shared prefix is stored up to
    its last multiple of `tail_tokens` (unless 0), even within a chunk."""

    def __init__(
        self,
        supersede: Callable[[Sequence[bytes]], None],
        keep: Callable[[Sequence[bytes]], None],
        groups: Sequence[Group],
        every_tokens: int,
        tail_tokens: int = 0,
    ) -> None:
        self._supersede, self._keep = supersede, keep
        self._every_tokens = every_tokens
        self._unit_tokens = unit_tokens(groups)
        self._tail_tokens = tail_tokens or self._unit_tokens
        assert every_tokens % self._unit_tokens == 0
        # Every whole chunk of the other groups is stored, as in vLLM.
        self._sparse = [at for at, group in enumerate(groups) if group.kind in SPARSE]
        assert self._sparse
        self._states = [at for at in self._sparse if groups[at].kind is GroupKind.STATE]
        self._reach_tokens = [
            group.tokens_per_chunk * (group.reach_chunks or 0) if group.kind in SPARSE else 0
            for group in groups
        ]
        ids = [group.group_id for group in groups]
        self._positions = np.zeros(max(ids) + 1, np.int64)  # by vLLM's group number
        self._positions[ids] = range(len(ids))
        self._reaches = np.array(self._reach_tokens, np.int64)
        self._requests: dict[str, _Request] = {}

    def offered(
        self, vllm_request: Any, keys: Sequence[bytes], ends: npt.NDArray[np.int64]
    ) -> Offer:
        """Choose the chunks to store from those that vLLM offers. `ends` is as in `Offer`."""
        unit, request_id = self._unit_tokens, vllm_request.request_id
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request()
        positions = self._positions[group_ids_of(b"".join(keys), len(keys))]
        reach = self._reaches[positions]
        lasts = (reach == 0) | (-ends % self._every_tokens < reach)
        # vLLM determines the shared prefix in a look-up, and again after a preemption.
        for tokens in (vllm_request.num_prompt_tokens - 1, vllm_request.shared_prefix_boundary):
            boundary = tokens // self._tail_tokens * self._tail_tokens
            lasts |= (ends <= boundary) & (boundary - ends < reach)
        frontier = max(int(ends.max()) // unit * unit, request.boundary)
        chosen = lasts | (frontier - ends < reach)
        stored = list(compress(keys, chosen.tolist()))
        return Offer(stored, ends[chosen], ~lasts[chosen], positions[chosen])

    def stored(self, request_id: str, offer: Offer) -> None:
        """Record that all chunks in `offer` are being stored or were stored before."""
        request = self._requests[request_id]
        for at in np.flatnonzero(self._reaches[offer.positions]).tolist():
            position, end = int(offer.positions[at]), int(offer.ends[at])
            if end <= request.latest.get(position, 0):
                continue  # offered before
            request.latest[position] = end
            if offer.provisional[at]:
                request.provisional.setdefault(position, deque()).append((end, offer.keys[at]))
        boundary = self._last_boundary(request)
        if boundary > request.boundary:
            request.boundary = boundary
            self._supersede_old(request)

    def preempted(self, request_id: str) -> None:
        """Keep the request's last boundary, from which it will resume."""
        if (request := self._requests.get(request_id)) is not None:
            self._keep_last(request)

    def ended(self, request_id: str) -> None:
        """Keep the request's last boundary, from which the next turn may resume."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._keep_last(request)
            beyond = [key for kept in request.provisional.values() for _, key in kept]
            if beyond:
                self._supersede(beyond)

    def reset(self) -> None:
        """Forget the chunks of all requests, which are no longer valid."""
        self._requests.clear()

    def _last_boundary(self, request: _Request) -> int:
        """Return the last boundary at which all windows and states are stored."""
        if len(request.latest) < len(self._sparse):
            return 0
        last = min(request.latest.values())
        if self._states:  # the computation can resume only from a state
            at_state = request.latest[self._states[0]]
            return at_state if at_state == last else 0
        return last // self._unit_tokens * self._unit_tokens

    def _supersede_old(self, request: _Request) -> None:
        old: list[bytes] = []
        for position, chunks in request.provisional.items():
            first = request.boundary - self._reach_tokens[position]
            while chunks and chunks[0][0] <= first:
                old.append(chunks.popleft()[1])
        if old:
            self._supersede(old)

    def _keep_last(self, request: _Request) -> None:
        kept: list[bytes] = []
        for chunks in request.provisional.values():
            while chunks and chunks[0][0] <= request.boundary:
                kept.append(chunks.popleft()[1])
        if kept:
            self._keep(kept)
