# SPDX-License-Identifier: Apache-2.0
"""The command `explain`, which prints a running server's records of a request."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import typer

from vllm_nvmeof_offload.commands import print_json
from vllm_nvmeof_offload.commands.scrape import ScrapeError, get
from vllm_nvmeof_offload.config import METRICS_ADDRESS
from vllm_nvmeof_offload.units import printable

_COLUMNS = 80
_TIERS = {
    "cpu_tokens": "from the CPU tier",
    "pool_tokens": "from the pool",
    "shared_tokens": "from another engine's pool",
}


def explain(request_id: str | None, url: str | None, as_json: bool) -> None:
    """Print the records of a request, or of the last request if `request_id` is None. Raises
    ScrapeError if the server does not answer or has no such record."""
    url = (url or f"http://{METRICS_ADDRESS}").rstrip("/").removesuffix("/metrics")
    records = _records(url, request_id)
    if as_json:
        print_json(records)
        return
    try:
        lines = [line for record in records for line in _lines(record)]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = f"its records have a different format ({error!r}); query a server of this version"
        raise ScrapeError(f"{url}: {why}") from None
    for line in lines:
        # The id is partly chosen by the client, and could contain control characters.
        wrapped = textwrap.wrap(printable(line), _COLUMNS, subsequent_indent=" " * 6)
        typer.echo("\n".join(wrapped))


def _records(url: str, request_id: str | None) -> list[dict[str, Any]]:
    name = "last" if request_id is None else quote(request_id, safe="")
    remedy = (
        "give the address in the server's start line as --url, or start the server with "
        f"VLLM_NVMEOF_METRICS_LISTEN={METRICS_ADDRESS}"
    )
    status, text = get(f"{url}/requests/{name}", remedy)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScrapeError(f"{url} did not answer with JSON ({error}); {remedy}") from None
    if isinstance(body, list):
        return body
    given = body.get("error") if isinstance(body, dict) else None
    if isinstance(given, str):
        raise ScrapeError(f"{url}: {given}; each engine records its own requests")
    # Web frameworks answer with {"detail": …}, vLLM with {"error": {…}}.
    why = f"HTTP status {status}; this seems to be vLLM's address, not the exporter's"
    raise ScrapeError(f"{url}: {why}; {remedy}")


def _lines(record: dict[str, Any]) -> Iterator[str]:
    yield f"request {record['request']}"
    for number, start in enumerate(record["starts"]):
        yield from _lines_of(start, "again after a preemption, " if number else "")


def _lines_of(start: dict[str, Any], again: str) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["unix_seconds"]))
    load = start["load"] or {}
    tiers = ", ".join(f"{load[key]:,} {text}" for key, text in _TIERS.items() if load.get(key))
    yield f"  started {again}{when}: {start['tokens']:,} tokens"
    yield _row("in GPU memory", start["gpu_tokens"])
    yield _row("found in the tiers", start["found_tokens"])
    yield _row("loaded", start["loaded_tokens"]) + (f": {tiers}" if tiers else "")
    yield _row("computed", start["computed_tokens"])
    if load and load["seconds"] is None:
        yield "    the load has not ended yet"
    elif load:
        line, saved_s = f"    waited {load['seconds']:.3f} s for the load", load["saved_seconds"]
        if saved_s is not None:
            line += f"; computing: about {load['seconds'] + saved_s:.3f} s, so "
            line += f"{abs(saved_s):.3f} s {'saved' if saved_s >= 0 else 'lost'}"
        yield line
    yield from (f"    why: {reason}" for reason in start["why"])


def _row(name: str, tokens: int) -> str:
    return f"    {name:<20}{tokens:>11,} tokens"
