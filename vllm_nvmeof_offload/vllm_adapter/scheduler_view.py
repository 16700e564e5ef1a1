# SPDX-License-Identifier: Apache-2.0
"""Access to internals of vLLM's scheduler side: keys, look-ups, GPU blocks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key

from vllm_nvmeof_offload.groups import GROUP_ID_BYTES, Group, GroupKind, group_id_of, leading
from vllm_nvmeof_offload.manager.core import FROM_CPU
from vllm_nvmeof_offload.manager.look_up import Answer, Question, Queue
from vllm_nvmeof_offload.manager.requests import WaitingRequests
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Add the method's running time to its object's `_spent_s`."""

    @functools.wraps(method)
    def with_time(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._spent_s += time.perf_counter() - began_s

    return with_time


def key_bytes_of(hash_algorithm: str) -> int:
    """Return the length of an offload key: vLLM's block hash and the group id."""
    return len(make_offload_key(get_hash_fn_by_name(hash_algorithm)(b""), 0))


class SchedulerView:
    """A view of an `OffloadingConnectorScheduler`.

    `groups` are the offloaded groups, in vLLM's order. `kv_cache_manager` returns vLLM's KV cache
    manager, which is created after the connector.
    """

    def __init__(
        self, scheduler: Any, groups: tuple[Group, ...], kv_cache_manager: Callable[[], Any]
    ) -> None:
        self._scheduler = scheduler
        self.manager: NVMeoFOffloadingManager = scheduler.manager
        self.groups = groups
        self.kv_cache_manager = kv_cache_manager
        configs = scheduler.config.kv_group_configs
        assert [one.group_idx for one in configs] == [one.group_id for one in groups]
        self._leading = leading(groups)
        #: The id of the group that determines a request's length.
        self.leading_id = groups[self._leading].group_id
        self.tokens_per_block: int = configs[self._leading].tokens_per_block
        self._hashes_per_chunk: int = configs[self._leading].hashes_per_chunk
        # vLLM finds a GPU block by the hash of one block, which is in the keys of these groups.
        self._comparable = {
            group.group_id
            for config, group in zip(configs, groups, strict=True)
            if group.kind is GroupKind.FULL
            and config.tokens_per_block == scheduler.config.tokens_per_hash
        }

    @property
    def waiting(self) -> WaitingRequests:
        assert self.manager.waiting is not None
        return self.manager.waiting

    def queue(self, *, by_priority: bool) -> Queue:
        return Queue(self.keys_of, self._ends_of, self._is_cached, self.groups, by_priority)

    @property
    def tail_tokens(self) -> int:
        """Return the unit in tokens, below a block, to which vLLM rounds stored prompts, or 0."""
        config = self._scheduler.config
        return config.tokens_per_hash if config.supports_partial_tail else 0

    def keys_of(self, request_id: str) -> list[Sequence[bytes]] | None:
        state = self._scheduler._req_status.get(request_id)
        if state is None:
            return None
        keys = state.group_states[self._leading].offload_keys
        if len(keys) < len(state.req.block_hashes) // self._hashes_per_chunk:
            state.update_offload_keys()  # slow: it iterates over all hashes
        return [group.offload_keys for group in state.group_states]

    def _ends_of(self, request_id: str, keys: Sequence[bytes]) -> list[int]:
        position = self.context(request_id).get_offload_key_position
        return [position(OffloadKey(key)) or 0 for key in keys]

    def context(self, request_id: str) -> ReqContext:
        context: ReqContext = self._scheduler._req_status[request_id].req_context
        return context

    # -- look-ups, in the form that `manager/look_up.py` needs --------------------------

    def sources_of(self, request: Any) -> int:
        return self.manager.sources_of(self.context(request.request_id).load_tier_filter)

    def look_up(
        self,
        request: Any,
        local: int,
        cap: int | None,
        theirs: Callable[[Any, int], tuple[int | None, bool]],
    ) -> tuple[int | None, bool]:
        """Return the number of tokens to load after the `local` tokens in GPU memory (None: delay
        the request), and whether the load may continue during later steps.

        `cap` limits this look-up, in addition to the request's own `max_load_tokens`. `theirs` is
        vLLM's method, which looks up the keys in our manager one by one.
        """
        request_id, hashes = request.request_id, request.block_hashes
        last = hashes[-1] if hashes else None
        question = Question(request.num_tokens, last, local, cap, self.sources_of(request))

        def ask(question: Question) -> Answer:
            look_ups = self.manager.look_ups
            # vLLM's look-ups use these lists of keys, and have added the request's new keys.
            states = self._scheduler._req_status[request_id].group_states
            look_ups.begin(question.sources, [group.offload_keys for group in states])
            try:
                found, later = theirs(request, local)
                rest = self.rest_of_a_chunk(request, question) if found == 0 else 0
            finally:
                hits, misses = look_ups.end()
            # With KV events no answer is reused, because vLLM's look-up records data for events.
            keep = not self.manager.config.kv_events and not rest
            return Answer(question, rest or found, hits, misses, later or rest > 0, keep)

        if not self._is_as_looked_up(request_id, local):
            self.waiting.look_ups.forget_answers(request_id)
        answer = self.waiting.look_ups.answer(request_id, question, ask, FROM_CPU)
        # Since 0.33, vLLM may refuse loads that continue during later steps.
        return answer.found, answer.later and bool(answer.found)

    def _is_as_looked_up(self, request_id: str, local: int) -> bool:
        """Return whether vLLM's state of a request is unchanged since its last look-up.

        A look-up sets the numbers of local tokens and of hit chunks, and clears the request's
        blocks; during a transfer, it delays the request.
        """
        state = self._scheduler._req_status[request_id]
        if state.transfer_jobs or state.num_locally_computed_tokens != local:
            return False
        return not any(group.block_ids for group in state.group_states)

    def rest_of_a_chunk(self, request: Any, question: Question) -> int:
        """Return the missing tokens of a chunk that a preempted request partly has in GPU memory.

        vLLM loads only whole chunks, and would recompute these tokens. With windows or states,
        which would have to be loaded too, the result is 0.
        """
        if len(self.groups) > 1 or self.groups[0].kind is not GroupKind.FULL:
            return 0
        request_id, per_chunk = request.request_id, self.groups[0].tokens_per_chunk
        local, missing = question.local, -question.local % per_chunk
        if not missing or local + missing > self.waiting.resumes.computed(request_id):
            return 0
        keys, state = self.keys_of(request_id), self._scheduler._req_status[request_id]
        limits = question.cap, state.max_load_tokens
        if any(most is not None and missing > most for most in limits):
            return 0
        chunk = local // per_chunk
        if keys is None or chunk >= len(keys[0]):  # the request is shorter
            return 0
        key = keys[0][chunk]
        # vLLM delays requests for a chunk that a load is reading.
        if state.transfer_jobs or key in (self._scheduler._chunks_being_loaded or ()):
            return 0
        hit = self.manager.lookup(OffloadKey(key), state.req_context) is LookupResult.HIT
        return missing if hit else 0

    # -- stores -------------------------------------------------------------------------

    def store_again(self) -> None:
        """Make requests with failed loads store the chunks that they now compute instead.

        vLLM counts the chunks of a planned load as stored. When this is called, a request's
        computed tokens end before the first failure, or are 0 if the request was reported instead
        of its blocks.
        """
        for state in self._scheduler._req_status.values():
            for group, stored in zip(self.groups, state.group_states, strict=True):
                computed = state.req.num_computed_tokens // group.tokens_per_chunk
                stored.next_stored_chunk_idx = min(stored.next_stored_chunk_idx, computed)

    def offer_again(self, refused: Mapping[str, Sequence[bytes]]) -> None:
        """Make vLLM offer these chunks again in the requests' next step. vLLM counts refused chunks
        as stored, but no later chunk would be found without them."""
        for request_id, keys in refused.items():
            state = self._scheduler._req_status.get(request_id)
            if state is None or state.req.is_finished():
                continue
            for group, stored in zip(self.groups, state.group_states, strict=True):
                own = (key for key in keys if group_id_of(key) == group.group_id)
                ends = filter(None, map(state.req_context.get_offload_key_position, own))
                for end in ends:
                    chunk = (end - 1) // group.tokens_per_chunk
                    stored.next_stored_chunk_idx = min(stored.next_stored_chunk_idx, chunk)

    def store_from_the_first(self, request_id: str) -> None:
        for group in self._scheduler._req_status[request_id].group_states:
            group.next_stored_chunk_idx = 0

    def _is_cached(self, request: Any, key: bytes) -> bool:
        manager, group_id = self.kv_cache_manager(), group_id_of(key)
        if manager is None or group_id not in self._comparable:
            return False
        block_hash = key[:-GROUP_ID_BYTES]
        return manager.block_pool.get_cached_block(block_hash, [group_id]) is not None
