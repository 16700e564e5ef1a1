# SPDX-License-Identifier: Apache-2.0
"""`bench cost`: goals on made-up samples, settings, waiting for quiet, a canned server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.cost import (
    Settings,
    extra_config,
    measure,
    prompts_of,
    server_spec,
    wait_until_quiet,
)
from vllm_nvmeof_bench.cost import ask as ask_at_once
from vllm_nvmeof_bench.reports.cost import (
    ARMS,
    goals,
    ratios_of,
    scheduler_share,
    within,
)
from vllm_nvmeof_bench.results import (
    BenchError,
    Goal,
    Paired,
    median_of,
    missed,
    ratios,
)
from vllm_nvmeof_bench.servers.client import Client

from tests.unit.bench.made_up_costs import CONDITIONS, everything, rounds, sample
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.units import MIB


def row(rows: list[Goal], start: str) -> Goal:
    (found,) = (one for one in rows if one.name.startswith(start))
    return found


def test_noise_that_hits_both_runs_of_a_pair_cancels() -> None:
    noise = [1.0, 7.0, 0.3, 2.0, 5.0, 11.0]
    found = ratios([1.05 * value for value in noise], noise)
    assert found.middle == pytest.approx(1.05)
    assert found.interval == pytest.approx((1.05, 1.05))
    assert found.n == 6
    assert not found.contains(1.0)


def test_the_interval_is_a_reproducible_bootstrap_of_the_median() -> None:
    values = [0.90, 0.95, 0.99, 1.00, 1.01, 1.02, 1.03, 1.10, 1.20]
    found = ratios(values, [1.0] * 9)
    assert found.middle == pytest.approx(1.01)
    # The median of nine draws is at most the k-th smallest when five draws are: a binomial sum,
    # 0.1 % for the smallest, 3.0 % for the 2nd. So 2.5 % lie below the 2nd; above, the 8th.
    assert found.interval == pytest.approx((0.95, 1.10))
    assert found == ratios(values, [1.0] * 9)
    assert found.contains(1.0)


def test_the_interval_covers_the_median_as_often_as_stated() -> None:
    import numpy as np

    dice = np.random.default_rng(1)
    covered = sum(
        ratios(np.exp(dice.normal(0.03, 0.05, 20)).tolist(), [1.0] * 20).contains(np.exp(0.03))
        for _ in range(40)
    )
    assert covered >= 34


def test_few_rounds_have_a_median_and_no_interval() -> None:
    found = ratios([1.0, 1.1, 1.3], [1.0] * 3)
    assert found.middle == pytest.approx(1.1)
    assert found.interval is None
    assert not found.contains(1.1)


def test_only_rounds_that_both_arms_have_are_paired() -> None:
    samples = [sample("none", "single", i, 1.0) for i in range(6)]
    samples += [sample("ours", "single", i, 2.0) for i in range(3, 9)]
    found = ratios_of(samples, "ours", "none", "single", "ttft_s")
    assert found is not None
    assert (found.n, found.middle) == (3, 2.0)
    assert ratios_of(samples, "ours", "none", "batch", "ttft_s") is None
    assert ratios_of(samples, "ours", "none", "single", "scheduler_us_per_step") is None
    assert ratios_of(samples, "ours", "none", "single", "written_bytes_per_1k_tokens") is None


@pytest.mark.parametrize(
    ("ratio", "more_is_worse", "fine"),
    [
        (Paired(1.019, (1.018, 1.02), 9), True, True),
        (Paired(1.021, (1.005, 1.04), 9), True, False),
        (Paired(1.05, (0.99, 1.12), 9), True, True),  # inside the noise
        (Paired(0.90, (0.88, 0.92), 9), True, True),  # faster
        (Paired(0.90, (0.88, 0.92), 9), False, False),
        (Paired(0.985, (0.983, 0.987), 9), False, True),
        (Paired(1.10, (1.05, 1.15), 9), False, True),
        (Paired(1.03, None, 2), True, False),
    ],
)
def test_within_two_per_cent_or_inside_the_noise(
    ratio: Paired, more_is_worse: bool, fine: bool
) -> None:
    assert within(ratio, more_is_worse) is fine


def test_goals_are_reached_by_good_samples() -> None:
    rows = goals(everything(), CONDITIONS)
    assert len(rows) == 6
    assert all(one.reached is True for one in rows), missed(rows)
    assert row(rows, "TTFT").shown == "1.010 (1.010 to 1.010)"
    assert row(rows, "our scheduler / steps, batch").shown == "1.00%"


def test_a_cost_that_the_noise_does_not_explain_is_missed() -> None:
    rows = goals(everything(ours=1.05), CONDITIONS)
    assert [one.name.split()[0] for one in missed(rows)] == ["TTFT,", "throughput,"]


def test_a_cost_within_the_noise_is_reported_as_such() -> None:
    seconds = (0.5, 2.0, 1.05, 3.0, 0.7, 1.5, 1.1, 0.9)
    samples = rounds("none", "single")
    samples += [sample("ours", "single", i, noise) for i, noise in enumerate(seconds)]
    samples = [
        replace(one, ttft_s=one.ttft_s * 1.2 if one.arm == "ours" else one.ttft_s)
        for one in samples
    ]
    found = row(goals(samples, {}), "TTFT")
    assert found.reached is True
    assert found.shown.endswith(", inside the noise")


def test_an_unfair_run_is_missed() -> None:
    samples = everything()
    for unfair in ({"hits": 32}, {"preemptions": 1}, {"loaded_bytes": 4096}):
        rows = goals([replace(samples[0], **unfair), *samples[1:]], CONDITIONS)  # type: ignore[arg-type]
        assert [one.name for one in missed(rows)] == [row(rows, "cache hits").name]
    rows = goals(samples, {"idle_cores": {"none": 0.0, "ours": 0.9}})
    assert (row(rows, "cores").shown, row(rows, "cores").where) == ("0.900", "ours")
    assert row(rows, "cores").reached is False


def test_an_unmeasured_goal_is_neither_reached_nor_missed() -> None:
    rows = goals([], {})
    assert len(rows) == 6
    assert all(one.reached is None for one in rows)
    unknown = goals(everything(known=False), CONDITIONS)
    assert [one.reached for one in unknown] == [True, True, None, None, True, True]


def test_the_schedulers_share_is_computed_over_all_rounds() -> None:
    samples = [
        sample("ours", "batch", 0, 1.0, scheduler_s=0.1, step_s=1.0),
        sample("ours", "batch", 1, 1.0, scheduler_s=0.1, step_s=3.0),
    ]
    assert scheduler_share(samples, "ours", "batch") == pytest.approx(0.05)
    samples.append(sample("ours", "batch", 2, 1.0))
    assert scheduler_share(samples, "ours", "batch") is None


def test_figures_are_per_step_and_per_1000_tokens() -> None:
    one = sample("ours", "batch", 0, 2.0, tokens=500, scheduler_s=0.01, scheduler_steps=40)
    one = replace(one, step_tokens=2000)
    assert one.scheduler_us_per_step == pytest.approx(250.0)
    assert one.scheduler_us_per_1k_tokens == pytest.approx(5000.0)
    assert one.tokens_per_s == 250.0
    assert median_of([one], "cpu_s_per_1k_tokens", arm="ours", case="batch") == pytest.approx(8.0)
    assert one.stored_bytes_per_1k_tokens == 60 * MIB


def test_settings_refuse_incomparable_runs() -> None:
    with pytest.raises(BenchError, match="no arm 'tier'"):
        Settings(arms=("none", "tier"))
    for arms in (("ours",), ("none",), ()):
        with pytest.raises(BenchError, match="nothing to"):
            Settings(arms=arms)
    with pytest.raises(BenchError, match="pairs"):
        Settings(pairs=0)


def test_everything_fits_in_the_gpu_cache_several_times() -> None:
    settings = Settings()
    assert settings.arms == ("none", "ours", "ours_prompt_only")
    assert (settings.gpu_blocks - 1) * 32 >= 4 * settings.tokens_at_once
    assert settings.model_len > settings.single_prompt_tokens + settings.single_answer_tokens


def test_too_little_space_is_reported_before_a_server_starts(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="give another --dir"):
        measure(Settings(directory=tmp_path / "disk", pool_bytes=1 << 60), tmp_path / "cost.json")
    assert list(tmp_path.iterdir()) == []


def test_the_arms_differ_only_as_their_names_state(tmp_path: Path) -> None:
    settings = Settings(arms=ARMS)
    specs = {arm: server_spec(arm, settings, tmp_path / "model", tmp_path) for arm in ARMS}
    commands = {arm: spec.command(1) for arm, spec in specs.items()}
    bare = commands["none"]
    assert all(command[: len(bare)] == bare for command in commands.values())
    default = parse_config({})
    extras = {
        arm: parse_config({**extra_config(arm, settings, tmp_path / arm)}) for arm in ARMS[1:]
    }
    changed = {
        arm: {key for key, value in extra if value != getattr(default, key)} - {"targets"}
        for arm, extra in extras.items()
    }
    assert changed["ours"] == {"pool_bytes"}
    assert changed["ours_prompt_only"] == {"pool_bytes", "offload_prompt_only"}
    assert extras["ours_prompt_only"].offload_prompt_only is True


class Machine:
    """A clock that only sleeping moves, and a server that works until `busy_until_s`."""

    def __init__(self, busy_until_s: float) -> None:
        self.now_s = 100.0
        self.busy_until_s = 100.0 + busy_until_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def cpu_s(self) -> float:
        return 7.0 + min(self.now_s, self.busy_until_s) - 100.0


@pytest.mark.parametrize(("busy_s", "waited_s"), [(0.0, 0.0), (0.3, 0.5), (2.0, 2.0)])
def test_a_server_is_quiet_when_its_cpu_time_stops_growing(busy_s: float, waited_s: float) -> None:
    machine = Machine(busy_s)
    assert wait_until_quiet(machine.cpu_s, machine.now, machine.sleep) == waited_s


def test_a_server_that_never_becomes_quiet_is_an_error() -> None:
    machine = Machine(1e9)
    with pytest.raises(BenchError, match="still uses 100% of a core"):
        wait_until_quiet(machine.cpu_s, machine.now, machine.sleep)


def test_prompts_are_the_same_for_every_arm_and_never_seen_before() -> None:
    settings = Settings()
    assert prompts_of(settings, "batch", 3) == prompts_of(settings, "batch", 3)
    seen = [
        tuple(prompt[:32])
        for case in ("single", "batch")
        for number in range(20)
        for prompt in prompts_of(settings, case, number)
    ]
    assert len(seen) == 20 * (1 + settings.batch_requests) == len(set(seen))


TOKEN = '{"id":"x","choices":[{"index":0,"text":"a"}]}'
USAGE = '{"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'


def ask(
    events: Sequence[str], status: str = "200 OK", prompts: int = 1
) -> tuple[tuple[float, float], int]:
    """Ask a server that answers every request with `events`; also return its number of requests."""
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        asked += 1
        body = "".join(f"data: {event}\n\n" for event in events)
        lines = (f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close")
        writer.write("\r\n".join((*lines, "", body)).encode())
        await writer.drain()
        writer.close()

    async def both() -> tuple[float, float]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            client = Client(f"http://{host}:{port}", model="made-up")
            try:
                return await ask_at_once(client, [[1, 2, 3]] * prompts, 2)
            finally:
                await client.close()

    return asyncio.run(both()), asked


def test_tokens_are_timed_and_the_usage_event_is_no_token() -> None:
    (ttft_s, seconds), asked = ask([TOKEN, TOKEN, USAGE, "[DONE]"], prompts=3)
    assert asked == 3
    assert 0 < ttft_s <= seconds


@pytest.mark.parametrize(
    ("events", "status", "needed"),
    [
        ([TOKEN, "[DONE]"], "200 OK", "1 of 2 tokens came"),
        ([USAGE, "[DONE]"], "200 OK", "2 of 2 tokens came"),
        ([TOKEN, USAGE.replace(":2}", ":1}"), "[DONE]"], "200 OK", "1 of 2 tokens came"),
        (['{"error":{"message":"made up"}}'], "200 OK", "made up"),
        (["overloaded"], "503 Service Unavailable", "HTTP 503: data: overloaded"),
    ],
)
def test_an_incomplete_answer_is_an_error(events: Sequence[str], status: str, needed: str) -> None:
    with pytest.raises(BenchError, match=needed):
        ask(events, status)


def test_a_stopped_server_is_an_error() -> None:
    async def gone() -> None:
        server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        client = Client(f"http://127.0.0.1:{port}", model="made-up")
        try:
            await ask_at_once(client, [[1]], 2)
        finally:
            await client.close()

    with pytest.raises(BenchError, match="a request failed"):
        asyncio.run(gone())
