# SPDX-License-Identifier: Apache-2.0
"""A simulated vLLM scheduler that drives our core as the offloading connector does.

It models these parts of vLLM 0.32/0.33: prefix cache and eviction, chunked prefill, preemption
with flush, loads for requests with nothing computed, stores built in the step that computes
them, fences of freed blocks, aborts during a load, recovery from failed blocks, resets.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.groups import GroupKind, group_id_of
from vllm_nvmeof_offload.manager.boundary import plan as boundary_of
from vllm_nvmeof_offload.manager.boundary import unit_tokens
from vllm_nvmeof_offload.manager.core import FROM_CPU, FROM_POOL, ManagerCore, StorePlan
from vllm_nvmeof_offload.manager.stores import BoundaryStores

from .base import Clock, Knobs, Tag, Trace, Violation
from .queue import Face, LookUp, SimQueue
from .rank import Metadata, Output, TransferJob, Work
from .requests import (
    BlockPool,
    Request,
    Status,
    note_refused,
    request_to_free,
    store_again,
    take_victim,
)
from .rules import Rules
from .shapes import block_tokens, needed_from, unit_of_blocks
from .store import NAMED_WEIGHTS, START_TAG, tag_of_version

LOAD_ATTEMPTS_MAX, BUDGET_TOKENS = 20, 24


class SimScheduler:
    """One EngineCore's scheduler. It fills `expected` with the right payload per generation."""

    def __init__(
        self,
        core: ManagerCore,
        knobs: Knobs,
        trace: Trace,
        rules: Rules,
        expected: dict[int, list[Tag]],
        clock: Clock,
    ) -> None:
        self.core = core
        #: The number of the weights, and of those that were never named.
        self.epoch = self._unnamed = 0
        #: Their share tag; None: they have none. is_named: a reset announces no other weights.
        self.tag: bytes | None = START_TAG
        self.is_named = knobs.weights_never_change
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: list[Request] = []
        self.counts: Counter[str] = Counter()
        self._knobs = knobs
        self._trace = trace
        self._rules = rules
        self._expected = expected
        self._blocks = BlockPool(knobs.gpu_blocks)
        self._step = 0
        self._jobs: dict[int, tuple[Request, bool, Counter[int]]] = {}
        self._job_keys: dict[int, tuple[bytes, ...]] = {}
        self._store_blocks: dict[int, list[int]] = {}
        self._fences: dict[int, set[int]] = {}  # block → stores of finished requests
        self._flush: set[int] = set()
        self._loads: dict[int, TransferJob] = {}
        self._allocated: set[int] = set()
        self._received: Counter[int] = Counter()
        self._requests: dict[int, Request] = {}
        self._ended: list[Request] = []  # finished since the last step
        self._gone: list[Request] = []  # the same, but before a reset: nothing of them is stored
        self._loading_keys: set[bytes] = set()
        self._queue = SimQueue(core, knobs, self._blocks, clock, self.counts)
        self._dropped: list[Request] = []  # preempted between two steps
        self._full_ids = {g.group_id for g in knobs.groups if g.kind is GroupKind.FULL}
        self._sizes = [block_tokens(group) for group in knobs.groups]
        #: Chooses among windows and states; None: those of the prompt's end are stored.
        self._boundaries: BoundaryStores | None = None
        if knobs.boundary_tokens:
            self._boundaries = BoundaryStores(
                rules.supersede, rules.keep, knobs.groups, knobs.boundary_tokens
            )

    # -- from outside -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        request.stored_chunks = [0] * len(self._knobs.groups)
        request.tables = [[] for _ in self._knobs.groups]
        self._requests[request.rid] = request
        self.waiting.append(request)
        self._queue.added(request)

    def abort(self, request: Request) -> None:
        self._trace("abort", request, request.status.value)
        request.aborted = True
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._finish(request)
            return
        self.waiting.remove(request)
        if request.status is Status.LOADING and not request.loaded:
            request.status = Status.DONE
            self.counts["aborted_loads"] += 1
            request.zombie = True  # freed when every rank has finished the load
            self._ended.append(request)
            self.done.append(request)
        else:
            self._finish(request)

    def reset(self, *, new_weights: bool) -> None:
        """`reset_prefix_cache(reset_running_requests=True, reset_connector=True)`."""
        self._trace("reset", "new weights" if new_weights else "")
        if new_weights:
            self._take_unnamed_weights()
        self._reset()

    def change_weights(self, version: int | None) -> None:
        """vLLM notices that the weights change. None: to a version that is never named."""
        self._trace("new weights are noticed, version", version)
        if version is None:
            self._take_unnamed_weights()
        else:
            self._take_weights(NAMED_WEIGHTS + version)
        self.core.weights_changed()
        self.tag, self.is_named = None, False
        self._reset()

    def name_weights(self, version: int) -> None:
        """The operator names the weights, which nobody may have noticed to be others."""
        self._trace("the weights are named", version)
        self._take_weights(NAMED_WEIGHTS + version)
        self.tag, self.is_named = tag_of_version(version), True
        if self.core.name_weights(self.tag):
            self._reset()

    def _take_unnamed_weights(self) -> None:
        self._unnamed += 1
        self._take_weights(self._unnamed)

    def _take_weights(self, weights: int) -> None:
        """Load these weights: vLLM aborts what has KV of others."""
        if weights == self.epoch:
            return
        for request in [r for r in self.waiting if r.holds_blocks]:
            self.abort(request)
        self.epoch = weights

    def _reset(self) -> None:
        while self.running:
            self._dropped.append(self.running.pop())
            self._preempt(self._dropped[-1])
        self._blocks.reset()
        self._flush.update(self._jobs)
        if self._boundaries is not None:
            self._boundaries.reset()
        again = not self.core.reset()
        self._rules.reset(self.tag if self.is_named else None, again=again)
        for request in list(self._requests.values()):
            request.stored_chunks = [0] * len(self._knobs.groups)
            request.jobs.clear()
            if request.status is Status.DONE and not request.zombie:
                del self._requests[request.rid]
        self._gone += self._ended
        self._ended.clear()
        self._jobs.clear()
        self._job_keys.clear()
        self._store_blocks.clear()
        self._fences.clear()
        self._loading_keys.clear()

    def flush_a_load(self, rng: random.Random) -> None:
        """vLLM may wait for any of its jobs; the others of the same chunks go on."""
        loads = [op for op, (_, is_store, _) in self._jobs.items() if not is_store]
        if loads:
            self._flush.add(rng.choice(loads))
            self.counts["flushed_loads"] += 1

    def busy(self) -> bool:
        """Whether vLLM's engine would step."""
        live = self.waiting or self.running or self._ended or self._gone or self._flush
        return bool(live or self._jobs) or self.core.has_pending_work()

    # -- schedule ---------------------------------------------------------------------

    def schedule(self) -> Metadata:
        self._step += 1
        metadata = Metadata(self._step, self.epoch)
        preempted: list[Request] = []
        scheduled: list[tuple[Request, int]] = []
        # The core's contract leaves open when in a step it is: requests may leave between it and
        # `take_commands`, which drops fetches that were never sent.
        turn_comes_first = self._step % 3 == 0
        if turn_comes_first:
            self._rules.turn()
        budget = self._schedule_running(scheduled, preempted)
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        dropped, self._dropped = self._dropped, []
        # vLLM names every request that has finished, whatever was reset since.
        gone, self._gone = self._gone, []
        left = preempted + dropped, gone + self._ended
        self._rules.fetching(lambda: self._queue.step(scheduled, *left))
        for request in preempted:
            self._flush |= request.jobs
        for request in preempted + dropped if self._boundaries is not None else ():
            self._boundaries.preempted(str(request))
        for block in self._allocated & self._fences.keys():
            self._flush |= self._fences[block]
        for request in self._requests.values():
            request.forget(self._allocated)
        for request, count in scheduled:
            self._store(metadata, request, min(request.computed + count, len(request.tokens)))
        ended, self._ended = self._ended, []
        for request in ended:
            self._store_rest(metadata, request)
        self.counts["flushed"] += len(self._flush)
        metadata.loads, self._loads = self._loads, {}
        metadata.flush, self._flush = self._flush, set()
        self._allocated = set()
        if not turn_comes_first:
            self._rules.turn()
        metadata.commands = self.core.take_commands()
        self._rules.commanded(metadata.commands)
        for request, count in scheduled:
            after = request.verify(count)
            tables = tuple(map(tuple, request.tables))
            metadata.work.append(Work(tables, tuple(request.hashes), request.computed, after))
            self._computed(request, after)
        return metadata

    def _schedule_running(
        self, scheduled: list[tuple[Request, int]], preempted: list[Request]
    ) -> int:
        budget = BUDGET_TOKENS
        for request in list(self.running):
            if request not in self.running:
                continue
            count = self._cut(request, min(request.wanted(self._knobs), budget))
            while count and not self._grow(request, request.computed + count):
                victim = take_victim(self.running, by_priority=self._knobs.by_priority)
                scheduled[:] = [item for item in scheduled if item[0] is not victim]
                preempted.append(victim)
                self._preempt(victim)
                if victim is request:
                    count = 0
            if count:
                scheduled.append((request, count))
                budget -= count
        return budget

    def _schedule_waiting(self, scheduled: list[tuple[Request, int]], budget: int) -> None:
        # Requests that hold blocks come first; otherwise no request could get any.
        for request in sorted(self.waiting, key=lambda r: (not r.holds_blocks, r.priority)):
            if request.status is Status.LOADING:
                if not request.loaded:
                    continue
                self._loaded(request)
            held = request.holds_blocks
            if not request.computed:
                if request.jobs:
                    continue  # as vLLM: the request's earlier transfers are under way
                started = self._match(request)
                if started is None:
                    break
                if not started or request.status is Status.LOADING:
                    continue
            count = self._cut(request, min(len(request.tokens) - request.computed, budget))
            room = count > 0 and self._grow(request, request.computed + count)
            while count > 0 and held and not room and not self.running:
                other = request_to_free(self.waiting, request)
                if other is None:
                    break
                self._drop(other)
                room = self._grow(request, request.computed + count)
            if not room:
                if not held:
                    self._drop(request)
                continue
            self.waiting.remove(request)
            request.status = Status.RUNNING
            self.running.append(request)
            scheduled.append((request, count))
            budget -= count

    def _match(self, request: Request) -> bool | None:
        """Match the local and external prefix of a request with nothing computed. None: no room."""
        computed = self._in_gpu(request)
        # Now and then only the CPU tier counts.
        cpu_only = self._step % 3 == 0 and request.rid % 3 == 0
        look_up = self._look_up(request, computed, FROM_CPU if cpu_only else FROM_CPU | FROM_POOL)
        if look_up.found is None:
            return False  # vLLM asks again in the next step
        assert look_up.answer is not None
        if self._queue.declines(request, look_up.answer):
            self.counts["declined"] += 1
            look_up = self._second_look_up(request, computed, look_up)
            if look_up.found is None:
                return False
            self._queue.declined(request, look_up.found)
        shared, fresh = self._plan(request, computed, computed + look_up.found)
        needed = fresh + sum(self._blocks.is_free(b) for t in shared for b in t if b is not None)
        if not look_up.found:
            needed += len(self._sizes)
        if needed > self._blocks.free_count:
            return None
        for block in (b for table in shared for b in table if b is not None):
            self._blocks.share(block)
        request.tables = shared
        request.computed = computed
        if look_up.found:
            self._load(request, look_up)
        self.counts["resumes"] += self._queue.allocated(request, look_up.found)
        return True

    def _in_gpu(self, request: Request) -> int:
        """The tokens up to the last boundary at which GPU memory has what computing on needs."""
        groups, unit = self._knobs.groups, unit_of_blocks(self._knobs.groups)
        boundary = (len(request.tokens) - 1) // unit * unit
        for position, group in enumerate(groups):
            if group.kind is GroupKind.FULL:
                first = self._missing(request, position, range(boundary // self._sizes[position]))
                if first is not None:
                    boundary = first * self._sizes[position] // unit * unit
        tails = [at for at, group in enumerate(groups) if group.kind is not GroupKind.FULL]
        while boundary and any(
            self._missing(request, at, self._needed(at, boundary)) is not None for at in tails
        ):
            boundary -= unit
        return boundary

    def _missing(self, request: Request, group: int, blocks: range) -> int | None:
        """The first of these blocks that is not in GPU memory."""
        size = self._sizes[group]
        for index in blocks:
            if self._blocks.find((group, request.hashes[(index + 1) * size - 1])) is None:
                return index
        return None

    def _needed(self, group: int, tokens: int) -> range:
        """The blocks that computing on from `tokens` needs."""
        size = self._sizes[group]
        return range(needed_from(self._knobs.groups[group], tokens) // size, -(-tokens // size))

    def _plan(self, request: Request, local: int, end: int) -> tuple[list[list[int | None]], int]:
        """The blocks in GPU memory that `end` tokens need, by group, and how many others."""
        tables: list[list[int | None]] = []
        fresh = 0
        for group, size in enumerate(self._sizes):
            needed = self._needed(group, end)
            table: list[int | None] = [None] * min(local // size, len(range(needed.stop)))
            for index in range(min(needed.start, needed.stop), local // size):
                table[index] = self._blocks.find((group, request.hashes[(index + 1) * size - 1]))
            fresh += len(range(max(needed.start, local // size), needed.stop))
            tables.append(table)
        return tables, fresh

    def _look_up(self, request: Request, local: int, sources: int) -> LookUp:
        """By vLLM's rule, which tests/unit/manager/test_groups.py compares with vLLM's own."""
        groups = self._knobs.groups
        by_group = [request.keys(group) for group in groups]
        hits: list[bytes] = []
        misses: list[bytes] = []

        def has(keys: Sequence[bytes]) -> bytes:
            found = bytearray(len(keys))
            for at, key in enumerate(keys):
                found[at] = self._rules.lookup(key, sources)
                (hits if found[at] else misses).append(key)
                if not found[at] and group_id_of(key) in self._full_ids:
                    break  # the others are of no use
            return bytes(found)

        if self._knobs.full_only:  # a load may begin inside a chunk
            first = local // groups[0].tokens_per_chunk
            present = has(by_group[0][first:])
            end = (first + present.count(1)) * groups[0].tokens_per_chunk
        else:
            end, _ = boundary_of(groups, by_group, local, len(request.tokens), has)
        keys = self._keys_of(request, local, end)
        found: int | None = max(0, end - local)
        if self._knobs.defer_shared_loads and self._loading_keys.intersection(keys):
            found = None
        look_up = LookUp(sources, found, hits, misses, keys)
        return replace(look_up, answer=self._queue.looked_up(request, local, look_up))

    def _second_look_up(self, request: Request, local: int, _: LookUp) -> LookUp:
        """Instead of the first one, which admission has declined."""
        return self._look_up(request, local, FROM_CPU)

    def _keys_of(self, request: Request, local: int, end: int) -> list[bytes]:
        """The keys of a load that brings a request from `local` tokens to `end`."""
        groups = enumerate(self._knobs.groups)
        return [k for at, one in groups for k in request.keys(one)[self._chunks(at, local, end)]]

    def _chunks(self, group: int, local: int, end: int) -> slice:
        """The chunks of a load that brings a request from `local` tokens to `end`."""
        tokens, size = self._knobs.groups[group].tokens_per_chunk, self._sizes[group]
        needed = self._needed(group, end)
        if end <= local or len(needed) == 0:
            return slice(0)
        first = max(local, needed.start * size)
        return slice(first // tokens, -(-end // tokens))

    def _load(self, request: Request, look_up: LookUp) -> None:
        knobs, local, keys = self._knobs, request.computed, look_up.keys
        assert look_up.found is not None
        end = local + look_up.found
        blocks, firsts, ends = [], [], []
        for group, size in enumerate(self._sizes):
            needed = self._needed(group, end)
            first = max(needed.start, local // size)
            fresh = self._blocks.allocate(len(range(first, needed.stop)))
            table = request.tables[group]
            table += [None] * (first - len(table)) + list(fresh)
            self._allocated.update(fresh)
            blocks.append(tuple(fresh))
            firsts.append(first)
            chunks = self._chunks(group, local, end)
            tokens = knobs.groups[group].tokens_per_chunk
            ends += [(chunk + 1) * tokens for chunk in range(chunks.stop)[chunks]]
            self.counts["loads_from_inside_a_chunk"] += bool(
                fresh and first % knobs.groups[group].blocks_per_chunk
            )
            request.stored_chunks[group] = end // tokens
            request.refused.difference_update(request.keys(knobs.groups[group], end // tokens))
        request.status = Status.LOADING
        request.loaded = request.failed = False
        request.load_attempts += 1
        if request.load_attempts > LOAD_ATTEMPTS_MAX:
            raise Violation("8", f"{request}: livelock, {request.load_attempts} failed loads")
        command = self._rules.prepare_load(
            keys,
            self._queue.limit_s(request),
            look_up.hits,
            range(local, end),
            None if knobs.full_only else np.array(ends, np.int64),
        )
        self.counts["loads"] += 1
        self.counts[f"loads:{knobs.shape}"] += 1
        job = TransferJob(request.rid, command, tuple(blocks), tuple(firsts))
        self._loads[command.op] = job
        self._jobs[command.op] = (request, False, Counter())
        self._job_keys[command.op] = tuple(keys)
        request.jobs.add(command.op)
        request.computed = end
        self._loading_keys.update(keys)
        self._trace("load", request, "op", command.op, *keys)

    def _loaded(self, request: Request) -> None:
        """`_update_waiting_for_remote_kv`."""
        request.status = Status.WAITING
        self.counts["failed_loads"] += request.failed
        if request.failed and not request.computed:
            self._free(request)
        else:
            self._cache_blocks(request, request.computed)
        if not request.failed:
            request.load_attempts = 0
        request.loaded = request.failed = False
        if request.computed == len(request.tokens):
            request.computed -= 1

    # -- stores -----------------------------------------------------------------------

    def _store(self, metadata: Metadata, request: Request, tokens: int) -> None:
        offered = self._offered(request, tokens)
        if not offered:
            return
        groups = self._knobs.groups
        by_group = [request.keys(group) for group in groups]
        at_key = {by_group[group][chunk]: (group, chunk) for group, chunk in offered}
        ends = [(chunk + 1) * groups[g].tokens_per_chunk for g, chunk in offered]
        plan, chosen = self._plan_store(request, list(at_key), np.array(ends, np.int64))
        note_refused(request, plan.refused, {key: at_key[key] for key in chosen})
        if plan.command is None:
            return
        batch, op = plan.command.batch, plan.command.op
        blocks: list[list[int]] = [[] for _ in groups]
        firsts = [0] * len(groups)
        for row, key in enumerate(batch.key_list()):
            group, chunk = at_key[key]
            span = self._blocks_of(group, chunk)
            for index in span:
                block = self._block_of(request, group, index)
                if block is None:  # vLLM leaves out blocks that were given back
                    self.counts["holes"] += 1
                    continue
                firsts[group] = firsts[group] if blocks[group] else index
                blocks[group].append(block)
            self._expected[int(batch.generations[row])] = [
                (self.epoch, request.hashes[(i + 1) * self._sizes[group] - 1], group) for i in span
            ]
        job = TransferJob(request.rid, plan.command, tuple(map(tuple, blocks)), tuple(firsts))
        metadata.stores[op] = job
        self._jobs[op] = (request, True, Counter())
        self._store_blocks[op] = job.all_blocks
        request.jobs.add(op)
        self._trace("store", request, "op", op, *batch.generations.tolist())
        for group, ids in zip(groups, blocks, strict=True):
            if group.kind is not GroupKind.FULL:  # a running request may give them back
                for block in ids:
                    self._fences.setdefault(block, set()).add(op)
        if request.status is Status.DONE:
            self._fence(op, job.all_blocks)

    def _plan_store(
        self, request: Request, keys: list[bytes], ends: npt.NDArray[np.int64]
    ) -> tuple[StorePlan, list[bytes]]:
        """What `NVMeoFOffloadingManager.prepare_store` does. Returns the keys of the offer, too."""
        if self._knobs.full_only:
            prefix = request.keys(self._knobs.groups[0])
            self._rules.follows_what_is_there(request.refused, prefix, keys)
            return self._rules.prepare_store(keys, again=request.offered), keys
        if self._boundaries is None:
            return self._rules.prepare_store(keys, ends, again=request.offered), keys
        offer = self._boundaries.offered(Face(request), keys, ends)
        plan = self._rules.prepare_store(
            offer.keys, offer.ends, offer.provisional, again=request.offered
        )
        if not plan.refused:
            self._boundaries.stored(str(request), offer)
        return plan, offer.keys

    def _offered(self, request: Request, tokens: int) -> list[tuple[int, int]]:
        """(group, chunk) of the new chunks whose last block vLLM still has."""
        unit = unit_tokens(self._knobs.groups)
        prompt_end = (request.prompt - 1) // unit * unit
        offered = []
        for position, group in enumerate(self._knobs.groups):
            size, begin = group.tokens_per_chunk, request.stored_chunks[position]
            reach = size * (group.reach_chunks or 0)
            for chunk in range(begin, tokens // size):
                end = (chunk + 1) * size
                last = self._blocks_of(position, chunk)[-1]
                is_sparse = group.kind in (GroupKind.WINDOW, GroupKind.STATE)
                sparse = is_sparse and self._boundaries is None
                if sparse and not prompt_end - reach < end <= prompt_end:
                    continue
                if self._block_of(request, position, last) is not None:
                    offered.append((position, chunk))
            request.stored_chunks[position] = max(begin, tokens // size)
        return offered

    def _blocks_of(self, group: int, chunk: int) -> range:
        per_chunk = self._knobs.groups[group].blocks_per_chunk
        return range(chunk * per_chunk, (chunk + 1) * per_chunk)

    def _block_of(self, request: Request, group: int, index: int) -> int | None:
        """The block, as far as vLLM's offloading scheduler knows."""
        block = request.tables[group][index] if index < len(request.tables[group]) else None
        if block is None:
            return request.left.get((group, index))
        gone = request.status is Status.DONE and block in self._allocated
        return None if gone and self._knobs.groups[group].kind is not GroupKind.FULL else block

    def _store_rest(self, metadata: Metadata, request: Request) -> None:
        """Store a finished request's last chunks; its blocks are already free, but fenced."""
        request.signaled = True
        if request.zombie:
            return
        tokens = request.computed
        if not request.aborted:
            tokens = min(tokens, max(request.prompt, len(request.tokens) - 1))
        if request.blocks:
            self._store(metadata, request, tokens)
        request.tables = []
        still = self.core.present([*request.refused]).count(0)
        self.core.counters["unstored_chunks", "no_room"] += still
        if self._boundaries is not None:
            self._boundaries.ended(str(request))
        if not request.jobs:
            self._requests.pop(request.rid, None)

    def _fence(self, op: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._fences.setdefault(block, set()).add(op)
            if block in self._allocated:
                self._flush.add(op)

    # -- request states ---------------------------------------------------------------

    def _cut(self, request: Request, count: int) -> int:
        """With states vLLM ends a step that crosses blocks where a block ends; one that begins
        inside a block, where that block ends."""
        if any(group.kind is GroupKind.STATE for group in self._knobs.groups):
            size, computed = unit_of_blocks(self._knobs.groups), request.computed
            end = (computed + count) // size * size
            if computed % size:
                end = min(end, -(-computed // size) * size)
            count = end - computed if end > computed else count
        return count

    def _grow(self, request: Request, tokens: int) -> bool:
        """Take the blocks that so many tokens need; give back those that no later one needs."""
        need = []
        for group, table in enumerate(request.tables):
            for index in range(min(self._needed(group, request.computed).start, len(table))):
                block = table[index]
                if block is not None:
                    request.left[group, index] = block
                    table[index] = None
                    self._blocks.release([block])
            end = -(-tokens // self._sizes[group])
            state = self._knobs.groups[group].kind is GroupKind.STATE
            need.append(min(1, end - len(table)) if state else end - len(table))
        if sum(max(0, count) for count in need) > self._blocks.free_count:
            return False
        for group, (count, table) in enumerate(zip(need, request.tables, strict=True)):
            if count > 0:
                fresh = self._blocks.allocate(count)
                self._allocated.update(fresh)
                end = -(-tokens // self._sizes[group])
                table.extend([None] * (end - count - len(table)) + list(fresh))
        return True

    def _computed(self, request: Request, after: int) -> None:
        request.computed = after
        self._cache_blocks(request, after)
        if after < len(request.tokens):
            return
        request.sample()
        if len(request.tokens) >= request.length:
            self.running.remove(request)
            self._finish(request)

    def _cache_blocks(self, request: Request, tokens: int) -> None:
        for group, (size, table) in enumerate(zip(self._sizes, request.tables, strict=True)):
            for index, block in enumerate(table[: tokens // size]):
                if block is not None:
                    self._blocks.cache(block, (group, request.hashes[(index + 1) * size - 1]))

    def _preempt(self, request: Request) -> None:
        self._trace("preempt", request)
        self.counts["preemptions"] += 1
        request.preempted()
        self._drop(request)
        self.waiting.insert(0, request)

    def _free(self, request: Request) -> None:
        self._blocks.release(request.blocks)
        request.tables = [[] for _ in self._sizes]
        request.left.clear()

    def _drop(self, request: Request) -> None:
        self._free(request)
        request.computed = 0

    def _finish(self, request: Request) -> None:
        self._trace("finish", request)
        request.status = Status.DONE
        keys, ends = [], []
        for group, chunks in zip(self._knobs.groups, request.stored_chunks, strict=True):
            keys += request.keys(group, chunks)
            ends += [(chunk + 1) * group.tokens_per_chunk for chunk in range(chunks)]
        self._rules.ended(keys, None if self._knobs.full_only else np.array(ends, np.int64))
        for op in request.jobs:
            self._fence(op, self._store_blocks[op])
        self._blocks.release(request.blocks)
        self._ended.append(request)
        self.done.append(request)

    # -- outputs ----------------------------------------------------------------------

    def update(self, outputs: Sequence[Output]) -> None:
        """As `update_from_output`: failed blocks first, then our reports, then finished jobs."""
        invalid: set[int] = set().union(*(o.invalid_blocks for o in outputs))
        failed: set[int] = set().union(*(o.failed for o in outputs))
        self._invalidate(invalid)
        for request in self.waiting:
            if request.rid in failed and request.status is Status.LOADING:
                request.load_failed(0)
                self.counts["failed_requests"] += 1
        if invalid or failed:
            store_again(self._requests.values(), self._knobs)
        self._rules.report([report for output in outputs for report in output.reports])
        for rank, output in enumerate(outputs):
            for op in output.finished:
                self._job_finished(op, rank)
        for output in outputs:
            for rid in output.received:
                self._received[rid] += 1
                if self._received[rid] == self._knobs.ranks:
                    del self._received[rid]
                    self._load_received(rid)

    def _invalidate(self, invalid: set[int]) -> None:
        for request in self.waiting if invalid else ():
            if request.status is not Status.LOADING:
                continue
            size = self._sizes[0]
            for index in range(-(-request.computed // size)):
                if request.tables[0][index] in invalid:
                    request.load_failed(index * size)
                    break

    def _job_finished(self, op: int, rank: int) -> None:
        job = self._jobs.get(op)
        if job is None:
            return  # from before a reset
        request, is_store, ranks = job
        ranks[rank] += 1
        if len(ranks) < self._knobs.ranks:
            return
        del self._jobs[op]
        request.jobs.discard(op)
        self._store_blocks.pop(op, None)
        if not is_store:
            self._loading_keys.difference_update(self._job_keys.pop(op))
        for ops in [f for f in self._fences.values() if op in f]:
            ops.discard(op)
        self._fences = {b: ops for b, ops in self._fences.items() if ops}
        if request.signaled and not request.jobs and not request.zombie:
            self._requests.pop(request.rid, None)

    def _load_received(self, rid: int) -> None:
        request = self._requests.get(rid)
        if request is None:
            return
        if request.status is Status.LOADING:
            request.loaded = True
        elif request.zombie:
            self._free(request)
            del self._requests[rid]
