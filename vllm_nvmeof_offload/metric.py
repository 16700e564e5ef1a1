# SPDX-License-Identifier: Apache-2.0
"""What a metric is, and how a table of them is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

__all__ = ["DIRECTION", "NO", "PREFIX", "TARGET", "Label", "Metric", "metrics", "one_of"]

PREFIX = "vllm:nvmeof_"


@dataclass(frozen=True, slots=True)
class Label:
    """values: all it can have; none given: they come from the deployment, as `of` says."""

    name: str
    values: tuple[str, ...] = ()
    of: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """name: with prefix, a counter's without `_total`. unit: what one of it is."""

    name: str
    unit: str
    help: str
    labels: tuple[Label, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    def series(self, targets: int) -> Sequence[tuple[str, ...]]:
        """Label values of all series, with so many targets; none if they are not known ahead."""
        values = [_TARGETS(targets) if one is TARGET else one.values for one in self.labels]
        return list(product(*values))


def _TARGETS(count: int) -> tuple[str, ...]:  # noqa: N802
    return tuple(map(str, range(count)))


#: A target's number: its place in the list of targets, from 0. `target_info` has its directory.
TARGET = Label("target", of="the configured targets, by number")
DIRECTION = Label("direction", ("store", "load"))


def metrics(*rows: tuple[str, str, str, tuple[Label, ...]]) -> dict[str, Metric]:
    """By name. rows: name without prefix, unit, meaning, labels."""
    return {name: Metric(PREFIX + name, unit, text, labels) for name, unit, text, labels in rows}


def one_of(name: str, *values: str) -> tuple[Label, ...]:
    """One label, which has one of `values`."""
    return (Label(name, values),)


#: No labels.
NO: tuple[Label, ...] = ()
