# SPDX-License-Identifier: Apache-2.0
"""The samples as one picture (PNG). matplotlib is imported here and only when it is asked for.

Left: the time to first token of each request over the time at which it was sent, and a median
that moves along: where it climbs while the users stay the same, the server is in the spiral.
Top right: requests completed over time. Bottom right: where prompt tokens were found.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.picture import pyplot, save
from vllm_nvmeof_bench.replay.samples import Sample, arms_of

__all__ = ["plot"]

_SIZE = 12
#: Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#999999", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
_FOUND = (("gpu", "#999999", "GPU"), ("cpu", "#E69F00", "CPU tier"), ("pool", "#0072B2", "pool"))
_OTHER = ("other", "#CC79A7", "elsewhere")
_WINDOWS = 12


def plot(path: Path, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    """Draw the picture.

    Raises:
        BenchError: matplotlib is not installed, or the file cannot be written.
    """
    figure = pyplot().figure(figsize=(16, 8), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1))
    _first_tokens(figure.add_subplot(grid[:, 0]), samples)
    _completed(figure.add_subplot(grid[0, 1]), samples)
    _found(figure.add_subplot(grid[1, 1]), arms_of(samples), conditions)
    settings = conditions["settings"]
    figure.suptitle(
        f"{settings['trace']}, {settings['pace']['users']} users, seed "
        f"{settings['pace']['seed']}: the same sessions against each server",
        fontsize=_SIZE + 2,
    )
    save(figure, path)


def _first_tokens(place: Any, samples: Sequence[Sample]) -> None:
    end_s = max((one.at_s for one in samples), default=1.0)
    edges = np.linspace(0, end_s or 1.0, _WINDOWS + 1)
    for number, arm in enumerate(arms_of(samples)):
        mine = [one for one in samples if one.arm == arm and one.ttft_s is not None]
        sent = np.array([one.at_s for one in mine])
        first = np.array([one.ttft_s for one in mine], float)
        colour = _COLOURS[number % len(_COLOURS)]
        place.plot(sent, first, ".", color=colour, alpha=0.35, markersize=6)
        middles, medians = [], []
        for low, high in itertools.pairwise(edges):
            inside = (sent >= low) & (sent <= high)
            if inside.any():
                middles.append((low + high) / 2)
                medians.append(float(np.median(first[inside])))
        place.plot(middles, medians, "-", color=colour, linewidth=2.5, label=arm)
    place.set_yscale("log")
    place.set_xlabel("sent, seconds after the first user came", fontsize=_SIZE)
    place.set_ylabel("time to first token, s", fontsize=_SIZE)
    place.set_title("each request, and a moving median", fontsize=_SIZE)
    place.grid(alpha=0.3, which="both")
    place.legend(fontsize=_SIZE)


def _completed(place: Any, samples: Sequence[Sample]) -> None:
    for number, arm in enumerate(arms_of(samples)):
        ends = sorted(
            one.at_s + one.end_s for one in samples if one.arm == arm and one.ended == "whole"
        )
        colour = _COLOURS[number % len(_COLOURS)]
        place.step([0.0, *ends], range(len(ends) + 1), where="post", color=colour, linewidth=2.5)
    place.set_xlabel("seconds", fontsize=_SIZE)
    place.set_title("requests completed", fontsize=_SIZE)
    place.grid(alpha=0.3)


def _found(place: Any, arms: Sequence[str], conditions: Mapping[str, Any]) -> None:
    left = np.zeros(len(arms))
    for name, colour, label in (*_FOUND, _OTHER):
        hits = [conditions["hits"][arm] for arm in arms]
        share = np.array([100 * one[name] / max(1, one["prompt"]) for one in hits])
        if name == _OTHER[0] and not share.any():
            continue
        place.barh(arms, share, left=left, color=colour, label=label)
        left += share
    place.invert_yaxis()
    place.set_xlim(0, 100)
    place.set_xlabel("% of prompt tokens", fontsize=_SIZE)
    place.set_title("where prompts were found; the rest was computed", fontsize=_SIZE)
    below = (0.5, -0.2)  # on the bars it would hide what it names
    place.legend(loc="upper center", bbox_to_anchor=below, ncols=len(_FOUND) + 1, fontsize=_SIZE)
