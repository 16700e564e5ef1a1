# SPDX-License-Identifier: Apache-2.0
"""`python -m research.cluster`: the benefit of reading over several links, for whole clusters.

The part `offline` runs DualPath's clusters with all agents at once, `agents` a cluster with several
numbers of agents, and `recorded` the trace's sessions as recorded. `online` finds the arrival rate
of agents that a cluster sustains within its objectives. `open` examines questions that DualPath
leaves open. `enclosure` compares drives in an enclosure with the same drives in the nodes.
`offline`, `split`, `routers` and `enclosure` run with every seed, the other parts with the first
seed. Results do not depend on this machine, and equal seeds give equal files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.home import OnProgress, progress, unheard
from vllm_nvmeof_bench.results import dump, percentile
from vllm_nvmeof_bench.settings import check_names, check_positive, option, recorded
from vllm_nvmeof_bench.traces import TRACE_HELP, Trace, read_trace

from research.cluster.agents import (
    Agent,
    Means,
    described,
    drawn_agents,
    recorded_agents,
)
from research.cluster.events import ROUTERS, Cluster, Given, Outcome, Rules
from research.cluster.lanes import WINDOW_S, balance
from research.cluster.machines import KNOWN, Machines, read_machines
from research.cluster.paper import OFFLINE
from research.cluster.report import PARTS, Sample
from research.cluster.tiers import Sizes, Tiers
from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.commands.size.report import turns_per_s

#: The rules by arm. `alternate` is DualPath without its scheduling.
ARMS = {
    "own": Rules(path="own"),
    "alternate": Rules(path="alternate", router="round_robin"),
    "request": Rules(path="request"),
    "chunk": Rules(path="chunk"),
    "none": Rules(path="none"),
}
#: The period in which all agents of an offline run start.
_START_S = 0.5
#: The share of an online run that is not counted, because the cluster is still filling up.
_WARM = 0.4
_SEARCH_STEPS = 8
_BALANCE_POINTS = 100


@dataclass(frozen=True)
class Settings:
    """The settings of a study. If a mean is 0 tokens, the agents are the sessions as recorded."""

    machines: Path = option(KNOWN, "File with clusters, such as this benchmark's machines.toml.")
    clusters: tuple[str, ...] = option(
        ("660b-2p4d", "27b-1p1d"),
        "Clusters in the machines file, for the parts agents, online and recorded.",
    )
    parts: tuple[str, ...] = option(PARTS, f"Parts to simulate: {', '.join(PARTS)}.")
    agents: tuple[int, ...] = option(
        (64, 128, 256, 512, 1024), "Numbers of concurrent agents in the part `agents`."
    )
    added_tokens: float = option(429.0, "Mean tokens that a turn adds; 0: the trace's.", min=0)
    answer_tokens: float = option(120.0, "Mean tokens of an answer; 0: the trace's.", min=0)
    context_tokens_max: int = option(
        64_000, "Longest context of an agent in tokens.", flag="--context-max", min=1
    )
    drawn: int = option(200, "Agents to draw from the trace's turns.", min=1)
    windows_s: tuple[int, ...] = option(
        (900, 3600),
        "Seconds of an online run; several values show whether a run is steady.",
        flag="--windows",
    )
    ttft_s: float = option(4.0, "Objective of an online run: mean TTFT in seconds.", min=0)
    tpot_s: float = option(0.05, "Objective: mean seconds per token of an answer.", min=0)
    seeds: tuple[int, ...] = option((1, 2, 3, 4, 5), "Seeds for agents, arrivals and order.")
    trace: Path = option(Path(), TRACE_HELP, argument=True)

    def __post_init__(self) -> None:
        check_names("part", self.parts, PARTS)
        check_positive(self, "agents", "context_tokens_max", "drawn", "windows_s", "seeds")


class Study:
    """All runs with one trace. `series` is the balance over time, by run."""

    def __init__(self, settings: Settings, on_progress: OnProgress) -> None:
        self.settings = settings
        self.series: dict[str, list[float]] = {}
        self._on_progress, self._done = on_progress, 0
        on_progress(0, 0, "reading the trace")
        self.trace: Trace = read_trace(settings.trace)
        self.as_recorded = recorded_agents(self.trace.capped(settings.context_tokens_max), 1.0)
        self._drawn: dict[int, list[Agent]] = {}

    def population(self, seed: int = 0) -> list[Agent]:
        """Return the agents to choose from. Seed 0 means the first seed of the settings."""
        settings, seed = self.settings, seed or self.settings.seeds[0]
        if not settings.added_tokens or not settings.answer_tokens:
            return self.as_recorded
        if seed not in self._drawn:
            means = Means(settings.added_tokens, settings.answer_tokens)
            self._drawn[seed] = drawn_agents(
                self.trace, means, settings.context_tokens_max, settings.drawn, seed
            )
        return self._drawn[seed]

    def machines(self, name: str) -> Machines:
        return read_machines(self.settings.machines, name)

    def note(self, what: str) -> None:
        self._done += 1
        self._on_progress(self._done, 0, what)

    def crowd(self, count: int, seed: int = 0) -> tuple[list[Agent], list[float]]:
        """Return `count` agents that start at about the same time, and their start times."""
        rng = random.Random(seed or self.settings.seeds[0])
        population = self.population(seed)
        agents = [rng.choice(population) for _ in range(count)]
        return agents, [rng.random() * _START_S for _ in agents]

    def arrivals(
        self, rate: float, window_s: float, seed: int = 0
    ) -> tuple[list[Agent], list[float]]:
        """Return agents that arrive at random times, `rate` per second, and their start times."""
        rng = random.Random(seed or self.settings.seeds[0])
        population = self.population(seed)
        starts_s: list[float] = []
        at_s = rng.expovariate(rate)
        while at_s < window_s:
            starts_s.append(at_s)
            at_s += rng.expovariate(rate)
        return [rng.choice(population) for _ in starts_s], starts_s

    def offline(
        self, base: Sample, machines: Machines, rules: Rules | None = None, **more: Any
    ) -> Sample:
        """Run a crowd that starts together, with the seed and number of agents of `base`."""
        agents, starts_s = self.crowd(base.agents, base.seed)
        return self.play(base, machines, agents, starts_s, rules, **more)

    def online(self, base: Sample, machines: Machines, rules: Rules | None = None) -> Sample:
        """Run agents that arrive at random, with the seed, rate and window of `base`."""
        agents, starts_s = self.arrivals(base.rate, base.window_s, base.seed)
        base = replace(base, agents=len(agents))
        return self.play(base, machines, agents, starts_s, rules)

    def play(
        self,
        base: Sample,
        machines: Machines,
        agents: Sequence[Agent],
        starts_s: Sequence[float],
        rules: Rules | None = None,
        sizes: Sizes | None = None,
    ) -> Sample:
        """Simulate one run. With `sizes` the product's managers determine the hits."""
        base = replace(base, cluster=machines.name)
        seed = f"seed {base.seed}" if base.seed else ""
        self.note(" · ".join(filter(None, (base.part, base.cluster, base.arm, base.knob, seed))))
        finds: Any = Given(agents, machines.local)
        if sizes is not None:
            engines = (machines.prefill, machines.decode)
            finds = Tiers(agents, sizes, engines, self.trace.block_tokens)
        horizon_s = base.window_s or float("inf")
        cluster = Cluster(machines, rules or ARMS[base.arm], agents, starts_s, finds, horizon_s)
        sample = _sampled(base, cluster.run())
        lanes = cluster.lanes
        if base.part == "herd":
            lanes = lanes[machines.prefill :]
        found = balance(lanes, 1.0 if base.window_s else 0.6)
        if base.part == "agents" and base.agents == max(self.settings.agents) and found:
            self.series[f"{base.cluster} {base.arm} {base.agents}"] = found[:_BALANCE_POINTS]
        kept = sample.ttft_mean_s <= self.settings.ttft_s and sample.tpot_s <= self.settings.tpot_s
        return replace(sample, balance=fmean(found) if found else 0.0, kept=kept)


def _sampled(base: Sample, out: Outcome) -> Sample:
    """Return a run's results; of an online run, those after the cluster has filled up."""
    since_s = _WARM * base.window_s
    counted = [
        (at_s, ttft_s)
        for at_s, ttft_s in zip(out.begun_s, out.ttft_s, strict=True)
        if at_s >= since_s
    ]
    values = [ttft_s for _, ttft_s in counted] or [0.0]
    middle_s = (since_s + base.window_s) / 2
    halves = [
        [ttft_s for at_s, ttft_s in counted if (at_s >= middle_s) == late] for late in (False, True)
    ]
    return replace(
        base,
        turns=len(out.ttft_s),
        end_s=out.end_s,
        ttft_mean_s=fmean(values),
        ttft_p50_s=percentile(values, 0.5),
        ttft_p95_s=percentile(values, 0.95),
        ttft_p99_s=percentile(values, 0.99),
        ttft_max_s=max(values),
        tpot_s=fmean(out.tpot_s or [0.0]),
        drift=fmean(halves[1]) / fmean(halves[0]) if base.window_s and all(halves) else 0.0,
        read_bytes=out.read_bytes,
        hit=out.found_tokens / max(1, out.prompt_tokens),
        recomputed=out.recomputed_tokens,
    )


# -- parts ----------------------------------------------------------------------------


def _offline(study: Study) -> Iterator[Sample]:
    for name, count in OFFLINE.items():
        for seed in study.settings.seeds:
            for arm in ARMS:
                base = Sample("offline", name, arm, count, seed=seed)
                yield study.offline(base, study.machines(name))


def _agents(study: Study) -> Iterator[Sample]:
    for name in study.settings.clusters:
        for count in study.settings.agents:
            for arm in ARMS:
                yield study.offline(Sample("agents", name, arm, count), study.machines(name))


def _online(study: Study) -> Iterator[Sample]:
    """Search for the highest rate: start at half of the rate that links and compute allow, go up
    while the objectives are met (in short windows far above that bound), and then bisect."""
    for name in study.settings.clusters:
        machines = study.machines(name)
        for arm in ("own", "request", "chunk"):
            bound = carried(machines, described(study.population()), helped=arm != "own")
            for window_s in study.settings.windows_s:
                low, high = 0.5 * bound, math.inf
                for _ in range(_SEARCH_STEPS):
                    rate = min(1.5 * low, (low * high) ** 0.5)
                    base = Sample("online", name, arm, 0, rate=rate, window_s=float(window_s))
                    sample = study.online(base, machines)
                    yield sample
                    low, high = (rate, high) if sample.kept else (low, rate)


def carried(machines: Machines, what: Mapping[str, float], helped: bool) -> float:
    """Return the agents per second that links and compute can sustain."""
    hit_tokens = what["context_tokens"] * what["hit"]
    read_bytes = what["turns"] * hit_tokens * machines.bytes_per_token
    compute_s = what["turns"] * machines.compute_s(hit_tokens, what["new_tokens"])
    links = machines.prefill + machines.decode * helped
    rate = machines.storage_bytes_per_s
    return turns_per_s(links, rate, read_bytes, machines.prefill, compute_s)


def _recorded(study: Study) -> Iterator[Sample]:
    agents = study.as_recorded
    starts_s = [one.start_s or 0.0 for one in agents]
    for name in study.settings.clusters:
        for arm in ("own", "request", "chunk", "none"):
            base = Sample("recorded", name, arm, len(agents))
            yield study.play(base, study.machines(name), agents, starts_s)


def _open(study: Study) -> Iterator[Sample]:
    for part in (_split, _routers, _admission, _sharing, _lost, _herd):
        yield from part(study)


#: The agents per second with which links are busy for a third to a half of the time.
_CALM = {"27b-1p1d": 0.45, "660b-2p4d": 0.4}


def _split(study: Study) -> Iterator[Sample]:
    for name, rate in _CALM.items():
        for seed in study.settings.seeds:
            for arm in ("own", "request", "chunk"):
                base = Sample("split", name, arm, 0, rate=rate, window_s=1800.0, seed=seed)
                yield study.online(base, study.machines(name))


#: The share of the sustainable rate with which routers are compared.
_BUSY = 0.85


def _routers(study: Study) -> Iterator[Sample]:
    for name in ("27b-2p2d", "660b-2p4d"):
        machines = study.machines(name)
        for arm in ("own", "chunk"):
            bound = carried(machines, described(study.population()), helped=arm == "chunk")
            for router in ROUTERS:
                rules = replace(ARMS[arm], router=router)
                for seed in study.settings.seeds:
                    base = Sample("routers", name, arm, 0, _BUSY * bound, 900.0, router, seed)
                    yield study.online(base, machines, rules)


_DECISIONS: dict[str, dict[str, Any]] = {
    "always load": {},
    "load or compute": {"admission": True},
    "the same, waiting prompts counted": {"admission": True, "queue": True},
}


def _admission(study: Study) -> Iterator[Sample]:
    """Compare decisions to read or recompute, with links at full rate and at fractions of it."""
    machines = study.machines("27b-1p1d")
    for share in (1.0, 0.2, 0.05):
        slow = replace(machines, storage_bytes_per_s=share * machines.storage_bytes_per_s)
        for arm in ("own", "chunk"):
            for words, more in _DECISIONS.items():
                base = Sample("admission", "", arm, 128, knob=f"links × {share:g}, {words}")
                yield study.offline(base, slow, replace(ARMS[arm], **more))


def _sharing(study: Study) -> Iterator[Sample]:
    """Compare sizes of an engine's pool, as shares of all agents' final tokens."""
    machines, count = study.machines("27b-2p2d"), 64
    agents, _ = study.crowd(count)
    whole = sum(one.hit[-1] + one.new[-1] + one.answer[-1] for one in agents)
    for share in (0.05, 0.1, 0.2, 0.5, 1.0):
        for shared in (True, False):
            for router in ("least", "sticky"):
                sizes = Sizes(whole // 100, int(share * whole), 256, shared)
                knob = f"pool × {share:g}, {'shared' if shared else 'apart'}, {router}"
                base = Sample("sharing", "", "chunk", count, knob=knob)
                rules = replace(ARMS["chunk"], router=router)
                yield study.offline(base, machines, rules, sizes=sizes)


def _lost(study: Study) -> Iterator[Sample]:
    """Simulate the loss of a prefill node's or a decode node's link for one minute."""
    machines = study.machines("27b-1p1d")
    for arm in ("own", "chunk"):
        for what, node in (("none", None), ("prefill", 0), ("decode", machines.prefill)):
            lost = None if node is None else (node, 500.0, 560.0)
            knob = f"{what} link lost for 60 s" if lost else "no link lost"
            base = Sample("lost", "", arm, 0, _CALM["27b-1p1d"], 900.0, knob)
            yield study.online(base, machines, replace(ARMS[arm], lost=lost))


def _herd(study: Study) -> Iterator[Sample]:
    machines = study.machines("27b-8p4d")
    for arm in ("request", "chunk"):
        for report_s in (0.001, 0.05, 0.5):
            knob = f"reports every {1000 * report_s:g} ms"
            base = Sample("herd", "", arm, 1024, knob=knob)
            yield study.offline(base, replace(machines, report_s=report_s))


def _enclosure(study: Study) -> Iterator[Sample]:
    for name in ("local-24", "enclosure-24"):
        for router, decides in (("least", False), ("sticky", False), ("sticky", True)):
            knob = f"{router} router, {'load or compute' if decides else 'always load'}"
            rules = replace(ARMS["own"], router=router, admission=decides)
            for seed in study.settings.seeds:
                base = Sample("enclosure", name, "own", 384, knob=knob, seed=seed)
                yield study.offline(base, study.machines(name), rules)


_PLAYED: dict[str, Callable[[Study], Iterator[Sample]]] = dict(
    zip(PARTS, (_offline, _agents, _online, _recorded, _open, _enclosure), strict=True)
)


def run(
    settings: Settings, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Simulate the parts; return the samples and the conditions. Raises BenchError if the trace or
    the clusters cannot be read, or a part is unknown."""
    study = Study(settings, on_progress)
    samples = [sample for part in settings.parts for sample in _PLAYED[part](study)]
    return samples, {
        "versions": {"vllm-nvmeof-offload": __version__},
        "trace": study.trace.name,
        "settings": recorded(settings),
        "agents": described(study.population()),
        "recorded": described(study.as_recorded),
        "window_s": WINDOW_S,
        "balance": {name: [round(one, 3) for one in row] for name, row in study.series.items()},
        "simulated": "links, compute and decode on a virtual clock; lane choice, admission and, "
        "where tiers are played, the manager are the product's",
    }


def _measure(settings: Settings, json_path: Path) -> None:
    with progress() as on_progress:
        dump(json_path, "cluster", *run(settings, on_progress))


COMMANDS = (
    Command(
        "cluster",
        "Simulate a cluster of prefill and decode engines on a trace: the benefit of dual-path "
        "loading, sharing and the choice of links.\n\nIt uses the product's own rules, without "
        "servers, GPUs or disks. Clusters are described in a file.",
        Settings,
        _measure,
    ),
)
