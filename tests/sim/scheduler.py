# SPDX-License-Identifier: Apache-2.0
"""A simulated vLLM scheduler with the offloading connector's scheduler side around our core.

It models these parts of vLLM 0.32/0.33: prefix cache and eviction, chunked prefill, preemption
with flush, loads for requests with nothing computed, stores built in the step that computes
them, fences of freed blocks, aborts during a load, recovery from failed blocks, resets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vllm_nvmeof_offload.manager.core import FROM_CPU, FROM_POOL, ManagerCore

from .base import Clock, Knobs, Trace, Violation
from .memory import Tag
from .queue import LookUp, SimQueue
from .rank import Metadata, Output, TransferJob, Work
from .requests import BlockPool, Request, Status, request_to_free, store_again, take_victim
from .rules import Rules

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
        self.epoch = 0
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
        self._store_blocks: dict[int, list[tuple[int, ...]]] = {}
        self._fences: dict[int, set[int]] = {}  # block → stores of finished requests
        self._flush: set[int] = set()
        self._loads: dict[int, TransferJob] = {}
        self._allocated: set[int] = set()
        self._received: Counter[int] = Counter()
        self._requests: dict[int, Request] = {}
        self._ended: list[Request] = []  # finished since the last step
        self._loading_keys: set[bytes] = set()
        self._queue = SimQueue(core, knobs, self._blocks, clock, self.counts)
        self._dropped: list[Request] = []  # preempted between two steps

    # -- from outside -----------------------------------------------------------------

    def add(self, request: Request) -> None:
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
            for request in [r for r in self.waiting if r.blocks]:
                self.abort(request)
            self.epoch += 1
        while self.running:
            self._dropped.append(self.running.pop())
            self._preempt(self._dropped[-1])
        self._blocks.reset()
        self._flush.update(self._jobs)
        self.core.reset()
        self._rules.reset()
        for request in list(self._requests.values()):
            request.stored_chunks = 0
            request.jobs.clear()
            if request.status is Status.DONE and not request.zombie:
                del self._requests[request.rid]
        self._ended.clear()
        self._jobs.clear()
        self._job_keys.clear()
        self._store_blocks.clear()
        self._fences.clear()
        self._loading_keys.clear()

    def busy(self) -> bool:
        """Whether vLLM's engine would step."""
        live = self.waiting or self.running or self._ended or self._flush
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
            self.core.turn()
        budget = self._schedule_running(scheduled, preempted)
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        dropped, self._dropped = self._dropped, []
        self._queue.step(scheduled, preempted + dropped, self._ended)
        for request in preempted:
            self._flush |= request.jobs
        for block in self._allocated & self._fences.keys():
            self._flush |= self._fences[block]
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
            self.core.turn()
        metadata.commands = self.core.take_commands()
        self._rules.commanded(metadata.commands)
        for request, count in scheduled:
            after = request.verify(count)
            metadata.work.append(
                Work(tuple(request.blocks), tuple(request.hashes), request.computed, after)
            )
            self._computed(request, after)
        return metadata

    def _schedule_running(
        self, scheduled: list[tuple[Request, int]], preempted: list[Request]
    ) -> int:
        budget = BUDGET_TOKENS
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(request.wanted(self._knobs), budget)
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
        for request in sorted(self.waiting, key=lambda r: (not r.blocks, r.priority)):
            if request.status is Status.LOADING:
                if not request.loaded:
                    continue
                self._loaded(request)
            held = bool(request.blocks)
            if not request.computed:
                if request.jobs:
                    continue  # as vLLM: the request's earlier transfers are under way
                started = self._match(request)
                if started is None:
                    break
                if not started or request.status is Status.LOADING:
                    continue
            count = min(len(request.tokens) - request.computed, budget)
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
        knobs = self._knobs
        size = knobs.block_tokens
        local: list[int] = []
        while (len(local) + 1) * size < len(request.tokens):
            block = self._blocks.find(request.hashes[(len(local) + 1) * size - 1])
            if block is None:
                break
            local.append(block)
        computed = len(local) * size
        # Now and then only the CPU tier counts.
        cpu_only = self._step % 3 == 0 and request.rid % 3 == 0
        look_up = self._look_up(request, computed, FROM_CPU if cpu_only else FROM_CPU | FROM_POOL)
        if look_up.found is None:
            return False  # vLLM asks again in the next step
        if self._queue.declines(request, computed, look_up.found):
            self.counts["declined"] += 1
            look_up = self._look_up(request, computed, FROM_CPU)
            if look_up.found is None:
                return False
            self._queue.declined(request, look_up.found)
        external, keys = look_up.found, look_up.hits
        needed = external // size + sum(self._blocks.is_free(b) for b in local)
        if not external:
            needed += 1
        if needed > self._blocks.free_count:
            return None
        for block in local:
            self._blocks.share(block)
        request.blocks = local
        request.computed = computed
        if external:
            self._load(request, keys, external)
        self.counts["resumes"] += self._queue.allocated(request)
        return True

    def _look_up(self, request: Request, computed: int, sources: int) -> LookUp:
        knobs = self._knobs
        first_chunk = computed // knobs.chunk_tokens
        hits: list[bytes] = []
        misses: list[bytes] = []
        for chunk in range(first_chunk, len(request.tokens) // knobs.chunk_tokens):
            key = request.key(chunk, knobs)
            if not self._rules.lookup(key, sources):
                misses.append(key)
                break
            hits.append(key)
        found: int | None = max(0, (first_chunk + len(hits)) * knobs.chunk_tokens - computed)
        if knobs.defer_shared_loads and self._loading_keys.intersection(hits):
            found = None
        look_up = LookUp(sources, found, hits, misses)
        self._queue.looked_up(request, computed, look_up)
        return look_up

    def _load(self, request: Request, keys: Sequence[bytes], external: int) -> None:
        knobs = self._knobs
        size, per_chunk = knobs.block_tokens, knobs.blocks_per_chunk
        begin = len(request.blocks)
        fresh = self._blocks.allocate(external // size)
        self._allocated.update(fresh)
        request.blocks = request.blocks + fresh
        request.status = Status.LOADING
        request.loaded = request.failed = False
        request.load_attempts += 1
        if request.load_attempts > LOAD_ATTEMPTS_MAX:
            raise Violation("8", f"{request}: livelock, {request.load_attempts} failed loads")
        command = self._rules.prepare_load(keys, self._queue.limit_s(request))
        end = len(request.blocks)
        first_chunk = begin // per_chunk
        chunks = tuple(
            tuple(request.blocks[max(begin, c * per_chunk) : min(end, (c + 1) * per_chunk)])
            for c in range(first_chunk, first_chunk + len(keys))
        )
        self.counts["loads"] += 1
        self.counts["loads_from_inside_a_chunk"] += bool(begin % per_chunk)
        self._loads[command.op] = TransferJob(request.rid, command, chunks, begin % per_chunk)
        self._jobs[command.op] = (request, False, Counter())
        self._job_keys[command.op] = tuple(keys)
        request.jobs.add(command.op)
        request.computed += external
        request.stored_chunks = first_chunk + len(keys)
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
        knobs = self._knobs
        begin, end = request.stored_chunks, tokens // knobs.chunk_tokens
        if end <= begin:
            return
        keys = [request.key(chunk, knobs) for chunk in range(begin, end)]
        request.stored_chunks = end
        plan = self._rules.prepare_store(keys)
        if plan.command is None:
            return
        per_chunk = knobs.blocks_per_chunk
        blocks = []
        batch = plan.command.batch
        for row, key in enumerate(batch.key_list()):
            index = begin + keys.index(key)
            span = range(index * per_chunk, (index + 1) * per_chunk)
            blocks.append(tuple(request.blocks[i] for i in span))
            self._expected[int(batch.generations[row])] = [
                (self.epoch, request.hashes[(i + 1) * knobs.block_tokens - 1]) for i in span
            ]
        op = plan.command.op
        metadata.stores[op] = TransferJob(request.rid, plan.command, tuple(blocks))
        self._jobs[op] = (request, True, Counter())
        self._store_blocks[op] = blocks
        request.jobs.add(op)
        self._trace("store", request, "op", op, *batch.generations.tolist())
        if request.status is Status.DONE:
            self._fence(request, op, blocks)

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
        request.blocks = []
        if not request.jobs:
            self._requests.pop(request.rid, None)

    def _fence(self, request: Request, op: int, blocks: Sequence[tuple[int, ...]]) -> None:
        for block in (b for chunk in blocks for b in chunk):
            self._fences.setdefault(block, set()).add(op)
            if block in self._allocated:
                self._flush.add(op)

    # -- request states ---------------------------------------------------------------

    def _grow(self, request: Request, tokens: int) -> bool:
        need = -(-tokens // self._knobs.block_tokens) - len(request.blocks)
        if need > self._blocks.free_count:
            return False
        if need > 0:
            fresh = self._blocks.allocate(need)
            self._allocated.update(fresh)
            request.blocks = request.blocks + fresh
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
        size = self._knobs.block_tokens
        for index in range(tokens // size):
            self._blocks.cache(request.blocks[index], request.hashes[(index + 1) * size - 1])

    def _preempt(self, request: Request) -> None:
        self._trace("preempt", request)
        self.counts["preemptions"] += 1
        request.preempted()
        self._drop(request)
        self.waiting.insert(0, request)

    def _free(self, request: Request) -> None:
        self._blocks.release(request.blocks)
        request.blocks = []

    def _drop(self, request: Request) -> None:
        self._free(request)
        request.computed = 0

    def _finish(self, request: Request) -> None:
        self._trace("finish", request)
        request.status = Status.DONE
        self.core.ended([request.key(i, self._knobs) for i in range(request.stored_chunks)])
        for op in request.jobs:
            self._fence(request, op, self._store_blocks[op])
        self._blocks.release(request.blocks)
        self._ended.append(request)
        self.done.append(request)

    # -- outputs ----------------------------------------------------------------------

    def update(self, outputs: Sequence[Output]) -> None:
        """As `update_from_output`: failed blocks first, then our reports, then finished jobs."""
        invalid: set[int] = set().union(*(o.invalid_blocks for o in outputs))
        if invalid:
            self._invalidate(invalid)
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
        size = self._knobs.block_tokens
        for request in self.waiting:
            if request.status is not Status.LOADING:
                continue
            for index in range(-(-request.computed // size)):
                if request.blocks[index] in invalid:
                    request.load_failed(index, self._knobs)
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
