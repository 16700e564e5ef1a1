# SPDX-License-Identifier: Apache-2.0
"""What a resumed request gets back is counted from recorded scheduler outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_nvmeof_offload.manager.resumes import ResumeCounter


def _step(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    preempted: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
) -> Any:
    """Requests as name → (tokens computed before the step, tokens scheduled in it)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={name: n for name, (_, n) in {**new, **cached}.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=c) for name, (c, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[c for c, _ in cached.values()]
        ),
        preempted_req_ids=set(preempted),
        finished_req_ids=set(finished),
    )


def test_reloaded_and_recomputed_tokens_of_a_resume() -> None:
    counter = ResumeCounter()
    counter.step(_step(new={"a": (0, 100)}))
    counter.step(_step(cached={"a": (100, 1)}))
    counter.step(_step(preempted=("a",)))
    counter.offered("a", 16, 64)
    counter.offered("a", 32, 48)  # vLLM found no room at first and asked again
    assert counter.resumed("a") == (48, 21)
    assert counter.resumed("a") is None


def test_a_first_admission_is_no_resume() -> None:
    counter = ResumeCounter()
    counter.offered("a", 0, 64)
    assert counter.resumed("a") is None


def test_preempted_twice_before_it_ran_again() -> None:
    counter = ResumeCounter()
    counter.step(_step(new={"a": (0, 40)}))
    counter.step(_step(preempted=("a",)))
    counter.step(_step(preempted=("a",)))
    counter.offered("a", 0, 32)
    assert counter.resumed("a") == (32, 8)


def test_a_request_that_ends_while_preempted_is_forgotten() -> None:
    counter = ResumeCounter()
    counter.step(_step(new={"a": (0, 40)}))
    counter.step(_step(preempted=("a",)))
    counter.step(_step(finished=("a",)))
    counter.offered("a", 0, 32)
    assert counter.resumed("a") is None
