# SPDX-License-Identifier: Apache-2.0
"""New weights in an engine that always has a running request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.e2e.shapes.models import make

#: Steps of the long request before the weights change: more than two chunks of answers.
_STEPS_BEFORE = 150


class SteadyEngine:
    """`LLM`'s engine, stepped by hand: a long request runs during all other requests."""

    def __init__(self, llm: Any, long: dict[str, Any]) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._answers: dict[str, list[int]] = {}
        self._numbers = self._names()
        self._long = self._add(long)
        #: Chunks of 64 tokens that the long request has stored before the weights change.
        self.chunks_before_max = (len(long["prompt"]) + _STEPS_BEFORE) // 64
        for _ in range(_STEPS_BEFORE):
            self._step()

    def reload(self, kind: str) -> None:
        """Load the weights of another model into this one by vLLM's API."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(make(kind))})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask while the long request runs."""
        name = self._add(request)
        while name not in self._answers:
            self._step()
        assert self._long not in self._answers, "the long request is not long enough"
        return {"tokens": self._answers[name], "logprobs": [], "gaps": []}

    def finish(self) -> dict[str, Any]:
        """Run the long request to its end."""
        while self._long not in self._answers:
            self._step()
        return {"tokens": self._answers[self._long], "logprobs": [], "gaps": []}

    def _add(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True)
        name = next(self._numbers)
        self._engine.add_request(name, {"prompt_token_ids": request["prompt"]}, sampling)
        return name

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._answers[output.request_id] = list(output.outputs[0].token_ids)

    def _names(self) -> Iterator[str]:
        number = 0
        while True:
            yield f"steady-{number}"
            number += 1
