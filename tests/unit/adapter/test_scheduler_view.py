# SPDX-License-Identifier: Apache-2.0
"""Reading vLLM's scheduler: the rest of a chunk of which GPU memory has a part; and remembered
answers, after which vLLM's state of a request is the one that a real look-up leaves."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as theirs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    RequestOffloadingContext,
    TierFilter,
    make_offload_key,
)

from vllm_nvmeof_offload.connector import NVMeoFOffloadingConnector
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.core import FROM_CPU, CoreConfig
from vllm_nvmeof_offload.manager.look_up import Question
from vllm_nvmeof_offload.manager.requests import WaitingRequests
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import OpReport, RankHello, RateReport
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager
from vllm_nvmeof_offload.vllm_adapter.new_weights import OldKV, PausedTiers
from vllm_nvmeof_offload.vllm_adapter.scheduler_view import SchedulerView, key_bytes_of

BLOCK_TOKENS, BLOCKS_PER_CHUNK = 16, 2
CHUNK = BLOCK_TOKENS * BLOCKS_PER_CHUNK
ONE = (Group(0, GroupKind.FULL, CHUNK, BLOCKS_PER_CHUNK),)


class State:
    """vLLM's state of a request: its keys follow its tokens."""

    def __init__(self, request: Any) -> None:
        self.req = request
        self.req_context = None
        self.transfer_jobs: set[int] = set()
        self.max_load_tokens: int | None = None
        self.group_states = (SimpleNamespace(offload_keys=[]),)

    def update_offload_keys(self) -> None:
        count = self.req.num_tokens // CHUNK
        self.group_states[0].offload_keys[:] = [b"key %d" % i for i in range(count)]


def _view(
    request: Any,
    hit: bool = True,
    cached: tuple[bytes, ...] = (),
    groups: tuple[Group, ...] = ONE,
    state: Any = None,
    computed: int = 0,
) -> SchedulerView:
    """Of a scheduler with one request. cached: block hashes that GPU memory has. computed: the
    reported number of the request's computed tokens."""
    configs = tuple(
        SimpleNamespace(
            group_idx=group.group_id,
            tokens_per_block=BLOCK_TOKENS,
            hashes_per_chunk=BLOCKS_PER_CHUNK,
        )
        for group in groups
    )
    found = LookupResult.HIT if hit else LookupResult.MISS
    resumes = SimpleNamespace(computed=lambda request_id: computed)
    manager = SimpleNamespace(
        lookup=lambda key, context: found, waiting=SimpleNamespace(resumes=resumes)
    )
    scheduler = SimpleNamespace(
        config=SimpleNamespace(kv_group_configs=configs, tokens_per_hash=BLOCK_TOKENS),
        _req_status={"a": state or State(request)},
        _chunks_being_loaded=set(),
        manager=manager,
    )
    pool = SimpleNamespace(get_cached_block=lambda key, groups: [1] if key in cached else None)
    return SchedulerView(scheduler, groups, lambda: SimpleNamespace(block_pool=pool))


def _question(local: int, cap: int | None = None) -> Question:
    return Question(0, None, local, cap, FROM_CPU)


def _rest(
    num_tokens: int,
    local: int,
    computed: int,
    hit: bool = True,
    most: int | None = None,
    cap: int | None = None,
) -> int:
    """Ask for a request's rest of a chunk; `computed` is the reported number of computed tokens.

    most: the request's `max_load_tokens`.
    """
    hashes = [b"%d" % i for i in range(num_tokens // BLOCK_TOKENS)]
    request = SimpleNamespace(request_id="a", num_tokens=num_tokens, block_hashes=hashes)
    state = State(request)
    state.max_load_tokens = most
    view = _view(request, hit, state=state, computed=computed)
    return view.rest_of_a_chunk(request, _question(local, cap))


@pytest.mark.parametrize("limit", ["most", "cap"])
def test_no_rest_is_offered_beyond_what_may_be_loaded(limit: str) -> None:
    for tokens, rest in ((0, 0), (15, 0), (16, 16)):
        assert _rest(num_tokens=40, local=16, computed=39, **{limit: tokens}) == rest


def test_the_rest_of_a_chunk_that_was_computed_is_offered() -> None:
    assert _rest(num_tokens=40, local=16, computed=39) == 16
    assert _rest(num_tokens=40, local=16, computed=39, hit=False) == 0


def test_no_rest_is_offered_after_whole_chunks_or_beyond_computed_tokens() -> None:
    assert _rest(num_tokens=80, local=32, computed=79) == 0
    assert _rest(num_tokens=80, local=48, computed=63) == 0


def test_a_count_beyond_the_requests_tokens_is_not_trusted() -> None:
    """No key has so high a number."""
    assert _rest(num_tokens=30, local=16, computed=34) == 0
    assert _rest(num_tokens=31, local=16, computed=1000) == 0


def test_a_chunk_is_cached_if_its_last_block_is_cached() -> None:
    request = SimpleNamespace(request_id="a", num_tokens=64, block_hashes=[b"0", b"1", b"2", b"3"])
    is_cached = _view(request, cached=(b"0", b"3")).queue(by_priority=False).is_cached
    keys = [make_offload_key(BlockHash(last), 0) for last in (b"1", b"3")]
    assert [is_cached(request, key) for key in keys] == [False, True]


def test_of_several_groups_only_full_attention_counts_as_cached() -> None:
    request = SimpleNamespace(request_id="a", num_tokens=40, block_hashes=[b"0", b"1"])
    groups = (
        Group(1, GroupKind.WINDOW, CHUNK, BLOCKS_PER_CHUNK, 1, 31),
        Group(4, GroupKind.FULL, CHUNK, BLOCKS_PER_CHUNK),
    )
    view = _view(request, cached=(b"1",), groups=groups, computed=39)
    queue = view.queue(by_priority=False)
    assert queue.groups == groups
    keys = [make_offload_key(BlockHash(b"1"), group.group_id) for group in groups]
    assert [queue.is_cached(request, key) for key in keys] == [False, True]
    assert view.leading_id == 4
    assert view.rest_of_a_chunk(request, _question(BLOCK_TOKENS)) == 0, (
        "a window would have to be there"
    )


def test_after_a_failed_load_every_group_stores_what_is_computed_again() -> None:
    """A group whose chunks are twice as long has stored half as many of them."""
    groups = (
        Group(0, GroupKind.WINDOW, CHUNK, BLOCKS_PER_CHUNK, 4),
        Group(1, GroupKind.FULL, 2 * CHUNK, BLOCKS_PER_CHUNK),
    )
    request = SimpleNamespace(request_id="a", num_computed_tokens=5 * CHUNK)
    states = [SimpleNamespace(next_stored_chunk_idx=stored) for stored in (8, 2)]
    view = _view(request, groups=groups, state=SimpleNamespace(req=request, group_states=states))
    view.store_again()
    assert [state.next_stored_chunk_idx for state in states] == [5, 2]
    request.num_computed_tokens = 0  # vLLM was told of the request, and not of its blocks
    view.store_again()
    assert [state.next_stored_chunk_idx for state in states] == [0, 0]


def test_what_was_refused_is_offered_again_from_its_first_chunk_on() -> None:
    groups = (
        Group(0, GroupKind.WINDOW, CHUNK, BLOCKS_PER_CHUNK, 4),
        Group(1, GroupKind.FULL, 2 * CHUNK, BLOCKS_PER_CHUNK),
    )
    keys = {make_offload_key(BlockHash(b"%d" % n), 1): 2 * n * CHUNK for n in (3, 4)}
    tail = make_offload_key(BlockHash(b"tail"), 0)
    keys[tail] = 8 * CHUNK + 1  # of a partial tail, which is in the chunk after eight whole ones
    states = [SimpleNamespace(next_stored_chunk_idx=stored) for stored in (8, 4)]
    request = SimpleNamespace(is_finished=lambda: False)
    context = SimpleNamespace(get_offload_key_position=keys.get)
    state = SimpleNamespace(req=request, group_states=states, req_context=context)
    view = _view(request, groups=groups, state=state)
    view.offer_again({"a": list(keys), "gone": [tail]})
    assert [state.next_stored_chunk_idx for state in states] == [8, 2]
    request.is_finished = lambda: True
    view.offer_again({"a": [make_offload_key(BlockHash(b"0"), 1)]})
    assert [state.next_stored_chunk_idx for state in states] == [8, 2]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_length_of_keys_follows_from_the_hash_algorithm(algorithm: str) -> None:
    if algorithm.startswith("xxhash"):
        pytest.importorskip("xxhash", reason="vLLM hashes with it")
    key = make_offload_key(get_hash_fn_by_name(algorithm)((b"parent", (1, 2, 3), None)), 7)
    assert key_bytes_of(algorithm) == len(key) == (36 if algorithm.startswith("sha") else 20)


BLOCK, KEY_BYTES, REACH = 16, 36, 2


def _hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(KEY_BYTES - 4, "big"))


def _vllms(group: Group, hashes: int) -> Any:
    """vLLM's configuration of a group."""
    return SimpleNamespace(
        group_idx=group.group_id,
        tokens_per_block=BLOCK,
        tokens_per_chunk=BLOCK,
        hashes_per_chunk=hashes,
        sliding_window_size_in_chunks=group.reach_chunks,
        is_eagle_group=False,
        load_window_size_in_chunks=lambda tokens: group.reach_chunks,
    )


class Engine:
    """A connector's scheduler side around a manager whose CPU tier has so many slots.

    windows: before the group of full attention, which is the last one, there is one of windows.
    tails: instead, one of states; a block has two hashes, and vLLM finds half of one (partial
    tails).
    """

    def __init__(
        self,
        slots: int,
        *,
        kv_events: bool = False,
        pool_slots: int = 0,
        windows: bool = False,
        tails: bool = False,
        remote: tuple[bool | None, ...] = (),
    ) -> None:
        self.now_s = 0.0
        self.manager = NVMeoFOffloadingManager(CoreConfig(kv_events=kv_events), lambda: self.now_s)
        full = Group(int(windows or tails), GroupKind.FULL, BLOCK)
        first = Group(0, GroupKind.WINDOW, BLOCK, reach_chunks=REACH)
        if tails:
            first = Group(0, GroupKind.STATE, BLOCK, reach_chunks=1)
        self.groups = groups = (first, full) if windows or tails else (full,)
        side = self.side = object.__new__(theirs.OffloadingConnectorScheduler)
        side.config = SimpleNamespace(  # type: ignore[assignment]
            kv_group_configs=tuple(_vllms(one, 2 if tails else 1) for one in groups),
            tokens_per_hash=BLOCK // (2 if tails else 1),
            supports_partial_tail=tails,
        )
        side._partial_tail_block_size = BLOCK
        side.manager = self.manager
        side._req_status, side._chunks_being_loaded = {}, set()
        side._lookup_groups = (1, 0) if len(groups) > 1 else (0,)
        side._sliding_window_groups = (0,) if len(groups) > 1 else ()
        side._mamba_align_size = BLOCK if tails else None
        side._connector_stats = theirs.OffloadingConnectorStats()
        tracker: Any = SimpleNamespace(
            record_lookup=self._looked_up, record_partial_lookup=self._looked_up
        )
        side._events_tracker = tracker
        self.hits = 0  # of vLLM's own look-ups
        connector = self.connector = object.__new__(NVMeoFOffloadingConnector)
        connector.connector_scheduler, connector._spent_s = side, 0.0
        connector._bounding_group_ids = ()
        connector._view = SchedulerView(side, groups, lambda: None)
        connector._old_kv = OldKV(self.manager.suspension, connector._view)
        connector.paused = PausedTiers(self.manager)
        of_rank = tuple(RankGroup(group, 1 << 15) for group in groups)
        hello = RankHello(0, 0, "k", slots, pool_slots, 1, 1 << 16, of_rank, remote=remote)
        self.manager.attach([hello], KEY_BYTES, groups, connector._view.queue(by_priority=False))

    def _looked_up(self, *args: Any) -> None:
        self.hits += 1

    def store(self, *numbers: int, group: int = -1) -> None:
        """Store chunks of a group, and write them if there is a pool."""
        keys = [make_offload_key(_hash(number), self.groups[group].group_id) for number in numbers]
        plan = self.manager.core.prepare_store(keys)
        if plan.command is not None:
            self.manager.report([OpReport(plan.command.op)], Counts())
        while commands := self.manager.take_commands():
            for command in commands:
                self.manager.report([OpReport(command.op)], Counts())  # type: ignore[union-attr]

    def slow(self) -> None:
        """The pool reads slower than the model computes."""
        self.manager.report([RateReport(0, 0, 0.0, 1.0)], Counts())
        self.manager.core.admission.prefill_rate = 1e9

    @property
    def waiting(self) -> WaitingRequests:
        assert self.manager.waiting is not None
        return self.manager.waiting

    def hit_chunks(self, name: str) -> list[int]:
        """By group, the chunks up to the end of vLLM's last look-up."""
        return [group.num_hit_chunks for group in self.side._req_status[name].group_states]

    def arrive(self, name: str, *numbers: int, tiers: list[dict[str, str]] | None = None) -> Any:
        """tiers: the request's `kv_load_tiers`."""
        allowed = TierFilter.ALL if tiers is None else theirs._parse_tier_filter(tiers)
        request = SimpleNamespace(
            request_id=name,
            num_tokens=BLOCK * len(numbers) + 1,
            num_prompt_tokens=BLOCK * len(numbers) + 1,
            block_hashes=[_hash(number) for number in numbers],
            kv_transfer_params=None,
            skip_reading_prefix_cache=False,
        )
        self.side._req_status[name] = theirs.RequestOffloadState(
            config=self.side.config,
            req=request,  # type: ignore[arg-type]
            req_context=ReqContext(name, load_tier_filter=allowed),
            offloading_context=RequestOffloadingContext(),
        )
        return request

    def ask(self, request: Any, local: int = 0) -> tuple[int | None, bool]:
        return self.connector.get_num_new_matched_tokens(request, local)

    def state(self, name: str) -> Any:
        state = self.side._req_status[name]
        return copy.deepcopy((state.group_states, state.num_locally_computed_tokens))


@pytest.mark.parametrize("local", [0, BLOCK])
def test_the_same_answer_and_the_same_state_without_a_look_up(local: int) -> None:
    engine = Engine(8)
    engine.store(0, 1, 2)
    request = engine.arrive("a", 0, 1, 2, 3)
    found = engine.ask(request, local)
    assert found == (3 * BLOCK - local, True)
    state, hits = engine.state("a"), engine.hits
    for other in range(100, 105):
        engine.store(other)
        assert engine.ask(request, local) == found
    assert engine.hits == hits
    assert engine.state("a") == state
    super(NVMeoFOffloadingConnector, engine.connector).get_num_new_matched_tokens(request, local)
    assert engine.state("a") == state


@pytest.mark.parametrize("change", ["blocks", "local", "token", "stored", "evicted"])
def test_a_change_needs_a_real_look_up(change: str) -> None:
    engine = Engine(4)
    engine.store(0, 1)
    request = engine.arrive("a", 0, 1, 2)
    engine.ask(request)
    hits, local, found = engine.hits, 0, 2 * BLOCK
    group = engine.side._req_status["a"].group_states[0]
    if change == "blocks":
        group.block_ids.append(7)
    elif change == "local":
        local, found = BLOCK, BLOCK
    elif change == "token":
        request.num_tokens += 1
    elif change == "stored":
        engine.store(2)
        found = 3 * BLOCK
    else:
        engine.store(100, 101, 102)
        found = BLOCK  # a prefix's head outlives its tail
    assert engine.ask(request, local) == (found, True)
    assert engine.hits > hits
    assert not group.block_ids


def test_during_a_transfer_vllm_delays_the_request() -> None:
    engine = Engine(4)
    engine.store(0)
    request = engine.arrive("a", 0)
    assert engine.ask(request) == (BLOCK, True)
    engine.side._req_status["a"].transfer_jobs.add(1)
    assert engine.ask(request) == (None, False)
    engine.side._req_status["a"].transfer_jobs.clear()
    hits = engine.hits
    assert engine.ask(request) == (BLOCK, True)
    assert engine.hits > hits, "a delay is not remembered, nor what was before it"


def test_a_chunk_that_is_loaded_for_another_request_delays_this_one() -> None:
    engine = Engine(4)
    engine.store(0)
    request = engine.arrive("a", 0)
    assert engine.ask(request) == (BLOCK, True)
    keys = [make_offload_key(_hash(0), 0)]
    engine.manager.core.prepare_load(keys)
    assert engine.side._chunks_being_loaded is not None
    engine.side._chunks_being_loaded.update(keys)
    assert engine.ask(request) == (None, False)


def test_a_declined_pool_is_left_out_of_a_second_look_up() -> None:
    """vLLM itself finds what the CPU tier has, and its state is that of the answer it gets."""
    engine = Engine(2, pool_slots=8)
    engine.store(1, 2)
    engine.store(0)  # evicts one of them
    request = engine.arrive("a", 0, 1, 2)
    assert engine.ask(request) == (3 * BLOCK, True)
    engine.slow()
    engine.now_s += 1.0
    found, _ = engine.ask(request)
    assert found in (BLOCK, 2 * BLOCK)
    assert engine.hit_chunks("a") == [found // BLOCK]
    attempt = engine.waiting.look_ups.attempt("a")
    assert attempt is not None
    assert (attempt.tokens, attempt.declined) == (found, 3 * BLOCK - found)
    hits = engine.hits
    assert engine.ask(request) == (found, True)
    assert engine.hits == hits, "both answers are remembered"
    # The pool is fast enough again: vLLM's state must be that of the first look-up.
    engine.manager.core.admission.prefill_rate = 1e-9
    engine.now_s += 1.0
    assert engine.ask(request) == (3 * BLOCK, True)
    assert engine.hit_chunks("a") == [3]
    assert engine.hits > hits
    hits = engine.hits
    assert engine.ask(request) == (3 * BLOCK, True)
    assert engine.hits == hits


@pytest.mark.parametrize(
    ("remote", "tiers", "found", "prefetched"),
    [
        ((True,), None, 3, True),
        ((True,), [], 0, False),
        ((True,), [{"medium": "cpu"}], 1, False),
        ((True,), [{"medium": "cpu"}, {"medium": "storage"}], 3, True),
        ((True,), [{"locality": "local"}], 1, False),
        ((False, True), [{"locality": "local"}], 1, False),
        ((False, False), [{"locality": "local"}], 3, True),
        ((False, None), [{"locality": "local"}], 3, True),
        ((True,), [{"medium": "storage", "locality": "local"}], 0, False),
        ((True,), [{"medium": "cpu"}, {"locality": "remote"}], 3, True),
        ((False,), [{"medium": "cpu"}, {"medium": "storage", "locality": "remote"}], 1, False),
    ],
)
def test_a_request_is_loaded_from_the_tiers_that_it_names(
    remote: tuple[bool | None, ...],
    tiers: list[dict[str, str]] | None,
    found: int,
    prefetched: bool,
) -> None:
    """`kv_load_tiers`, by medium and by where the pool's targets are. An unknown locality matches,
    as in vLLM's own tiers. The first chunk is in both tiers, the others in the pool."""
    engine = Engine(3, pool_slots=8, remote=remote)
    engine.store(0, 1, 2)
    engine.store(8, 9)  # evicts the prompt's end
    assert engine.ask(engine.arrive("cpu", 0, tiers=[{"medium": "cpu"}])) == (BLOCK, True)
    request = engine.arrive("a", 0, 1, 2, tiers=tiers)
    assert engine.ask(request) == (found * BLOCK, found > 0)
    assert engine.connector._may_prefetch(request) is prefetched


@pytest.mark.parametrize(("limit", "prefetched"), [(None, True), (0, False), (BLOCK, True)])
def test_nothing_is_fetched_for_a_request_that_may_load_nothing(
    limit: int | None, prefetched: bool
) -> None:
    engine = Engine(3, pool_slots=8)
    engine.store(0)
    request = engine.arrive("a", 0)
    engine.side._req_status["a"].max_load_tokens = limit
    assert engine.connector._may_prefetch(request) is prefetched


def test_a_chunk_that_is_being_fetched_is_no_hit_of_the_second_look_up() -> None:
    """It would wait for the very read that was declined."""
    engine = Engine(2, pool_slots=8)
    engine.store(0)
    engine.store(1, 2)
    key = make_offload_key(_hash(0), 0)
    assert engine.manager.core._tiers.begin_fetch(key, 0)
    request = engine.arrive("a", 0)
    assert engine.ask(request) == (BLOCK, True)
    engine.slow()
    engine.now_s += 1.0
    assert engine.ask(request) == (0, False)


def test_over_several_groups_vllm_finds_a_shorter_boundary_in_the_cpu_tier() -> None:
    """What the longest one needs is in the pool; windows of the one that trimming gives are not
    stored."""
    engine = Engine(8, pool_slots=16, windows=True)
    full, window = 1, 0
    engine.store(2, 3, group=full)
    engine.store(2, 3, group=window)
    engine.store(*range(100, 108))  # these are in the pool only
    engine.store(0, 1, group=full)
    engine.store(0, 1, group=window)
    request = engine.arrive("a", 0, 1, 2, 3)
    request.num_tokens = 4 * BLOCK + 2
    assert engine.ask(request) == (4 * BLOCK, True)
    engine.slow()
    engine.now_s += 1.0
    assert engine.ask(request) == (2 * BLOCK, True)
    assert engine.hit_chunks("a") == [2, 2]


@pytest.mark.parametrize(
    ("group", "number", "found"), [(1, 5, 4), (0, 4, 5), (0, 100, 4), (1, 100, 4)]
)
def test_over_several_groups_an_answer_rests_on_every_key_that_was_asked(
    group: int, number: int, found: int
) -> None:
    """Full attention has chunks 0 to 4, and windows those that end at chunk 3 and at chunk 5."""
    engine = Engine(64, windows=True)
    engine.store(*range(5), group=1)
    engine.store(2, 3, group=0)
    request = engine.arrive("a", *range(6))
    request.num_tokens = 6 * BLOCK + 2
    assert engine.ask(request) == (4 * BLOCK, True)
    hits = engine.hits
    assert engine.ask(request) == (4 * BLOCK, True)
    assert engine.hits == hits
    engine.store(number, group=group)
    assert engine.ask(request) == (found * BLOCK, True)
    assert (engine.hits > hits) is (number < 100)


def test_that_no_boundary_was_found_is_remembered_until_a_window_comes() -> None:
    """vLLM asks for the windows of every position."""
    engine = Engine(64, windows=True)
    engine.store(*range(6), group=1)
    request = engine.arrive("a", *range(6))
    request.num_tokens = 6 * BLOCK + 2
    assert engine.ask(request) == (0, False)
    hits = engine.hits
    assert engine.ask(request) == (0, False)
    assert engine.hits == hits
    engine.store(1, 2, group=0)
    assert engine.ask(request) == (3 * BLOCK, True)


def test_what_vllm_finds_of_a_block_is_weighed_not_the_whole_block() -> None:
    """Five half blocks are stored, and the request has six: the key of its third block is that of a
    chunk that nobody has. Half a block is in the pool only, and too slow to be read."""
    engine = Engine(5, pool_slots=16, tails=True)
    tail, whole = 4, (1, 3)  # by their last half blocks
    for group in (0, 1):
        engine.store(tail, group=group)
    engine.store(100, 101, 102)
    engine.store(*whole, group=1)
    engine.store(*whole[1:], group=0)
    request = engine.arrive("a", *range(6))
    request.num_tokens = request.num_prompt_tokens = 6 * BLOCK // 2 + 1
    found, admissions = engine.ask(request), engine.manager.core.counters
    assert found == (5 * BLOCK // 2, True)
    assert engine.ask(request) == found
    engine.slow()
    engine.now_s += 1.0
    assert engine.ask(request) == (2 * BLOCK, True), "what the CPU tier has"
    engine.waiting.allocated("a", 2 * BLOCK)
    assert admissions["admissions", "partial"] == 1
    assert admissions["recomputed_tokens", "declined"] == BLOCK // 2


def test_with_kv_events_every_look_up_is_real() -> None:
    """vLLM notes at each hit what the chunk's event will tell."""
    engine = Engine(4, kv_events=True)
    engine.store(0)
    request = engine.arrive("a", 0)
    for count in range(1, 4):
        engine.ask(request)
        assert engine.hits == count
