# SPDX-License-Identifier: Apache-2.0
"""Cache slots held for requests to come: kept from eviction, or filled from the pool.

What is worth holding is `reload`'s choice; here it is done. A held chunk has one more user of
its cache slot, so nothing evicts it and nothing else changes. A fetch that nobody wants any
more is cancelled: its entry is in the pool alone again at once, and its cache slot comes back
when every rank has released it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.manager.index import Entry, Event, State
from vllm_nvmeof_offload.manager.ledger import Ledger, Op, OpKind
from vllm_nvmeof_offload.manager.plan import Source
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.protocol import CancelCommand, Command, FetchCommand

__all__ = ["Reason", "Shelf"]

#: Slots that stay evictable whatever is held: what is computed must find room.
_ROOM_SHARE = 0.125


class Reason(enum.Enum):
    """Why a chunk is held or fetched."""

    RELOAD = "reload"  # for a preempted request
    QUEUE = "queue"  # for a request that waits in vLLM's queue
    PROBE = "probe"  # to learn how fast the pool is, where admission loads nothing from it

    __hash__ = object.__hash__


@dataclass(slots=True, eq=False)
class _Held:
    """op: the fetch that is filling the slot. fetched: it is to be counted at its end."""

    entry: Entry
    slot: int
    reason: Reason
    op: Op | None = None
    fetched: bool = False
    used: bool = False


class Shelf:
    """What is held, by key. `attach` once the capacity is known."""

    def __init__(
        self,
        tiers: Tiers,
        ledger: Ledger,
        commands: list[Command],
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.fetching = 0  # fetches under way that are still wanted
        self.counts = dict.fromkeys(Reason, 0)  # held, by reason
        self._tiers = tiers
        self._ledger = ledger
        self._commands = commands
        self._counters = counters
        self._clock = clock
        self._held: dict[bytes, _Held] = {}
        self._unsent: dict[int, FetchCommand] = {}
        self._probing: list[int] = []  # by target: probes begun since none was under way
        self._room_min = 1

    def attach(self, cache_slots: int) -> None:
        self._room_min = max(1, int(_ROOM_SHARE * cache_slots))

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def keys(self) -> Iterable[bytes]:
        """What is held, in no particular order."""
        return self._held.keys()

    def source(self, key: bytes) -> Source | None:
        """Where `key` is: in a cache slot, or in the pool alone on a target that answers."""
        cache_slot, pool_slot = self._tiers.index.slots(key)
        if cache_slot is not None:
            return Source.CPU
        if pool_slot is not None and self._tiers.targets.usable(pool_slot):
            return Source.POOL
        return None

    def hold(self, key: bytes, reason: Reason) -> bool:
        """Keep a chunk, which has a cache slot, from eviction; False if there is no room to."""
        if key in self._held:
            return True
        if not self._has_room():
            return False
        entry = self._tiers.index.find(key)
        assert entry is not None and entry.cache_slot is not None
        self._keep(_Held(entry, entry.cache_slot, reason))
        self._tiers.settle(entry)
        return True

    def fetch(self, key: bytes, reason: Reason) -> bool:
        """Begin to read a chunk that is in the pool alone into a cache slot, and hold it."""
        if key in self._held:
            return True
        slot = self._tiers.take_cache_slot(spare_unwritten=True) if self._has_room() else None
        if slot is None:
            return False
        tiers = self._tiers
        entry = tiers.index.find(key)
        assert entry is not None and entry.pool_slot is not None
        pool_slot = entry.pool_slot
        tiers.give_cache(entry, slot)
        tiers.cache.use(slot)
        tiers.pool.use(pool_slot)
        tiers.on(entry, Event.FETCH_BEGIN)
        op = self._ledger.open(OpKind.FETCH, self._clock(), (entry,), (slot,), (pool_slot,))
        if reason is Reason.PROBE:
            self._time(op, tiers.pool.lane(pool_slot))
        self._keep(_Held(entry, slot, reason, op, fetched=True))
        tiers.settle(entry)
        self.fetching += 1
        self._counters[f"prefetches:{reason.value}"] += 1
        urgent = reason is Reason.RELOAD
        command = FetchCommand(op.number, entry.identity, pool_slot, slot, urgent=urgent)
        self._commands.append(command)
        self._unsent[op.number] = command
        return True

    def sent(self) -> None:
        """The commands so far are on their way."""
        self._unsent.clear()

    def used(self, key: bytes) -> None:
        """A load takes this chunk from its cache slot."""
        held = self._held.get(key)
        if held is not None:
            held.used = True

    def drop(self, key: bytes) -> None:
        """Nobody wants `key` any more; what is not held is ignored."""
        held = self._held.pop(key, None)
        if held is None:
            return
        how = "used" if held.used else "wasted"
        if held.op is not None:
            self.fetching -= 1
            # Whoever else uses the slot is a load that waits for this very read.
            if not held.used and self._tiers.cache.users(held.slot) == 2:
                how = "cancelled"
                self._cancel(held.entry, held.op)
        self._let_go(held, how)

    def ended(self, op: Op, failure: Outcome | None) -> None:
        """A fetch has its outcome on every rank."""
        held = self._held.get(op.entries[0].identity.key)
        if held is None or held.op is not op:
            return
        held.op = None
        self.fetching -= 1
        if failure is not None or op.probe:
            del self._held[held.entry.identity.key]
            self._let_go(held, "failed" if failure is not None else "probe")

    def gone(self, entry: Entry) -> None:
        """`entry` was doomed."""
        held = self._held.get(entry.identity.key)
        if held is not None and held.entry is entry:
            self._lose(held)

    def reset(self) -> None:
        """Every entry was doomed, and no fetch that was not sent will be."""
        self._unsent.clear()
        for held in list(self._held.values()):
            self._lose(held)

    # -- helpers ----------------------------------------------------------------------

    def _time(self, op: Op, lane: int) -> None:
        """`op` is there to be timed, behind the probes that began with it."""
        if not self.counts[Reason.PROBE]:
            self._probing = [0] * self._tiers.pool.lanes
        op.probe, op.queued = True, tuple(self._probing)
        self._probing[lane] += 1

    def _has_room(self) -> bool:
        """Whether enough stays evictable with one more held."""
        tiers = self._tiers
        evictable = tiers.cache.free + len(tiers.clean)
        if tiers.demotes:
            evictable += len(tiers.waiting)
        return evictable > self._room_min

    def _keep(self, held: _Held) -> None:
        self._tiers.cache.use(held.slot)
        self._held[held.entry.identity.key] = held
        self.counts[held.reason] += 1

    def _lose(self, held: _Held) -> None:
        del self._held[held.entry.identity.key]
        self.fetching -= held.op is not None
        self._let_go(held, "used" if held.used else "failed")

    def _let_go(self, held: _Held, how: str) -> None:
        self.counts[held.reason] -= 1
        if held.fetched:
            self._counters[f"prefetches_ended:{how}"] += 1
        self._tiers.cache.unuse(held.slot)
        self._tiers.settle(held.entry)

    def _cancel(self, entry: Entry, op: Op) -> None:
        """Take the entry off its fetch: whoever looks it up from now on finds it in the pool."""
        assert entry.state is State.FETCHING
        self._tiers.on(entry, Event.FETCH_CANCELLED)
        self._tiers.leave_cache(entry)
        op.detached = True
        if op.number not in self._unsent:
            self._commands.append(CancelCommand(op.number))
            return
        # Never sent: no rank will report on it.
        self._commands.remove(self._unsent.pop(op.number))
        self._tiers.let_go(self._ledger.withdraw(op.number))
