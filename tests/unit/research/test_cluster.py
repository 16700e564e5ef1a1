# SPDX-License-Identifier: Apache-2.0
"""The simulated cluster: its clock, its links, and the rules of the product that it plays."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.results import BenchError, rows_in
from vllm_nvmeof_bench.traces import read_trace

from examples.dual_path import choose_decode, choose_helpers, choose_prefill
from research.cluster import events, measure, real
from research.cluster.__main__ import app
from research.cluster.agents import Agent, Means, described, drawn_agents, recorded_agents
from research.cluster.events import PATHS, Cluster, Given, Rules
from research.cluster.lanes import Lane, SharedLane, balance
from research.cluster.machines import KNOWN, Machines, read_machines
from research.cluster.measure import Settings, carried, run
from research.cluster.paper import capacity, gains, goals, rows
from research.cluster.report import Sample
from research.cluster.tiers import Sizes, Tiers
from tests.unit.bench.made_up import agentic, mooncake
from vllm_nvmeof_offload import native
from vllm_nvmeof_offload.manager.load_or_recompute import Decision

#: A turn reads for some ms, computes for a few and decodes for tens.
SMALL = read_machines(KNOWN, "27b-1p1d")


def crowd(count: int, seed: int = 1, turns: int = 12) -> list[Agent]:
    """Agents whose contexts grow to a few ten thousand tokens."""
    rng = random.Random(seed)
    agents = []
    for _ in range(count):
        hits, new, answers, context = [], [], [], 0
        for turn in range(rng.randint(2, turns)):
            added = rng.randint(200, 900) if turn else rng.randint(8000, 30000)
            hit = context // 64 * 64
            hits.append(hit)
            new.append(context + added - hit)
            answers.append(rng.randint(5, 60))
            context += added + answers[-1]
        agents.append(Agent(tuple(hits), tuple(new), tuple(answers), (0.0,) * len(new)))
    return agents


def played(
    machines: Machines, rules: Rules, agents: list[Agent], finds: Any = None
) -> tuple[Cluster, events.Outcome]:
    starts_s = [0.01 * number for number in range(len(agents))]
    cluster = Cluster(machines, rules, agents, starts_s, finds or Given(agents, machines.local))
    return cluster, cluster.run()


# -- links and the router ---------------------------------------------------------------


def test_a_link_serves_in_turn_and_a_peer_knows_what_was_reported_and_what_it_has_given() -> None:
    lane = Lane(rate=100.0, report_s=1.0)
    assert lane.read(0.0, 50.0) == 0.5
    assert lane.read(0.1, 100.0) == 1.5
    assert lane.queue_s(0.5) == 1.0
    assert lane.seen_s(0.5, peer=3) == 0.0, "nothing was reported since the beginning"
    assert lane.seen_s(1.0, peer=3) == 0.5
    assert lane.read(1.0, 20.0, peer=3) == pytest.approx(1.7)
    assert lane.seen_s(1.0, peer=3) == pytest.approx(0.7)
    assert lane.seen_s(1.0, peer=4) == 0.5, "what another peer gave is not reported yet"
    assert sum(lane.windows) == 170.0


def test_loads_share_a_link_and_all_is_read_as_early_as_in_turn() -> None:
    """A short load that comes behind a long one waits for what is in flight, and then for as many
    reads of the long one as it has itself."""
    lane = SharedLane(rate=10.0, report_s=1.0, places=2, chunk_bytes=10.0)
    events = lane.begin(0.0, 7, 100.0)
    assert events == [(1.0, 7), (2.0, 7)]
    events += lane.begin(0.5, 8, 25.0)
    assert lane.queue_s(0.5) == 12.0
    ends = {}
    while events:
        now_s, load = min(events)
        events.remove((now_s, load))
        reads, ended = lane.came(now_s, load)
        events += reads
        if ended:
            ends[load] = now_s
    assert ends == {8: 6.5, 7: 12.5}


def test_a_lost_link_reads_on_when_it_is_back() -> None:
    lane = Lane(rate=100.0, report_s=1.0)
    lane.lost = (1.0, 5.0)
    assert lane.read(0.0, 50.0) == 0.5
    assert lane.read(0.5, 100.0) == 5.5
    assert [lane.usable(at_s, 0.5) for at_s in (1.2, 1.5, 4.9, 5.0)] == [True, False, False, True]


def test_balance_is_the_most_over_the_mean_of_the_windows_that_read() -> None:
    lanes = [Lane(100.0, 1.0), Lane(100.0, 1.0)]
    lanes[0].read(0.0, 30.0)
    lanes[1].read(0.0, 10.0)
    lanes[0].read(9.0, 10.0)
    assert balance(lanes, 1.0) == [1.5, 2.0]
    assert balance(lanes, 0.5) == [1.5]


def test_a_prompt_goes_to_a_short_queue_first_and_then_to_the_fewest_tokens() -> None:
    assert choose_prefill([10, 5], [0.0, 0.0], 100) == 1
    assert choose_prefill([10, 5], [0.0, 0.06], 100) == 0
    assert choose_prefill([10, 5], [0.06, 0.06], 100) == 1
    assert choose_prefill([10, 10], [0.0, 0.0], 100) == 0
    assert choose_prefill([101, 5], [0.0, 9.0], 100) == 1
    assert choose_prefill([101, 101], [0.0, 0.0], 100) is None


def test_an_answer_goes_to_few_requests_unless_that_engine_is_far_above_the_mean() -> None:
    assert choose_decode([100, 100], [3, 2], 10, 0) == 1
    assert choose_decode([900, 100], [1, 5], 100, 0) == 1, "engine 0 would be above the mean"
    assert choose_decode([900, 800], [1, 5], 200, 1000) == 1, "engine 0 has no room"
    assert choose_decode([900, 900], [1, 5], 200, 1000) is None


def test_the_engine_of_the_answer_helps_first_and_then_short_queues() -> None:
    assert choose_helpers(2, [], 1) == [2]
    assert choose_helpers(2, [0.3, 0.1, 0.9, 0.2], 3) == [2, 1, 3]


# -- the cluster ------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_turn_ends_once_and_reads_what_it_found(path: str, seed: int) -> None:
    agents = crowd(24, seed)
    for machines in (SMALL, replace(SMALL, prefill=2, decode=3), replace(SMALL, decode=0)):
        cluster, out = played(machines, Rules(path=path), agents)
        assert len(out.ttft_s) == sum(len(one.new) for one in agents)
        assert out.answer_tokens == sum(sum(one.answer) for one in agents)
        assert min(out.ttft_s) > 0
        assert min(out.ended_s) > 0
        assert max(out.ended_s) == out.end_s
        found_bytes = sum(sum(one.hit) for one in agents) * machines.bytes_per_token
        assert out.read_bytes == (0 if path == "none" else found_bytes)
        moved = sum(sum(lane.windows) for lane in cluster.lanes)
        assert moved == pytest.approx(out.read_bytes)


@pytest.mark.parametrize(
    "rules",
    [
        Rules(admission=True),
        Rules(helpers=3),
        Rules(router="sticky"),
        Rules(lost=(0, 0.2, 1.0)),
        Rules(path="own", lost=(0, 0.2, 1.0)),
        Rules(path="request", lost=(2, 0.2, 1.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("room", [0.0, 150_000.0])
def test_every_turn_ends_once_whatever_is_lost_or_full(rules: Rules, room: float) -> None:
    machines = replace(
        SMALL,
        prefill=2,
        decode=3,
        storage_bytes_per_s=2e9,
        decode_tokens_max=room,
        prefill_tokens_max=room,
    )
    agents = crowd(40)
    _, out = played(machines, rules, agents)
    assert len(out.ttft_s) == sum(len(one.new) for one in agents)
    assert min(out.ended_s) > 0
    assert out.found_tokens <= out.prompt_tokens


def test_equal_agents_give_equal_runs_and_another_seed_gives_another() -> None:
    def outcome(seed: int) -> events.Outcome:
        return played(replace(SMALL, prefill=2, decode=2), Rules(), crowd(30, seed))[1]

    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)


def test_the_links_of_all_engines_are_chosen_by_the_products_own_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert events.choose_lane is native.choose_lane
    agents = crowd(40)
    machines = replace(SMALL, storage_bytes_per_s=5e9)
    both = {path: played(machines, Rules(path=path), agents)[1] for path in ("request", "chunk")}
    own = played(machines, Rules(path="own"), agents)[1]
    assert max(out.end_s for out in both.values()) < 0.8 * own.end_s
    monkeypatch.setattr(events, "choose_lane", lambda own_end_s, own_room, peers: 0)
    for path in both:
        assert played(machines, Rules(path=path), agents)[1].ttft_s == own.ttft_s


def test_whether_to_read_is_the_products_own_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = crowd(20)
    slow = replace(SMALL, storage_bytes_per_s=1e6)
    always, decides = (
        played(slow, Rules(path="own", admission=on), agents)[1] for on in (False, True)
    )
    assert always.recomputed_tokens == 0
    assert decides.recomputed_tokens > 0.9 * always.found_tokens
    assert decides.end_s < 0.1 * always.end_s
    monkeypatch.setattr(events.Admission, "decide", lambda *_: Decision(load=True))
    assert played(slow, Rules(path="own", admission=True), agents)[1] == always


def test_decode_engines_that_nobody_reads_through_change_nothing() -> None:
    agents = crowd(60)
    one, two = (played(replace(SMALL, decode=n), Rules(path="own"), agents)[1] for n in (1, 2))
    assert one.ttft_s == two.ttft_s
    assert one.end_s == two.end_s


def test_a_second_link_is_worth_the_same_wherever_it_is() -> None:
    """Where links are the limit: both paths of 1P1D are the own links of 2P1D."""
    agents = crowd(200, turns=20)
    slow = replace(SMALL, storage_bytes_per_s=2e9)
    both = played(slow, Rules(path="chunk"), agents)[1].end_s
    own = played(replace(slow, prefill=2), Rules(path="own"), agents)[1].end_s
    assert both == pytest.approx(own, rel=0.1)


def test_a_load_split_by_chunk_has_come_before_one_that_is_not() -> None:
    agents = [Agent((0, 64_000), (64_000, 500), (10, 10), (0.0, 0.0))]
    ttft_s = {
        path: played(SMALL, Rules(path=path), agents)[1].ttft_s[1] for path in ("request", "chunk")
    }
    compute_s = SMALL.compute_s(64_000, 500)
    assert ttft_s["chunk"] - compute_s == pytest.approx(
        (ttft_s["request"] - compute_s) / 2, rel=0.1
    )


def test_what_a_lost_link_was_reading_goes_elsewhere_or_is_computed() -> None:
    agents = [Agent((0, 64_000), (64_000, 500), (10, 10), (0.0, 0.0))]
    machines = replace(SMALL, storage_bytes_per_s=1e9)
    begins_s = machines.compute_s(0, 64_000) + 64_000 * 24e3 / 400e9 + 10 * 0.01
    lost = (0, begins_s + 0.5, begins_s + 60.5)
    own = played(machines, Rules(path="own", lost=lost), agents)[1]
    assert own.recomputed_tokens == 64_000
    both = played(machines, Rules(path="request", lost=lost), agents)[1]
    assert both.recomputed_tokens == 0
    assert both.ttft_s[1] == pytest.approx(1.0 + 64_000 * 24e3 / 1e9, rel=0.01)


def test_prompts_whose_links_are_all_lost_are_computed_until_one_is_back() -> None:
    agents = crowd(20)
    lost = replace(SMALL, storage_bytes_per_s=5e9), (0, 0.0, 1e6)
    own = played(lost[0], Rules(path="own", lost=lost[1]), agents)[1]
    assert own.read_bytes == 0
    assert own.recomputed_tokens == sum(sum(one.hit) for one in agents)
    both = played(lost[0], Rules(path="chunk", lost=lost[1]), agents)[1]
    assert both.recomputed_tokens == 0


def test_admission_that_counts_waiting_prompts_does_not_flood_the_engine() -> None:
    agents = crowd(120)
    slow = replace(SMALL, storage_bytes_per_s=10e9)
    end_s = {
        queue: played(slow, Rules(path="own", admission=True, queue=queue), agents)[1].end_s
        for queue in (False, True)
    }
    assert end_s[True] < 0.9 * end_s[False]


def test_a_shared_enclosure_is_a_limit_for_all_links_together() -> None:
    agents = crowd(40)
    nodes = replace(SMALL, prefill=4, decode=0, storage_bytes_per_s=5e9)
    wide = played(nodes, Rules(path="own"), agents)[1]
    narrow = played(replace(nodes, drives=1, drive_bytes_per_s=5e9), Rules(path="own"), agents)[1]
    assert narrow.end_s > 1.5 * wide.end_s


def test_local_drives_find_only_what_their_node_has_stored() -> None:
    agents = crowd(40)
    nodes = replace(SMALL, prefill=4, decode=0, local=True)
    found = {
        router: played(nodes, Rules(path="own", router=router), agents)[1].found_tokens
        for router in ("sticky", "round_robin")
    }
    assert found["sticky"] == sum(sum(one.hit) for one in agents)
    assert found["round_robin"] < 0.9 * found["sticky"]


# -- tiers ------------------------------------------------------------------------------


def tiers(agents: list[Agent], pool_tokens: int, sharing: bool) -> Tiers:
    return Tiers(agents, Sizes(30_000, pool_tokens, 256, sharing), (2, 1), 64)


def test_the_products_managers_find_less_in_a_small_pool_and_more_in_a_shared_one() -> None:
    agents, machines = crowd(16, turns=6), replace(SMALL, prefill=2)

    def found(pool_tokens: int, sharing: bool) -> int:
        out = played(
            machines, Rules(router="round_robin"), agents, tiers(agents, pool_tokens, sharing)
        )[1]
        assert len(out.ttft_s) == sum(len(one.new) for one in agents)
        return out.found_tokens

    everything = sum(one.hit[-1] + one.new[-1] for one in agents)
    large, small = found(2 * everything, True), found(everything // 20, True)
    apart = found(2 * everything, False)
    assert small < 0.8 * large
    assert apart < 0.9 * large
    assert large > 0.85 * sum(sum(one.hit) for one in agents), "whole chunks of 256 tokens"


# -- machines, agents -------------------------------------------------------------------


def test_every_known_cluster_can_be_read() -> None:
    names = [line[1:-2] for line in KNOWN.read_text().splitlines(True) if line.startswith("[")]
    assert len(names) == 8
    for name in names:
        assert read_machines(KNOWN, name).name == name
    assert read_machines(KNOWN, "660b-2p4d").step_s(1e6) == pytest.approx(0.0246, abs=1e-4)
    assert read_machines(KNOWN, "enclosure-24").shared_bytes_per_s == 135e9


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("[a]\nprefill = 1\n", "needs"),
        ('[a]\nlike = "b"\n', "no cluster 'b'; choose from a"),
        ('[a]\nlike = "a"\n', "more than"),
        ("[a", "cannot be read"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused(tmp_path: Path, text: str, needed: str) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    with pytest.raises(BenchError, match=needed):
        read_machines(path, "a")


def test_measured_numbers_give_the_machine_that_they_come_from(tmp_path: Path) -> None:
    """And the simulator plays a lone request in just that time."""
    new, link = real.NEW_TOKENS, 3e7
    lengths = [512, 3840]

    def compute_s(before: int, count: int) -> float:
        return 0.03 + count / 2e4 + count * (before + count / 2) * 1e-8

    hit_s = [compute_s(before, new) for before in lengths]
    read_s = [before * 16384 / link for before in lengths]
    loaded_s = [0.01 + read + hit for read, hit in zip(read_s, hit_s, strict=True)]
    numbers = real.Numbers(
        (hit_s[0], hit_s[1]), (loaded_s[0], loaded_s[1]), compute_s(0, 2048), 0.02
    )
    machines = real.machine_file(tmp_path / "machines.toml", numbers)
    assert machines.storage_bytes_per_s == pytest.approx(link)
    assert machines.flop_per_s / machines.flop_per_token == pytest.approx(2048 / compute_s(0, 2048))
    for before in (512, 1000, 3840):
        assert machines.compute_s(before, new) == pytest.approx(compute_s(before, new))
    alone = [real.Asked(100.0 * number, number) for number in range(2)]
    for router in ("least", "round_robin"):
        found = real.simulated(machines, lengths, alone, router)
        assert found == pytest.approx([one + two for one, two in zip(read_s, hit_s, strict=True)])
    both = [real.Asked(0.0, 1), real.Asked(0.1, 0), real.Asked(0.2, 0)]
    last_s = [
        real.simulated(machines, lengths, both, router)[1] for router in ("least", "round_robin")
    ]
    assert last_s[0] < last_s[1], "in turn it shares the link with the long one"


def test_unknown_keys_and_impossible_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    known = KNOWN.read_text()
    for line, needed in (("prefil = 2", "unknown prefil"), ("flop_per_s = 0", "must be above 0")):
        path.write_text(f'{known}\n[a]\nlike = "27b-1p1d"\n{line}\n')
        with pytest.raises(BenchError, match=needed):
            read_machines(path, "a")
    path.write_text(f'{known}\n[a]\nlike = "27b-1p1d"\nmodel = "Llama-3.1-8B-Instruct"\n')
    assert read_machines(path, "a").bytes_per_token == 131072


def test_drawn_agents_have_the_means_that_were_asked_for(tmp_path: Path) -> None:
    trace = read_trace(agentic(tmp_path / "traces"))
    agents = drawn_agents(trace, Means(400, 100), 64_000, 40, seed=1)
    assert agents == drawn_agents(trace, Means(400, 100), 64_000, 40, seed=1)
    assert agents != drawn_agents(trace, Means(400, 100), 64_000, 40, seed=2)
    what = described(agents)
    assert what["answer_tokens"] == pytest.approx(100, rel=0.1)
    assert 400 < what["new_tokens"] < 600, "with the first prompt and the rest of a block"
    for one in agents:
        assert one.hit[-1] + one.new[-1] + one.answer[-1] <= 64_000
        for turn in range(1, len(one.new)):
            context = one.hit[turn - 1] + one.new[turn - 1] + one.answer[turn - 1]
            assert one.hit[turn] == context // 64 * 64


def test_recorded_sessions_find_what_they_had_and_timed_requests_what_anybody_had(
    tmp_path: Path,
) -> None:
    agents = recorded_agents(read_trace(agentic(tmp_path / "traces")), think_scale=0.5)
    assert [one.hit for one in agents] == [(0, 128, 192), (0,), (0,), (0, 192)]
    assert agents[0].think_s[1] == 3.0
    timed = recorded_agents(read_trace(mooncake(tmp_path / "trace.jsonl")), think_scale=1.0)
    assert [one.hit for one in timed] == [(0,), (1024,), (511,)]
    assert [one.start_s for one in timed] == [0.0, 1.5, 3.0]


# -- the study --------------------------------------------------------------------------


def sample(cluster: str, arm: str, end_s: float, seed: int) -> Sample:
    return Sample("offline", cluster, arm, 256, seed=seed, end_s=end_s)


def test_a_row_is_the_median_of_the_seeds_own_ratios() -> None:
    times = {1: (100.0, 50.0), 2: (90.0, 60.0), 3: (300.0, 100.0)}
    samples = [
        sample("660b-2p4d", arm, end_s, seed)
        for seed, both in times.items()
        for arm, end_s in zip(("own", "request"), both, strict=True)
    ]
    assert gains(samples, "660b-2p4d", "request") == [2.0, 1.5, 3.0]
    row = rows(samples)[0]
    assert (row.ours, row.near) == (2.0, True)
    assert rows(samples)[1].ours is None
    assert {goal.reached for goal in goals(samples, {})} == {None}


def test_capacity_is_bound_by_links_or_by_compute() -> None:
    what = {"turns": 100.0, "context_tokens": 30_000.0, "hit": 0.98, "new_tokens": 600.0}
    own, both = (carried(SMALL, what, helped) for helped in (False, True))
    assert own == pytest.approx(50e9 / (100 * 30_000 * 0.98 * 24e3))
    assert both == pytest.approx(2 * own)
    fast = replace(SMALL, storage_bytes_per_s=1e15)
    assert carried(fast, what, False) == pytest.approx(5.5e15 / (100 * 600 * 20e9))


def tiny(trace: Path, **more: Any) -> Settings:
    return Settings(
        trace=trace,
        clusters=("27b-1p1d",),
        agents=(2, 3),
        context_tokens_max=9000,
        drawn=3,
        windows_s=(4,),
        seeds=(1, 2),
        **more,
    )


def test_equal_seeds_give_equal_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "OFFLINE", {"27b-1p1d": 3, "660b-2p4d": 4})
    settings = tiny(agentic(tmp_path / "traces"), parts=("offline", "agents", "online", "recorded"))
    texts = []
    for number in range(2):
        path = tmp_path / f"{number}.json"
        measure.dump(path, "cluster", *run(settings))
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]
    rows = rows_in(json.loads(texts[0]))
    assert {row["part"] for row in rows} == set(settings.parts)
    assert {row["seed"] for row in rows if row["part"] == "offline"} == {1, 2}


@pytest.mark.parametrize("times", [0.7, 1.0, 4.0])
def test_the_search_finds_the_most_agents_also_far_above_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    """In a short window the objectives are kept at rates that links cannot carry for long."""
    bounds: dict[str, float] = {}

    def online(study: measure.Study, base: Sample, machines: Machines) -> Sample:
        bound = carried(machines, described(study.population()), helped=base.arm != "own")
        bounds[base.arm] = times * bound
        return replace(base, cluster=machines.name, kept=base.rate <= bounds[base.arm])

    monkeypatch.setattr(measure.Study, "online", online)
    samples, _ = run(tiny(agentic(tmp_path / "traces"), parts=("online",)))
    for arm, most in bounds.items():
        best = capacity(samples, "27b-1p1d", arm, 4)
        assert best is not None
        assert 0.93 * most < best.rate <= most, arm


def test_the_command_writes_a_file_and_a_table(tmp_path: Path) -> None:
    trace, json_path = agentic(tmp_path / "traces"), tmp_path / "cluster.json"
    options = {
        "--parts": "agents,online,enclosure",
        "--clusters": "27b-1p1d",
        "--agents": "2,3",
        "--context-max": "9000",
        "--drawn": "3",
        "--windows": "4",
        "--seeds": "1",
        "--json": str(json_path),
    }
    arguments = [str(trace), *(word for pair in options.items() for word in pair)]
    result = CliRunner().invoke(app, ["play", *arguments])
    assert result.exit_code == 0, result.output
    for needed in ("drawn from traces", "Most agents per second", "24 drives", "enclosure-24"):
        assert needed in result.output
    shown = CliRunner().invoke(app, ["report", str(json_path)])
    assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (["--parts", "offlin"], "no part 'offlin'"),
        (["--clusters", "27b-9p9d", "--parts", "recorded"], "no cluster '27b-9p9d'"),
        (["--seeds", "0"], "seeds must be at least 1"),
    ],
)
def test_errors_are_one_plain_line(tmp_path: Path, options: list[str], needed: str) -> None:
    trace = agentic(tmp_path / "traces")
    json_path = str(tmp_path / "cluster.json")
    result = CliRunner().invoke(app, ["play", str(trace), "--json", json_path, *options])
    assert result.exit_code == 2
    assert needed in result.stderr
