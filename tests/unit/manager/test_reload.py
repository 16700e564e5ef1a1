# SPDX-License-Identifier: Apache-2.0
"""What the ReloadScheduler holds and fetches in the real core, and the tokens that resumed requests
get back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH
from vllm_nvmeof_offload.manager import core as manager_core
from vllm_nvmeof_offload.manager.handshake import WritePolicy
from vllm_nvmeof_offload.manager.requests import ResumeCounter
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import Holds, Wanted
from vllm_nvmeof_offload.protocol import CancelCommand

from .bench import keys_of, numbers_of
from .test_holds import HoldsBench

CACHE_SLOTS = 1 << 14


class CountingHolds(Holds):
    """looks: how many chunks were looked up."""

    looks = 0

    def advance(
        self, wanted: Wanted, start: int, stop: int, local: int, looks: int, *limits: int
    ) -> tuple[int, int, int, int]:
        done = super().advance(wanted, start, stop, local, looks, *limits)
        self.looks += looks - done[1]
        return done


class ReloadRig(HoldsBench):
    """reload, queue: budgets in cache slots. pool, cached: the chunks that only this tier has."""

    def __init__(
        self,
        reload: int = 16,
        queue: int = 16,
        slot_bytes: int = 1 << 20,
        pool: Sequence[int] = (),
        cached: Sequence[int] = (),
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager_core, "Holds", CountingHolds)
            super().__init__(
                CACHE_SLOTS,
                max(1, len(pool)),
                slot_bytes=slot_bytes,
                entries=[(slot, 1, number) for slot, number in enumerate(pool)],
                write_policy=WritePolicy.OFF,
                reload_cache_share=reload / CACHE_SLOTS,
                prefetch_cache_share=queue / CACHE_SLOTS,
            )
        self._rows: dict[int, tuple[int, int]] = {}  # chunk → op and row of its fetch
        if cached:
            self.store(*cached)

    @property
    def looks(self) -> int:
        return self.core._holds.looks  # type: ignore[attr-defined,no-any-return]

    def turn(self) -> list[str]:
        """What a step holds and fetches."""
        before, fetched = self.held(), list[int]()
        for fetch in self.fetches():
            numbers = numbers_of(fetch.batch.keys)
            self._rows.update({number: (fetch.op, row) for row, number in enumerate(numbers)})
            fetched += numbers
        held = sorted({*self.held()} - {*before, *fetched})
        return [f"hold {number}" for number in held] + [f"fetch {number}" for number in fetched]

    def left(self, *names: str) -> list[str]:
        """What requests that leave drop and cancel; the ranks report the cancelled reads."""
        log = []
        for name in names:
            before = self.held()
            self.core.reload.left(name)
            gone = sorted({*before} - {*self.held()})
            cancelled = set()
            for command in self.core.take_commands():
                assert isinstance(command, CancelCommand) and command.indexes is not None
                cancelled |= {(command.target_op, row) for row in command.indexes.tolist()}
            for number in gone:
                is_cancelled = self._rows.get(number) in cancelled
                log.append(f"{'cancel' if is_cancelled else 'drop'} {number}")
            for op, row in cancelled:
                self.report(op, (row, CANCELLED), rows=[row])
        return log

    def arrived(self, *numbers: int) -> None:
        """End the fetches of these chunks."""
        for op, row in map(self._rows.__getitem__, numbers):
            self.report(op, rows=[row])

    def failed(self, number: int) -> None:
        op, row = self._rows[number]
        self.report(op, (row, CHECKSUM_MISMATCH), rows=[row])


def test_chunks_in_gpu_memory_are_not_fetched_but_held_if_the_cpu_tier_has_them() -> None:
    rig = ReloadRig(pool=[1, 2], cached=[0])
    rig.preempted("a", *range(3), in_gpu=lambda chunk: chunk < 2)
    assert rig.turn() == ["hold 0", "fetch 2"]


def test_remaining_chunks_decide_the_order_and_not_a_requests_length() -> None:
    rig = ReloadRig(reload=6, pool=range(100))
    rig.preempted("a", *range(8))
    assert len(rig.turn()) == 6  # 2 remain
    rig.preempted("b", 20, 21, 22)
    rig.preempted("c", 30)
    assert rig.turn() == [], "the budget is spent"
    assert rig.left("a") == [f"cancel {n}" for n in range(6)]
    assert rig.turn() == ["fetch 30", "fetch 20", "fetch 21", "fetch 22"]


def test_two_requests_share_a_prefix_until_the_last_has_left() -> None:
    rig = ReloadRig(reload=3, queue=3, pool=range(10))
    rig.preempted("a", 0, 1, 2)
    rig.queued("b", 0, 1, 5)
    assert rig.turn() == ["fetch 0", "fetch 1", "fetch 2", "fetch 5"]
    assert rig.core.gauges()["held_cache_slots", "queue"] == 1, (
        "shared chunks are on the victim's account"
    )
    assert rig.left("a") == ["cancel 2"]
    rig.arrived(0)
    assert rig.left("b") == ["drop 0", "cancel 1", "cancel 5"]
    rig.check_idle()


# -- budgets, looks in one turn, fetches under way, and patience ----------------------

#: The scheduler's bounds: looks per turn, and seconds until no request overtakes another.
LOOKS_MAX = 4096
MIB = 1 << 20


def test_ten_thousand_waiting_requests_cost_a_bounded_number_of_looks_per_turn() -> None:
    rig = ReloadRig()
    for number in range(10_000):
        rig.queued(f"r{number}", *range(3 * number, 3 * number + 3))
    rig.preempted("v", *range(100_000, 100_400), in_gpu=lambda _: True)
    looks = 0
    while rig.looks < 400 + 10_000:
        rig.turn()
        assert 0 < rig.looks - looks <= LOOKS_MAX
        looks = rig.looks
    assert rig.turn() == []
    assert rig.looks == looks, "everybody was looked at once: nothing was there"


def test_gpu_memory_is_asked_a_bounded_number_of_times_per_turn() -> None:
    rig = ReloadRig(pool=range(1000))
    asked: list[int] = []

    def in_gpu(chunk: int) -> bool:
        asked.append(chunk)
        return chunk < 500

    for number in range(8):
        rig.preempted(f"p{number}", *range(1000), in_gpu=in_gpu)
    rig.queued("q", *range(1000), in_gpu=in_gpu)
    fetched: list[str] = []
    turns = 0
    while not fetched:
        before = len(asked)
        fetched, turns = rig.turn(), turns + 1
        assert 0 < len(asked) - before <= 256
    assert fetched[0] == "fetch 500", "vLLM finds the chunks before it in GPU memory"
    assert turns <= 1 + 8 * 501 // 256


def test_requests_that_left_are_forgotten_behind_a_head_that_waits() -> None:
    rig = ReloadRig(queue=1, pool=range(2))
    rig.queued("head", 0, 1)
    kept = []
    for number in range(100):

        def in_gpu(_chunk: int) -> bool:
            return False

        kept.append(weakref.ref(in_gpu))
        rig.queued(f"r{number}", 100 + number, in_gpu=in_gpu)
        del in_gpu
        rig.turn()
        rig.left(f"r{number}")
    rig.turn()
    assert sum(one() is not None for one in kept) <= 2
    assert len(rig.core.reload) == 1


def test_fetches_under_way_are_bounded_by_bytes_and_at_least_four() -> None:
    for slot_bytes, fetches in ((64 * MIB, 4), (32 * MIB, 8), (1024 * MIB, 4)):
        rig = ReloadRig(slot_bytes=slot_bytes, pool=range(16))
        rig.queued("a", *range(16))
        assert len(rig.turn()) == fetches
        assert rig.turn() == []
        rig.arrived(0)
        assert rig.turn() == [f"fetch {fetches}"]


# -- changing GPU memory, probes, resets and other requests ---------------------------


def test_chunks_that_all_left_gpu_memory_are_fetched_after_the_next_look_up() -> None:
    rig = ReloadRig(pool=range(4))
    rig.preempted("a", *range(4), in_gpu=lambda _: True)
    assert rig.turn() == []
    rig.core.reload.looked_up("a", 4)
    assert rig.turn() == [], "all of it is there still"
    rig.core.reload.looked_up("a", 0)
    assert rig.turn() == ["fetch 0", "fetch 1", "fetch 2", "fetch 3"]
    looks = rig.looks
    rig.core.reload.looked_up("a", 0)
    assert (rig.turn(), rig.looks) == ([], looks), "once"


def test_chunks_of_a_tail_that_left_gpu_memory_are_fetched_after_the_next_look_up() -> None:
    """vLLM evicts a request's last blocks first: this is how it usually goes."""
    rig = ReloadRig(pool=range(4))
    rig.queued("a", *range(4), in_gpu=lambda _: True)
    assert rig.turn() == []
    rig.core.reload.looked_up("a", 3)
    assert rig.turn() == ["fetch 3"]
    rig.core.reload.looked_up("a", 1)
    assert rig.turn() == ["fetch 1", "fetch 2"]


def test_a_victim_behind_the_head_is_fetched_for_when_its_blocks_are_overwritten() -> None:
    rig = ReloadRig(pool=range(4))
    in_gpu = {0, 1, 2, 3}
    rig.preempted("a", *range(4), in_gpu=lambda chunk: chunk in in_gpu)
    assert rig.turn() == []
    in_gpu -= {2, 3}
    log: list[str] = []
    for second in range(30):
        rig.now_s = float(second)
        log += rig.turn()
    assert log == ["fetch 2", "fetch 3"]


def test_reset_forgets_all_requests_and_later_victims_are_followed() -> None:
    rig = ReloadRig(pool=range(4))
    rig.preempted("a", 0, 1)
    rig.queued("b", 2)
    rig.turn()
    rig.core.reset()
    rig.core.take_commands()
    assert (len(rig.core.reload), rig.turn(), rig.left("a", "b")) == (0, [], [])
    rig.store(0)
    rig.preempted("a", 0, 1)
    assert rig.turn() == ["hold 0"]
    assert rig.left("a") == ["drop 0"]


def test_reset_between_two_turns_empties_the_line() -> None:
    bench = HoldsBench(prefetch_cache_share=0.125)
    bench.in_the_pool(0, 1)
    bench.queued("a", 0)
    bench.queued("b", 1)
    assert numbers_of(bench.fetch().batch.keys) == [0]
    bench.core.reset()
    bench.core.take_commands()
    bench.in_the_pool(2)
    bench.queued("b", 2)  # the same name again
    assert numbers_of(bench.fetch().batch.keys) == [2]
    bench.core.reload.looked_up("a", 0)
    assert bench.fetches() == []


def test_a_probe_skips_held_and_missing_chunks() -> None:
    rig = ReloadRig(pool=[0, 2])
    rig.preempted("a", 0)
    assert rig.turn() == ["fetch 0"]
    rig.core.reload.probe(keys_of(0, 1, 2))
    assert rig.turn() == ["fetch 2"]


# Tokens that a resumed request gets back, counted from recorded scheduler outputs.


def _step(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    preempted: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
    drafts: tuple[str, ...] = (),
) -> Any:
    """Requests as name → (tokens computed before the step, tokens scheduled in it).

    drafts: of these requests all scheduled tokens but the first are drafts.
    """
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={name: n for name, (_, n) in {**new, **cached}.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=c) for name, (c, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[c for c, _ in cached.values()]
        ),
        scheduled_spec_decode_tokens={name: [0] * (cached[name][1] - 1) for name in drafts},
        preempted_req_ids=set(preempted),
        finished_req_ids=set(finished),
    )


class Resumes(ResumeCounter):
    """Give every request so many tokens."""

    def __init__(self, tokens_per_chunk: int = 1, tokens: Callable[[], int] = lambda: 1000) -> None:
        self.counts = Counts()
        super().__init__(lambda name: tokens(), tokens_per_chunk, self.counts)

    def gets(self, loaded: int, recomputed: int, chunk_tokens: int, chunk_tokens_lost: int) -> bool:
        """Whether the request "a" is resumed, with so many tokens of each kind."""
        return self.resumed("a", loaded) and self.counts == {
            ("resumed_tokens", "loaded"): loaded,
            ("resumed_tokens", "recomputed"): recomputed,
            ("resumed_chunk_tokens", "found"): chunk_tokens - chunk_tokens_lost,
            ("resumed_chunk_tokens", "recomputed"): chunk_tokens_lost,
        }


@pytest.mark.parametrize(
    ("unit", "steps", "preemptions", "offers", "gets"),
    [
        (1, [(0, 100), (100, 1)], 1, [(16, 64), (32, 48)], (48, 21, 69, 21)),
        (1, [(0, 100)], 1, [(32, 48)], (0, 20, 68, 20)),
        (1, [(0, 40)], 2, [(0, 32)], (32, 8, 40, 8)),
        (16, [(0, 100)], 1, [(32, 32)], (32, 36, 64, 32)),
        (16, [(0, 60), (60, 1)], 1, [(0, 48)], (48, 13, 48, 0)),
        (16, [(0, 20)], 1, [(16, 32)], (32, 0, 0, 0)),
    ],
    ids=[
        "vLLM found no room at first and asked again",
        "another connector has what was found or GPU memory has as much",
        "preempted twice before it ran",
        "whole chunks outside GPU memory count as chunk tokens",
        "an unfinished last chunk is no loss",
        "another request had more of the prefix",
    ],
)
def test_tokens_of_a_resume(
    unit: int,
    steps: list[tuple[int, int]],
    preemptions: int,
    offers: list[tuple[int, int]],
    gets: tuple[int, int, int, int],
) -> None:
    """steps: tokens computed before each, and in it. offers: tokens in GPU memory, and found."""
    counter = Resumes(unit)
    counter.step(_step(new={"a": steps[0]}))
    for step in steps[1:]:
        counter.step(_step(cached={"a": step}))
    for _ in range(preemptions):
        counter.step(_step(preempted=("a",)))
    for offer in offers:
        counter.offered("a", *offer)
    assert counter.gets(*gets)
    assert not counter.resumed("a", 0)


def test_computed_tokens_of_a_victim_are_known_only_while_it_waits() -> None:
    counter = Resumes()
    counter.step(_step(new={"a": (0, 40), "b": (16, 8)}))
    assert (counter.computed("a"), counter.computed("unknown")) == (0, 0)
    counter.step(_step(preempted=("a", "b")))
    assert (counter.computed("a"), counter.computed("b")) == (40, 24)
    counter.offered("a", 0, 32)
    counter.resumed("a", 0)
    counter.step(_step(cached={"a": (32, 9)}, finished=("b",)))
    assert (counter.computed("a"), counter.computed("b")) == (0, 0)


def test_a_request_preempted_between_two_steps_is_resumed_in_the_next() -> None:
    """`reset_prefix_cache`: the next step names the request as preempted and schedules it."""
    counter = Resumes()
    counter.step(_step(new={"a": (0, 40)}))
    counter.step(_step(preempted=("a",), cached={"a": (0, 41)}))
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") == 41


@pytest.mark.parametrize("accepted", range(6))
def test_accepted_drafts_were_computed(accepted: int) -> None:
    tokens = 29
    counter = Resumes(tokens=lambda: tokens)
    counter.step(_step(new={"a": (0, 28)}))
    counter.step(_step(cached={"a": (28, 6)}, drafts=("a",)))
    tokens += accepted + 1
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") == 29 + accepted


def test_a_request_never_had_more_computed_than_it_has_tokens() -> None:
    """A step that was scheduled ahead of its tokens, and whose answer was dropped."""
    counter = Resumes(tokens=lambda: 28)
    counter.step(_step(new={"a": (0, 28)}))
    counter.step(_step(cached={"a": (28, 1)}))
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") == 28
