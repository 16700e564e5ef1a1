# SPDX-License-Identifier: Apache-2.0
"""The connector's half of the simulated scheduler: the reload of waiting requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from vllm_nvmeof_offload.groups import GroupKind, group_id_of
from vllm_nvmeof_offload.manager.core import ManagerCore
from vllm_nvmeof_offload.manager.look_up import Answer, Question, Queue
from vllm_nvmeof_offload.manager.requests import WaitingRequests

from .base import Clock, Knobs, Violation
from .requests import BlockPool, Request


@dataclass(frozen=True)
class LookUp:
    """vLLM's look-up of a request. found: tokens; None: it delays the request. keys: what a load of
    these tokens takes, in the order of groups. answer: that the connector takes for it."""

    sources: int
    found: int | None
    hits: Sequence[bytes]
    misses: Sequence[bytes]
    keys: Sequence[bytes]
    answer: Answer | None = None


class Face:
    """A request as vLLM exposes it: the token count is read live and grows."""

    def __init__(self, request: Request) -> None:
        self.request_id = str(request)
        self.priority, self.arrival_time = request.priority, request.born_s
        self._request = request

    @property
    def num_tokens(self) -> int:
        return len(self._request.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.prompt

    @property
    def shared_prefix_boundary(self) -> int:
        return 0


class SimQueue:
    """The real `WaitingRequests`, which receives each step as vLLM's `SchedulerOutput`."""

    def __init__(
        self,
        core: ManagerCore,
        knobs: Knobs,
        blocks: BlockPool,
        clock: Clock,
        counts: Counter[str],
    ) -> None:
        self._counts = counts
        self._core = core
        self._knobs = knobs
        self._blocks = blocks
        self._requests: dict[str, Request] = {}
        self._seen: set[str] = set()  # scheduled before
        self._had: dict[Request, int] = {}  # preempted request → the most tokens it had computed
        self._drafted: set[str] = set()  # requests that the last step scheduled with drafts
        asked = (self._by_group, self._ends_of, self._is_cached)
        queue = Queue(*asked, knobs.groups, knobs.by_priority)
        self.waiting = WaitingRequests(core, queue, clock)
        core.admission.prefill_rate = knobs.prefill_rate

    def added(self, request: Request) -> None:
        self._requests[str(request)] = request
        self.waiting.added(Face(request))

    def looked_up(self, request: Request, local: int, look_up: LookUp) -> Answer:
        """A look-up has ended. Rule 2: what is remembered says the same, and admission weighs what
        is loaded. Return what the connector would take for its answer."""
        name, found = str(request), look_up.found
        question = Question(len(request.tokens), request.hashes[-1], local, None, look_up.sources)
        answer = self.waiting.look_ups.recall(name, question)
        if answer is None:
            said = Answer(question, found, look_up.hits, look_up.misses)
            return self.waiting.look_ups.asked(name, said)
        self._counts["remembered_answers"] += 1
        remembered = answer.found
        if remembered != (found or 0):
            raise Violation("2", f"{request}: remembered {remembered}, a look-up finds {found}")
        if answer.find is not None:
            find = self._core.find(look_up.keys)
            if find.read_bytes != answer.find.read_bytes:
                raise Violation("2", f"{request}: {answer.find} is remembered, it is {find}")
        return answer

    def declines(self, request: Request, answer: Answer) -> bool:
        """Whether only what the CPU tier has of the found tokens is to be loaded."""
        return bool(self.waiting.look_ups.decide(str(request), answer).declined)

    def declined(self, request: Request, tokens: int) -> None:
        """The CPU tier has so many of them."""
        self.waiting.look_ups.declined(str(request), tokens)

    def limit_s(self, request: Request) -> float | None:
        attempt = self.waiting.look_ups.attempt(str(request))
        return None if attempt is None else attempt.decision.limit_s

    def allocated(self, request: Request, loaded: int) -> bool:
        """The request got its blocks, and loads so many tokens; return whether it was preempted
        before."""
        resumed = self.waiting.resumes.resumed(str(request), loaded)
        self.waiting.allocated(str(request), loaded)
        if resumed:
            self._had.pop(request, None)
        return resumed

    def step(
        self,
        scheduled: Sequence[tuple[Request, int]],
        preempted: Sequence[Request],
        ended: Sequence[Request],
    ) -> None:
        new = [(r, n) for r, n in scheduled if str(r) not in self._seen]
        old = [(r, n) for r, n in scheduled if str(r) in self._seen]
        drafts = {str(r): [0] * (r.computed + n - len(r.tokens)) for r, n in old}
        self._seen.update(str(r) for r, _ in new)
        self.waiting.step(
            SimpleNamespace(
                num_scheduled_tokens={str(r): n for r, n in scheduled},
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=str(r), num_computed_tokens=r.computed) for r, _ in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[str(r) for r, _ in old],
                    num_computed_tokens=[r.computed for r, _ in old],
                ),
                scheduled_spec_decode_tokens={name: d for name, d in drafts.items() if d},
                preempted_req_ids={str(r) for r in preempted},
                finished_req_ids={str(r) for r in ended},
            )
        )
        for request in preempted:
            self._had[request] = max(request.had, self._had.get(request, 0))
        elsewhere = {*(r for r, _ in scheduled), *ended}  # scheduled again, or finished
        self._check_counts([r for r in preempted if r not in elsewhere])
        self._drafted = {name for name, tokens in drafts.items() if tokens}
        for request in ended:
            self._requests.pop(str(request), None)
            self._had.pop(request, None)

    def _check_counts(self, preempted: Sequence[Request]) -> None:
        """Check that the tokens a preempted request had computed count no rejected draft."""
        for request in preempted:
            computed = self.waiting.resumes.computed(str(request))
            self._counts["preempted_with_drafts"] += str(request) in self._drafted
            if computed != self._had[request]:
                had = self._had[request]
                raise Violation("count", f"{request} had {had} tokens computed, not {computed}")

    def _by_group(self, request_id: str) -> list[list[bytes]] | None:
        request = self._requests.get(request_id)
        return None if request is None else [request.keys(group) for group in self._knobs.groups]

    def _ends_of(self, request_id: str, keys: Sequence[bytes]) -> list[int]:
        by_group = [(group, self._requests[request_id].keys(group)) for group in self._knobs.groups]
        ends = {
            key: (chunk + 1) * group.tokens_per_chunk
            for group, of_group in by_group
            for chunk, key in enumerate(of_group)
        }
        return [ends[key] for key in keys]

    def _is_cached(self, face: Face, key: bytes) -> bool:
        """Windows and states count as not."""
        request = self._requests[face.request_id]
        for position, group in enumerate(self._knobs.groups):
            if group.kind is GroupKind.FULL and group_id_of(key) == group.group_id:
                tokens = (request.keys(group).index(key) + 1) * group.tokens_per_chunk
                return self._blocks.find((position, request.hashes[tokens - 1])) is not None
        return False
