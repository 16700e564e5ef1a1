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
        # The client chose a part of the id, which could control the terminal.
        typer.echo(f"request {''.join(filter(str.isprintable, record['request']))}")
        for number, start in enumerate(record["starts"]):
            for line in _lines(start, "again after a preemption, " if number else ""):
                typer.echo("\n".join(textwrap.wrap(line, _COLUMNS, subsequent_indent=" " * 6)))


def _records(url: str, request_id: str | None) -> list[dict[str, Any]]:
    name = "last" if request_id is None else quote(request_id, safe="")
    try:
        answer = httpx.get(f"{url}/requests/{name}", timeout=_TIMEOUT_S, trust_env=False)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        remedy = (
            f"does not answer ({error}); give the address in the server's start line, or start "
            f"the server with VLLM_NVMEOF_METRICS_LISTEN={METRICS_ADDRESS}"
        )
        raise ConfigError("--url", url, remedy) from None
    if answer.status_code == httpx.codes.OK and isinstance(body, list):
        return body
    given = body.get("error") if isinstance(body, dict) else f"HTTP status {answer.status_code}"
    raise ConfigError("--url", url, f"{given}; each engine records its own requests")


def _lines(start: dict[str, Any], again: str) -> Iterator[str]:
    """Yield the lines on one start, not wrapped yet."""
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
