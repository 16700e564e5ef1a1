# SPDX-License-Identifier: Apache-2.0
"""What is stored of windows and states: what a later request resumes from, and little else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.manager.boundary import plan, unit_tokens
from vllm_nvmeof_offload.manager.stores import BoundaryStores

FULL = Group(0, GroupKind.FULL, 16)
WINDOW = Group(3, GroupKind.WINDOW, 16, 1, 3, 47)
LOCAL = Group(4, GroupKind.LOCAL, 16, 1, 2, 32)
STATE = Group(5, GroupKind.STATE, 16, 1, 1)
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


def test_of_a_prompt_only_the_window_at_its_end_lasts() -> None:
    server = Server([FULL, WINDOW], prompt=170)
    server.run(170)
    assert server.kept(FULL) == list(range(16, 161, 16))
    assert (server.kept(WINDOW), server.provisional(WINDOW)) == ([128, 144, 160], [])


def test_local_chunks_are_all_stored() -> None:
    server = Server([FULL, LOCAL, WINDOW])
    server.run(160)
    assert server.kept(LOCAL) == server.kept(FULL)


def test_a_prompt_of_several_steps_has_the_last_step_s_window() -> None:
    """Until the next one is there: the request may be preempted within its prompt."""
    server = Server([FULL, WINDOW], prompt=300)
    server.run(64)
    assert server.provisional(WINDOW) == [32, 48, 64]
    server.run(64)
    assert server.provisional(WINDOW) == [96, 112, 128]
    assert server.resumes_at() == 128


def test_a_window_lasts_at_every_so_many_tokens_and_at_a_shared_prefix() -> None:
    server = Server([FULL, WINDOW], every_tokens=96, prompt=300)
    server.shared = 208
    server.run(300)
    assert server.kept(WINDOW) == [64, 80, 96, 160, 176, 192, 208, 256, 272, 288]


def test_in_decode_the_last_window_is_there_and_earlier_ones_are_superseded() -> None:
    server = Server([FULL, WINDOW], prompt=32)
    server.run(32)
    for _ in range(100):
        server.run(1)
    assert server.provisional(WINDOW) == [96, 112, 128]
    assert server.resumes_at() == 128
    server.stores.ended("a")
    assert server.kept(WINDOW) == [16, 96, 112, 128]


def test_a_preempted_request_keeps_what_it_resumes_from() -> None:
    server = Server([FULL, WINDOW], prompt=32)
    server.run(32)
    for _ in range(40):
        server.run(1)
    server.stores.preempted("a")
    assert server.provisional(WINDOW) == []
    for _ in range(100):
        server.run(1)
    assert server.kept(WINDOW) == [16, 32, 48, 64], "they last"
    assert server.provisional(WINDOW) == [128, 144, 160]


def test_a_prompt_s_last_part_of_a_chunk_lasts_where_vllm_stores_and_finds_it() -> None:
    server = Server([FULL, STATE], prompt=172, tail_tokens=4)
    tails = [(FULL, 168), (STATE, 168)]
    server.run(160)
    server.computed = 172
    server.offer(tails)
    for _ in range(100):
        server.run(1)
    server.stores.ended("a")
    assert [server.chunks[server.key(group, end)] for group, end in tails] == ["kept"] * 2
    assert server.kept(STATE) == [160, 272]


def test_windows_wait_for_the_state_of_their_boundary() -> None:
    """States come more seldom, and computing goes on only from one."""
    server = Server([FULL, WINDOW, STATE], prompt=32)
    server.run(32)
    for _ in range(96):
        server.run(1)
    server.offer([(FULL, 144), (WINDOW, 144)])
    server.computed = 144
    assert server.resumes_at() == 128
    assert server.provisional(WINDOW) == [96, 112, 128, 144]


def test_after_a_reset_everything_is_offered_anew() -> None:
    server = Server([FULL, WINDOW], prompt=32)
    server.run(64)
    server.chunks.clear()
    server.stores.reset()
    server.computed = 0
    server.run(80)
    assert server.resumes_at() == 80


def test_requests_without_a_store_are_ignored() -> None:
    server = Server([FULL, WINDOW])
    server.stores.preempted("b")
    server.stores.ended("b")


@pytest.mark.parametrize("tails", [[WINDOW], [STATE], [WINDOW, STATE], [WINDOW, LOCAL]])
@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 400),
    steps=st.lists(st.sampled_from([1, 1, 1, 2, 16, 16, 48, 128]), max_size=60),
    every_tokens=st.sampled_from([96, LONG]),
)
def test_a_request_always_resumes_near_its_end(
    tails: list[Group], prompt: int, steps: list[int], every_tokens: int
) -> None:
    server = Server([FULL, *tails], every_tokens, prompt)
    unit, at_state = unit_tokens(server.groups), 0
    for tokens in steps:
        server.run(tokens)
        if server.computed % STATE.tokens_per_chunk == 0:
            at_state = server.computed
        end = at_state if STATE in tails else server.computed // unit * unit
        assert server.resumes_at() == end
        for group in tails:
            if group.kind is not GroupKind.LOCAL and STATE not in tails:
                assert len(server.provisional(group)) <= 2 * (group.reach_chunks or 0)
    server.stores.ended("a")
    assert all(how == "kept" for how in server.chunks.values())
