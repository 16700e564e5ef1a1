# SPDX-License-Identifier: Apache-2.0
"""HTTP requests to a server, and readings of its `/metrics`."""

from __future__ import annotations

import re
import time
from collections import defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.metrics import PREFIX
from vllm_nvmeof_offload.units import MIB, printable

_NAME = re.compile(r"[^{\s#]+")
_CONNECT_S_MAX, _ANSWER_S_MAX = 5.0, 30.0
#: A server with many engines has about 1 MiB of metrics.
ANSWER_BYTES_MAX = 16 * MIB


class ScrapeError(OffloadError):
    """Raised if a server's metrics cannot be read. The message contains the remedy."""


class Metrics:
    """A reading of a server's metrics. Samples are parsed on demand, because callers need few."""

    def __init__(self, text: str) -> None:
        self._lines: dict[str, list[str]] = defaultdict(list)
        for line in text.split("\n"):
            if name := _NAME.match(line):
                self._lines[name[0]].append(line)
        self._parsed: dict[str, list[tuple[dict[str, str], float]]] = {}

    def has(self, name: str) -> bool:
        return name in self._lines

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the printable labels and the value of each sample of `name`.

        If several API servers of one vLLM export a gauge per process (`pid`), the largest counts.
        Raises ScrapeError if a line is not in the Prometheus format.
        """
        if name not in self._parsed:
            largest: dict[tuple[tuple[str, str], ...], float] = {}
            text = "\n".join(self._lines.get(name, ()))
            try:
                found = [one for f in text_string_to_metric_families(text) for one in f.samples]
            except (ValueError, IndexError) as error:  # the parser can index past a line's end
                raise ScrapeError(f"metric {name}: not in Prometheus' format: {error}") from None
            for one in found:
                pairs = ((name, printable(value)) for name, value in one.labels.items())
                labels = tuple(pair for pair in pairs if pair[0] != "pid")
                largest[labels] = max(one.value, largest.get(labels, one.value))
            self._parsed[name] = [(dict(labels), value) for labels, value in largest.items()]
        return self._parsed[name]

    def value(self, name: str, **labels: str) -> float:
        return sum(value for have, value in self.samples(name) if labels.items() <= have.items())


def get(page: str, remedy: str) -> tuple[int, str]:
    """Send an HTTP request; return the status and text of the response. Raises ScrapeError, with
    `remedy`, if there is no response, or if it is too long or too slow."""
    body, ends_s = bytearray(), time.monotonic() + _ANSWER_S_MAX
    try:
        with httpx.stream("GET", page, timeout=_CONNECT_S_MAX, trust_env=False) as answer:
            for part in answer.iter_bytes():
                body += part
                if len(body) > ANSWER_BYTES_MAX or time.monotonic() > ends_s:
                    raise ScrapeError(f"{page}: the answer is too long or too slow")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # ValueError: a bad name
        raise ScrapeError(f"{page}: no answer ({error}); {remedy}") from None
    return answer.status_code, body.decode(errors="replace")


def scrape(url: str) -> Metrics:
    page = f"{url.rstrip('/').removesuffix('/metrics')}/metrics"
    remedy = "give the address of a running server, such as http://127.0.0.1:8000"
    status, text = get(page, remedy)
    if status != httpx.codes.OK:
        raise ScrapeError(f"{page}: HTTP {status}; {remedy}")
    return Metrics(text)


def scrape_ours(url: str) -> Metrics:
    """Read the metrics of a server with this backend. Raises ScrapeError for any other server."""
    found = scrape(url)
    if not found.has(f"{PREFIX}stored_chunks_total"):  # counters are exported from the start
        remedy = "--kv-offloading-backend nvmeof and without VLLM_USE_RUST_FRONTEND"
        raise ScrapeError(f"{url} exports no {PREFIX}… metrics: start the server with {remedy}")
    return found
