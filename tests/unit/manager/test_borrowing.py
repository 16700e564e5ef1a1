# SPDX-License-Identifier: Apache-2.0
"""Other engines' chunks in the real core: attachments, commands, counters, requests that wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.follow.kit import NONE, Others
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    STALE,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.native import Foreign
from vllm_nvmeof_offload.protocol import (
    AttachCommand,
    CancelCommand,
    Command,
    DetachCommand,
    FetchCommand,
    ResetCommand,
)

from .bench import TAG, key, keys_of
from .test_groups import (
    GroupsBench,
)
from .test_holds import HoldsBench
from .test_waiting_requests import ALL, QUESTION, Lobby, T

EIO, ENOENT = 5, 2


class BorrowBench(HoldsBench):
    """A core, and owner 1 with the chunks 0 … 7 in slots 10 … 17; owner 2 has 8 … 15."""

    def __init__(self, cache: int = 8, **config: object) -> None:
        self.others = Others(TAG)
        self.foreign: Foreign = self.others.foreign
        for owner in (1, 2):
            self.others.owner(owner)
        for number in range(16):
            owner = 1 + number // 8
            self.others.offer(key(number), 10 + number, 1000 + number, owner=owner)
        super().__init__(cache, foreign=self.foreign, **config)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.foreign.set_time(self.now_s)

    def step(self) -> list[Command]:
        self.core.turn()
        return self.core.take_commands()

    def attach(self) -> None:
        """The ranks have opened what this step's commands name first."""
        for command in self.step():
            assert isinstance(command, AttachCommand)
            self.done(command.op)

    def failures(self) -> dict[str, float]:
        return {
            series[1]: count
            for series, count in self.core.counters.items()
            if series[0] == "borrow_failures"
        }


def counted(bench: BorrowBench | GroupsBench, name: str) -> dict[str, float]:
    """A counter with one label, without zeros."""
    counters = bench.core.counters.items()
    return {series[1]: count for series, count in counters if series[0] == name and count}


# -- attachments ----------------------------------------------------------------------


def test_what_one_rank_cannot_open_is_not_borrowed_from_by_any() -> None:
    bench = BorrowBench(ranks=2)
    load = bench.load(0)
    (attach,) = bench.step()
    assert isinstance(attach, AttachCommand)
    bench.report(attach.op, (0, io_error(ENOENT)))
    assert bench.source(1) is None
    assert bench.source(8) is Source.SHARED, "another owner"
    assert bench.step() == [], "the other rank may be opening its files"
    bench.report(attach.op)
    assert bench.step() == [DetachCommand(1)]
    bench.done(load.op, (0, io_error(ENOENT)))
    assert bench.failures() == {"attach": 1, "io_error": 1}
    assert bench.core.counters["recomputed_tokens", "load_failed"] == 1
    bench.others.owner(1, uuid=b"w" * 16)
    assert bench.source(1) is Source.SHARED
    bench.load(1)
    (again,) = bench.step()
    assert again == AttachCommand(again.op, 1, 11, b"w" * 16)  # type: ignore[union-attr]
    bench.done(again.op)  # type: ignore[union-attr]
    assert bench.source(2) is Source.SHARED


def test_every_rank_may_fail_to_attach() -> None:
    bench = BorrowBench(ranks=2)
    bench.load(0)
    (attach,) = bench.step()
    assert isinstance(attach, AttachCommand)
    bench.done(attach.op, (0, io_error(ENOENT)))
    assert bench.step() == [DetachCommand(1)]
    assert bench.failures() == {"attach": 1}
    assert bench.core.gauges()["ops"] == 1, "the load"


def test_an_owner_that_is_gone_is_detached_in_the_next_step() -> None:
    """Loads of this one may name it."""
    bench = BorrowBench()
    bench.load(0)
    bench.others.owner(1, state=NONE)
    (attach,) = bench.step()
    assert isinstance(attach, AttachCommand)
    assert bench.core.has_pending_work()
    assert bench.step() == [DetachCommand(1)]
    bench.done(attach.op)
    assert bench.step() == []


def test_an_attach_that_fails_after_the_owner_is_gone_changes_nothing() -> None:
    bench = BorrowBench()
    bench.load(0)
    (attach,) = bench.step()
    assert isinstance(attach, AttachCommand)
    bench.others.owner(1, state=NONE)
    bench.step()
    assert bench.step() == [DetachCommand(1)]
    bench.done(attach.op, (0, io_error(ENOENT)))
    assert bench.step() == []


# -- weights and resets ---------------------------------------------------------------


def test_a_reset_asks_for_what_is_written_from_then_on() -> None:
    bench = BorrowBench(weights_never_change=True)
    bench.load(0)
    assert bench.core.reset()
    assert bench.others.writer.version_asked == 1
    assert bench.hits(range(16)) == []
    attach, reset = bench.step()
    assert isinstance(attach, AttachCommand)
    assert isinstance(reset, ResetCommand)
    bench.others.owner(2, version=1)
    assert bench.hits(range(16)) == list(range(8, 16))


def test_a_second_reset_voids_what_others_have_offered_since_the_first() -> None:
    """Although it sends nothing: no step has taken the first one, and nothing of ours is left."""
    bench = BorrowBench(weights_never_change=True)
    assert bench.core.reset()
    bench.others.owner(1, version=bench.others.writer.version_asked)
    assert bench.core.lookup(key(0)) is Source.SHARED
    assert not bench.core.reset()
    assert bench.core.lookup(key(0)) is None
    bench.others.owner(1, version=bench.others.writer.version_asked)
    assert bench.core.lookup(key(0)) is Source.SHARED
    assert [type(command) for command in bench.step()] == [ResetCommand]


def test_weights_that_have_changed_accept_nobody_any_more() -> None:
    bench = BorrowBench(weights_never_change=True)
    bench.core.weights_changed()
    bench.core.reset()
    bench.others.owner(1, version=1)
    assert bench.hits(range(16)) == []
    may_change = BorrowBench()
    assert may_change.hits(range(16)) == list(range(16))
    may_change.core.reset()
    may_change.others.owner(1, version=1)
    assert may_change.hits(range(16)) == []


# -- weights that the operator names --------------------------------------------------

NAMED = b"tag of step-1200"


def resets_of(bench: BorrowBench) -> list[tuple[bytes, bool]]:
    """Tag and `named` of the resets that a step sends."""
    return [(one.tag, one.named) for one in bench.step() if isinstance(one, ResetCommand)]


@pytest.mark.parametrize("never_change", [True, False])
def test_weights_with_a_name_share_again_with_their_like(never_change: bool) -> None:
    """With all that others have stored under this name, before and after."""
    bench = BorrowBench(weights_never_change=never_change)
    bench.core.weights_changed()
    assert bench.core.reset()
    ((random, named),) = resets_of(bench)
    assert not named
    bench.others.owner(1, version=1, tag=NAMED)
    assert bench.hits(range(16)) == []
    assert bench.core.name_weights(NAMED)
    assert bench.core.reset()
    assert resets_of(bench) == [(NAMED, True)]
    assert bench.hits(range(16)) == [], "what the follower knew is void"
    writer = bench.others.writer
    assert writer.version_asked == writer.version_of_all == 2
    bench.others.owner(1, version=2, tag=NAMED)
    bench.others.owner(2, version=2)  # with the weights of the start
    assert bench.hits(range(16)) == list(range(8))
    bench.others.owner(2, version=2, tag=random)
    assert bench.hits(range(16)) == list(range(8))


def test_the_name_of_weights_that_have_it_already_voids_nothing() -> None:
    bench = BorrowBench()
    assert bench.core.name_weights(NAMED), "the weights of the start have no name"
    assert bench.core.reset()
    assert not bench.core.name_weights(NAMED)
    assert bench.core.name_weights(NAMED[::-1])
    assert bench.core.name_weights(NAMED)
    bench.core.weights_changed()
    assert bench.core.name_weights(NAMED), "they may be others under the same name"


def test_a_plain_reset_keeps_the_name_and_takes_what_is_written_later() -> None:
    bench = BorrowBench()
    bench.core.name_weights(NAMED)
    bench.core.reset()
    bench.others.owner(1, version=1, tag=NAMED)
    assert resets_of(bench) == [(NAMED, True)]
    assert bench.source(0) is Source.SHARED
    bench.store(100)
    assert bench.core.reset()
    assert resets_of(bench) == [(NAMED, True)]
    assert bench.source(0) is None
    writer = bench.others.writer
    assert (writer.version_asked, writer.version_of_all) == (2, 1), "only what is written later"
    bench.others.owner(1, version=2, tag=NAMED)
    assert bench.source(0) is Source.SHARED


def test_new_weights_after_a_name_have_none() -> None:
    bench = BorrowBench(weights_never_change=True)
    bench.core.name_weights(NAMED)
    bench.core.reset()
    bench.others.owner(1, version=1, tag=NAMED)
    assert bench.source(0) is Source.SHARED
    bench.core.weights_changed()
    bench.core.reset()
    assert bench.source(0) is None, "before any step"
    bench.others.owner(1, version=2, tag=NAMED)
    assert bench.source(0) is None
    assert [named for _, named in resets_of(bench)] == [True, False]


def test_a_second_reset_before_a_step_keeps_what_others_have_under_a_new_name() -> None:
    """vLLM resets a connector with KV events twice."""
    bench = BorrowBench()
    bench.core.name_weights(NAMED)
    assert bench.core.reset()
    assert not bench.core.reset()
    writer = bench.others.writer
    assert writer.version_asked == writer.version_of_all == 1
    assert resets_of(bench) == [(NAMED, True)]
    assert bench.core.reset(), "that one is sent"
    assert (writer.version_asked, writer.version_of_all) == (2, 1)


# -- counters -------------------------------------------------------------------------


def test_what_is_borrowed_is_counted_when_every_rank_has_it() -> None:
    bench = BorrowBench(ranks=2, tokens_per_chunk=16, land_cache_share=0.25)
    bench.store(100)
    load = bench.load(100, 0, 1, 2)
    assert counted(bench, "loaded_tokens") == {"cpu": 16, "shared": 48}
    assert (load.batch.cache >= 0).tolist() == [True, True, True, False]
    bench.report(load.op, rows=[0, 1, 2, 3])
    assert bench.core.counters["borrowed_chunks"] == 0
    bench.report(load.op, (2, STALE), rows=[0, 1, 2, 3])
    assert bench.core.counters["borrowed_chunks"] == 2
    failed = bench.core.counters["recomputed_tokens", "load_failed"]
    assert failed == 32, "vLLM computes on from the third chunk"
    assert bench.failures() == {"stale": 1}
    assert [bench.source(number) for number in range(3)] == [
        *(Source.CPU, None, Source.SHARED),
    ]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (io_error(EIO), "io_error"),
        (CHECKSUM_MISMATCH, "checksum_mismatch"),
        (STALE, "stale"),
        (DEADLINE, "deadline"),
    ],
)
def test_failures_of_others_chunks_are_not_our_targets(outcome: Outcome, reason: str) -> None:
    bench = BorrowBench()
    bench.done(bench.load(0).op, (0, outcome))
    assert bench.failures() == {reason: 1}
    assert not [series for series in bench.core.counters if series[0] == "failed_chunks"]
    assert bench.core.last_failures == {}


def test_a_cancelled_borrow_is_no_failure_of_the_owner() -> None:
    bench = BorrowBench()
    bench.done(bench.load(0).op, (0, CANCELLED))
    assert bench.failures() == {}
    assert bench.core.counters["failed_chunks", "load", "cancelled", "0"] == 1
    assert bench.source(0) is Source.SHARED


# -- requests that wait ---------------------------------------------------------------


def test_a_fetch_of_others_chunks_is_cancelled_when_nobody_wants_it() -> None:
    bench = BorrowBench()
    bench.queued("a", 0)
    bench.core.turn()
    bench.core.reload.left("a")
    assert bench.source(0) is Source.SHARED
    bench.attach()
    bench.queued("b", 0, 1)
    (fetch,) = bench.step()
    assert isinstance(fetch, FetchCommand)
    bench.core.reload.left("b")
    (cancel,) = bench.step()
    assert isinstance(cancel, CancelCommand)
    assert cancel.indexes is not None
    assert sorted(cancel.indexes) == [0, 1]
    assert bench.source(0) is Source.SHARED
    bench.queued("c", 0)
    (again,) = bench.step()
    assert isinstance(again, FetchCommand)
    bench.done(fetch.op)  # it had ended already
    assert bench.held() == [0]
    bench.done(again.op)
    assert bench.source(0) is Source.CPU
    bench.core.reload.left("c")
    assert bench.ended() == {"cancelled": 3, "wasted": 1}
    bench.check_idle()


def test_a_declined_pool_is_probed_with_others_chunks_too() -> None:
    bench = BorrowBench()
    bench.core.reload.probe(keys_of(0, 1))
    _, fetch = bench.step()
    assert isinstance(fetch, FetchCommand)
    assert len(fetch.batch) == 2


# -- remembered answers ---------------------------------------------------------------


class BorrowLobby(Lobby):
    """A request for three chunks, of which others have the first two."""

    def __init__(self) -> None:
        self.others = Others(TAG)
        self.others.owner(1)
        for number in range(2):
            self.others.offer(key(number), number)
        super().__init__(prefetch_cache_share=0.0, foreign=self.others.foreign)
        self.add("a", 0, 1, 2, prefetch=False)
        self.look_up("a", QUESTION)

    def recall(self, name: str = "a") -> int | None:
        answer = self.look_ups.recall(name, QUESTION)
        return None if answer is None else answer.found


def test_an_answer_is_void_at_a_reset() -> None:
    lobby = BorrowLobby()
    lobby.core.reset()
    assert lobby.recall() is None
    assert lobby.look_up("a", replace(QUESTION, sources=ALL)) == 0


def test_a_decision_weighs_what_others_have() -> None:
    lobby = BorrowLobby()
    find = lobby.core.find(keys_of(0, 1))
    assert (find.leading_cpu, list(find.read_bytes), find.tokens) == (0, [2 * 8192], 2 * T)


# -- events ---------------------------------------------------------------------------


def test_a_borrowed_chunk_comes_to_the_cpu_tier_and_leaves_it() -> None:
    bench = BorrowBench(cache=1, kv_events=True, land_cache_share=1.0)
    load = bench.load(0)
    assert not bench.core.changed_keys
    bench.done(load.op)
    bench.done(bench.load(1).op)
    changes = [(one.tier, one.removed, one.keys) for one in bench.core.take_changes()]
    assert changes == [
        (Source.CPU, False, keys_of(0)),
        (Source.CPU, True, keys_of(0)),
        (Source.CPU, False, keys_of(1)),
    ]


def test_places_in_commands_are_the_owners() -> None:
    bench = BorrowBench(land_cache_share=0.0)
    load = bench.load(0, 8)
    owners = load.batch.places >> 48
    assert (owners.tolist(), (load.batch.places & 0xFFFFFFFF).tolist()) == ([1, 2], [10, 18])
    assert np.all(load.batch.cache == -1)
