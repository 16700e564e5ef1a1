# SPDX-License-Identifier: Apache-2.0
"""A core over several KV cache groups: bytes, tokens, order, and chunks that are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.errors import STALE
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.boundary import prefix_order, tokens_by_source
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.manager.load_or_recompute import Find
from vllm_nvmeof_offload.manager.telemetry import start_line
from vllm_nvmeof_offload.protocol import CancelCommand, RankHello, place_of

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


def rank_hello(rank: int, cache: int, payloads: Sequence[int] = PAYLOADS) -> RankHello:
    groups = tuple(RankGroup(*one) for one in zip(GROUPS, payloads, strict=True))
    return replace(hello(rank, cache, 64, ()), slot_bytes=max(GROUP_BYTES), groups=groups)


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


def test_ranks_agree_on_the_groups_and_on_the_most_bytes_of_each() -> None:
    agreement = agree([rank_hello(0, 8), rank_hello(1, 8, (9000, 0, 5000))])
    assert agreement.capacity.group_bytes == (16384, 16384, 12288)
    assert agree([rank_hello(0, 8)]).capacity.group_bytes == GROUP_BYTES
    other = replace(rank_hello(1, 8), groups=())
    with pytest.raises(AssertionError, match="other models"):
        agree([rank_hello(0, 8), other])
    assert agree([hello(0, 8, 8, ())]).capacity.group_bytes == (8192,)
    with pytest.raises(AssertionError, match="another model"):
        Core(CoreConfig(1, KEY_BYTES, GROUPS), agree([hello(0, 8, 8, ())]))


def test_a_stores_rows_have_vllms_order_and_their_groups_positions() -> None:
    bench = GroupsBench()
    keys = [*chunks(WINDOW, 2, 3), key_of(STATE, 1), *chunks(FULL, 0, 1, 2, 3)]
    command = bench.core.prepare_store(keys, ends_of(keys)).command
    assert command is not None
    assert command.batch.key_list() == keys
    assert command.batch.groups.tolist() == [0, 0, 1, 2, 2, 2, 2]


def test_a_store_that_does_not_fit_keeps_the_prefix() -> None:
    """vLLM gives the windows first."""
    bench = GroupsBench(cache=3)
    keys = [*chunks(WINDOW, 2, 3), key_of(STATE, 1), *chunks(FULL, 0, 1, 2, 3)]
    assert bench.keep(*keys) == chunks(FULL, 0, 1, 2)


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


def test_the_tails_of_the_last_boundary_are_evicted_before_the_prefix_that_they_need() -> None:
    bench = GroupsBench(cache=6)
    keys = [*chunks(WINDOW, 2, 3), key_of(STATE, 1), *chunks(FULL, 1, 2, 3)]
    assert bench.keep(*keys) == keys
    bench.write_all()
    bench.core.ended(keys, ends_of(keys))
    in_order = [
        *(key_of(FULL, 1), key_of(FULL, 2), key_of(WINDOW, 2)),
        *(key_of(FULL, 3), key_of(WINDOW, 3), key_of(STATE, 1)),
    ]
    given_up = []
    for number in range(6):
        bench.keep(key_of(FULL, 100 + number))
        cached = bench.core.present(keys, 1)
        gone = [key for key, there in zip(keys, cached, strict=True) if not there]
        given_up += [key for key in gone if key not in given_up]
        bench.core.prepare_store([key_of(FULL, 100 + number)])  # its slot is used just now
    assert set(given_up[:2]) == set(in_order[-2:]), "window and state end where the last chunk does"
    assert given_up[2:] == in_order[:-2][::-1]


def test_admission_counts_each_groups_own_bytes() -> None:
    bench = GroupsBench(cache=3)
    keys = [key_of(WINDOW, 1), key_of(STATE, 0), key_of(FULL, 0)]
    bench.keep(*keys)
    bench.write_all()
    bench.keep(*chunks(FULL, 50, 51, 52))
    assert bench.core.find(keys, 2 * T) == Find(0, [sum(GROUP_BYTES)], [0], 2 * T)
    load = bench.core.prepare_load(keys, tokens=range(2 * T), ends=ends_of(keys))
    assert bench.core.queued_bytes() == [sum(GROUP_BYTES)]
    bench.done(load.op)
    assert bench.core.queued_bytes() == [0]


def test_the_tokens_of_a_load_count_once_and_fail_together() -> None:
    bench = GroupsBench(cache=8)
    pooled = [key_of(WINDOW, 3), *chunks(FULL, 0, 1)]
    bench.keep(*pooled)
    bench.write_all()
    bench.keep(*chunks(FULL, *range(50, 58)))
    bench.write_all()
    cached = [key_of(STATE, 1), *chunks(FULL, 2, 3)]
    bench.keep(*cached)
    keys = [key_of(WINDOW, 3), key_of(STATE, 1), *chunks(FULL, 0, 1, 2, 3)]
    load = bench.core.prepare_load(keys, tokens=range(8, 4 * T), ends=ends_of(keys))
    assert load.batch.key_list() == keys
    assert bench.loaded() == {"pool": 3 * T - 8, "cpu": T}, "a window's last chunk and the head"
    bench.report(load.op, (0, STALE), rows=(0,))
    assert bench.core.counters["recomputed_tokens", "load_failed"] == 4 * T - 8
    bench.report(load.op, (1, STALE), rows=(1, 2, 3, 4, 5))
    assert bench.core.counters["recomputed_tokens", "load_failed"] == 4 * T - 8


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


def test_a_chunk_that_is_gone_fails_alone() -> None:
    bench = GroupsBench()
    keys = chunks(FULL, 0, 1, 2)
    bench.keep(keys[0], keys[2])
    bench.write_all()
    load = bench.core.prepare_load(keys, tokens=range(3 * T), ends=ends_of(keys))
    batch = load.batch
    assert batch.key_list() == keys
    assert (batch.cache[1], batch.places[1], batch.generations[1]) == (-1, -1, 0)
    assert batch.groups.tolist() == [2, 2, 2]
    bench.report(load.op, (1, STALE), rows=(0, 1, 2))
    assert bench.there(keys) == [keys[0], keys[2]]
    assert bench.core.gauges()["ops"] == 0
    assert bench.core.gauges()["cache_slots_in_use"] == 0


@pytest.mark.parametrize("ended_by", ["reset", "store"])
def test_a_chunk_that_is_gone_and_comes_back_is_not_the_one_that_fails(ended_by: str) -> None:
    bench = Bench()
    load = bench.load(1)
    assert load.batch.cache.tolist() == load.batch.places.tolist() == [-1]
    if ended_by == "reset":
        bench.core.reset()
    bench.store(1)
    bench.report(load.op, (0, STALE), rows=(0,))
    assert bench.hits([1]) == [1]


Ranges = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 11), st.booleans()), max_size=12, unique=True
)


Some = st.sampled_from([GROUPS, *((group,) for group in GROUPS)])


@given(Some, Ranges, st.integers(0, 100), st.integers(1, 100))
def test_tokens_by_source_are_those_of_a_token_by_token_count(
    groups: tuple[Group, ...], rows: list[tuple[int, int, bool]], first: int, count: int
) -> None:
    rows = [row for row in rows if row[0] < len(groups)]
    tokens = range(first, first + count)
    sources: dict[int, set[bool]] = {token: set() for token in tokens}
    for at, chunk, from_pool in rows:
        size = groups[at].tokens_per_chunk
        begin = 0 if groups[at].kind is GroupKind.STATE else chunk * size
        for token in range(max(begin, first), min((chunk + 1) * size, tokens.stop)):
            sources[token].add(from_pool)
    columns: Any = list(zip(*rows, strict=True)) or ((), (), ())
    positions = np.array(columns[0], np.uint8)
    sizes = np.array([group.tokens_per_chunk for group in groups])[positions]
    ends = (np.array(columns[1], np.int64) + 1) * sizes
    found = tokens_by_source(tokens, ends, np.array(columns[2], np.bool_), positions, groups)
    pool = sum(True in one for one in sources.values())
    assert found == (sum(map(bool, sources.values())) - pool, pool)


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
