# SPDX-License-Identifier: Apache-2.0
"""The manager's core, which decides where every chunk is kept. No I/O, no vLLM, no torch.

All calls are made on one thread. A decision uses only data in memory. It produces a command with an
op number, and the ranks answer with reports (`protocol.py`). Commands of `prepare_store` and
`prepare_load` are sent in vLLM's transfer jobs; all others are queued for `take_commands`.

Code that runs per chunk is in `native.Tiers`: the index, the slots of both tiers, eviction, and the
states of entries.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import (
    CANCELLED,
    ERRORS,
    Outcome,
    OutcomeKind,
    Scope,
    code_of,
    io_error,
    outcome_of,
)
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.manager.boundary import prefix_order
from vllm_nvmeof_offload.manager.eviction import MakePolicy
from vllm_nvmeof_offload.manager.handshake import Agreement, CoreConfig, WritePolicy
from vllm_nvmeof_offload.manager.hold_and_prefetch import (
    ROOM_SHARE,
    Reason,
    ReloadScheduler,
    count_fetches,
)
from vllm_nvmeof_offload.manager.ledger import Entry, Ledger, Op, Source, State, columns_of
from vllm_nvmeof_offload.manager.load_or_recompute import Admission, Find, LoadTimes
from vllm_nvmeof_offload.manager.request_log import LoadRecord, RequestLog
from vllm_nvmeof_offload.manager.stores import StoreThreshold
from vllm_nvmeof_offload.manager.target_choice import Targets
from vllm_nvmeof_offload.metrics import Counts, Series
from vllm_nvmeof_offload.native import Batch, Foreign, Holds, LookUps, Tiers, Whereabouts
from vllm_nvmeof_offload.protocol import (
    OURS,
    SESSION,
    TAG_BYTES,
    AdoptedEntries,
    AttachCommand,
    CancelCommand,
    ChunkBatch,
    Command,
    DetachCommand,
    FetchCommand,
    LevelReport,
    LoadCommand,
    OpKind,
    OpReport,
    OpReports,
    RateReport,
    Report,
    ResetCommand,
    SavedSessions,
    SessionsCommand,
    StoreCommand,
    Urgency,
    WriteCommand,
    owner_of,
    split_keys,
    target_of,
)

__all__ = ["CoreConfig", "ManagerCore", "SessionIds", "Source", "StorePlan"]
_SIGHTINGS_MIN = 1 << 16  # the minimum of `StoreThreshold`'s `keys_max`; normally one per slot
RETAIN_S_MAX = 7 * 24 * 3600  # the longest retention, so that every session ends
#: The minimum interval between two saves of the sessions, and the largest share of time that saves
#: may take. Saving a million chunks takes 0.15 s of a step (on 2 busy cores).
_SAVES_PERIOD_S, _SAVES_SHARE = 1.0, 1 / 1000
_SOURCES = (None, Source.CPU, Source.POOL, Source.SHARED)  # by the native look-up's number
FROM_CPU, FROM_POOL = 1, 2  # the tiers that a look-up may hit, as bits
_KEPT, _PROVISIONAL = 1, 2  # values of `wanted` in `Tiers.plan_store`
_NATIVE_KIND = {OpKind.STORE: 0, OpKind.LOAD: 1, OpKind.WRITE: 2, OpKind.FETCH: 3}
#: By errno: whether the error affects only a slot, not the whole target.
_SLOT_ERRNOS = [io_error(number).scope is Scope.SLOT for number in range(max(ERRORS) + 1)]
#: The series of the counts that `Tiers.take_counts` returns, in order.
_NATIVE_COUNTS: tuple[Series, ...] = (
    ("evictions", "cpu"),
    ("evictions", "pool"),
    ("unwritten_chunks", "evicted"),
    "written_chunks",
    "retired_pool_slots",
    ("unwritten_chunks", "superseded"),
    "borrowed_chunks",
    ("unwritten_chunks", "shared"),
)
_SOURCE_NAMES = tuple(source.value for source in Source)
#: Keys per `take_changes`: an eighth of the backlog, within these bounds. Splitting and pickling
#: 32,768 keys takes 8 ms (AMD EPYC); ten million adopted chunks are reported within 310 steps.
_CHANGES_MIN, _CHANGES_MAX = 4096, 32_768
_CHANGES_SHARE = 8


class Change(NamedTuple):
    """The keys that entered or left a tier."""

    tier: Source
    removed: bool
    keys: list[bytes]


class SessionIds(NamedTuple):
    """The ids of a session (64 bits) and of its client, the holder of a cache salt (32 bits)."""

    session: int
    client: int


class StorePlan(NamedTuple):
    """The result of `prepare_store`. `command` is None if there is nothing to store. `refused`
    lists the new chunks that got no cache slot: the last ones in the prefix."""

    command: StoreCommand | None
    refused: list[bytes]


class ManagerCore:
    """The state of every offloaded chunk in both tiers, created from the ranks' handshake.

    `policy` is a user's eviction policy; None selects the native one. `wall_clock` dates what is
    retained on disk, because it also advances while no server is running. `first_generation` is for
    simulations; None selects a random number. `prompts_s` returns the seconds that the model has
    spent on prompts since the start. `foreign` gives access to other engines' chunks on the same
    targets; it is None if nothing is shared.
    """

    def __init__(
        self,
        config: CoreConfig,
        agreement: Agreement,
        clock: Callable[[], float] = time.monotonic,
        policy: MakePolicy | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        first_generation: int | None = None,
        prompts_s: Callable[[], float] = lambda: 0.0,
        foreign: Foreign | None = None,
    ) -> None:
        self.config = config
        self.capacity = capacity = agreement.capacity
        assert len(capacity.group_bytes) == len(config.groups), "ranks of another model"
        #: The weights' share tag, empty if they have no name, and whether a reset keeps it, because
        #: the weights were named or never change.
        self.name = agreement.tag, config.weights_never_change
        self._lane_bytes = list(capacity.lane_bytes)
        self._land_max = int(config.land_cache_share * capacity.cache_slots)
        self._counters = Counts()
        self.last_failures: dict[Series, Outcome] = {}  # last outcome per `failed_chunks` series
        self.levels: dict[int, LevelReport] = {}  # the last report from each rank
        self.request_log = RequestLog()  # what was found, loaded and computed for recent requests
        self.planned: LoadRecord | None = None  # the record of the load that was planned last
        #: Positions of groups whose bytes differed between ranks that must store equal bytes.
        self.unequal_groups: list[int] = []
        self._clock, self._wall_clock = clock, wall_clock
        self._ledger = Ledger(config.world_size, clock, prompts_s)
        self._foreign = foreign
        self._shared_tag = agreement.tag  # the tag that others' chunks must have; empty for none
        self._began: ResetCommand | None = None  # the reset that introduced this tag
        if foreign is not None:
            foreign.set_tag(agreement.tag)
        self._tiers = tiers = self._make_tiers(policy)
        self._unsent: list[Command] = []
        self._holds = holds = Holds(tiers, max(1, int(ROOM_SHARE * tiers.cache_slots)))
        cancel = partial(_cancel_fetches, tiers, self._ledger, self._unsent)
        #: The caller notifies this object when a request starts or stops waiting.
        self.reload = ReloadScheduler(config, capacity, tiers, holds, cancel, clock)
        self.targets = Targets(tiers, len(capacity.pool_slots))  # the targets' verdicts and rates
        self.admission = Admission(config, self.targets.read_rates)
        self._load_times = LoadTimes(self._ledger, self.admission, clock, capacity, config)
        slots = capacity.cache_slots + capacity.pool_slots_total
        self._threshold = StoreThreshold(config.store_threshold, max(_SIGHTINGS_MIN, slots))
        # Random at start, then incremented; generations are compared only for equality.
        self._generation = secrets.randbits(63) if first_generation is None else first_generation
        entries = agreement.entries
        adopted = tiers.adopt(entries.places, entries.generations, entries.keys)
        incomplete = agreement.unadopted + len(entries) - adopted
        self._counters["adoption_chunks", "adopted"] += adopted
        self._counters["adoption_chunks", "incomplete"] += incomplete
        #: Whether the sessions file is outdated, and the earliest time to replace it.
        self._is_unsaved, self._save_s = False, clock()
        saved = SavedSessions.decode(agreement.sessions)
        if len(saved.sessions) and len(entries):
            self._restore_sessions(saved, entries)

    def _make_tiers(self, policy: MakePolicy | None) -> Tiers:
        config, slots = self.config, self.capacity.cache_slots
        return Tiers(
            slots,
            list(self.capacity.pool_slots),
            key_bytes=config.key_bytes,
            group_ids=[group.group_id for group in config.groups],
            group_tokens=[
                0 if group.kind is GroupKind.STATE else group.tokens_per_chunk
                for group in config.groups
            ],
            ranks=config.world_size,
            credit=int(config.credit_share * slots),
            writes=bool(self.capacity.pool_slots_total)
            and config.write_policy is not WritePolicy.OFF,
            demotes=config.write_policy is WritePolicy.ON_EVICTION,
            logs_moves=config.kv_events,
            writes_max=max(1, int(config.writes_pending_share * slots)),
            clean_min=max(1, int(config.clean_share * slots)),
            policy=policy,
            slot_errnos=_SLOT_ERRNOS,
            set_sizes=self.capacity.set_sizes,
            equal_min=config.equal_min,
            sample_every=config.sample_every,
            foreign=self._foreign,
            retain_share=config.retain_share,
        )

    # -- look-up ----------------------------------------------------------------------

    def lookup(self, key: bytes, sources: int = FROM_CPU | FROM_POOL) -> Source | None:
        """Return the source from which `key` can be loaded now, or None for a miss."""
        return _SOURCES[self._tiers.lookup(key, sources)]

    def look_ups(self, sources_of: Callable[[Any], int], hit: object, miss: object) -> LookUps:
        """Return an object that answers vLLM's look-ups of single keys. `sources_of` returns the
        sources that a request's filter allows; `hit` and `miss` are vLLM's two answers."""
        return LookUps(self._tiers, sources_of, hit, miss)

    def present(self, keys: Sequence[bytes], sources: int = FROM_CPU | FROM_POOL) -> bytes:
        """Return one byte per key: 1 if a look-up in these sources would hit, else 0."""
        return self._tiers.present(keys, sources)

    def find(self, keys: Sequence[bytes], tokens: int = 0) -> Find:
        """Return the size in bytes and tokens of a load of `keys`, which a look-up has just found.
        `tokens` is the number of tokens that they cover; 0 for whole full-attention chunks."""
        leading, read_bytes = self._tiers.weigh(keys, self._lane_bytes)
        if self.config.full_attention_only:
            missing = (len(keys) - leading) * self.config.groups[0].tokens_per_chunk
            tokens = min(tokens, missing) if tokens else missing
        return Find(leading, read_bytes, self.queued_bytes(), tokens)

    def queued_bytes(self) -> list[int]:
        """Return the bytes that loads still have to read, by lane."""
        return self._load_times.reading.copy()

    def whereabouts(self, keys: Sequence[bytes], sources: int) -> Whereabouts | None:
        """Return these chunks' locations, or None if a look-up in these sources misses one."""
        return self._tiers.whereabouts(keys, sources)

    def unmoved(self, before: Whereabouts, keys: Sequence[bytes], sources: int) -> bool:
        """Return whether, since `before`, no chunk has moved and no load of one has begun."""
        return self._tiers.unmoved(before, keys, sources)

    def ended(self, keys: Sequence[bytes], ends: npt.NDArray[np.int64] | None = None) -> None:
        """Record that a request whose chunks have these `keys` has ended. `ends` is as in
        `prepare_store`, except that a key can appear twice."""
        keys, _ = self._in_prefix_order(keys, ends)
        self._tiers.touch(keys, ended=True)
        self._tiers.drain()  # write chunks that other engines no longer have

    # -- store ------------------------------------------------------------------------

    def prepare_store(
        self,
        keys: Sequence[bytes],
        ends: npt.NDArray[np.int64] | None = None,
        provisional: npt.NDArray[np.bool_] | None = None,
        *,
        again: Collection[bytes] = (),
        client: int = 0,
    ) -> StorePlan:
        """Plan to store the new chunks of `keys` that have reached the store threshold, in prefix
        order, until no cache slot is left. The command's rows are in the order of `keys`.

        With several groups, `ends` gives the request's tokens up to each chunk's end, and each key
        must appear once. Without `ends`, the keys must be in prefix order. `provisional` marks the
        keys whose chunks must not be written before `keep`. `again` contains keys that the request
        has offered before. `client` is the request's `pool.format.client_of`, which is stored with
        the chunks; 0 if unknown.
        """
        once = list(dict.fromkeys(keys)) if ends is None and len(keys) > 1 else keys
        in_order, order = self._in_prefix_order(once, ends)
        wanted = self._threshold.see(in_order, again)
        if provisional is not None:
            how = np.where(
                provisional if order is None else provisional[order], _PROVISIONAL, _KEPT
            )
            wanted = (how if wanted is None else how * wanted).astype(np.uint8)
        batch, absent, refused, self._generation = self._tiers.plan_store(
            in_order, wanted, self._generation, order, client
        )
        stored = len(batch)
        if absent > stored:
            self._counters["unstored_chunks", "below_threshold"] += absent - stored - len(refused)
        command = None
        if stored:
            self._counters["stored_chunks"] += stored
            op = self._ledger.open(OpKind.STORE, batch)
            command = StoreCommand(op.number, columns_of(batch))
        self._tiers.drain()  # evictions here may have made demotions due
        return StorePlan(command, [in_order[at] for at in refused])

    def _in_prefix_order(
        self, keys: Sequence[bytes], ends: npt.NDArray[np.int64] | None
    ) -> tuple[Sequence[bytes], npt.NDArray[np.uint32] | None]:
        """Return the keys in prefix order, and their indexes in `keys` (None if unchanged)."""
        if ends is None or not keys:
            return keys, None
        order = prefix_order(keys, ends, self.config.groups)
        return [keys[at] for at in order.tolist()], order

    def supersede(self, keys: Sequence[bytes]) -> None:
        """Evict these provisional chunks next, unless a request is using them."""
        self._tiers.supersede(keys)

    def keep(self, keys: Sequence[bytes]) -> None:
        """Turn the provisional chunks of `keys` into ordinary ones, which are kept and written."""
        self._tiers.keep(keys)
        self._tiers.drain()

    def cool(self, keys: Sequence[bytes]) -> None:
        """Evict these chunks from the CPU tier next, the last one first, except chunks that several
        requests have used."""
        self._tiers.cool(keys)
        self._tiers.drain()

    # -- retention --------------------------------------------------------------------

    def retain(
        self,
        keys: Sequence[bytes],
        ends: npt.NDArray[np.int64] | None,
        session: SessionIds,
        seconds: int,
        priority: int,
    ) -> None:
        """Retain these chunks, and those that the session already retains, for `seconds`. `ends` is
        as in `ended`. If the client's share is used up, its sessions with lower `priority` (1 to
        100) retain less."""
        keys, _ = self._in_prefix_order(keys, ends)
        self._tiers.retain(keys, *session, int(self._clock()) + seconds, priority)
        self._is_unsaved = self.capacity.pool_slots_total > 0

    def drop_session(self, session: SessionIds) -> None:
        """Stop retaining a session's chunks. An unknown session is ignored."""
        if self._tiers.drop_session(session.session):
            self._is_unsaved = self.capacity.pool_slots_total > 0

    def _save_sessions(self) -> list[Command]:
        """Return the command that saves the sessions, or no command if a save is not due."""
        now_s = self._clock()
        if not self._is_unsaved or now_s < self._save_s:
            return []
        raw, generations = self._tiers.save_sessions()
        sessions = np.frombuffer(raw, SESSION).copy()
        until = sessions["until"].astype(np.int64) + int(self._wall_clock()) - int(now_s)
        sessions["until"] = np.clip(until, 0, np.iinfo(np.uint32).max)  # the clock may be unset
        content = SavedSessions(sessions, np.frombuffer(generations, np.uint64)).encode()
        self._is_unsaved = False
        self._save_s = now_s + max(_SAVES_PERIOD_S, (self._clock() - now_s) / _SAVES_SHARE)
        return [SessionsCommand(content)]

    def _restore_sessions(self, saved: SavedSessions, entries: AdoptedEntries) -> None:
        """Retain the adopted chunks of an earlier process's sessions that have not yet expired."""
        now, wall = int(self._clock()), int(self._wall_clock())
        order = np.argsort(entries.generations)
        at = np.searchsorted(entries.generations, saved.generations, sorter=order)
        rows = order[np.minimum(at, len(order) - 1)]
        rows[entries.generations[rows] != saved.generations] = -1
        every, size, end = entries.keys, entries.key_bytes, 0
        for session, client, until, chunks, priority in saved.sessions.tolist():
            of, end = rows[end : end + chunks].tolist(), end + chunks
            keys = [every[row * size : (row + 1) * size] for row in of if row >= 0]
            left_s = min(until - wall, RETAIN_S_MAX)  # the clock may have been set back
            if keys and left_s > 0:
                self._tiers.retain(keys, session, client, now + left_s, priority)

    # -- load -------------------------------------------------------------------------

    def prepare_load(
        self,
        keys: Sequence[bytes],
        limit_s: float | None = None,
        *,
        tokens: range = range(0),
        ends: npt.NDArray[np.int64] | None = None,
        helpers: int | None = None,
        predicted_s: float = 0.0,
        client: int = 0,
    ) -> LoadCommand:
        """Plan the load of `keys` and pin their chunks. Rows of evicted chunks fail with STALE.

        `limit_s` is the time after which the load is cut off, excluding time spent on prompts; None
        for no limit. `tokens` are the request's tokens that the load covers; empty for whole
        full-attention chunks from the first token. `ends` and `client` are as in `prepare_store`,
        `helpers` as in `LoadCommand`, `predicted_s` as in `Decision`.
        """
        in_order, order = self._in_prefix_order(keys, ends)
        batch = self._tiers.plan_load(in_order, self._land_max, order, client)
        op = self._ledger.open(OpKind.LOAD, batch)
        if ends is None:
            tokens = tokens or range(len(keys) * self.config.groups[0].tokens_per_chunk)
        op.tokens, op.predicted_s = tokens, predicted_s
        self._load_times.planned(op, limit_s)
        borrows = self._foreign is not None and op.reads > 0 and batch.borrows
        if borrows:
            self._attach()
        self._holds.used(batch)
        columns = columns_of(batch)
        counts = self.tokens_by_source(columns, op.tokens, ends)
        self.planned = op.record = LoadRecord(*counts)
        for source, count in zip(_SOURCE_NAMES, counts, strict=True):
            if count:
                self._counters["loaded_tokens", source] += count
        self._tiers.drain()
        return LoadCommand(op.number, columns, helpers)

    def tokens_by_source(
        self, batch: ChunkBatch, tokens: range, ends: npt.NDArray[np.int64] | None
    ) -> tuple[int, int, int]:
        """Return the number of `tokens` that a load takes from each `Source`, in the enum's order.
        `ends` is as in `prepare_store`. A token with chunks in several sources counts towards the
        last one. Evicted chunks cover no tokens, and windows need not cover all tokens."""
        return self._tiers.tokens_by_source(batch, tokens.start, tokens.stop, ends)

    # -- other engines' chunks --------------------------------------------------------

    def _attach(self) -> None:
        """Make the ranks open the regions to which the next commands refer for the first time."""
        assert self._foreign is not None
        for owner, engine_index, pool_uuid in self._foreign.take_attachments():
            op = self._ledger.open(OpKind.ATTACH)
            op.owner = owner
            self._unsent.append(AttachCommand(op.number, owner, engine_index, pool_uuid))

    def _attach_reported(self, op: Op, report: OpReport) -> None:
        assert self._foreign is not None
        op.ranks_left -= 1
        if report.codes is not None and report.codes[0] and op.failure is None:
            op.failure = outcome_of(int(report.codes[0]), 0)
            self._foreign.attach_failed(op.owner)
            self._counters["borrow_failures", "attach"] += 1
        if op.failure is not None and not op.ranks_left and self._foreign.detach(op.owner):
            self._unsent.append(DetachCommand(op.owner))  # some ranks may have opened the regions

    # -- commands and reports ---------------------------------------------------------

    def turn(self) -> None:
        """Hold and fetch chunks for waiting requests, cut off overdue loads, and end expired
        sessions. Call once per step, before `take_commands`."""
        for op in self._load_times.take_overdue():
            self._unsent.append(CancelCommand(op))
            self._counters["loads_cut"] += 1
        self._tiers.expire(int(self._clock()))
        self.reload.turn()

    def take_commands(self) -> list[Command]:
        """Take all commands to send to every rank with this step, in order."""
        foreign = self._foreign
        borrows = foreign is not None and foreign.is_used
        if borrows:
            self._attach()
        commands = self._unsent + self._save_sessions()
        self._unsent.clear()
        writes = self._tiers.take_writes()
        if len(writes):
            op = self._ledger.open(OpKind.WRITE, writes)
            commands.append(WriteCommand(op.number, columns_of(writes), writes.clients))
        for reason in Reason:
            fetches = self._tiers.take_fetches(reason.value)
            if not len(fetches):
                continue
            op = self._ledger.open(OpKind.FETCH, fetches)
            op.probe = reason is Reason.PROBE
            self._holds.sent(op.number, fetches)
            urgency = Urgency.URGENT if reason is Reason.RELOAD else Urgency.PREFETCH
            commands.append(FetchCommand(op.number, columns_of(fetches), urgency))
        if foreign is not None and borrows:
            # Close regions of vanished engines in the next step: this step's loads may use them.
            self._unsent += map(DetachCommand, foreign.take_detachments())
        return commands

    def report(self, reports: Iterable[Report]) -> None:
        """Apply the ranks' reports in order of arrival."""
        for report in reports:
            if isinstance(report, OpReport):  # most reports are of this kind or the next
                self._reported(self._ledger[report.op], report)
            elif isinstance(report, OpReports):
                self._reported_whole(report)
            elif isinstance(report, RateReport):
                self.targets.rate(report)
            elif isinstance(report, LevelReport):
                self.levels[report.rank] = report
            else:
                self._counters["verdict_changes"] += self.targets.verdict(report)
        self._tiers.drain()

    def _reported(self, op: Op, report: OpReport) -> None:
        batch = op.batch
        if batch is None and op.kind is OpKind.ATTACH:
            self._attach_reported(op, report)
        elif batch is None:
            self._reset_reported(op, report)
        else:
            effect = self._tiers.report(
                _NATIVE_KIND[op.kind],
                batch,
                report.indexes,
                report.codes,
                report.errnos,
                report.released,
                report.crcs,
                report.rank,
            )
            self._follow(op, batch, *effect)
        if op.over:
            self._ledger.close(op)
        if report.crcs is not None and (unequal := self._tiers.take_unequal()):
            self.unequal_groups += unequal
            self.reset(same_weights=True)  # on disk too, for other engines and after a restart

    def _reported_whole(self, report: OpReports) -> None:
        """Apply a rank's report that all rows of several ops are OK and released."""
        ops, batches = [], []
        for op in map(self._ledger.__getitem__, report.columns()[0]):
            if op.batch is None:
                self._reported(op, OpReport(op.number))
                continue
            ops.append(op)
            batches.append(op.batch)
        kinds = bytes([_NATIVE_KIND[op.kind] for op in ops])
        over, news = self._tiers.report_whole(kinds, batches)
        for at, effect in news:
            self._follow(ops[at], batches[at], *effect)
        for at in over:
            self._ledger.close(ops[at])

    def _follow(
        self,
        op: Op,
        batch: Batch,
        lost: list[int],
        decided: list[int] | None,
        failed: list[int],
        ended: bool,
    ) -> None:
        if lost:
            self._holds.lost(batch, lost)
        if op.kind is OpKind.FETCH:
            self._holds.ended(op.number, batch, decided, op.probe)
        if failed:
            self._count_failures(
                op, batch.codes[failed], batch.errors[failed], batch.places[failed]
            )
            if op.kind is OpKind.LOAD:
                self._count_lost(op, min(failed))
        if ended and op.kind is OpKind.LOAD:
            self._load_ended(op)
        elif ended and op.probe:
            self._load_times.probed(op)

    def _load_ended(self, op: Op) -> None:
        record = op.record
        assert record is not None
        record.seconds, record.was_cut_off = self._load_times.loaded(op)
        record.failed_tokens = op.lost
        if not self.admission.prefill_rate:
            return
        arrived = len(op.tokens) - op.lost
        saved_s = self.admission.compute_s(arrived, op.tokens.start) - record.seconds
        record.saved_seconds = saved_s
        result, tier = "saved" if saved_s >= 0 else "lost", "pool" if op.reads else "cpu"
        self._counters["prefill_seconds", result, tier] += abs(saved_s)
        self._counters["gpu_seconds", result, tier] += abs(saved_s) * self.config.world_size

    def _reset_reported(self, op: Op, report: OpReport) -> None:
        op.ranks_left -= 1
        if report.codes is not None and report.codes[0] and op.failure in (None, CANCELLED):
            errno = 0 if report.errnos is None else int(report.errnos[0])
            op.failure = outcome_of(int(report.codes[0]), errno)
        if op.failure is not None and not op.ranks_left:
            series = "failed_chunks", op.kind.value, op.failure.kind.value, "none"
            self._counters[series] += 1
            self.last_failures[series] = op.failure

    def has_pending_work(self, *, count_writes: bool = True) -> bool:
        """Return whether a command is waiting to be sent, or an awaited report is not overdue.
        `count_writes=False` ignores writes, because they can wait for the engine's next step."""
        if self._unsent or self._tiers.fetches_intended:
            return True
        # Count only saves that are due soon: otherwise an idle engine would keep stepping.
        saves_soon = self._is_unsaved and self._save_s - self._clock() <= _SAVES_PERIOD_S
        if count_writes and (self._tiers.writes_intended or saves_soon):
            return True
        oldest_s = self._clock() - self.config.report_deadline_s
        return any(
            op.outcomes_owed
            and op.issued_s > oldest_s
            and (count_writes or op.kind is not OpKind.WRITE)
            for op in self._ledger
        )

    def _count_failures(
        self,
        op: Op,
        codes: npt.NDArray[np.uint8],
        errnos: npt.NDArray[np.int16],
        places: npt.NDArray[np.int64],
    ) -> None:
        """Count failed rows on which every rank has reported."""
        if op.record is not None:
            kinds = Counter(op.record.failed_chunks)
            for code, count in Counter(codes.tolist()).items():
                kinds[outcome_of(code, 0).kind.value] += count
            op.record.failed_chunks = dict(kinds)  # replaced, because other threads may read it
        if self._foreign is not None:
            borrows = (owner_of(places) > OURS) & (codes != code_of(OutcomeKind.CANCELLED))
            for code, count in Counter(codes[borrows].tolist()).items():
                self._counters["borrow_failures", outcome_of(code, 0).kind.value] += count
            codes, errnos, places = codes[~borrows], errnos[~borrows], places[~borrows]
        targets = np.where(places >= 0, target_of(places), -1)
        for code, target in set(zip(codes.tolist(), targets.tolist(), strict=True)):
            same = np.flatnonzero((codes == code) & (targets == target))
            outcome = outcome_of(code, int(errnos[same[-1]]))
            name = "none" if target < 0 else str(target)
            series = "failed_chunks", op.kind.value, outcome.kind.value, name
            self._counters[series] += len(same)
            self.last_failures[series] = outcome

    def _count_lost(self, op: Op, row: int) -> None:
        """Count the tokens that are recomputed because this row of a load failed: those from this
        row on or, with several groups, all tokens of the load."""
        lost = len(op.tokens)
        if self.config.full_attention_only:
            per_chunk = self.config.groups[0].tokens_per_chunk
            first = (op.tokens.start // per_chunk + row) * per_chunk
            lost = op.tokens.stop - max(op.tokens.start, first)
        if lost > op.lost:
            self._counters["recomputed_tokens", "load_failed"] += lost - op.lost
            op.lost = lost

    @property
    def counters(self) -> Counts:
        """The number of events since the start, by series (`metrics.COUNTERS`)."""
        for series, amount in zip(_NATIVE_COUNTS, self._tiers.take_counts(), strict=True):
            if amount:
                self._counters[series] += amount
        count_fetches(self._holds, self._counters)
        return self._counters

    # -- KV events --------------------------------------------------------------------

    @property
    def changed_keys(self) -> int:
        """The number of keys in changes not yet taken; 0 unless `kv_events` is set."""
        return self._tiers.moved_bytes // self.config.key_bytes

    def take_changes(self) -> list[Change]:
        """Take the oldest changes of the tiers' contents, in order, up to the limit per step.

        A chunk is in the CPU tier when its copy is complete on every rank, and in the pool when its
        write is complete. It can be in both. Applied in order, the changes reproduce the index;
        consumers must count the announcements for each block. A reset drops additions that were not
        taken, because it also removes their keys.
        """
        left = min(max(_CHANGES_MIN, self.changed_keys // _CHANGES_SHARE), _CHANGES_MAX)
        key_bytes = self.config.key_bytes
        return [
            Change(Source.CPU if tier == 1 else Source.POOL, removed, split_keys(keys, key_bytes))
            for tier, removed, keys in self._tiers.take_moves(left * key_bytes)
        ]

    # -- weights and resets -----------------------------------------------------------

    def weights_changed(self) -> None:
        """Forget the weights' name, so that no later start adopts chunks. A reset must follow."""
        self.name = b"", False

    def name_weights(self, tag: bytes) -> bool:
        """Set the weights' share tag. Return whether it is new; if so, a reset must follow."""
        before, self.name = self.name, (tag, True)
        return self.name != before

    @property
    def is_storing(self) -> bool:
        """Whether any rank is still copying chunks from GPU memory."""
        return any(op.kind is OpKind.STORE for op in self._ledger)

    def reset(self, *, same_weights: bool = False) -> bool:
        """Drop every entry, including those for chunks on disk. Slots become free as the ranks
        release them. With `same_weights`, later chunks keep the share tag. Return False if nothing
        was left to drop and a reset is already queued."""
        tag, is_kept = self.name
        tag = self._shared_tag if same_weights else tag if is_kept else b""
        last = self._unsent[-1] if self._unsent else None
        is_repeated = isinstance(last, ResetCommand) and tag == (last.tag if last.named else b"")
        if is_repeated and not self._tiers:
            if self._foreign is not None and last is not self._began:
                self._tiers.reset()  # other engines may have offered more chunks since
            return False  # a weight update may call this once per piece
        self._unsent[:] = [one for one in self._unsent if not isinstance(one, CancelCommand)]
        op = self._ledger.open(OpKind.RESET)
        # Weights without a name get a random tag, which no other start can use.
        command = ResetCommand(op.number, tag or secrets.token_bytes(TAG_BYTES), bool(tag))
        if tag != self._shared_tag:
            self._shared_tag, self._began = tag, command
            if self._foreign is not None:
                self._foreign.change_tag(tag)
        self._tiers.reset()
        self._holds.reset()
        self.reload.reset()
        self._unsent.append(command)
        self._counters["resets"] += 1
        return True

    # -- gauges -----------------------------------------------------------------------

    def gauges(self) -> dict[Series, float]:
        """Return gauges by series (`metrics.GAUGES`); other names are for leak checks."""
        tiers = self._tiers
        retained_cache, retained_pool = tiers.retained
        return {
            "entries": len(tiers),
            ("slots", "cache"): self.capacity.cache_slots,
            ("slots_used", "cache"): tiers.cache_taken,
            ("slots_retained", "cache"): retained_cache,
            ("slots_retained", "pool"): retained_pool,
            "sessions": tiers.sessions,
            "cache_slots_orphaned": tiers.cache_orphans,
            ("slots", "pool"): self.capacity.pool_slots_total - tiers.pool_retired,
            ("slots_used", "pool"): tiers.pool_taken - tiers.pool_retired,
            "pool_slots_orphaned": tiers.pool_orphans,
            "ops": len(self._ledger),
            ("writes_pending", "waiting"): tiers.backlog,
            ("writes_pending", "sent"): tiers.writes_pending,
            "commands_waiting": (
                len(self._unsent) + tiers.writes_intended + tiers.fetches_intended
            ),
            ("held_cache_slots", "reload"): self._holds.held(Reason.RELOAD),
            ("held_cache_slots", "queue"): self._holds.held(Reason.QUEUE),
            "requests_waiting": len(self.reload),
            "shared_entries": self._foreign.rows if self._foreign else 0,
            "shared_age_seconds": self._shared_age_s(),
            "cache_slots_in_use": tiers.cache_in_use,
            "prefill_tokens_per_second": self.admission.prefill_rate,
            "pool_read_bytes_per_second": self.admission.bytes_per_s,
            "load_slowness": self.admission.slowness,
        }

    def _shared_age_s(self) -> float:
        scanned_ns = self._foreign.scanned_ns if self._foreign else 0
        return max(0.0, self._clock() - scanned_ns / 1e9) if scanned_ns else 0.0

    def activity(self) -> tuple[float, ...]:
        """Return values that are cheap to compute and that change whenever nearly any counter or
        gauge does."""
        return (
            *self.counters.values(),  # not the sum, in which bytes would hide small counts
            len(self._ledger),
            len(self.reload),
            *map(self._holds.held, Reason),
            *self.targets.worst_verdicts(),
        )

    def held(self) -> Iterable[bytes]:
        """Return the keys of cache slots that are held for waiting requests."""
        return self._holds.keys(self._tiers)

    def entries(self) -> list[Entry]:
        return [
            Entry(State(state), generation, cache, place, key)
            for state, generation, cache, place, key in self._tiers.entries()
        ]


def _cancel_fetches(
    tiers: Tiers, ledger: Ledger, unsent: list[Command], number: int, rows: Sequence[int]
) -> None:
    """Cancel rows of a fetch. Later look-ups find the entries in the pool."""
    batch = ledger[number].batch
    assert batch is not None
    for row in rows:
        tiers.detach(batch, row)
    unsent.append(CancelCommand(number, np.array(rows, np.uint32)))
