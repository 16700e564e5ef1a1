# SPDX-License-Identifier: Apache-2.0
"""vLLM's look-up of a waiting request, in the form that `manager/look_up.py` needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult

from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.manager.core import FROM_CPU
from vllm_nvmeof_offload.manager.look_up import Answer, Question
from vllm_nvmeof_offload.vllm_adapter.scheduler_view import SchedulerView


def look_up(
    view: SchedulerView,
    request: Any,
    local: int,
    cap: int | None,
    theirs: Callable[[Any, int], tuple[int | None, bool]],
) -> tuple[int | None, bool]:
    """Return the tokens to load after `local` ones in GPU memory, or None to delay the request, and
    whether the load may continue during later steps.

    `cap` limits this look-up; the request's own limit, `max_load_tokens`, does not change. `theirs`
    is vLLM's method, which looks up the keys in our manager one by one.
    """
    manager, request_id = view.manager, request.request_id
    hashes = request.block_hashes
    last = hashes[-1] if hashes else None
    sources = sources_of(view, request)
    question = Question(request.num_tokens, last, local, cap, sources)

    def ask(question: Question) -> Answer:
        manager.look_ups.begin(question.sources, view.key_lists(request_id))
        try:
            found, later = theirs(request, local)
            rest = rest_of_a_chunk(view, request, question) if found == 0 else 0
        finally:
            hits, misses = manager.look_ups.end()
        # With KV events no answer is reused, because vLLM's look-up records data for the events.
        keep = not manager.config.kv_events and not rest
        return Answer(question, rest or found, hits, misses, later or rest > 0, keep)

    look_ups = view.waiting.look_ups
    if not view.is_as_looked_up(request_id, local):
        look_ups.forget_answers(request_id)
    answer = look_ups.answer(request_id, question, ask, FROM_CPU)
    # vLLM decides whether the load may continue during later steps; since 0.33 it may refuse.
    return answer.found, answer.later and bool(answer.found)


def sources_of(view: SchedulerView, request: Any) -> int:
    """Return the sources that the request may be loaded from."""
    return view.manager.sources_of(view.context(request.request_id).load_tier_filter)


def rest_of_a_chunk(view: SchedulerView, request: Any, question: Question) -> int:
    """Return the tokens missing from a chunk that a preempted request has partly in GPU memory.

    vLLM loads only whole chunks and skips this one. Loading the rest avoids computing its tokens a
    second time. Returns 0 with windows or states, which would have to be loaded too.
    """
    if len(view.groups) > 1 or view.groups[0].kind is not GroupKind.FULL:
        return 0
    request_id, per_chunk = request.request_id, view.groups[0].tokens_per_chunk
    local, missing = question.local, -question.local % per_chunk
    if not missing or local + missing > view.waiting.resumes.computed(request_id):
        return 0
    keys, state = view.keys_of(request_id), view.state(request_id)
    if any(most is not None and missing > most for most in (question.cap, state.max_load_tokens)):
        return 0
    chunk = local // per_chunk
    if keys is None or chunk >= len(keys[0]):  # the request is shorter
        return 0
    key = keys[0][chunk]
    if state.transfer_jobs or view.is_being_loaded(key):
        return 0
    hit = view.manager.lookup(key, state.req_context) is LookupResult.HIT
    return missing if hit else 0
