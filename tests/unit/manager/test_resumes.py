# SPDX-License-Identifier: Apache-2.0
"""Tokens that a resumed request gets back, counted from recorded scheduler outputs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload.manager.requests import ResumeCounter
from vllm_nvmeof_offload.metrics import Counts


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


def test_loaded_and_recomputed_tokens_of_a_resume() -> None:
    counter = Resumes()
    counter.step(_step(new={"a": (0, 100)}))
    counter.step(_step(cached={"a": (100, 1)}))
    counter.step(_step(preempted=("a",)))
    counter.offered("a", 16, 64)
    counter.offered("a", 32, 48)  # vLLM found no room at first and asked again
    assert counter.gets(48, 21, 69, 21)
    assert not counter.resumed("a", 0)


def test_what_vllm_does_not_have_us_load_is_not_counted_as_loaded() -> None:
    """Another connector has it, or GPU memory has as much."""
    counter = Resumes()
    counter.step(_step(new={"a": (0, 100)}))
    counter.step(_step(preempted=("a",)))
    counter.offered("a", 32, 48)
    assert counter.gets(loaded=0, recomputed=20, chunk_tokens=68, chunk_tokens_lost=20)


def test_a_first_admission_is_no_resume() -> None:
    counter = Resumes()
    counter.offered("a", 0, 64)
    assert not counter.resumed("a", 0)


def test_two_preemptions_before_a_run_count_once() -> None:
    counter = Resumes()
    counter.step(_step(new={"a": (0, 40)}))
    counter.step(_step(preempted=("a",)))
    counter.step(_step(preempted=("a",)))
    counter.offered("a", 0, 32)
    assert counter.gets(32, 8, 40, 8)


def test_a_request_that_ends_while_preempted_is_forgotten() -> None:
    counter = Resumes()
    counter.step(_step(new={"a": (0, 40)}))
    counter.step(_step(preempted=("a",)))
    counter.step(_step(finished=("a",)))
    counter.offered("a", 0, 32)
    assert not counter.resumed("a", 0)


def test_chunk_tokens_are_those_of_full_chunks_outside_gpu_memory() -> None:
    counter = Resumes(tokens_per_chunk=16)
    counter.step(_step(new={"a": (0, 100)}))
    counter.step(_step(preempted=("a",)))
    counter.offered("a", 32, 32)
    assert counter.gets(loaded=32, recomputed=36, chunk_tokens=64, chunk_tokens_lost=32)


def test_an_unfinished_last_chunk_is_no_loss() -> None:
    counter = Resumes(tokens_per_chunk=16)
    counter.step(_step(new={"a": (0, 60)}))
    counter.step(_step(cached={"a": (60, 1)}))
    counter.step(_step(preempted=("a",)))
    counter.offered("a", 0, 48)
    assert counter.gets(48, 13, 48, 0)


def test_finding_more_than_was_computed_is_no_negative_loss() -> None:
    """Another request had the same prefix, and more of it."""
    counter = Resumes(tokens_per_chunk=16)
    counter.step(_step(new={"a": (0, 20)}))
    counter.step(_step(preempted=("a",)))
    counter.offered("a", 16, 32)
    assert counter.gets(32, 0, 0, 0)


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


def test_a_victim_preempted_during_its_load_keeps_its_computed_tokens() -> None:
    counter = Resumes()
    counter.step(_step(new={"a": (0, 40)}))
    counter.step(_step(preempted=("a",)))
    counter.offered("a", 0, 32)
    counter.step(_step(cached={"a": (32, 1)}))  # ran again before anybody asked what it got
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") == 40


def test_a_request_preempted_between_two_steps_is_resumed_in_the_next() -> None:
    """`reset_prefix_cache`: the next step names the request as preempted and schedules it."""
    counter = Resumes()
    counter.step(_step(new={"a": (0, 40)}))
    counter.step(_step(preempted=("a",), cached={"a": (0, 41)}))
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") == 41


def test_rejected_drafts_were_not_computed() -> None:
    """28 tokens and one answered; then one step computes that one and five drafts."""
    tokens = 29
    counter = Resumes(8, lambda: tokens)
    counter.step(_step(new={"a": (0, 28)}))
    counter.step(_step(cached={"a": (28, 6)}, drafts=("a",)))
    tokens = 30  # every draft was rejected: only the token that was sampled instead is new
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") == 29
    counter.offered("a", 16, 0)
    assert counter.gets(loaded=0, recomputed=13, chunk_tokens=8, chunk_tokens_lost=8)


@pytest.mark.parametrize("accepted", range(6))
def test_accepted_drafts_were_computed(accepted: int) -> None:
    tokens = 29
    counter = Resumes(tokens=lambda: tokens)
    counter.step(_step(new={"a": (0, 28)}))
    counter.step(_step(cached={"a": (28, 6)}, drafts=("a",)))
    tokens += accepted + 1
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") == 29 + accepted


def test_tokens_of_a_step_that_ends_after_the_preemption_are_counted() -> None:
    """Asynchronous scheduling: the step's answer comes when the next step is scheduled."""
    tokens = 29
    counter = Resumes(tokens=lambda: tokens)
    counter.step(_step(new={"a": (0, 28)}))
    counter.step(_step(cached={"a": (28, 6)}, drafts=("a",)))
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") <= tokens
    tokens = 33
    assert counter.computed("a") == 32


def test_drafts_of_an_earlier_step_do_not_matter() -> None:
    counter = Resumes(tokens=lambda: 40)
    counter.step(_step(new={"a": (0, 28)}))
    counter.step(_step(cached={"a": (28, 6)}, drafts=("a",)))
    counter.step(_step(cached={"a": (29, 1)}))  # vLLM has taken back what was rejected
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") == 30


def test_a_request_never_had_more_computed_than_it_has_tokens() -> None:
    """A step that was scheduled ahead of its tokens, and whose answer was dropped."""
    counter = Resumes(tokens=lambda: 28)
    counter.step(_step(new={"a": (0, 28)}))
    counter.step(_step(cached={"a": (28, 1)}))
    counter.step(_step(preempted=("a",)))
    assert counter.computed("a") == 28
