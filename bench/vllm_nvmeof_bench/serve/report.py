# SPDX-License-Identifier: Apache-2.0
"""The samples of `bench ttft`, `hits` and `turns`: ratios, tables, pictures.

Ratios are of the same prompt, or of the same round. Every difference is to the first arm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import plots, results, tables
from vllm_nvmeof_bench.benchmark import Benchmark
from vllm_nvmeof_bench.plots import Style
from vllm_nvmeof_bench.results import distinct, mean, median, median_of, paired, select, spread_of
from vllm_nvmeof_bench.tables import NOTHING, Column, Table, arm_columns, by_arm, load_in, number

#: Ours, and the peer with the same bytes of CPU memory on the same storage.
_RIVALS = (("full", "peer_full"), ("pool", "peer"), ("target", "peer_target"))
#: Our arms whose CPU tier holds everything, as in the published measurements.
_HOLD_ALL = ("cpu", "full")
_PLACES = ("gpu", "cpu", "pool", "other")
Conditions = Mapping[str, Any]


@dataclass(frozen=True)
class TtftSample:
    """One request. Seconds; tokens of the prompt by where they were found, as in `Hits`.

    same: whether the answer equals the first arm's when it computed the prompt; None if one failed.
    """

    arm: str
    phase: str
    length: int
    round: int
    ttft_s: float | None
    end_s: float
    gpu: int
    cpu: int
    pool: int
    other: int
    same: bool | None
    failure: str | None

    @property
    def prompt_tokens(self) -> int:
        return self.length


@dataclass(frozen=True)
class HitSample:
    """One batch. seconds: from the first request to the last token. Tokens: of all prompts, of
    all answers, and of the prompts by where they were found.

    ttft_s: median. same, compared: answers to returning prompts that equal the first arm's. cpu_s:
    CPU seconds of the server's processes meanwhile; None: it was not started here.
    """

    arm: str
    rate: int
    round: int
    requests: int
    failures: int
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float | None
    gpu: int
    cpu: int
    pool: int
    other: int
    same: int
    compared: int
    cpu_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that were served, computed or not, and answer tokens, per second."""
        return (self.prompt_tokens + self.answer_tokens) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.failures) / self.seconds


@dataclass(frozen=True)
class TurnSample:
    """One turn of one conversation. start_s: of its request, from the measurement's start. digest:
    of the answer, so that arms can be compared. gpu to other: hits of the whole measurement, in
    the first turn of its first conversation; 0 elsewhere.
    """

    arm: str
    concurrency: int
    round: int
    conversation: int
    turn: int
    start_s: float
    ttft_s: float | None
    end_s: float
    prompt_tokens: int
    answer_tokens: int
    digest: str
    failure: str | None
    gpu: int = 0
    cpu: int = 0
    pool: int = 0
    other: int = 0


def rivals(arms: Iterable[str]) -> list[tuple[str, str]]:
    """(ours, the peer) of every pair that was measured whole."""
    known = set(arms)
    return [pair for pair in _RIVALS if known.issuperset(pair)]


def found_in(samples: Sequence[Any]) -> tuple[float, ...]:
    """Shares of the prompts' tokens in GPU, CPU tier, pool; a fourth, elsewhere, only if any."""
    prompt = sum(one.prompt_tokens for one in samples)
    shares = [sum(getattr(one, at) for one in samples) / max(1, prompt) for at in _PLACES]
    return tuple(shares) if shares[3] else tuple(shares[:3])


def ratio_of_ttft(
    samples: Sequence[Any], arm: str, length: int | None = None, other: str | None = None
) -> list[float]:
    """Of each prompt: its first time over its return on `arm`; with `other`, returns of the two.

    length: of the prompts; None: all.
    """
    below: dict[str, object] = {"arm": other or arm, "phase": "back", "length": length}
    above = {**below, "arm": arm, "phase": "back" if other else "cold"}
    pairs = paired(samples, "ttft_s", above, below, lambda one: (one.length, one.round))
    return [a / b for a, b in pairs if b]


def ratio_of_hits(samples: Sequence[Any], arm: str, other: str, rate: int) -> list[float]:
    """Throughput of `arm` over that of `other`, paired by round."""
    above, below = ({"arm": name, "rate": rate} for name in (arm, other))
    return [a / b for a, b in paired(samples, "tokens_per_s", above, below) if b]


def ratio_of_cpu(samples: Sequence[Any], arm: str, other: str, rate: int) -> list[float]:
    """CPU seconds of the server `arm` over those of `other`, paired by round."""
    above, below = ({"arm": name, "rate": rate} for name in (arm, other))
    return [a / b for a, b in paired(samples, "cpu_s", above, below) if b]


def throughput_ratios(samples: Sequence[HitSample]) -> list[dict[str, Any]]:
    """Of each of our arms whose rival was measured too, by hit rate: the median of the paired
    rounds' ratios, and its 95 % interval (`results.Paired`); low and high are None for few rounds.
    """
    rows: list[dict[str, Any]] = []
    for rate in _levels(samples, "rate"):
        for mine, theirs in rivals(distinct(samples, "arm")):
            if found := ratio_of_hits(samples, mine, theirs, rate):
                one = results.median_ratio(found)
                low, high = one.interval or (None, None)
                row = {"arm": mine, "rival": theirs, "rate": rate, "median": one.middle}
                rows.append(row | {"low": low, "high": high, "pairs": one.n})
    return rows


@dataclass(frozen=True)
class Turns:
    """One arm at one concurrency, all rounds together. found: as `found_in`."""

    tokens_per_s: float | None
    ttft_mean_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    failures: int
    found: tuple[float, ...]


def turns_of(samples: Sequence[Any], arm: str, concurrency: int) -> Turns:
    mine = select(samples, arm=arm, concurrency=concurrency)
    whole = [one for one in mine if one.failure is None]
    # From the start of each measurement to its last answer.
    seconds = sum(
        max(one.start_s + one.end_s for one in mine if one.round == index)
        for index in distinct(mine, "round")
    )
    tokens = sum(one.prompt_tokens + one.answer_tokens for one in whole)
    ttfts = results.values_of(whole, "ttft_s")
    return Turns(
        tokens_per_s=tokens / seconds if seconds else None,
        ttft_mean_s=mean(ttfts),
        ttft_p95_s=results.percentile(ttfts, 0.95) if ttfts else None,
        ttft_p99_s=results.percentile(ttfts, 0.99) if ttfts else None,
        failures=len(mine) - len(whole),
        found=found_in(mine),
    )


def ratio_of_turns(samples: Sequence[Any], arm: str, other: str, concurrency: int) -> list[float]:
    """Tokens per second of `arm` over those of `other`, paired by round."""
    found = []
    for index in _levels(samples, "round"):
        part = select(samples, round=index)
        mine, theirs = (turns_of(part, name, concurrency).tokens_per_s for name in (arm, other))
        if mine is not None and theirs:
            found.append(mine / theirs)
    return found


def changed(value: float | None, base: float | None) -> str:
    """`value` against `base` in per cent, as tables print it; – where one is missing."""
    return NOTHING if value is None or not base else f"{100 * (value / base - 1):+.0f} %"


def _same_turns(samples: Sequence[Any]) -> tuple[int, int]:
    """(equal, compared): answers against the first arm's to the same turn."""
    first: dict[tuple[int, ...], str] = {}
    same = compared = 0
    for one in samples:
        if one.failure is None:
            key = (one.concurrency, one.round, one.conversation, one.turn)
            compared += key in first
            same += key in first and first[key] == one.digest
            first.setdefault(key, one.digest)
    return same, compared


def _published_ttft(samples: Sequence[Any]) -> dict[str, str]:
    """Medians of the lengths' ratios, of an arm whose CPU tier holds everything."""
    for arm in _HOLD_ALL:
        lengths = distinct(select(samples, arm=arm), "length")
        found = [median(ratio_of_ttft(samples, arm, length)) for length in lengths]
        if known := [one for one in found if one is not None]:
            text = f"{min(known):.1f}×–{max(known):.1f}×, by prompt length ({arm})"
            return {"TTFT, computed / loaded from the CPU tier": text}
    return {}


def _published_hits(samples: Sequence[Any]) -> dict[str, str]:
    """The most hits over the fewest, by medians, of an arm whose CPU tier holds everything."""
    rates = _levels(samples, "rate")
    for arm in _HOLD_ALL if len(rates) > 1 else ():
        ends = (rates[0], rates[-1])
        few, many = (median_of(samples, "tokens_per_s", arm=arm, rate=rate) for rate in ends)
        if few and many is not None:
            text = f"{many / few:.1f}× ({arm}, {rates[-1]} % hits / {rates[0]} %)"
            return {"throughput, many hits in the CPU tier / none": text}
    return {}


def _lines(conditions: Conditions) -> Iterator[str]:
    gpus = "".join(f"{gpu}, " for gpu in conditions.get("gpus", ()))
    where = f"{gpus}{tables.machine_in(conditions)}, vLLM {tables.vllm_in(conditions, 'not here')}"
    yield f"{where}; {load_in(conditions)} (the servers at work count)"
    if model := conditions.get("model"):
        yield (
            f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, "
            f"{model['kv_bytes_per_token'] // 1024} KiB of KV per token; GPU cache "
            f"{conditions['gpu_tokens']} tokens; chunks of {conditions['chunk_bytes'] // 1024} KiB"
        )
    for name, arm in conditions.get("arms", {}).items():
        staging = arm.get("staging_bytes")
        memory = f" ({staging / (1 << 20):.0f} MiB of CPU memory)" if staging else ""
        yield f"{name}: {arm['says']}{memory}"
    yield from (conditions[name] for name in ("stand_in", "peer_note") if name in conditions)
    kept = [name for name, done in conditions.get("gpu_cache_emptied", {}).items() if not done]
    if kept:
        yield (
            f"the GPU's prefix cache was not emptied on {', '.join(kept)} (no /reset_prefix_cache: "
            f"VLLM_SERVER_DEV_MODE=1): hits there are of GPU memory too"
        )
    if conditions.get("cut_off"):
        yield "this run was cut off: not every arm has every sample"


def _ordered(samples: Iterable[Any], conditions: Conditions) -> list[Any]:
    """The samples of the first arm first: the others are compared with them."""
    order = list(conditions.get("arms", {}))
    return sorted(samples, key=lambda one: order.index(one.arm) if order else 0)


def _levels(samples: Sequence[Any], field: str) -> list[Any]:
    return sorted(set(distinct(samples, field)))


def _times(ratios: Sequence[float]) -> str:
    return number(median(ratios), "{:.2f}×")


def _found_table(samples: Sequence[Any], field: str, form: str) -> Table:
    def cell(arm: str, row: Any) -> str:
        shares = found_in(select(samples, **{"arm": arm, field: row}))
        return " / ".join(f"{share:.0%}" for share in shares)

    title = "Found, share of the prompts' tokens: GPU / CPU tier / pool"
    columns = [Column("", form.format), *by_arm(distinct(samples, "arm"), cell)]
    return Table(title, columns, distinct(samples, field))


def _rival_lines(
    samples: Sequence[Any], what: str, ratios: Callable[[str, str], list[float]]
) -> Iterator[str]:
    """One sentence for each of our arms whose rival was measured too."""
    for mine, theirs in rivals(distinct(samples, "arm")):
        if found := ratios(mine, theirs):
            one = results.median_ratio(found)
            between = one.text(".2f", ", 95 % interval {} to {}")
            yield (
                f"• {what}: {mine} / {theirs} {between} (median of {one.n} pairs, which are "
                f"{min(found):.2f} to {max(found):.2f})"
            )


def _answer_lines(samples: Sequence[Any], same: int, compared: int) -> Iterator[str]:
    for reason in sorted({one.failure for one in samples if getattr(one, "failure", None)}):
        yield f"failed: {reason}"
    yield f"answers that equal the first arm's: {same} of {compared}"


def _ttft_tables(samples: Sequence[Any], conditions: Conditions) -> Iterator[Table | str]:
    samples = _ordered(samples, conditions)
    arms, lengths = distinct(samples, "arm"), _levels(samples, "length")
    phases = {"cold": "first time", "back": "returning"}
    rows = [{"length": length, "phase": phase} for length in lengths for phase in phases]
    counts = {len(select(samples, arm=arm, **row)) for arm in arms for row in rows}
    of = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "0"
    columns = [
        Column("prompt, tokens", lambda row: str(row["length"])),
        Column("", lambda row: phases[row["phase"]]),
        *arm_columns(samples, arms, "ttft_s", scale=0.001),
    ]
    yield Table(f"TTFT in ms, medians of {of} rounds", columns, rows, grouped=True)
    columns = by_arm(arms, lambda arm, length: _times(ratio_of_ttft(samples, arm, length)))
    title = "First time / returning, paired by prompt: times as fast"
    yield Table(title, [Column("tokens", str), *columns], lengths)
    yield _found_table(select(samples, phase="back"), "length", "{}")
    yield from _rival_lines(samples, "TTFT", lambda a, b: ratio_of_ttft(samples, a, None, b))
    known = results.values_of(samples, "same")
    yield from _answer_lines(samples, int(sum(known)), len(known))


def _hits_tables(samples: Sequence[Any], conditions: Conditions) -> Iterator[Table | str]:
    samples = _ordered(samples, conditions)
    arms, rates = distinct(samples, "arm"), _levels(samples, "rate")

    def rate_of(measure: str, form: str) -> Callable[[str, int], str]:
        return lambda arm, rate: number(median_of(samples, measure, arm=arm, rate=rate), form)

    against = f"/ {arms[0]}" if arms else "/"
    cells: dict[str, Callable[[str, int], str]] = {
        "tokens/s": rate_of("tokens_per_s", "{:,.0f}"),
        "requests/s": rate_of("requests_per_s", "{:,.1f}"),
        against: lambda arm, rate: _times(ratio_of_hits(samples, arm, arms[0], rate)),
    }
    if results.values_of(samples, "cpu_s"):
        cells["CPU s"] = rate_of("cpu_s", "{:.2f}")
    columns = [
        Column("hit rate", lambda row: f"{row[0]} %"),
        Column("", lambda row: row[1]),
        *by_arm(arms, lambda arm, row: cells[row[1]](arm, row[0])),
    ]
    requests = samples[0].requests if samples else 0
    title = f"Throughput of {requests} prompts at once, medians of rounds"
    yield Table(title, columns, [(rate, what) for rate in rates for what in cells], grouped=True)
    yield _found_table(samples, "rate", "{} %")
    for rate in rates:
        ratios = partial(ratio_of_hits, samples, rate=rate)
        yield from _rival_lines(samples, f"throughput at {rate} % hits", ratios)
        spent = partial(ratio_of_cpu, samples, rate=rate)
        yield from _rival_lines(samples, f"CPU seconds at {rate} % hits", spent)
    same, compared = (sum(getattr(one, name) for one in samples) for name in ("same", "compared"))
    yield from _answer_lines(samples, same, compared)


def _turns_tables(samples: Sequence[Any], conditions: Conditions) -> Iterator[Table | str]:
    """The columns of the Data24 table, by concurrency and arm."""
    samples = _ordered(samples, conditions)
    arms, levels = distinct(samples, "arm"), _levels(samples, "concurrency")
    found = {(level, arm): turns_of(samples, arm, level) for level in levels for arm in arms}

    def shown(name: str, scale: float = 1.0) -> Callable[[tuple[int, str]], str]:
        return lambda row: number(getattr(found[row], name), scale=scale)

    def delta(name: str) -> Callable[[tuple[int, str]], str]:
        return lambda row: changed(getattr(found[row], name), getattr(found[row[0], arms[0]], name))

    def places(row: tuple[int, str]) -> str:
        shares = zip(found[row].found, ("GPU", "CPU", "pool", "other"), strict=False)
        return ", ".join(f"{share:.0%} {name}" for share, name in shares)

    columns = [
        Column("at once", lambda row: str(row[0])),
        Column("arm", lambda row: row[1], left=True),
    ]
    for name, title, scale in (
        ("tokens_per_s", "tokens/s", 1.0),
        ("ttft_mean_s", "TTFT avg, ms", 0.001),
        ("ttft_p95_s", "P95", 0.001),
        ("ttft_p99_s", "P99", 0.001),
    ):
        columns += [Column(title, shown(name, scale)), Column("Δ", delta(name))]
    columns += [Column("failures", lambda row: found[row].failures), Column("found", places)]
    rounds = len(set(distinct(samples, "round")))
    yield Table(f"Conversations; rounds, taken together: {rounds}", columns, found, grouped=True)
    yield "tokens/s: of all prompts and answers; found: share of the prompts' tokens"
    for level in levels:
        ratios = partial(ratio_of_turns, samples, concurrency=level)
        yield from _rival_lines(samples, f"tokens/s at {level}", ratios)
    yield from _answer_lines(samples, *_same_turns(samples))


#: Ours solid, peers dashed.
_STYLES = {
    "none": Style(plots.BLACK, "s"),
    "cpu": Style(plots.GREEN, "^"),
    "full": Style(plots.GREEN, "o"),
    "pool": Style(plots.BLUE, "o"),
    "target": Style(plots.SKY, "o"),
    "peer_full": Style(plots.ORANGE, "v", linestyle="--"),
    "peer": Style(plots.RED, "v", linestyle="--"),
    "peer_target": Style(plots.PINK, "v", linestyle="--"),
}
_OTHERS = (plots.BLUE, plots.RED, plots.GREEN, plots.PINK, plots.ORANGE, plots.SKY, plots.BLACK)


def _styles(samples: Sequence[Any]) -> dict[str, Style]:
    """By arm; the arm is the label."""
    others = zip(distinct(samples, "arm"), itertools.cycle(_OTHERS), strict=False)
    return {arm: replace(_STYLES.get(arm, Style(other)), label=arm) for arm, other in others}


@contextmanager
def _panels(path: Path, title: str, conditions: Conditions) -> Iterator[list[Any]]:
    """Two panels side by side, with a legend that describes the arms."""
    arms, model = conditions.get("arms", {}), conditions.get("model", {})
    size = f", random model of {model['parameters'] / 1e6:.1f} M parameters" if model else ""
    stand_in = arms.get("target", {}).get("throttled_mb_per_s")
    note = f"; target: stand-in, local disk throttled to {stand_in} MB/s" if stand_in else ""

    def named(arm: str) -> str:
        about = arms.get(arm, {}).get("says")
        return f"{arm}: {about}" if about else arm

    where = f"{plots.where_measured(conditions)}{size}{note}"
    with plots.picture(path, f"{title}\n{where}", "AB") as (figure, panels):
        yield panels
        plots.legend_below(figure, panels[:1], 2, named)


def _plot_ttft(path: Path, samples: Sequence[Any], conditions: Conditions) -> None:
    samples = _ordered(samples, conditions)
    back, styles, lengths = (
        select(samples, phase="back"),
        _styles(samples),
        _levels(samples, "length"),
    )
    ylabel = "time to first token of a returning prompt, ms"
    with _panels(path, "Time to first token of one request", conditions) as (times, ratios):
        plots.lines(
            times, styles, lengths, results.spreads_by(back, "ttft_s", "arm", "length"), 0.001
        )
        plots.lines(ratios, styles, lengths, lambda *at: spread_of(ratio_of_ttft(samples, *at)))
        for panel in (times, ratios):
            plots.size_axis(panel, lengths, "{:,}".format)
        times.set_yscale("log")
        times.yaxis.set_major_formatter("{x:,.0f}")
        times.yaxis.set_minor_formatter(lambda x, _: f"{x:,.0f}" if f"{x:e}"[0] in "25" else "")
        plots.finish(times, xlabel="prompt, tokens", ylabel=ylabel)
        ratios.axhline(1.0, color=plots.GREY, linewidth=1)
        ratios.set_ylim(bottom=0)
        plots.finish(ratios, xlabel="prompt, tokens", ylabel="first time / returning")


def _plot_hits(path: Path, samples: Sequence[Any], conditions: Conditions) -> None:
    samples = _ordered(samples, conditions)
    first, styles, rates = samples[0].arm, _styles(samples), _levels(samples, "rate")
    labels = ("prompt and answer tokens per second", f"throughput / {first}")
    with _panels(path, "Throughput against hit rate", conditions) as (speeds, ratios):
        plots.lines(
            speeds, styles, rates, results.spreads_by(samples, "tokens_per_s", "arm", "rate")
        )
        plots.lines(
            ratios, styles, rates, lambda arm, at: spread_of(ratio_of_hits(samples, arm, first, at))
        )
        ratios.axhline(1.0, color=plots.GREY, linewidth=1)
        for panel, ylabel in zip((speeds, ratios), labels, strict=True):
            panel.set_xticks(rates)
            panel.set_ylim(bottom=0)
            plots.finish(panel, xlabel="prompts that return, per cent", ylabel=ylabel)


def _plot_turns(path: Path, samples: Sequence[Any], conditions: Conditions) -> None:
    samples = _ordered(samples, conditions)
    levels = {str(level): level for level in _levels(samples, "concurrency")}
    rates_label = "prompt and answer tokens per second"
    labels = (rates_label, "time to first token, s: average; whisker: P99")

    def rate(arm: str, level: int) -> results.Spread | None:
        value = turns_of(samples, arm, level).tokens_per_s
        return None if value is None else results.Spread(value, value, value, 1)

    def ttft(arm: str, level: int) -> results.Spread | None:
        found = turns_of(samples, arm, level)
        low, high = found.ttft_mean_s, found.ttft_p99_s
        return None if low is None or high is None else results.Spread(low, low, high, 1)

    with _panels(path, "Conversations of four turns", conditions) as panels:
        for panel, spread, ylabel in zip(panels, (rate, ttft), labels, strict=True):
            plots.bars(panel, _styles(samples), levels, spread, form="")
            plots.finish(panel, xlabel="conversations at once", ylabel=ylabel)


BENCHES = (
    Benchmark("ttft", TtftSample, _lines, _ttft_tables, _plot_ttft, None, "", _published_ttft, 150),
    Benchmark("hits", HitSample, _lines, _hits_tables, _plot_hits, None, "", _published_hits, 150),
    Benchmark("turns", TurnSample, _lines, _turns_tables, _plot_turns, columns=150),
)
