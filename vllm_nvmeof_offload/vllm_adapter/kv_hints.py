# SPDX-License-Identifier: Apache-2.0
"""An orchestrator's advice on the KV of a request.

It arrives as vLLM's `kv_hints`, or over HTTP, where vLLM's Python server drops that field, as the
same envelope in `kv_transfer_params: {"kv_hint": …}`; such a request gets an answer per action.

vLLM defines only the envelope, a list of actions with a type, a version and a payload, but no
actions. Four are supported here, in the form that their authors published. Other actions, other
major versions and malformed payloads are counted and ignored. Advice never causes an error, applies
only to the request that carries it, and never overrides what the request or the operator specifies.

* `kv.prefetch` 1.x, empty payload: the request's chunks are fetched from the pool before those of
  other waiting requests.
* `kv.fetch` 1.x, `{"source_control_endpoint", "block_hashes"}`: the same. The endpoint belongs to a
  process that cannot read pools, so it is ignored, and so is the list of blocks.
* `kv.retain` 1.x, `{"directives": [{"start", "end", "priority", "duration"} or {"covers_output",
  …}]}`: chunks that end in a range of tokens are retained for `duration` seconds after the
  request's end, in a session per directive. Without a duration they are only kept longer, as if
  another request had used them. A priority or duration of 0 retains nothing.
* `kv.demote` 1.x, `{}` or `{"session_id"}` of the request's own session: when the request ends, its
  chunks are the next to be moved from pinned memory to the pool.

A router names helpers elsewhere, in `kv_transfer_params: {"nvmeof": {"helpers": [...]}}`, which
other connectors ignore. Only configured peers named there may then read for the request.
`{"nvmeof": {"explain": true}}` logs the request's record when the request ends.

`{"nvmeof": {"retain_s", "priority", "session"}}` retains the request's chunks in both tiers for
that many seconds after its end. `session` names what several requests with the same `cache_salt`
retain together; the last one sets time and priority, and 0 s drops the session.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_nvmeof_offload.manager.core import RETAIN_S_MAX, SessionIds
from vllm_nvmeof_offload.pool.format import client_of

#: The most actions that are read per request; the rest are counted as unknown.
_ACTIONS_MAX = 16
_DIRECTIVES_MAX = 128
_DIRECTIVE_KEYS = {"start", "end", "priority", "duration", "covers_output"}
_PRIORITY_MAX = 100
_HELPERS_MAX = 64
#: The longest id of an action that an answer repeats; a longer one is null there.
_ID_CHARS_MAX = 128
_SESSION_CHARS_MAX = 256
_RETENTION_KEYS = {"retain_s", "priority", "session"}
_FETCH_KEYS = {"source_control_endpoint": str, "block_hashes": list}


class Retention(NamedTuple):
    """A request to retain chunks for this many seconds; 0 drops the session."""

    seconds: int
    priority: int
    session: SessionIds


class TokenRange(NamedTuple):
    """Tokens whose chunks are kept longer or, with `retention`, retained. `end` is exclusive, or
    None for no end."""

    first: int
    end: int | None
    retention: Retention | None = None

    def contains(self, chunk_end: int) -> bool:
        return self.first < chunk_end and (self.end is None or chunk_end <= self.end)


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice on a request. `helpers` is as in `LoadCommand`. `answers` has an entry per action
    of a `kv_hint`, `retention_answer` is empty unless the request has keys of `retention`."""

    prefetch: bool = False
    retain: tuple[TokenRange, ...] = ()
    demote: bool = False
    helpers: int | None = None
    answers: tuple[dict[str, Any], ...] = ()
    retention: Retention | None = None
    retention_answer: str = ""

    def together(self, other: Advice) -> Advice:
        """Return this advice and `other`, with the helpers of the first and the other's answers."""
        return Advice(
            self.prefetch or other.prefetch,
            self.retain + other.retain,
            self.demote or other.demote,
            self.helpers,
            other.answers,
            self.retention,
            self.retention_answer,
        )

    def kept(self, ends: Iterable[int]) -> list[int]:
        """Return the positions of chunks to keep longer. `ends` are the chunks' exclusive ends."""
        ranges = [one for one in self.retain if one.retention is None]
        return [at for at, end in enumerate(ends) if any(one.contains(end) for one in ranges)]

    def retentions(self) -> list[tuple[Retention, TokenRange]]:
        """Return what to retain when the request ends. -1 is before every chunk."""
        every = TokenRange(-1, None, self.retention)
        found = ((one.retention, one) for one in (*self.retain, every))
        return [(asked, one) for asked, one in found if asked and asked.seconds]


def advice_of(
    envelope: Any,
    request: Any,
    count: Callable[[str], None],
    *,
    may_prefetch: bool = True,
    may_retain: bool = True,
) -> Advice:
    """Read the hints for `request` in `envelope`, an object or the dictionary from a JSON object.

    `count` is called for each action with its kind, `unknown` or `malformed`. Without
    `may_prefetch`, the answer to a prefetch is that nothing was done. Without `may_retain`,
    durations have no effect.
    """
    prefetch = demote = False
    retain: list[TokenRange] = []
    answers: list[dict[str, Any]] = []
    actions = _field(envelope, "actions")
    if not isinstance(actions, list | tuple):
        count("malformed")
        return Advice(answers=({"action_id": None, "done": "malformed"},))
    for number, action in enumerate(actions):
        kind, done, payload = _kind(action), "unknown", _field(action, "payload")
        if kind is None or number >= _ACTIONS_MAX:
            pass
        elif not isinstance(payload, dict):
            done = "malformed"
        elif kind == "retain":
            ranges = _ranges(payload, request)
            retain += ranges or ()
            done = "malformed" if ranges is None else kind
        elif kind == "fetch":
            done = "prefetch" if _is_fetch(payload) else "malformed"
        elif not payload or (kind == "demote" and _is_own(payload, request)):
            done = kind  # a payload may also name blocks other than the request's
        prefetch, demote = prefetch or done == "prefetch", demote or done == "demote"
        count(done)
        if number < _ACTIONS_MAX:
            ignored = {"ignored": [*_FETCH_KEYS]} if (kind, done) == ("fetch", "prefetch") else {}
            if done == "prefetch" and not may_prefetch:
                done = "nothing"
            answers.append({"action_id": _id(action), "done": done, **ignored})
    if not may_retain:
        retain = [one._replace(retention=None) for one in retain]
    return Advice(prefetch, tuple(retain), demote, answers=tuple(answers))


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


def retention_of(params: Any, request: Any, count: Callable[[str], None]) -> Advice:
    """Read the keys of `Retention` in a request's `kv_transfer_params`.

    `count` is called with `retain`, `drop` or `malformed` if there are any.
    """
    ours = params.get("nvmeof") if isinstance(params, dict) else None
    if not isinstance(ours, dict) or _RETENTION_KEYS.isdisjoint(ours):
        return Advice()
    seconds: Any = ours.get("retain_s")
    priority, name = ours.get("priority", 50), ours.get("session")
    is_time = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    is_name = isinstance(name, str) and 0 < len(name) <= _SESSION_CHARS_MAX
    is_valid = is_time and 0 <= seconds <= RETAIN_S_MAX and (is_name or (name is None and seconds))
    if not is_valid or not _is_int(priority, 1, _PRIORITY_MAX):
        count("malformed")
        return Advice(retention_answer="malformed")
    done = "retain" if seconds else "drop"
    count(done)
    whose = f"session {name}" if is_name else f"request {request.request_id}"
    session = _session_ids(request, whose)
    # At least a second, because 0 is a drop.
    retention = Retention(math.ceil(seconds), priority, session)
    return Advice(retention=retention, retention_answer=done)


def _session_ids(request: Any, whose: str) -> SessionIds:
    """Return the ids of a session, which a request with another salt cannot name."""
    salt = getattr(request, "cache_salt", None) or ""
    client = hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
    session = hashlib.sha256(client + whose.encode(errors="surrogatepass")).digest()
    return SessionIds(int.from_bytes(session[:8]), client_of(salt))


def _field(one: Any, name: str, default: Any = None) -> Any:
    return one.get(name, default) if isinstance(one, dict) else getattr(one, name, default)


def _id(action: Any) -> str | None:
    name = _field(action, "action_id")
    return name if isinstance(name, str) and len(name) <= _ID_CHARS_MAX else None


def _kind(action: Any) -> str | None:
    """Return the kind of an action, or None if unknown."""
    major = str(_field(action, "action_version", "")).partition(".")[0]
    family, _, kind = str(_field(action, "action_type", "")).partition(".")
    known = family == "kv" and kind in ("prefetch", "fetch", "retain", "demote") and major == "1"
    return kind if known else None


def _is_fetch(payload: dict[str, Any]) -> bool:
    return all(isinstance(payload.get(key), kind) for key, kind in _FETCH_KEYS.items())


def _is_own(payload: dict[str, Any], request: Any) -> bool:
    session = getattr(request, "session_id", None)
    return session is not None and payload == {"session_id": session}


def _ranges(payload: dict[str, Any], request: Any) -> list[TokenRange] | None:
    """Return the ranges to retain, or None if the payload is malformed."""
    directives = payload.get("directives")
    if not isinstance(directives, list) or len(directives) > _DIRECTIVES_MAX:
        return None
    ranges: list[TokenRange] = []
    for one in directives:
        if not isinstance(one, dict) or not _is_directive(one):
            return None
        first = int(request.num_prompt_tokens) if one.get("covers_output") else one.get("start", 0)
        seconds, retention = one.get("duration"), None
        if seconds:
            ids = _session_ids(request, f"request {request.request_id}, {sorted(one.items())}")
            retention = Retention(math.ceil(min(seconds, RETAIN_S_MAX)), one["priority"], ids)
        if one["priority"] and seconds != 0:
            ranges.append(TokenRange(first, one.get("end"), retention))
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
