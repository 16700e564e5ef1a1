# SPDX-License-Identifier: Apache-2.0
"""The operator's policies: which chunks are stored, and when they are written to the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chunks import cache_member
from vllm_nvmeof_offload.manager.core import ManagerCore, Source
from vllm_nvmeof_offload.manager.ledger import State
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, Command, WriteCommand

from .base import Knobs, Violation


class PolicyRules:
    """The policies' rules for one process's life; `Rules` checks the protocol's."""

    def __init__(self, core: ManagerCore, knobs: Knobs) -> None:
        self._core = core
        self._knobs = knobs
        self._sightings: Counter[bytes] = Counter()
        self._dropped = 0
        self._clean_min = max(1, int(core.config.clean_share * knobs.cache_slots))
        self._roomy = True  # no request for a cache slot has failed so far
        self._demotes = knobs.write_policy == "on_eviction"

    def see(self, keys: Iterable[bytes]) -> None:
        """Check before the core is asked to store these keys."""
        self._sightings.update(set(keys))

    def due(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys that were looked up often enough."""
        return [key for key in keys if self._sightings[key] >= self._knobs.store_threshold]

    def turned(self, provisional: int) -> None:
        """Note what fetches have taken: a request that leaves in the same step may give it back.
        They may have evicted entries, this many provisional ones among them."""
        self._note_room()
        if self._take_dropped() > provisional:
            raise Violation("hole", "a fetch evicted a chunk that was never written")

    def _take_dropped(self) -> int:
        dropped = self._core.counters["unwritten_chunks", "evicted"] - self._dropped
        self._dropped += dropped
        return int(dropped)

    def planned(
        self, used_cache: Iterable[int], provisional: int, offered: Sequence[bytes] | None
    ) -> None:
        """Check after a store or a load was planned: the plan may have evicted entries, this many
        provisional ones among them. offered: the store's keys; None: it was a load."""
        self._note_room()  # a slot that it has taken may be free again before the next command
        dropped = self._take_dropped()
        if dropped <= provisional:
            return
        if offered is None:
            raise Violation("hole", "a load evicted a chunk that was never written")
        gauges = self._core.gauges()
        if gauges["slots", "pool"] and not self._core.targets.suspects:
            raise Violation("hole", f"{dropped} chunks were evicted that could have been written")
        if self._knobs.set_size > 1:
            return  # the rows of those that are left may have other parts that cannot be evicted
        used, held = set(used_cache), set(self._core.held())
        if not self._demotes:
            held.update(offered)  # without a prefix its continuation would be unreachable
        for entry in self._core.entries():
            free = entry.cache not in used and entry.key not in held
            if entry.state is State.BOTH and free:
                raise Violation("demotion", f"an unwritten chunk was evicted before {entry}")

    def refused(self, used_cache: Iterable[int]) -> None:
        """Check rule 9 after a store was refused because no cache slot could be had."""
        gauges = self._core.gauges()
        used, held, unwritten = set(used_cache), set(self._core.held()), 0
        if gauges["slots_used", "cache"] < gauges["slots", "cache"]:
            raise Violation("9", "refused a store with a cache slot free")
        for entry in self._core.entries():
            free = entry.cache not in used and entry.key not in held
            whole = cache_member(entry.cache) == EVERY_MEMBER
            if entry.state is State.BOTH and free and whole:
                raise Violation("9", f"refused a store although {entry} could be evicted")
            unwritten += entry.state is State.CACHED and free and whole
        suspects = len(self._core.targets.suspects)
        takes_writes = gauges["slots", "pool"] and suspects < self._knobs.targets
        if unwritten > (gauges["writes_pending", "waiting"] if takes_writes else 0):
            raise Violation("9", f"refused a store although {unwritten} chunks could be evicted")

    def commanded(self, commands: Iterable[Command]) -> None:
        self._note_room()
        writes = [command for command in commands if isinstance(command, WriteCommand)]
        if writes and self._knobs.write_policy == "off":
            raise Violation("off", f"{writes[0]}")
        if writes and self._demotes and self._roomy:
            raise Violation("demotion", f"{writes[0]} although the CPU tier has room")

    def check(self) -> None:
        self._dropped = self._core.counters["unwritten_chunks", "evicted"]
        self._note_room()
        gauges, knobs = self._core.gauges(), self._knobs
        for reason, share in (("reload", knobs.reload_share), ("queue", knobs.prefetch_share)):
            held = gauges["held_cache_slots", reason]
            if held > int(share * knobs.cache_slots):
                raise Violation("budget", f"{reason}: {held} slots held")
        for key in self._core.held():
            if self._core.lookup(key) is not Source.CPU:
                raise Violation("held", f"{key.hex()} is held but not in the CPU tier")

    def _note_room(self) -> None:
        gauges = self._core.gauges()
        free = gauges["slots", "cache"] - gauges["slots_used", "cache"]
        self._roomy &= free >= self._clean_min

    def idle(self) -> None:
        """Check with nothing under way: every chunk that was due is written."""
        gauges = self._core.gauges()
        self._check_prefetches()
        waiting = gauges["writes_pending", "waiting"]
        if not gauges["slots", "pool"] or self._core.targets.suspects or not waiting:
            return
        if not self._demotes:
            raise Violation("leak", f"not written at the end: {gauges}")
        cached = sum(entry.cache >= 0 for entry in self._core.entries())
        clean = cached - waiting
        short = self._clean_min - clean - gauges["slots", "cache"] + gauges["slots_used", "cache"]
        if short > 0:
            raise Violation("demotion", f"{short} demotions are due but not started: {gauges}")

    def _check_prefetches(self) -> None:
        """Check that every prefetch was used, cancelled, or counted as failed or wasted."""
        begun, ended = Counter[str](), Counter[str]()
        for series, count in self._core.counters.items():
            if series[0] == "prefetches":
                begun[series[1]] += int(count)
            elif series[0] == "prefetches_ended":
                ended[series[1]] += int(count)
        if begun.total() != ended.total():
            raise Violation("prefetch", f"started {dict(begun)}, ended {dict(ended)}")
