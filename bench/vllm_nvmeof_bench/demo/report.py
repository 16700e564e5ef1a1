# SPDX-License-Identifier: Apache-2.0
"""The demo's results and verdict. `reports.demo` describes the cases of the samples."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_nvmeof_bench.demo.chat import words
from vllm_nvmeof_bench.demo.workload import Session
from vllm_nvmeof_bench.reports.demo import RETURNING, Sample, speedup
from vllm_nvmeof_bench.results import distinct, dump
from vllm_nvmeof_bench.servers.client import Answer
from vllm_nvmeof_bench.servers.model import distinct_ratio

#: Up to this difference, a token's log-probabilities on two servers count as equal. A different
#: order of float32 sums changed them by up to 5e-5; KV from another token, by whole units.
LOGPROB_TOLERANCE = 1e-3
#: The minimum speed-up of a later turn's TTFT over that of a cold first turn.
SPEEDUP_MIN = 3.0
#: An answer with a smaller share of distinct 3-grams counts as a loop, which would hide wrong KV.
DISTINCT_RATIO_MIN = 0.5

_TITLES = {
    "cold_without": "cold, no offloading",
    "cold": "cold",
    "cpu_tier": "back, from CPU tier",
    "pool": "back, from pool",
    "restart": "back, after restart",
    "preempted_recompute": "preempted, recompute",
    "preempted": "preempted, reload",
}

_FOUND = {"cold": "computing", "gpu": "GPU cache", "cpu_tier": "CPU tier", "pool": "pool"}


@dataclass(frozen=True)
class Comparison:
    """A token-by-token comparison of two servers' greedy answers.

    logprob_difference_max: over the tokens before the first difference. gap_min: the smallest
    difference in log-probability between a chosen token and the runner-up.
    """

    answers: int
    tokens: int
    differences: tuple[str, ...]
    logprob_difference_max: float
    gap_min: float
    distinct_ratio_min: float

    @property
    def identical(self) -> bool:
        return not self.differences and self.logprob_difference_max <= LOGPROB_TOLERANCE


def compare(expected: Mapping[str, Answer], got: Mapping[str, Answer]) -> Comparison:
    """Compare each answer in `got` with the answer of the same name in `expected`."""
    differences: list[str] = []
    logprob_max, gap_min, ratio_min, tokens = 0.0, float("inf"), 1.0, 0
    for name, answer in got.items():
        reference = expected[name]
        same = list(zip(reference.tokens, answer.tokens, strict=False))
        at = next((i for i, (a, b) in enumerate(same) if a != b), len(same))
        if reference.tokens != answer.tokens:
            differences.append(f"{name}: token {at + 1} of {len(reference.tokens)} differs")
        deltas = zip(reference.logprobs[:at], answer.logprobs[:at], strict=True)
        logprob_max = max([logprob_max, *(abs(a - b) for a, b in deltas)])
        gap_min = min([gap_min, *reference.gaps])
        ratio_min = min(ratio_min, distinct_ratio(reference.tokens))
        tokens += len(answer.tokens)
    return Comparison(len(got), tokens, tuple(differences), logprob_max, gap_min, ratio_min)


@dataclass
class Report:
    """The sessions on three servers: without offloading, with it, and after a restart."""

    baseline: Session
    offloaded: Session
    restarted: Session
    conditions: dict[str, Any] = field(default_factory=dict)

    def samples(self) -> list[Sample]:
        """Return the samples in order of cases."""
        out: dict[str, list[float]] = {name: [] for name in _TITLES}
        for turn in self.baseline.turns:
            if turn.case == "cold":
                out["cold_without"].append(turn.answer.ttft_s)
        for turn in self.offloaded.turns:
            if turn.case in ("cold", *RETURNING):
                out[turn.case].append(turn.answer.ttft_s)
        restarted = (turn for turn in self.restarted.turns if turn.case in RETURNING)
        out["restart"] = [turn.answer.ttft_s for turn in restarted]
        out["preempted"] = self.offloaded.crowd.resumes_s
        out["preempted_recompute"] = self.baseline.crowd.resumes_s
        return [Sample(case, seconds) for case, values in out.items() for seconds in values]

    def comparison(self) -> Comparison:
        """Compare both offloading servers' answers with those of the server without offloading."""
        got = self.offloaded.answers() | self.restarted.answers()
        return compare(self.baseline.answers(), got)

    def speedups(self) -> dict[str, float]:
        """Return case → speed-up, for cases with samples."""
        samples = self.samples()
        found = {case: speedup(samples, case) for case in _TITLES}
        return {case: times for case, times in found.items() if times is not None}

    def failures(self) -> list[str]:
        """Return why the demo failed, one line per reason; empty if it passed."""
        seen, measured = self.comparison(), distinct(self.samples(), "case")
        out = list(seen.differences)
        if seen.logprob_difference_max > LOGPROB_TOLERANCE:
            out.append(
                f"log-probabilities differ by up to {seen.logprob_difference_max:.2g}, "
                f"more than {LOGPROB_TOLERANCE:g}"
            )
        if seen.distinct_ratio_min < DISTINCT_RATIO_MIN and not self._speaks:
            out.append(f"an answer is a loop: {seen.distinct_ratio_min:.0%} distinct 3-grams")
        out += [f"{title}: never seen" for name, title in _TITLES.items() if name not in measured]
        out += [
            f"{t.conversation}, turn {t.number}: found {t.found_tokens} of {t.prompt_tokens} "
            f"prompt tokens"
            for t in (*self.offloaded.turns, *self.restarted.turns)
            if t.number > 1 and t.case in ("cold", "partial")
        ]
        if not self.offloaded.reloaded_tokens:
            out.append("no token of a preempted request was reloaded")
        out += [
            f"{_TITLES[name]}: only {times:.1f}× faster than cold"
            for name, times in self.speedups().items()
            if name in RETURNING and times < SPEEDUP_MIN
        ]
        return out

    def facts(self) -> dict[str, Any]:
        """Return the conditions in the results file."""
        seen, sessions = self.comparison(), (self.baseline, self.offloaded, self.restarted)
        return {
            **self.conditions,
            "identical": seen.identical,
            "speedup": {name: round(value, 2) for name, value in self.speedups().items()},
            "external_hit_tokens": sum(one.external_hit_tokens for one in sessions[1:]),
            "preemptions": self.offloaded.crowd.preemptions,
            "reloaded_tokens": self.offloaded.reloaded_tokens,
            "recomputed_tokens": self.offloaded.recomputed_tokens,
            "failures": self.failures(),
            "answers_compared": seen.answers,
            "tokens_compared": seen.tokens,
            "logprob_difference_max": seen.logprob_difference_max,
            "logprob_tolerance": LOGPROB_TOLERANCE,
            "logprob_gap_min": seen.gap_min,
            "distinct_3gram_ratio_min": seen.distinct_ratio_min,
            "preemptions_without_offloading": self.baseline.crowd.preemptions,
            "startup_s": [round(one.startup_s, 4) for one in sessions],
            "turns": [
                {**turn.facts(), "restarted": one is self.restarted}
                for one in sessions[1:]
                for turn in one.turns
            ],
        }

    @property
    def _speaks(self) -> bool:
        return any(turn.question for turn in self.baseline.turns)

    def picture(self) -> str:
        """Return questions, answers and times as SVG; "" if the model's tokens are not text."""
        return picture_of(self.facts()) if self._speaks else ""

    def write(self, path: Path) -> None:
        """Write the results file; raise BenchError if it cannot be written."""
        dump(path, "demo", self.samples(), self.facts())


def picture_of(facts: Mapping[str, Any]) -> str:
    """Draw the turns in `Report.facts` as an SVG of a terminal window."""
    table = Table(box=box.SIMPLE)
    for heading in ("", "question", "answer"):
        table.add_column(heading, no_wrap=True)
    table.add_column("prompt tokens", justify="right", no_wrap=True)
    table.add_column("KV came from", no_wrap=True)
    table.add_column("first token", justify="right", no_wrap=True)
    for turn in facts["turns"]:
        case = turn["case"]
        style = "red" if case == "cold" else "green"
        table.add_row(
            turn["conversation"],
            escape(words(turn["question"], 40)),
            escape(words(turn["answer"], 54)),
            f"{turn['prompt_tokens']:,}",
            _FOUND.get(case, case) + (", after a restart" if turn["restarted"] else ""),
            f"[{style}]{turn['ttft_s']:.2f} s[/]",
        )
    console = Console(record=True, width=175, file=io.StringIO(), highlight=False)
    console.print(table)
    same = "as without offloading, token by token" if facts["identical"] else "DIFFERENT"
    console.print(f"  {facts['answers_compared']} answers: {same}")
    # An image in a page must not load fonts from another site.
    form = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=f"make demo: {facts['model']['name']}", code_format=form)
