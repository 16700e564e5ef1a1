# SPDX-License-Identifier: Apache-2.0
"""An orchestrator's advice on the KV of a request: vLLM's `kv_hints`.

vLLM defines only the envelope, a list of actions with a type, a version and a payload, but no
actions. Three are supported here, in the form that their authors published. Other actions, other
major versions and malformed payloads are counted and ignored. Advice never causes an error, applies
only to the request that carries it, and never overrides what the request or the operator specifies.

* `kv.prefetch` 1.x, empty payload: the request's chunks are fetched from the pool before those of
  other waiting requests.
* `kv.retain` 1.x, `{"directives": [{"start", "end", "priority", "duration"} or {"covers_output",
  …}]}`: chunks that end in a range of tokens are kept longer, as if another request had used
  them. A priority or duration of 0 retains nothing; all higher values have the same effect.
* `kv.demote` 1.x, `{}` or `{"session_id"}` of the request's own session: when the request ends, its
  chunks are the next to be moved from pinned memory to the pool.

A router names helpers elsewhere, in `kv_transfer_params: {"nvmeof": {"helpers": [...]}}`, which
other connectors ignore. Only configured peers named there may then read for the request.
`{"nvmeof": {"explain": true}}` logs the request's record when the request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: The most actions that are read per request; the rest are counted as unknown.
_ACTIONS_MAX = 16
_DIRECTIVES_MAX = 128
_DIRECTIVE_KEYS = {"start", "end", "priority", "duration", "covers_output"}
_PRIORITY_MAX = 100
_HELPERS_MAX = 64


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice on a request. `retain` lists ranges of tokens as (first, end), with an exclusive
    end or None for no end. `helpers` is as in `LoadCommand`."""

    prefetch: bool = False
    retain: tuple[tuple[int, int | None], ...] = ()
    demote: bool = False
    helpers: int | None = None

    def retained(self, ends: Iterable[int]) -> list[int]:
        """Return the positions of chunks to retain. `ends` are the chunks' exclusive ends."""
        return [
            at
            for at, end in enumerate(ends)
            if any(first < end and (last is None or end <= last) for first, last in self.retain)
        ]


def advice_of(envelope: Any, request: Any, count: Callable[[str], None]) -> Advice:
    """Read the hints for `request` in `envelope`. `count` is called for each action with its kind,
    `unknown` or `malformed`."""
    prefetch = demote = False
    retain: list[tuple[int, int | None]] = []
    actions = getattr(envelope, "actions", ())
    if not isinstance(actions, list | tuple):
        count("malformed")
        return Advice()
    for number, action in enumerate(actions):
        kind, payload = _kind(action), getattr(action, "payload", None)
        if kind is None or number >= _ACTIONS_MAX:
            count("unknown")
        elif not isinstance(payload, dict):
            count("malformed")
        elif kind == "retain":
            ranges = _ranges(payload, int(request.num_prompt_tokens))
            retain += ranges or ()
            count("malformed" if ranges is None else kind)
        elif payload and not (kind == "demote" and _is_own(payload, request)):
            count("unknown")  # for blocks other than the request's
        else:
            prefetch, demote = prefetch or kind == "prefetch", demote or kind == "demote"
            count(kind)
    return Advice(prefetch, tuple(retain), demote)


def wants_record(params: Any) -> bool:
    """Return whether a request's `kv_transfer_params` ask for its record in the log."""
    ours = params.get("nvmeof") if isinstance(params, dict) else None
    return isinstance(ours, dict) and ours.get("explain") is True


def helpers_of(params: Any, peers: Sequence[str], count: Callable[[str], None]) -> int | None:
    """Convert a request's `kv_transfer_params` to `LoadCommand.helpers`.

    `peers` are the configured ones; names must match exactly. `count` is called for each helper
    with `known` or `unknown`, or once with `malformed` for a hint that is ignored.
    """
    ours = params.get("nvmeof") if isinstance(params, dict) else None
    if ours is None or (isinstance(ours, dict) and "helpers" not in ours):
        return None
    named: Any = ours["helpers"] if isinstance(ours, dict) else None
    is_short = isinstance(named, list | tuple) and len(named) <= _HELPERS_MAX
    if not is_short or not all(isinstance(one, str) for one in named):
        count("malformed")
        return None
    for one in named:
        count("known" if one in peers else "unknown")
    return sum(1 << number for number, peer in enumerate(peers) if peer in named)


def _kind(action: Any) -> str | None:
    """Return the kind of an action, or None if unknown."""
    major = str(getattr(action, "action_version", "")).partition(".")[0]
    family, _, kind = str(getattr(action, "action_type", "")).partition(".")
    known = family == "kv" and kind in ("prefetch", "retain", "demote") and major == "1"
    return kind if known else None


def _is_own(payload: dict[str, Any], request: Any) -> bool:
    session = getattr(request, "session_id", None)
    return session is not None and payload == {"session_id": session}


def _ranges(payload: dict[str, Any], prompt_tokens: int) -> list[tuple[int, int | None]] | None:
    """Return the ranges to retain, or None if the payload is malformed."""
    directives = payload.get("directives")
    if not isinstance(directives, list) or len(directives) > _DIRECTIVES_MAX:
        return None
    ranges: list[tuple[int, int | None]] = []
    for one in directives:
        if not isinstance(one, dict) or not _is_directive(one):
            return None
        first = prompt_tokens if one.get("covers_output") else one.get("start", 0)
        if one["priority"] and one.get("duration") != 0:
            ranges.append((first, one.get("end")))
    return ranges


def _is_directive(one: dict[str, Any]) -> bool:
    start, end, duration = one.get("start", 0), one.get("end"), one.get("duration")
    if one.get("covers_output") and not one.keys().isdisjoint({"start", "end"}):
        return False
    return (
        one.keys() <= _DIRECTIVE_KEYS
        and _is_int(one.get("priority"), 0, _PRIORITY_MAX)
        and _is_int(start, 0)
        and (end is None or _is_int(end, start + 1))
        and (duration is None or (isinstance(duration, int | float) and duration >= 0))
        and isinstance(one.get("covers_output", False), bool)
    )


def _is_int(value: Any, least: int, most: int | None = None) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and value >= least and (most is None or value <= most)
