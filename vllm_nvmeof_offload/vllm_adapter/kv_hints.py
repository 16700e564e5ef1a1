# SPDX-License-Identifier: Apache-2.0
"""Advice on a request's KV: an orchestrator's hints, and our own keys (docs/requests.md).

Hints arrive as vLLM's `kv_hints` or, because vLLM's Python server drops this field, as the same
envelope in `kv_transfer_params: {"kv_hint": …}`; this second form gets an answer per action. Our
own keys are in `kv_transfer_params: {"nvmeof": {…}}`, which other connectors ignore.

vLLM defines only the envelope: a list of actions with a type, a version and a payload. Four actions
are supported, in the form that their authors published: `kv.prefetch`, `kv.fetch`, `kv.retain` and
`kv.demote`, each in version 1.x. Other actions, other versions and malformed payloads are counted
and ignored. Advice never causes an error, applies only to its own request, and never overrides the
request's parameters or the configuration.

A directive of `kv.retain` has a `priority`, and can have a range of tokens (`start`, `end`) or
`covers_output`, and a `duration`. `kv.demote` can name the request's own `session_id`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm_nvmeof_offload.manager.core import RETAIN_S_MAX, SessionIds
from vllm_nvmeof_offload.pool.format import client_of

#: The maximum number of actions read per request; further actions are counted as unknown.
_ACTIONS_MAX = 16
_DIRECTIVES_MAX = 128
_DIRECTIVE_KEYS = {"start", "end", "priority", "duration", "covers_output"}
_PRIORITY_MAX = 100
_HELPERS_MAX = 64
#: The longest action id that an answer repeats; a longer id becomes null.
_ID_CHARS_MAX = 128
_SESSION_CHARS_MAX = 256
_RETENTION_KEYS = {"retain_s", "priority", "session"}
_FETCH_KEYS = {"source_control_endpoint": str, "block_hashes": list}


class Retention(NamedTuple):
    seconds: int
    priority: int
    session: SessionIds


class TokenRange(NamedTuple):
    """Tokens whose chunks are kept longer or, with `retention`, retained. `end` is exclusive; None
    if the range has no end."""

    first: int
    end: int | None
    retention: Retention | None = None

    def contains(self, chunk_end: int) -> bool:
        return self.first < chunk_end and (self.end is None or chunk_end <= self.end)


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice on a request. `helpers` is as in `LoadCommand`. `answers` has an entry for each
    action in a `kv_hint`; `retention_answer` is empty if no key for retention was given."""

    prefetch: bool = False
    retain: tuple[TokenRange, ...] = ()
    demote: bool = False
    helpers: int | None = None
    answers: tuple[dict[str, Any], ...] = ()
    retention: Retention | None = None
    retention_answer: str = ""

    def together(self, other: Advice) -> Advice:
        """Combine two pieces of advice: keep the helpers and retention of this one, and the answers
        of `other`."""
        return replace(
            self,
            prefetch=self.prefetch or other.prefetch,
            retain=self.retain + other.retain,
            demote=self.demote or other.demote,
            answers=other.answers,
        )

    def kept(self, ends: Iterable[int]) -> list[int]:
        """Return the positions of chunks to keep longer. `ends` are the chunks' ends in tokens."""
        ranges = [one for one in self.retain if one.retention is None]
        return [at for at, end in enumerate(ends) if any(one.contains(end) for one in ranges)]

    def retentions(self) -> list[tuple[Retention, TokenRange]]:
        every = TokenRange(-1, None, self.retention)  # -1 is before every chunk
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
    """Read the hints for `request` in `envelope`, an object or a dictionary from JSON.

    `count` is called for each action with its kind, `unknown` or `malformed`. Without
    `may_prefetch`, the answer to a prefetch is "nothing". Without `may_retain`, durations have no
    effect.
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
            done = kind  # other payloads may name blocks of other requests
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
    ours = params.get("nvmeof") if isinstance(params, dict) else None
    return isinstance(ours, dict) and ours.get("explain") is True


def helpers_of(params: Any, peers: Sequence[str], count: Callable[[str], None]) -> int | None:
    """Convert a request's `kv_transfer_params` to `LoadCommand.helpers`.

    Names must match those in `peers`. `count` is called for each helper with `known` or `unknown`,
    or once with `malformed` for a hint that is ignored.
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
    """Read the keys for retention in a request's `kv_transfer_params`. If there are any, `count`
    is called with `retain`, `drop` or `malformed`."""
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
    # Round up, because 0 seconds drop the session.
    retention = Retention(math.ceil(seconds), priority, session)
    return Advice(retention=retention, retention_answer=done)


def _session_ids(request: Any, whose: str) -> SessionIds:
    """Return the ids of a session. A request with a different salt cannot name the same session."""
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
