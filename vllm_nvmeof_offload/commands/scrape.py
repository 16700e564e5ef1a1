# SPDX-License-Identifier: Apache-2.0
"""A server's `/metrics`: one reading, and amounts by our metrics' names and label values."""

from __future__ import annotations

import re
from collections import defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.metrics import PREFIX, Metric

#: Gauges in these units are added over a server's engines; of all others the largest is shown.
_ADDED_UNITS = ("chunks", "slots", "tokens", "operations", "requests", "parts")
_NAME = re.compile(r"[^{\s#]+")


class ScrapeError(OffloadError):
    """An error if a server's metrics cannot be read; the message contains the remedy."""


class Metrics:
    """One reading of a server's counters and gauges.

    A sample is parsed when its name is first asked for, because a caller that polls needs few.

    Args:
        text: the answer of `/metrics` in Prometheus' text format.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[str, list[str]] = defaultdict(list)
        for line in text.split("\n"):
            if name := _NAME.match(line):
                self._lines[name[0]].append(line)
        self._parsed: dict[str, list[tuple[dict[str, str], float]]] = {}

    def has(self, name: str) -> bool:
        """Return whether the server exports `name`."""
        return name in self._lines

    @property
    def ours(self) -> bool:
        """Return whether the server exports any metric of this package."""
        return any(name.startswith(PREFIX) for name in self._lines)

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each sample of `name`.

        Several API servers of one vLLM export each gauge once per process (`pid`); their largest
        value is returned.

        Raises:
            ScrapeError: a line is not in Prometheus' text format.
        """
        if name not in self._parsed:
            largest: dict[tuple[tuple[str, str], ...], float] = {}
            text = "\n".join(self._lines.get(name, ()))
            try:
                found = [one for f in text_string_to_metric_families(text) for one in f.samples]
            except ValueError as error:
                raise ScrapeError(f"metric {name}: not in Prometheus' format: {error}") from None
            for sample in found:
                labels = tuple((key, text) for key, text in sample.labels.items() if key != "pid")
                largest[labels] = max(sample.value, largest.get(labels, sample.value))
            self._parsed[name] = [(dict(labels), value) for labels, value in largest.items()]
        return self._parsed[name]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of `name` over all samples with `labels`; 0 if there are none."""
        return sum(value for have, value in self.samples(name) if labels.items() <= have.items())

    def amounts(self, metric: Metric) -> dict[str, float]:
        """Return the amounts of a metric of ours, over all engines, by its labels' values.

        A key holds the values, separated by spaces; it is "" without labels.
        """
        counted = metric.kind == "counter"
        by_key: dict[str, list[float]] = defaultdict(list)
        for labels, value in self.samples(metric.name + "_total" * counted):
            key = " ".join(labels.get(label.name, "") for label in metric.labels)
            by_key[key].append(value)
        added = counted or metric.unit in _ADDED_UNITS
        return {key: sum(values) if added else max(values) for key, values in by_key.items()}


def scrape(url: str, timeout_s: float = 5.0) -> Metrics:
    """Read the metrics of the server at `url`.

    Raises:
        ScrapeError: the server does not answer, or has no `/metrics`.
    """
    page = f"{url.rstrip('/').removesuffix('/metrics')}/metrics"
    remedy = "give the address of a running server, such as http://127.0.0.1:8000"
    try:
        answer = httpx.get(page, timeout=timeout_s, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ScrapeError(f"{page}: no answer ({error}); {remedy}") from None
    if answer.status_code != httpx.codes.OK:
        raise ScrapeError(f"{page}: HTTP {answer.status_code}; {remedy}")
    return Metrics(answer.text)


def scrape_ours(url: str, timeout_s: float = 5.0) -> Metrics:
    """Read the metrics of a server that uses this backend.

    Raises:
        ScrapeError: as `scrape`, or the server exports no metric of this package.
    """
    found = scrape(url, timeout_s)
    if not found.ours:
        raise ScrapeError(
            f"{url} exports no {PREFIX}… metrics: start the server with --kv-offloading-backend "
            "nvmeof and without VLLM_USE_RUST_FRONTEND (docs/operations.md)"
        )
    return found
