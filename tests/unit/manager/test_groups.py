# SPDX-License-Identifier: Apache-2.0
"""Several KV cache groups: bytes, tokens and order, the boundary of a load, and what is stored at
boundaries."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.boundary import (
    limit_of,
    plan,
    prefix_order,
    taken,
    unit_tokens,
    wanted,
)
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.manager.stores import BoundaryStores
from vllm_nvmeof_offload.manager.telemetry import start_line
from vllm_nvmeof_offload.protocol import (
    NOWHERE,
    CancelCommand,
    ChunkBatch,
    RankHello,
    owned_by,
    place_of,
)

from .bench import KEY_BYTES, Bench, Core, hello

#: Tokens in a chunk of each group. vLLM numbers the groups 0, 1 and 3.
T = 16
WINDOW = Group(0, GroupKind.WINDOW, T, reach_chunks=2)
STATE = Group(1, GroupKind.STATE, 2 * T, reach_chunks=1)
FULL = Group(3, GroupKind.FULL, T)
GROUPS = (WINDOW, STATE, FULL)
#: Payload bytes: header page and padding come to 8, 16 and 12 KiB.
PAYLOADS = (3000, 12000, 5000)
GROUP_BYTES = (8192, 16384, 12288)


def key_of(group: Group, chunk: int) -> bytes:
    return b"%08d" % chunk + group.group_id.to_bytes(4, "big")


def chunks(group: Group, *numbers: int) -> list[bytes]:
    return [key_of(group, number) for number in numbers]


def ends_of(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    sizes = {group.group_id: group.tokens_per_chunk for group in GROUPS}
    return np.array([(int(key[:8]) + 1) * sizes[key[-1]] for key in keys], np.int64)


def rank_hello(
    rank: int,
    cache: int,
    payloads: Sequence[int] = PAYLOADS,
    groups: Sequence[Group] = GROUPS,
) -> RankHello:
    of_rank = tuple(map(RankGroup, groups, payloads))
    return replace(hello(rank, cache, 64, ()), slot_bytes=max(GROUP_BYTES), groups=of_rank)


class GroupsBench(Bench):
    """A bench over the three groups."""

    def __init__(self, cache: int = 32, **config: object) -> None:
        super().__init__()
        self.core = Core(
            CoreConfig(1, KEY_BYTES, GROUPS, **config),  # type: ignore[arg-type]
            agree([rank_hello(0, cache)]),
            lambda: self.now_s,
            first_generation=100,
        )

    def keep(self, *keys: bytes) -> list[bytes]:
        """Store these keys, given in this order; return those that are stored."""
        command = self.core.prepare_store(keys, ends_of(keys)).command
        if command is None:
            return []
        self.done(command.op)
        return command.batch.key_list()

    def there(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if self.core.lookup(key) is not None]

    def loaded(self) -> dict[str, float]:
        return {tier: self.core.counters["loaded_tokens", tier] for tier in ("cpu", "pool")}


def test_a_stores_rows_have_vllms_order_and_their_groups_positions() -> None:
    bench = GroupsBench()
    keys = [*chunks(WINDOW, 2, 3), key_of(STATE, 1), *chunks(FULL, 0, 1, 2, 3)]
    command = bench.core.prepare_store(keys, ends_of(keys)).command
    assert command is not None
    assert command.batch.key_list() == keys
    assert command.batch.groups.tolist() == [0, 0, 1, 2, 2, 2, 2]


def test_keys_of_a_group_that_is_not_offloaded_are_never_stored_or_adopted() -> None:
    bench = GroupsBench()
    other = key_of(Group(2, GroupKind.FULL, T), 0)
    assert bench.core.prepare_store([other], np.array([T])).command is None
    assert bench.core.lookup(other) is None
    assert bench.core.counters["stored_chunks"] == 0
    one = hello(0, 4, 8, [(1, 7, 1), (2, 8, 2)])
    foreign = one.adopted.keys[:KEY_BYTES] + one.adopted.keys[KEY_BYTES:-1] + b"\2"
    one = replace(one, adopted=replace(one.adopted, keys=foreign))
    core = Core(CoreConfig(1, KEY_BYTES), agree([one]))
    assert [entry.place for entry in core.entries()] == [place_of(0, 1)]
    assert core.counters["adoption_chunks", "incomplete"] == 1


@pytest.mark.parametrize("read", [0, 1])
def test_an_overdue_load_is_cut_off_only_before_its_first_read_has_ended(read: int) -> None:
    bench = GroupsBench(cache=3)
    keys = [key_of(WINDOW, 1), *chunks(FULL, 0, 1)]
    bench.keep(*keys)
    bench.write_all()
    bench.keep(*chunks(FULL, 50, 51, 52))
    load = bench.core.prepare_load(keys, 1.0, tokens=range(2 * T), ends=ends_of(keys))
    if read:
        bench.report(load.op, rows=(2,))
    bench.now_s += 1.5
    bench.core.turn()
    cancelled = [c.target_op for c in bench.core.take_commands() if isinstance(c, CancelCommand)]
    assert cancelled == ([] if read else [load.op])
    assert bench.core.counters["loads_cut"] == 1 - read


Ranges = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 11), st.integers(-1, 2)), max_size=12, unique=True
)


Some = st.sampled_from([GROUPS, *((group,) for group in GROUPS)])


@given(Some, Ranges, st.integers(0, 100), st.integers(1, 100))
def test_tokens_by_source_are_those_of_a_token_by_token_count(
    groups: tuple[Group, ...], rows: list[tuple[int, int, int]], first: int, count: int
) -> None:
    rows = [row for row in rows if row[0] < len(groups)]
    tokens = range(first, first + count)
    last_source = dict.fromkeys(tokens, -1)
    for at, chunk, source in rows:
        size = groups[at].tokens_per_chunk
        begin = 0 if groups[at].kind is GroupKind.STATE else chunk * size
        for token in range(max(begin, first), min((chunk + 1) * size, tokens.stop)):
            last_source[token] = max(last_source[token], source)
    columns: Any = list(zip(*rows, strict=True)) or ((), (), ())
    positions = np.array(columns[0], np.uint8)
    sizes = np.array([group.tokens_per_chunk for group in groups])[positions]
    ends = (np.array(columns[1], np.int64) + 1) * sizes
    found = _core_of(groups).tokens_by_source(_rows_from(columns[2], positions), tokens, ends)
    assert [*found] == [[*last_source.values()].count(source) for source in range(3)]


def _rows_from(sources: Sequence[int], positions: Any) -> ChunkBatch:
    """Return rows of a load from these sources, by their order; -1 for an evicted chunk."""
    count, place = len(sources), place_of(0, 1)
    cache = np.array([0 if one == 0 else NOWHERE for one in sources], np.int32)
    places = {-1: NOWHERE, 0: NOWHERE, 1: place, 2: owned_by(3, place)}
    found = np.array([places[one] for one in sources], np.int64)
    return ChunkBatch.of(b"k" * count, np.ones(count, np.uint64), cache, found, positions)


@functools.cache
def _core_of(groups: tuple[Group, ...]) -> Core:
    """Return the core of an engine with these groups."""
    return Core(CoreConfig(1, KEY_BYTES, groups), agree([rank_hello(0, 32, groups=groups)]))


@given(st.permutations([*chunks(WINDOW, 0, 1, 2, 3), *chunks(STATE, 0, 1), *chunks(FULL, 0, 1, 2)]))
def test_full_attention_comes_before_the_tails_that_end_with_it(keys: list[bytes]) -> None:
    ends = ends_of(keys)
    order = prefix_order(keys, ends, GROUPS)
    ranks = [(ends[at], keys[at][-1] != FULL.group_id) for at in order]
    assert ranks == sorted(ranks)
    assert sorted(order) == list(range(len(keys)))


def test_the_start_line_tells_what_groups_take_of_a_slot() -> None:
    bench = GroupsBench()
    line = start_line([rank_hello(0, 32)], bench.core)
    assert "CPU tier of at most 512 tokens" in line
    assert "3 KV cache groups (window, state, full) with chunks of 8.0 KiB, 16.0 KiB, 12.0" in line
    assert "each boundary's windows and states take 3 slots" in line
    assert "WARNING" not in line, "a quarter of the slots is unused, not more"
    bench.core.capacity = replace(bench.core.capacity, group_bytes=(8192, 16384, 8192))
    line = start_line([rank_hello(0, 32)], bench.core)
    assert "WARNING 33% of the slots' bytes are unused" in line


def test_capacity_in_tokens_counts_the_groups_of_which_every_chunk_is_kept() -> None:
    local = Group(4, GroupKind.LOCAL, 2 * T, reach_chunks=4)
    assert CoreConfig(groups=(FULL, local, WINDOW)).tokens_in(30) == 30 * 2 * T // 3
    assert CoreConfig(groups=(WINDOW,)).tokens_in(30) == 30 * T
    assert CoreConfig(groups=(FULL, local)).boundary_slots == 0
    assert CoreConfig(groups=(FULL,)).tokens_in(30) == 30 * T


def test_the_full_prefix_comes_first_then_windows_then_states() -> None:
    index = Index([STATE_3, WINDOW_1, FULL_0], 80, set())
    boundary, keys = index.plan(0, 80)
    assert boundary == 64, "the last token is computed, and a state is there at its chunk's end"
    assert keys == [b"0/16", b"0/32", b"0/48", b"0/64", b"1/48", b"1/64", b"3/64"]


# -- the boundary of a load -----------------------------------------------------------

FULL_0 = Group(0, GroupKind.FULL, 16)
WINDOW_1 = Group(1, GroupKind.WINDOW, 16, reach_chunks=2, reach_tokens=31)
LOCAL_2 = Group(2, GroupKind.LOCAL, 16, reach_chunks=4, reach_tokens=64)
STATE_3 = Group(3, GroupKind.STATE, 16, reach_chunks=1)


class Index:
    """keys: group ids and ends in tokens of the chunks that are present."""

    def __init__(self, groups: list[Group], tokens: int, missing: set[tuple[int, int]]) -> None:
        self.groups = groups
        self.keys = [
            [
                b"%d/%d" % (group.group_id, end)
                for end in range(group.tokens_per_chunk, tokens + 1, group.tokens_per_chunk)
            ]
            for group in groups
        ]
        self.missing = {b"%d/%d" % one for one in missing}
        self.questions = 0

    def has(self, keys: Any) -> bytes:
        self.questions += 1
        return bytes(key not in self.missing for key in keys)

    def plan(self, local: int, limit: int) -> tuple[int, list[bytes]]:
        return plan(self.groups, self.keys, local, limit, self.has)


def test_of_a_full_group_alone_every_token_may_be_loaded() -> None:
    index = Index([FULL_0], 80, {(0, 64)})
    assert index.plan(16, 80) == (48, [b"0/32", b"0/48"])
    assert Index([FULL_0], 80, set()).plan(0, 80)[0] == 80


def test_local_chunks_are_wanted_from_the_last_multiple_on() -> None:
    index = Index([FULL_0, LOCAL_2], 80, set())
    assert index.plan(0, 81)[1][-1:] == [b"2/80"]
    assert wanted(index.groups, index.keys, 0, 64) == [b"0/16", b"0/32", b"0/48", b"0/64"]


def test_what_is_in_gpu_memory_is_not_wanted() -> None:
    index = Index([FULL_0, WINDOW_1, STATE_3], 96, set())
    assert index.plan(48, 96) == (80, [b"0/64", b"0/80", b"1/64", b"1/80", b"3/80"])
    assert index.plan(80, 96) == (80, [])


def key_at(group: Group, end: int) -> bytes:
    return b"%d" % end + group.group_id.to_bytes(4, "big")


@pytest.mark.parametrize(
    ("groups", "hits", "local", "boundary", "expected"),
    [
        pytest.param(
            [WINDOW_1, FULL_0],
            [
                (FULL_0, 32),
                (FULL_0, 48),
                (FULL_0, 64),
                (FULL_0, 80),
                (WINDOW_1, 80),
                (WINDOW_1, 64),
            ],
            16,
            64,
            [(FULL_0, 32), (FULL_0, 48), (FULL_0, 64), (WINDOW_1, 48), (WINDOW_1, 64)],
            id="whole chunks",
        ),
        pytest.param(
            [STATE_3, FULL_0],
            [(FULL_0, 16), (FULL_0, 32), (STATE_3, 16), (STATE_3, 24), (FULL_0, 28), (FULL_0, 24)],
            0,
            24,
            [(FULL_0, 16), (STATE_3, 24), (FULL_0, 24)],
            id="the head of a chunk that is there too",
        ),
        pytest.param(
            [STATE_3, FULL_0],
            [(FULL_0, 16), (STATE_3, 24), (FULL_0, 24)],
            0,
            24,
            [(FULL_0, 16), (STATE_3, 24), (FULL_0, 24)],
            id="the head of a chunk that nobody has stored",
        ),
    ],
)
def test_a_load_takes_what_was_hit(
    groups: list[Group],
    hits: list[tuple[Group, int]],
    local: int,
    boundary: int,
    expected: list[tuple[Group, int]],
) -> None:
    ends = {key_at(*one): one[1] for one in hits}
    by_group = [[key_at(group, end) for end in range(16, 97, 16)] for group in groups]
    found = taken(
        groups, by_group, list(ends), local, boundary, lambda keys: [ends[k] for k in keys]
    )
    assert found == [key_at(*one) for one in expected]


def test_the_index_is_asked_once_per_group() -> None:
    index = Index([FULL_0, WINDOW_1, STATE_3], 4096, {(3, end) for end in range(64, 4097, 16)})
    assert index.plan(0, 4096)[0] == 48
    assert index.questions == 3


# -- against vLLM -------------------------------------------------------------------------


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[Group], int, int, set[tuple[int, int]]]:
    """Groups, tokens of a request, tokens in GPU memory, the ends of chunks that are missing."""
    size = st.sampled_from([16, 32, 48])
    state_tokens = draw(size)
    groups: list[Group] = []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(list(GroupKind)))
        tokens = state_tokens if kind is GroupKind.STATE else draw(size)
        if kind is GroupKind.FULL:
            groups.append(Group(number, kind, tokens))
        elif kind is GroupKind.STATE:
            groups.append(Group(number, kind, tokens, reach_chunks=1))
        elif kind is GroupKind.LOCAL:
            reach = tokens * draw(st.integers(1, 4))
            groups.append(Group(number, kind, tokens, 1, reach // tokens, reach))
        else:
            window, extra = draw(st.integers(2, 160)), draw(st.sampled_from([0, 0, 3]))
            chunks = max(-(-window // tokens), -(-(window - 1 + extra) // tokens))
            groups.append(Group(number, kind, tokens, 1, chunks, window - 1 + extra))
    tokens = draw(st.integers(20, 420))
    unit = unit_tokens(groups)
    local = draw(st.integers(0, tokens // unit // 2)) * unit
    ends = [
        (group.group_id, end)
        for group in groups
        for end in range(group.tokens_per_chunk, tokens + 1, group.tokens_per_chunk)
    ]
    missing = draw(st.sets(st.sampled_from(ends), max_size=6)) if ends else set()
    return groups, tokens, local, missing


def _vllm_finds(index: Index, tokens: int, local: int) -> int:
    """Tokens beyond `local` that vLLM's own look-up finds."""
    theirs = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
    )
    from vllm.v1.kv_offload.base import LookupResult

    side = object.__new__(theirs.OffloadingConnectorScheduler)
    configs = tuple(_config(theirs, group) for group in index.groups)
    full = tuple(at for at, one in enumerate(configs) if one.sliding_window_size_in_chunks is None)
    tails = [at for at in range(len(configs)) if at not in full]
    tails.sort(key=lambda at: configs[at].sliding_window_size_in_chunks, reverse=True)
    side.config = SimpleNamespace(kv_group_configs=configs)
    side._lookup_groups, side._sliding_window_groups = full + tuple(tails), tuple(tails)
    sizes = [g.tokens_per_chunk for g in index.groups if g.kind is GroupKind.STATE]
    side._mamba_align_size = sizes[0] if sizes else None
    side._chunks_being_loaded = set()
    side._events_tracker = SimpleNamespace(record_lookup=lambda *args: None)
    results = {0: LookupResult.MISS, 1: LookupResult.HIT}
    side.manager = SimpleNamespace(lookup=lambda key, context: results[index.has([key])[0]])
    states = tuple(
        SimpleNamespace(offload_keys=keys, lookup_hit_end_chunk_idx=0) for keys in index.keys
    )
    status = SimpleNamespace(
        num_locally_computed_tokens=local,
        req=SimpleNamespace(num_tokens=tokens, request_id="a"),
        req_context=None,
        max_load_tokens=None,
        group_states=states,
    )
    found: int = side._lookup_complete_chunks(status)
    return found


def _config(theirs: Any, group: Group) -> Any:
    """vLLM's own configuration of the group, as far as a look-up reads it."""
    fields: dict[str, Any] = dict.fromkeys(theirs.GroupOffloadConfig._fields)
    spec: Any = None
    if group.kind is GroupKind.WINDOW:
        assert group.reach_tokens is not None
        spec = object.__new__(theirs.SlidingWindowSpec)
        for name, value in {
            "sliding_window": group.reach_tokens + 1,
            "extra_retained_tokens": 0,
        }.items():
            object.__setattr__(spec, name, value)
    return theirs.GroupOffloadConfig(
        **{
            **fields,
            "group_idx": group.group_id,
            "tokens_per_chunk": group.tokens_per_chunk,
            "sliding_window_size_in_chunks": group.reach_chunks,
            "kv_cache_spec": spec,
            "is_eagle_group": False,
        }
    )


@settings(max_examples=500, deadline=None)
@given(_cases())
def test_the_boundary_is_the_one_that_vllms_look_up_finds(
    case: tuple[list[Group], int, int, set[tuple[int, int]]],
) -> None:
    groups, tokens, local, missing = case
    index = Index(groups, tokens, missing)
    boundary, keys = index.plan(local, tokens)
    assert boundary - local == _vllm_finds(index, tokens, local)
    assert not index.missing.intersection(keys)
    assert boundary <= max(local, limit_of(groups, tokens))


# -- what is stored of windows and states ---------------------------------------------

WINDOW_3 = Group(3, GroupKind.WINDOW, 16, 1, 3, 47)
LOCAL_4 = Group(4, GroupKind.LOCAL, 16, 1, 2, 32)
STATE_5 = Group(5, GroupKind.STATE, 16, 1, 1)
LONG = 1 << 20


class Server:
    """One request of a server whose CPU tier has room for everything. chunks: how each stored one
    stays; what is superseded counts as evicted."""

    def __init__(
        self,
        groups: Sequence[Group],
        every_tokens: int = LONG,
        prompt: int = 160,
        tail_tokens: int = 0,
    ) -> None:
        self.groups = groups
        calls = self.supersede, self.keep
        self.stores = BoundaryStores(*calls, groups, every_tokens, tail_tokens)
        self.prompt, self.computed = prompt, 0
        self.chunks: dict[bytes, str] = {}
        self.shared = 0

    def keep(self, keys: Sequence[bytes]) -> None:
        self.chunks.update(dict.fromkeys(keys, "kept"))

    def supersede(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            assert self.chunks.pop(key) == "provisional"

    def key(self, group: Group, end: int) -> bytes:
        return end.to_bytes(4, "big") + group.group_id.to_bytes(4, "big")

    def run(self, tokens: int) -> None:
        """One step computes so many: states are offered one by one, then all other chunks that the
        step completes; of a window also those that it still has in GPU memory."""
        before, self.computed = self.computed, self.computed + tokens
        offers: list[list[tuple[Group, int]]] = []
        rest: list[tuple[Group, int]] = []
        for group in self.groups:
            size = group.tokens_per_chunk
            ends = range((before // size + 1) * size, self.computed + 1, size)
            if group.kind is GroupKind.STATE:
                # A state is there only where a step ends.
                offers += [[(group, end)] for end in ends if end == self.computed]
            else:
                rest += [(group, end) for end in ends]
        for offer in [*offers, rest]:
            if offer:
                self.offer(offer)

    def offer(self, chunks: Sequence[tuple[Group, int]]) -> None:
        offer = self.stores.offered(
            SimpleNamespace(
                request_id="a", num_prompt_tokens=self.prompt, shared_prefix_boundary=self.shared
            ),
            [self.key(group, end) for group, end in chunks],
            np.array([end for _, end in chunks], np.int64),
        )
        for key, is_provisional in zip(offer.keys, offer.provisional.tolist(), strict=True):
            if not is_provisional:
                self.chunks[key] = "kept"
            self.chunks.setdefault(key, "provisional")
        self.stores.stored("a", offer)

    def kept(self, group: Group) -> list[int]:
        """The ends of the group's chunks that last."""
        return [end for end in self._ends(group) if self.chunks[self.key(group, end)] == "kept"]

    def provisional(self, group: Group) -> list[int]:
        return [end for end in self._ends(group) if end not in self.kept(group)]

    def resumes_at(self) -> int:
        """The boundary that a look-up of this request finds."""
        keys = [
            [self.key(group, end) for end in range(size, self.computed + 1, size)]
            for group in self.groups
            for size in [group.tokens_per_chunk]
        ]
        has = self.chunks.__contains__
        return plan(self.groups, keys, 0, self.computed + 1, lambda k: bytes(map(has, k)))[0]

    def _ends(self, group: Group) -> Iterator[int]:
        size = group.tokens_per_chunk
        for end in range(size, self.computed + 1, size):
            if self.key(group, end) in self.chunks:
                yield end


def test_a_window_lasts_at_every_so_many_tokens_and_at_a_shared_prefix() -> None:
    server = Server([FULL_0, WINDOW_3], every_tokens=96, prompt=300)
    server.shared = 208
    server.run(300)
    assert server.kept(WINDOW_3) == [64, 80, 96, 160, 176, 192, 208, 256, 272, 288]


def test_in_decode_the_last_window_is_there_and_earlier_ones_are_superseded() -> None:
    server = Server([FULL_0, WINDOW_3], prompt=32)
    server.run(32)
    for _ in range(100):
        server.run(1)
    assert server.provisional(WINDOW_3) == [96, 112, 128]
    assert server.resumes_at() == 128
    server.stores.ended("a")
    assert server.kept(WINDOW_3) == [16, 96, 112, 128]


def test_a_preempted_request_keeps_what_it_resumes_from() -> None:
    server = Server([FULL_0, WINDOW_3], prompt=32)
    server.run(32)
    for _ in range(40):
        server.run(1)
    server.stores.preempted("a")
    assert server.provisional(WINDOW_3) == []
    for _ in range(100):
        server.run(1)
    assert server.kept(WINDOW_3) == [16, 32, 48, 64], "they last"
    assert server.provisional(WINDOW_3) == [128, 144, 160]


def test_a_prompt_s_last_part_of_a_chunk_lasts_where_vllm_stores_and_finds_it() -> None:
    server = Server([FULL_0, STATE_5], prompt=172, tail_tokens=4)
    tails = [(FULL_0, 168), (STATE_5, 168)]
    server.run(160)
    server.computed = 172
    server.offer(tails)
    for _ in range(100):
        server.run(1)
    server.stores.ended("a")
    assert [server.chunks[server.key(group, end)] for group, end in tails] == ["kept"] * 2
    assert server.kept(STATE_5) == [160, 272]


def test_after_a_reset_everything_is_offered_anew() -> None:
    server = Server([FULL_0, WINDOW_3], prompt=32)
    server.run(64)
    server.chunks.clear()
    server.stores.reset()
    server.computed = 0
    server.run(80)
    assert server.resumes_at() == 80


@pytest.mark.parametrize("tails", [[WINDOW_3], [STATE_5], [WINDOW_3, STATE_5], [WINDOW_3, LOCAL_4]])
@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 400),
    steps=st.lists(st.sampled_from([1, 1, 1, 2, 16, 16, 48, 128]), max_size=60),
    every_tokens=st.sampled_from([96, LONG]),
)
def test_a_request_always_resumes_near_its_end(
    tails: list[Group], prompt: int, steps: list[int], every_tokens: int
) -> None:
    server = Server([FULL_0, *tails], every_tokens, prompt)
    unit, at_state = unit_tokens(server.groups), 0
    for tokens in steps:
        server.run(tokens)
        if server.computed % STATE_5.tokens_per_chunk == 0:
            at_state = server.computed
        end = at_state if STATE_5 in tails else server.computed // unit * unit
        assert server.resumes_at() == end
        for group in tails:
            if group.kind is not GroupKind.LOCAL and STATE_5 not in tails:
                assert len(server.provisional(group)) <= 2 * (group.reach_chunks or 0)
    server.stores.ended("a")
    assert all(how == "kept" for how in server.chunks.values())
