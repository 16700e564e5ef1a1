# SPDX-License-Identifier: Apache-2.0
"""The command `explain`: where a request's tokens came from, from the running server's records."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import typer

from vllm_nvmeof_offload.commands import print_json
from vllm_nvmeof_offload.config import METRICS_ADDRESS
from vllm_nvmeof_offload.errors import ConfigError

_COLUMNS = 80
_TIMEOUT_S = 5.0
_TIERS = {
    "cpu_tokens": "from the CPU tier",
    "pool_tokens": "from the pool",
    "shared_tokens": "from another engine's pool",
}


def explain(request_id: str | None, url: str | None, as_json: bool) -> None:
    """Print the records of a request, or of the last one if `request_id` is None.

    Raises: ConfigError: the server does not answer, or has no such record.
    """
    records = _records((url or f"http://{METRICS_ADDRESS}").rstrip("/"), request_id)
    if as_json:
        print_json(records)
        return
    for record in records:
        for line in _lines(record):
            typer.echo(line)


def _records(url: str, request_id: str | None) -> list[dict[str, Any]]:
    address = f"{url}/requests/{'last' if request_id is None else quote(request_id, safe='')}"
    try:
        answer = httpx.get(address, timeout=_TIMEOUT_S, trust_env=False)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        remedy = (
            f"does not answer ({error}); give the address in the server's start line, or start "
            f"the server with VLLM_NVMEOF_METRICS_LISTEN={METRICS_ADDRESS}"
        )
        raise ConfigError("--url", url, remedy) from None
    if answer.status_code != httpx.codes.OK or not isinstance(body, list):
        given = body.get("error") if isinstance(body, dict) else None
        remedy = f"{given or f'HTTP status {answer.status_code}'}; each engine records its own"
        raise ConfigError("--url", url, remedy)
    return body


def _lines(record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines on one record, at most `_COLUMNS` wide unless the id is longer."""
    yield f"request {record['request']}"
    for number, start in enumerate(record["starts"]):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["unix_seconds"]))
        again = ", again after a preemption" if number else ""
        yield f"  started {when}{again}: {start['tokens']:,} tokens"
        yield _row("in GPU memory", start["gpu_tokens"])
        yield _row("found in the tiers", start["found_tokens"])
        load = start["load"] or {}
        tiers = [f"{load[key]:,} {text}" for key, text in _TIERS.items() if load.get(key)]
        yield from _wrapped(_row("loaded", start["loaded_tokens"]), ", ".join(tiers))
        yield _row("computed", start["computed_tokens"])
        yield from _time(load)
        for reason in start["why"]:
            yield from _wrapped("    why:", reason)


def _row(name: str, tokens: int) -> str:
    return f"    {name:<20}{tokens:>11,} tokens"


def _time(load: dict[str, Any]) -> Iterator[str]:
    if not load:
        return
    seconds, saved_s = load["seconds"], load["saved_seconds"]
    if seconds is None:
        yield "    the load has not ended yet"
        return
    line = f"    {'waited for the load':<20}{seconds:>11.3f} s"
    if saved_s is not None:
        computing = f"computing: {seconds + saved_s:.3f} s, as estimated"
        line += f"; {computing}; {'saved' if saved_s >= 0 else 'lost'} {abs(saved_s):.3f} s"
    yield from _wrapped(line, "")


def _wrapped(head: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(f"{head} {text}".rstrip(), _COLUMNS, subsequent_indent=" " * 6)
