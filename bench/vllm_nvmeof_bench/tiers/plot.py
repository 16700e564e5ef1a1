# SPDX-License-Identifier: Apache-2.0
"""The samples as one picture (PNG). matplotlib is imported here and only when it is asked for.

Left: hits by tier over the size of the pool, the default policy's as areas, the others' sums as
lines. Middle: what is written for each token of a prompt. Right: orders of eviction alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.picture import pyplot, save
from vllm_nvmeof_bench.tiers.report import of_sweep, share_of
from vllm_nvmeof_bench.tiers.samples import Sample

__all__ = ["plot"]

_SIZE = 12
_DEFAULT, _PLAIN = "credited_lru", "lru"
#: Okabe and Ito's colours, which colour-blind readers can tell apart.
_TIERS = (("hit_gpu", "#999999", "GPU"), ("hit_cpu", "#E69F00", "CPU tier"))
_POOL = ("hit_pool", "#0072B2", "pool")
_LINES = {
    "best": ("#999999", ":", "best there could be"),
    _DEFAULT: ("#0072B2", "-", "credited LRU (default)"),
    _PLAIN: ("#D55E00", "--", "plain LRU"),
    "s3_fifo": ("#009E73", "-.", "S3-FIFO"),
}
#: Of the user's own policies, in turn.
_OWN = ("#CC79A7", "#E69F00", "#56B4E9", "black")


def plot(path: Path, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    """Draw the picture.

    Raises:
        BenchError: matplotlib is not installed, or the file cannot be written.
    """
    figure, places = pyplot().subplots(1, 3, figsize=(17, 6.5), layout="constrained")
    _by_tier(places[0], of_sweep(samples, "pool"), conditions)
    _written(places[1], of_sweep(samples, "pool"), conditions)
    _alone(places[2], of_sweep(samples, "alone"), conditions)
    figure.suptitle(
        f"{conditions['trace']}: {conditions['requests']:,} requests, working set "
        f"{conditions['working_set_tokens'] / 1e6:,.1f} M tokens; simulated",
        fontsize=_SIZE + 2,
    )
    save(figure, path)


def _by_tier(place: Any, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    names = _policies(samples)
    areas = _DEFAULT if _DEFAULT in names else names[0]
    ours = [one for one in samples if one.policy == areas]
    across = [share_of(one.pool_tokens, conditions) for one in ours]
    layers = [
        [100 * getattr(one, field) / one.prompt_tokens for one in ours]
        for field, _, _ in (*_TIERS, _POOL)
    ]
    colours = [colour for _, colour, _ in (*_TIERS, _POOL)]
    tiers = [name for _, _, name in (*_TIERS, _POOL)]
    place.stackplot(across, layers, colors=colours, labels=tiers, alpha=0.75)
    for number, policy in enumerate(name for name in names if name != areas):
        some = [one for one in samples if one.policy == policy]
        place.plot(
            [share_of(one.pool_tokens, conditions) for one in some],
            [100 * one.hit for one in some],
            ("--", ":", "-.")[number % 3],
            color="black",
            label=f"all tiers, {_line_of(policy, names)[2]}",
        )
    place.axhline(100 * conditions["reusable"], color="black", linewidth=1, linestyle=":")
    place.annotate(
        "all that comes again",
        (1, 100 * conditions["reusable"]),
        (-4, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
    )
    _finish(place, "prompt tokens found, %", "where prompts are found")
    place.legend(loc="upper left", bbox_to_anchor=(0, 0.93), fontsize=_SIZE - 1)


def _written(place: Any, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    names = _policies(samples)
    for policy in names:
        colour, style, name = _line_of(policy, names)
        some = [one for one in samples if one.policy == policy and one.pool_tokens]
        place.plot(
            [share_of(one.pool_tokens, conditions) for one in some],
            [100 * one.written / one.prompt_tokens for one in some],
            style,
            marker="o",
            color=colour,
            label=name,
        )
    _finish(place, "written to the pool, % of prompt tokens", "what the pool's drives write")
    place.legend(fontsize=_SIZE - 1)


def _alone(place: Any, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    names = _policies(samples)
    for policy in names:
        colour, style, name = _line_of(policy, names)
        some = [one for one in samples if one.policy == policy]
        place.plot(
            [share_of(one.pool_tokens, conditions) for one in some],
            [100 * one.hit for one in some],
            style,
            marker="o",
            color=colour,
            label=name,
        )
    _finish(place, "prompt tokens found, %", "one tier alone, by order of eviction")
    place.set_xlabel("size of the tier / working set", fontsize=_SIZE)
    place.set_xscale("log")
    sizes = sorted({round(share_of(one.pool_tokens, conditions), 3) for one in samples})
    place.set_xticks(sizes, [f"{size:.2g}" for size in sizes])
    place.minorticks_off()
    place.legend(fontsize=_SIZE - 1)


def _policies(samples: Sequence[Sample]) -> list[str]:
    """In the order of `_LINES`, then the user's own."""
    there = dict.fromkeys(one.policy for one in samples)
    return [*(name for name in _LINES if name in there), *(n for n in there if n not in _LINES)]


def _line_of(policy: str, names: Sequence[str]) -> tuple[str, str, str]:
    """Colour, style, and what the legend says."""
    if policy in _LINES:
        return _LINES[policy]
    own = [name for name in names if name not in _LINES]
    return _OWN[own.index(policy) % len(_OWN)], "-", policy


def _finish(place: Any, what: str, title: str) -> None:
    place.set_xlabel("size of the pool / working set", fontsize=_SIZE)
    place.set_ylabel(what, fontsize=_SIZE)
    place.set_title(title, fontsize=_SIZE)
    place.set_ylim(0, None)
    place.grid(alpha=0.3)
