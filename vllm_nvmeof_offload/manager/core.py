# SPDX-License-Identifier: Apache-2.0
"""The manager's core: pure, no I/O, no vLLM, no torch. It decides; workers move bytes.

Calls come from one thread, and every decision is made from memory at once. A decision results in
a command with an op number, which the ranks answer with reports (protocol). `prepare_store` and
`prepare_load` return commands that travel inside vLLM's own transfer jobs; writes, fetches,
cancellations and resets are queued and taken with `take_commands`.

The caller reports waiting requests to `reload`, which acts once per step, in `turn`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.errors import CANCELLED, STALE, Outcome
from vllm_nvmeof_offload.manager.eviction import LruPolicy, MakePolicy
from vllm_nvmeof_offload.manager.handshake import Agreement, CoreConfig
from vllm_nvmeof_offload.manager.hold_and_prefetch import Holds, Reason, ReloadScheduler
from vllm_nvmeof_offload.manager.index import Entry, Event, Source, State
from vllm_nvmeof_offload.manager.kv_events import KvEventLog
from vllm_nvmeof_offload.manager.ledger import Ledger, Op
from vllm_nvmeof_offload.manager.load_or_recompute import Admission, Find, LoadTimes
from vllm_nvmeof_offload.manager.store_threshold import StoreThreshold
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.manager.writes import WriteBehind
from vllm_nvmeof_offload.metrics import Counts, Series
from vllm_nvmeof_offload.protocol import (
    CancelCommand,
    Command,
    LevelReport,
    LoadChunk,
    LoadCommand,
    OpKind,
    OpReport,
    RateReport,
    Report,
    ResetCommand,
    SlotIdentity,
    StoreChunk,
    StoreCommand,
    VerdictReport,
    WriteCommand,
)

__all__ = ["CoreConfig", "ManagerCore", "Source", "StorePlan"]
#: The least number of keys whose sightings are counted; the default is the number of slots.
_SIGHTINGS_MIN = 1 << 16
_GENERATION_MASK = (1 << 64) - 1
#: States in which the chunk is not in a cache slot yet, although its entry may name one.
_READ_FIRST = frozenset({State.POOLED, State.FETCHING})


@dataclass(frozen=True, slots=True)
class StorePlan:
    """command None: nothing to store. refused: new chunks that found no cache slot."""

    command: StoreCommand | None
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]
    refused: int


class ManagerCore:
    """The state of every offloaded chunk, over both tiers; made from the ranks' handshake.

    first_generation: for simulations; None: random. prompts_s: seconds that the model has computed
    prompts since the start.
    """

    def __init__(
        self,
        config: CoreConfig,
        agreement: Agreement,
        clock: Callable[[], float] = time.monotonic,
        policy: MakePolicy = LruPolicy,
        *,
        first_generation: int | None = None,
        prompts_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.config = config
        self.capacity = capacity = agreement.capacity
        #: The weights are not those that the keyspace names: nothing is adoptable from now on.
        self.weights_changed = False
        #: Events since the start, under the names of `metrics.COUNTERS`.
        self.counters = Counts()
        #: By series of `failed_chunks`: the last failure that it counted.
        self.last_failures: dict[Series, Outcome] = {}
        self.levels: dict[int, LevelReport] = {}  # by rank, as it last reported
        #: Changes of the tiers' contents, if the configuration asks for them.
        self.kv_events = KvEventLog() if config.kv_events else None
        self._clock = clock
        self._ledger = ledger = Ledger(config.world_size, clock, prompts_s)
        self._tiers = tiers = Tiers(agreement, policy, self.counters, config, self.kv_events)
        #: Where a key can be loaded from now; None is a miss.
        self.lookup = tiers.lookup
        #: The targets, for their verdicts and rates.
        self.targets = tiers.targets
        self._writes = WriteBehind(config, tiers, ledger)
        self._holds = Holds(tiers, ledger)
        #: The caller reports to it each request that begins to wait, and that waits no more.
        self.reload = ReloadScheduler(config, capacity, self._holds, clock)
        self.admission = Admission(config, tiers.targets.read_rates)
        sizes = capacity.slot_bytes, config.tokens_per_chunk
        self._load_times = LoadTimes(tiers, ledger, self.admission, clock, *sizes)
        slots = capacity.cache_slots + capacity.pool_slots
        self._threshold = StoreThreshold(config.store_threshold, max(_SIGHTINGS_MIN, slots))
        # Boot nonce and counter in one: compared only for equality.
        self._generation = secrets.randbits(64) if first_generation is None else first_generation
        self.counters["unadopted_chunks"] += agreement.unadopted

    # -- look-up ----------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> Find:
        """Where `keys`, all of which `lookup` has just found, would be loaded from."""
        index, lane = self._tiers.index, self._tiers.pool.lane
        slot_bytes = self.capacity.slot_bytes
        queued_bytes = [count * slot_bytes for count in self._load_times.reading]
        read_bytes = [0] * len(queued_bytes)
        leading, all_cpu = 0, True
        for key in keys:
            in_cache = key in index.cached
            if not in_cache and key not in index.pooled:
                entry = index.awake.get(key)
                in_cache = entry is not None and entry.state not in _READ_FIRST
            if in_cache:
                leading += all_cpu
            else:
                all_cpu = False
                pool_slot = index.slots(key)[1]
                assert pool_slot is not None
                read_bytes[lane(pool_slot)] += slot_bytes
        tokens = (len(keys) - leading) * self.config.tokens_per_chunk
        return Find(leading, read_bytes, queued_bytes, tokens)

    def ended(self, keys: Iterable[bytes]) -> None:
        """A request that used `keys`, in prefix order, has ended."""
        self._tiers.touch(keys, ended=True)

    # -- store ------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[bytes]) -> StorePlan:
        """Plan the store of those `keys` that are new and reached the threshold: as many as fit,
        in their order."""
        tiers = self._tiers
        once = dict.fromkeys(keys)
        self._threshold.see(once)
        absent = [key for key in once if key not in tiers.index]
        new = [key for key in absent if self._threshold.reached(key)]
        self.counters["below_threshold_chunks"] += len(absent) - len(new)
        held: list[int] = []
        if len(new) > tiers.cache.free:
            tiers.touch(keys)  # before evicting, so that chunks offered here are evicted last
            # With on-eviction writing, chunks that the pool has too are evicted first, even those
            # of this prefix.
            held = [] if tiers.demotes else tiers.hold_back(once)
        entries: list[Entry] = []
        chunks: list[StoreChunk] = []
        for key in new:
            slot = tiers.take_cache_slot()
            if slot is None and held:
                tiers.put_back(held)
                slot = tiers.take_cache_slot()
            if slot is None:
                break
            self._generation = (self._generation + 1) & _GENERATION_MASK
            entry = Entry(SlotIdentity(key, self._generation), State.STORING, cache_slot=slot)
            tiers.cache.use(slot)  # by the op below; keeps the next victim from being this one
            tiers.index.add(entry)
            entries.append(entry)
            chunks.append(StoreChunk(entry.identity, slot))
        tiers.put_back(held)
        tiers.touch(keys)
        refused = len(new) - len(entries)
        self.counters["stored_chunks"] += len(entries)
        self.counters["refused_stores"] += refused
        command = None
        if entries:
            slots = [chunk.cache_slot for chunk in chunks]
            op = self._ledger.open(OpKind.STORE, tuple(entries), slots)
            command = StoreCommand(op.number, tuple(chunks))
        self._writes.drain()  # evictions here may have made demotions due
        stored = tuple(entry.identity.key for entry in entries)
        return StorePlan(command, stored, tiers.take_evicted(), refused)

    # -- load -------------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[bytes], limit_s: float | None = None) -> LoadCommand:
        """Plan the load of `keys`, all of which `lookup` has just found; pins them.

        limit_s: time without prompts after which the load is cut off; None: never.
        """
        tiers = self._tiers
        entries: list[Entry] = []
        tiers.touch(keys)
        # Pin everything first: landing below evicts, and must not evict a chunk of this load.
        for key in keys:
            entry = tiers.index.find(key)
            assert entry is not None, "prepare_load of a key that no tier has"
            entries.append(entry)
            if entry.in_cache:
                assert entry.cache_slot is not None
                tiers.cache.use(entry.cache_slot)
                self._holds.used(key)
            else:
                assert entry.pool_slot is not None
                tiers.pool.use(entry.pool_slot)
            tiers.settle(entry)
        chunks: list[LoadChunk] = []
        landing: set[int] = set()
        for index, entry in enumerate(entries):
            pool_slot = None if entry.in_cache else entry.pool_slot
            if pool_slot is not None and self._land(entry, len(landing)):
                landing.add(index)
            chunks.append(LoadChunk(entry.identity, entry.cache_slot, pool_slot))
        op = self._ledger.open(
            OpKind.LOAD,
            tuple(entries),
            [chunk.cache_slot for chunk in chunks],
            [chunk.pool_slot for chunk in chunks],
            frozenset(landing),
        )
        self._load_times.planned(op, limit_s)
        from_pool = sum(chunk.pool_slot is not None for chunk in chunks)
        tokens = self.config.tokens_per_chunk
        self.counters["loaded_tokens", "cpu"] += (len(chunks) - from_pool) * tokens
        self.counters["loaded_tokens", "pool"] += from_pool * tokens
        self._writes.drain()
        return LoadCommand(op.number, tuple(chunks))

    def _land(self, entry: Entry, landed: int) -> bool:
        """Give a pool-only entry a cache slot to read its chunk into, within the load's share."""
        if landed >= int(self.config.land_cache_share * self.capacity.cache_slots):
            return False
        slot = self._tiers.take_cache_slot(spare_unwritten=True)
        if slot is None:
            return False
        self._tiers.begin_fetch(entry, slot)
        self._tiers.settle(entry)
        return True

    # -- commands and reports ---------------------------------------------------------

    def turn(self) -> None:
        """Once per step, before its commands are taken: hold and fetch chunks for the requests that
        wait, and cut off overdue loads."""
        for op in self._load_times.take_overdue():
            self._ledger.cancel(op)
            self.counters["loads_cut"] += 1
        self.reload.turn()

    def take_commands(self) -> list[Command]:
        """Everything to send to every rank with this step, in order."""
        commands = list(self._ledger.unsent.values())
        self._ledger.unsent.clear()
        return commands

    def report(self, reports: Iterable[Report]) -> None:
        """Apply the ranks' reports, in the order in which they came."""
        for report in reports:
            if isinstance(report, VerdictReport):
                self.counters["verdict_changes"] += self.targets.verdict(report)
                continue
            if isinstance(report, RateReport):
                self.targets.rate(report)
                continue
            if isinstance(report, LevelReport):
                self.levels[report.rank] = report
                continue
            op, decided, released = self._ledger.apply(report)
            if isinstance(report, OpReport):
                self._doom_failed(op, report)
            if decided:
                self._decide(op)
            if released:
                self._tiers.release(op)
            elif decided:
                # Only chunks that failed can have buffers still in the kernel: one hung read must
                # not pin the whole load.
                self._tiers.release(op, spare=frozenset(op.failures))
        self._writes.drain()

    def has_pending_work(self, *, count_writes: bool = True) -> bool:
        """Whether a command waits to be sent, or a report is owed and not overdue.

        count_writes: False leaves out write-behind, which can wait for the engine's next step.
        """
        commands = self._ledger.unsent.values()
        if any(count_writes or not isinstance(c, WriteCommand) for c in commands):
            return True
        oldest_s = self._clock() - self.config.report_deadline_s
        return any(
            op.outcomes_left
            and op.issued_s > oldest_s
            and (count_writes or op.kind is not OpKind.WRITE)
            for op in self._ledger
        )

    def _doom_failed(self, op: Op, report: OpReport) -> None:
        """One rank's failure decides: the key misses before the other ranks have reported."""
        for index, outcome in report.failures:
            stored = op.kind is OpKind.STORE
            loaded = op.kind in (OpKind.LOAD, OpKind.FETCH) and outcome != CANCELLED
            slot = op.pool_slots[index] if op.pool_slots else None
            if outcome == STALE and slot is None and op.entries[index].state in _READ_FIRST:
                continue  # it waited for another's read, which was cut off: the pool still has it
            if stored or loaded:
                worn = slot is not None and self._writes.read_failed(slot, outcome)
                self._tiers.doom(op.entries[index], retire=worn)
                self._holds.gone(op.entries[index])

    def _decide(self, op: Op) -> None:
        for index, outcome in op.failures.items():
            slot = op.pool_slots[index] if op.pool_slots else None
            target = "none" if slot is None else str(self._tiers.pool.lane(slot))
            series = "failed_chunks", op.kind.value, outcome.kind.value, target
            self.counters[series] += 1
            self.last_failures[series] = outcome
        if op.kind is OpKind.LOAD:
            failed_tokens = len(op.failures) * self.config.tokens_per_chunk
            self.counters["failed_load_tokens"] += failed_tokens
        for index, entry in enumerate(op.entries):
            failure = op.failures.get(index)
            if op.kind is OpKind.STORE:
                if failure is None and self._tiers.on(entry, Event.COPIED) is State.CACHED:
                    self._writes.want(entry)
            elif op.kind is OpKind.WRITE:
                pool_slot = op.pool_slots[index]
                assert pool_slot is not None
                self._writes.ended(entry, pool_slot, failure)
            elif (op.kind is OpKind.FETCH and not op.detached) or index in op.landing:
                self._fetched(entry, failure)
        if op.kind in (OpKind.LOAD, OpKind.FETCH):
            self._writes.reads_ended(op)
        if op.kind is OpKind.LOAD:
            self._load_times.loaded(op)
        elif op.kind is OpKind.FETCH:
            self._holds.ended(op, op.failures.get(0))
            if op.probe and not op.detached:
                self._load_times.learn(op, was_cut=False)

    def _fetched(self, entry: Entry, failure: Outcome | None) -> None:
        if entry.state is State.DOOMED:
            return
        if failure is None:
            self._tiers.on(entry, Event.FETCHED)
        else:  # cancelled: any other failure has doomed the entry
            self._tiers.on(entry, Event.FETCH_CANCELLED)
            self._holds.gone(entry)  # a landing may be held
            self._tiers.leave_cache(entry)

    # -- reset ------------------------------------------------------------------------

    def reset(self) -> bool:
        """Drop every entry, on disk too; slots come back as they are released.

        Returns False if nothing was left to drop and a reset is queued already.
        """
        ledger, unsent = self._ledger, self._ledger.unsent
        adoptable = self.config.weights_never_change and not self.weights_changed
        last = next(reversed(unsent.values()), None)
        if isinstance(last, ResetCommand) and last.adoptable == adoptable and not self._tiers.index:
            return False  # weights come in many pieces
        for number, command in list(unsent.items()):
            if isinstance(command, CancelCommand):
                del unsent[number]
            elif not isinstance(command, ResetCommand):
                # Never sent: no rank will report on it.
                if isinstance(command, WriteCommand):
                    self._writes.count(command.pool_slot, -1)
                self._tiers.release(ledger.withdraw(number))
        self._tiers.reset()
        self._writes.reset()
        self._holds.reset()
        self.reload.reset()
        op = ledger.open(OpKind.RESET)
        unsent[op.number] = ResetCommand(op.number, adoptable)
        self.counters["resets"] += 1
        return True

    # -- gauges -----------------------------------------------------------------------

    def gauges(self) -> dict[Series, float]:
        """Gauges under the names of `metrics.GAUGES`; other names are for leak checks only."""
        tiers = self._tiers
        return {
            "entries": len(tiers.index),
            "cache_slots": self.capacity.cache_slots,
            "cache_slots_used": tiers.cache.taken,
            "cache_slots_orphaned": tiers.cache.orphans,
            "pool_slots": self.capacity.pool_slots - tiers.pool.retired,
            "pool_slots_used": tiers.pool.taken - tiers.pool.retired,
            "pool_slots_orphaned": tiers.pool.orphans,
            "ops": len(self._ledger),
            "writes_pending": self._writes.pending,
            "write_backlog": tiers.backlog,
            "commands_waiting": sum(number > 0 for number in self._ledger.unsent),
            ("held_cache_slots", "reload"): self._holds.counts[Reason.RELOAD],
            ("held_cache_slots", "queue"): self._holds.counts[Reason.QUEUE],
            "requests_waiting": len(self.reload),
            "cache_slots_in_use": len(tiers.cache.users),
            "suspect_targets": len(self.targets.suspects),
            "prefill_tokens_per_second": self.admission.tokens_per_s,
            "pool_read_bytes_per_second": self.admission.bytes_per_s,
            "load_overhead_seconds": self.admission.overhead_s,
        }

    def activity(self) -> tuple[float, ...]:
        """A cheap value that differs after nearly every change of a counter or a gauge."""
        return (
            *self.counters.values(),  # not their sum: bytes would hide the small ones
            len(self._ledger),
            len(self.reload),
            *self._holds.counts.values(),
            *self.targets.worst_verdicts(),
        )

    def held(self) -> Iterable[bytes]:
        """The keys whose cache slots are held for requests that wait."""
        return self._holds.held.keys()

    def entries(self) -> Iterable[Entry]:
        """All live entries, for inspection; copies of those that rest."""
        return iter(self._tiers.index)
