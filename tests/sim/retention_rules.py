# SPDX-License-Identifier: Apache-2.0
"""Sessions: what they retain is evicted last, for their time, and within their client's share."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.manager.core import ManagerCore, SessionIds
from vllm_nvmeof_offload.manager.ledger import Entry, State
from vllm_nvmeof_offload.protocol import Command, SessionsCommand, target_of

from .base import CLIENT, Clock, Knobs, Violation

_SESSIONS = 4

#: By the content of a file of sessions: each session's end, its chunks' generations by key, and
#: whether all that was asked for could be retained.
SavedRetention = dict[bytes, tuple[dict[int, int], dict[int, dict[bytes, int]], bool]]


class RetentionRules:
    """Requests of one client that ask for retention, and the rules for one process's life."""

    def __init__(
        self, core: ManagerCore, knobs: Knobs, clock: Clock, saved: SavedRetention
    ) -> None:
        self._core, self._knobs, self._clock, self._saved = core, knobs, clock, saved
        self._rng = random.Random(f"{knobs!r} {len(saved)}")
        self._until: dict[int, int] = {}
        self._chunks: dict[int, set[bytes]] = {}
        #: Whether all that was asked for could be retained since the last reset.
        self._fits = True

    def ended(self, keys: Sequence[bytes], ends: npt.NDArray[np.int64] | None) -> None:
        """A request has ended: it may ask for retention, or drop a session."""
        draw, name = self._rng.random(), self._rng.randrange(_SESSIONS)
        if draw >= self._knobs.retains:
            return
        session = SessionIds(name, CLIENT)
        if draw < 0.2 * self._knobs.retains:
            self._core.drop_session(session)
            self.clear(name)
            return
        seconds, priority = self._rng.randint(1, 6), self._rng.randint(1, 100)
        present = {entry.key for entry in self._core.entries()}
        self._core.retain(keys, ends, session, seconds, priority)
        self._until[name] = int(self._clock()) + seconds
        self._chunks.setdefault(name, set()).update(present.intersection(keys))
        self._fits &= self._fit()

    def _fit(self) -> bool:
        slots = min(self._knobs.cache_slots, self._knobs.pool_slots)
        share = int(self._core.config.retain_share * slots)
        return len(set().union(*self._chunks.values())) <= share

    def commanded(self, commands: Collection[Command]) -> None:
        """Remember what a file holds that is to be written."""
        for command in commands:
            if isinstance(command, SessionsCommand):
                generations = {entry.key: entry.generation for entry in self._core.entries()}
                chunks = {
                    name: {key: generations[key] for key in keys if key in generations}
                    for name, keys in self._chunks.items()
                }
                self._saved[command.content] = self._until.copy(), chunks, self._fits

    def restored(self, content: bytes) -> int:
        """Check at a start what is retained of this file. Returns the number of sessions."""
        if not content:
            return 0
        until, chunks, self._fits = self._saved[content]
        adopted = {entry.key: entry.generation for entry in self._core.entries()}
        for name, end in until.items():
            left = {key for key, one in chunks[name].items() if adopted.get(key) == one}
            if left and end > int(self._clock()):
                self._until[name], self._chunks[name] = end, left
        self._fits &= self._fit()
        sessions = self._core.gauges()["sessions"]
        if self._fits and sessions != len(self._until):
            raise Violation("retention", f"{sessions} sessions after a start, not {self._until}")
        return len(self._until)

    def turned(self) -> None:
        """Check after a turn, which ends the sessions whose time has passed."""
        for name in [name for name, end in self._until.items() if end <= int(self._clock())]:
            self.clear(name)
        gauges, knobs = self._core.gauges(), self._knobs
        if self._fits and gauges["sessions"] > len(self._until):
            raise Violation("retention", f"{gauges['sessions']} sessions, more than {self._until}")
        share = self._core.config.retain_share
        for tier, slots in (("cache", knobs.cache_slots), ("pool", knobs.pool_slots)):
            if gauges["slots_retained", tier] > int(share * slots):
                raise Violation("retention", f"one client retains too much: {gauges}")
        if not gauges["sessions"]:
            self.clear()

    def planned(
        self, before: Mapping[bytes, Entry], used: Collection[int], offered: Collection[bytes]
    ) -> None:
        """Check after a plan, which may have evicted chunks. used: the cache slots and places of
        ops; offered: keys of this plan."""
        retained = set().union(*self._chunks.values()) if self._fits else set()
        after = {entry.key: entry for entry in self._core.entries()}
        spared = retained.union(offered, self._core.held())
        others = [e for key, e in after.items() if key not in spared and before.get(key) == e]
        free = [e for e in others if e.cache not in used and e.state is State.BOTH]
        for key in retained.intersection(before).difference(offered):
            old, new = before[key], after.get(key)
            if old.cache >= 0 and (new is None or new.cache < 0) and free:
                raise Violation("retention", f"{old} has left the CPU tier before {free[0]}")
            if old.place < 0 or (new is not None and new.place >= 0):
                continue
            settled = (State.BOTH, State.POOLED)
            same = [e for e in others if e.state in settled and e.place not in used]
            same = [e for e in same if target_of(e.place) == target_of(old.place)]
            if same:
                raise Violation("retention", f"{old} has left the pool before {same[0]}")

    def clear(self, name: int | None = None) -> None:
        """Forget a session, or all of them."""
        for one in [*self._until] if name is None else [name]:
            self._until.pop(one, None)
            self._chunks.pop(one, None)
        self._fits |= name is None
