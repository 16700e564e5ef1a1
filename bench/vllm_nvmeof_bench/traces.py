# SPDX-License-Identifier: Apache-2.0
"""Public traces of LLM requests: file formats, structure, and users on a virtual clock.

A block ID identifies the block's tokens *and all tokens before them*: two prompts share a prefix
as far as their IDs are equal. The readers make IDs unique in the whole trace, and reject a file in
which an ID follows two different IDs.

An agentic session of kv-cache-tester is a JSON file; several sessions are a folder of such files.

    {"id": …, "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "in": 25259, "out": 86, "hash_ids": [1, 2, …], "api_time": 4.1,
         "think_time": 0.0, "type": "s", …},
        {"t": 9.0, "type": "subagent", "requests": [the same], …}]}

`hash_ids` identify whole blocks; IDs of scope "local" are valid only in their file. As in
kv-cache-tester's own replay, adjacent sub-agents run concurrently while their parent waits.

A Mooncake trace has one JSON line per request, in order of arrival.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}

Timestamps are in milliseconds; requests do not wait for answers. A block has 512 tokens; a prompt's
last block can be partial. An ID identifies a prefix in the whole file.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.settings import option

Ids = npt.NDArray[np.int64]
CONTEXT_HELP = "Most tokens of a request and its answer; a longer request ends its session."
TRACE_HELP = "Folder of kv-cache-tester's *.json files, or Mooncake *.jsonl file."
_MOONCAKE_BLOCK_TOKENS = 512
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and its answer.

    blocks: int64[n], the IDs of the prompt's blocks; the prompt can end within the last block or
    after it. think_s: time from the previous answer's end to this request. service_s: recorded
    duration of the answer; 0: unknown.
    """

    input_tokens: int
    output_tokens: int
    blocks: Ids
    think_s: float = 0.0
    service_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """One user's steps in order: requests, and groups of sub-agents' sessions that run concurrently
    while this session waits. start_s: None if it starts when a user becomes free."""

    name: str
    steps: tuple[Step, ...]
    start_s: float | None = None

    def requests(self) -> Iterator[Request]:
        """Yield all requests, including those of sub-agents."""
        for step in self.steps:
            if isinstance(step, Request):
                yield step
            else:
                for child in step:
                    yield from child.requests()


Step = Request | tuple[Session, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A trace of sessions. block_tokens: tokens per block ID."""

    name: str
    block_tokens: int
    sessions: tuple[Session, ...]

    def requests(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(session.requests() for session in self.sessions)

    def capped(self, context_tokens_max: int) -> Trace:
        """Cut each session before the first request that exceeds `context_tokens_max` with its
        answer; leave out sessions that are then empty."""
        cut = (_until(session, context_tokens_max) for session in self.sessions)
        return replace(self, sessions=tuple(one for one in cut if one.steps))

    def scaled(self, block_tokens: int) -> Trace:
        """Return the trace with blocks of `block_tokens`, and prompts and answers scaled to
        match."""

        def shrink(tokens: int) -> int:
            return max(1, round(tokens * block_tokens / self.block_tokens))

        def step(one: Step) -> Step:
            if not isinstance(one, Request):
                return tuple(map(session, one))
            tokens = shrink(one.input_tokens), shrink(one.output_tokens)
            return replace(one, input_tokens=tokens[0], output_tokens=tokens[1])

        def session(one: Session) -> Session:
            return replace(one, steps=tuple(map(step, one.steps)))

        if block_tokens == self.block_tokens:
            return self
        return Trace(self.name, block_tokens, tuple(map(session, self.sessions)))

    def unique_tokens(self) -> int:
        """Return the number of tokens in all distinct blocks, which are the working set."""
        every = [one.blocks for one in self.requests()]
        return len(np.unique(np.concatenate(every))) * self.block_tokens if every else 0


def _until(session: Session, tokens_max: int) -> Session:
    steps: list[Step] = []
    for step in session.steps:
        if isinstance(step, Request):
            if step.input_tokens + step.output_tokens > tokens_max:
                break
            steps.append(step)
        elif children := tuple(one for s in step if (one := _until(s, tokens_max)).steps):
            steps.append(children)
    return replace(session, steps=tuple(steps))


@dataclass(frozen=True)
class Pace:
    """The number of users, their arrivals and their think times."""

    users: int = option(16, "Concurrent users.", min=1)
    ramp_s: float = option(5.0, "Seconds between users' arrivals.", flag="--ramp", min=0)
    time_scale: float = option(1.0, "Factor for think times and arrivals; 0: no waiting.", min=0)
    think_s_max: float = option(
        60.0, "Longest think time in seconds, after scaling.", flag="--think-max", min=0
    )
    seed: int = option(1, "Seed for the order of sessions.")


def starts(trace: Trace, pace: Pace) -> tuple[list[tuple[float, Session]], Iterator[Session]]:
    """Return (time, session) for sessions with a start time and for each user's first session, and
    the users' later sessions. Sessions without a start time are in random order."""
    free = [one for one in trace.sessions if one.start_s is None]
    random.Random(pace.seed).shuffle(free)
    timed = [(one.start_s, one) for one in trace.sessions if one.start_s is not None]
    begun = [(at_s * pace.time_scale, one) for at_s, one in sorted(timed, key=itemgetter(0))]
    begun += [(number * pace.ramp_s, one) for number, one in enumerate(free[: pace.users])]
    return begun, iter(free[pace.users :])


def thinking_s(request: Request, pace: Pace) -> float:
    return min(request.think_s * pace.time_scale, pace.think_s_max)


@dataclass(slots=True)
class _Cursor:
    """A position in a session. children: running sub-agents. ready: the next request."""

    steps: Iterator[Step]
    parent: _Cursor | None
    children: int = 0
    ready: Request | None = None


def virtual(trace: Trace, pace: Pace) -> Iterator[tuple[float, Request]]:
    """Yield (time, request) in time order; answers have the recorded durations."""
    numbers = itertools.count()  # the order of simultaneous events
    heap: list[tuple[float, int, _Cursor]] = []

    def push(at_s: float, cursor: _Cursor) -> None:
        heapq.heappush(heap, (at_s, next(numbers), cursor))

    def begin(session: Session, at_s: float, parent: _Cursor | None = None) -> None:
        push(at_s, _Cursor(iter(session.steps), parent))

    begun, waiting = starts(trace, pace)
    for at_s, session in begun:
        begin(session, at_s)
    while heap:
        now_s, _, cursor = heapq.heappop(heap)
        if cursor.ready is not None:
            yield now_s, cursor.ready
            now_s += cursor.ready.service_s
        cursor.ready = None
        step = next(cursor.steps, None)
        if isinstance(step, Request):
            cursor.ready = step
            push(now_s + thinking_s(step, pace), cursor)
        elif step is not None:
            cursor.children = len(step)
            for child in step:
                begin(child, now_s, cursor)
        elif cursor.parent is not None:
            cursor.parent.children -= 1
            if not cursor.parent.children:
                push(now_s, cursor.parent)
        elif (following := next(waiting, None)) is not None:
            begin(following, now_s)


def read_trace(path: Path) -> Trace:
    """Read a folder or file of kv-cache-tester's *.json, or Mooncake's *.jsonl; raise BenchError,
    with the file and position, if the path is neither or malformed."""
    if not path.exists():
        raise BenchError(f"{path}: no such file or folder")
    try:
        if path.is_dir() or path.suffix == ".json":
            return _read_folder(path)
        if path.suffix == ".jsonl":
            return _read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: cannot be read ({error})") from None
    raise BenchError(
        f"{path}: give a folder of kv-cache-tester's *.json files, or a Mooncake *.jsonl file"
    )


def _read_folder(path: Path) -> Trace:
    """Read a folder's session files in alphabetical order, or a single file."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise BenchError(f"{path}: no *.json files in this folder")
    sessions: list[Session] = []
    block_tokens, first_id = 0, 0
    for file in files:
        reader = _File(file, first_id)
        sessions.append(reader.session())
        if block_tokens not in (0, reader.block_tokens):
            raise BenchError(
                f"{file}: block_size {reader.block_tokens}, but {block_tokens} in earlier files"
            )
        block_tokens = reader.block_tokens
        ends = (int(one.blocks.max(initial=-1)) + 1 for one in sessions[-1].requests())
        first_id = max([first_id, *ends])
    return Trace(path.stem, block_tokens, tuple(sessions))


class _File:
    """A reader of one session file. It shifts IDs of scope "local" to start at `first_id`."""

    def __init__(self, file: Path, first_id: int) -> None:
        self._file = file
        self._first_id = first_id

    def session(self) -> Session:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            self.block_tokens = int(content["block_size"])
            entries = list(content["requests"])
            if content.get("hash_id_scope", "local") != "local":
                self._first_id = 0
        except json.JSONDecodeError as error:
            raise BenchError(f"{self._file}, line {error.lineno}: {error.msg}") from None
        except UnicodeDecodeError as error:
            raise BenchError(f"{self._file}: cannot be read ({error})") from None
        except _DAMAGE as error:
            raise BenchError(f"{self._file}: not a session of kv-cache-tester: {error!r}") from None
        if self.block_tokens < 1:
            raise BenchError(f"{self._file}: block_size {self.block_tokens} is not positive")
        session = Session(self._file.stem, self._steps(entries, "requests"))
        _check_chained(self._file, session.requests())
        return session

    def _steps(self, entries: list[Any], where: str) -> tuple[Step, ...]:
        steps: list[Step] = []
        children: list[Session] = []
        ended_s = 0.0
        for number, entry in enumerate(entries):
            place = f"{where}[{number}]"
            try:
                if entry.get("type") == "subagent":
                    name = str(entry.get("agent_id", place))
                    children.append(Session(name, self._steps(list(entry["requests"]), place)))
                    continue
                if children:
                    steps.append(tuple(children))
                    children = []
                begun_s = float(entry["t"])
                request = self._request(entry, max(0.0, begun_s - ended_s) if number else 0.0)
            except _DAMAGE as error:
                raise BenchError(f"{self._file}, {place}: {error!r}") from None
            ended_s = begun_s + request.service_s
            steps.append(request)
        return (*steps, tuple(children)) if children else tuple(steps)

    def _request(self, entry: dict[str, Any], gap_s: float) -> Request:
        """Read a request. gap_s: time since the previous answer, the default think time."""
        ids = np.array(entry["hash_ids"], np.int64).reshape(-1)
        if len(ids) and int(ids.min()) < 0:
            raise ValueError(f"hash id {int(ids.min())} is negative")
        if len(ids) > int(entry["in"]) // self.block_tokens + 1:
            raise ValueError(f"{len(ids)} hash_ids for {entry['in']} tokens")
        ids += self._first_id
        think = entry.get("think_time")
        return Request(
            input_tokens=int(entry["in"]),
            output_tokens=max(1, int(entry["out"])),
            blocks=ids,
            think_s=gap_s if think is None else max(0.0, float(think)),
            service_s=max(0.0, float(entry.get("api_time") or 0.0)),
        )


def _read_lines(path: Path) -> Trace:
    with path.open(encoding="utf-8") as file:
        sessions = [_session(path, n, line) for n, line in enumerate(file, 1) if line.strip()]
    if not sessions:
        raise BenchError(f"{path}: the file has no requests")
    trace = Trace(path.stem, _MOONCAKE_BLOCK_TOKENS, tuple(sessions))
    _check_chained(path, trace.requests())
    return trace


def _session(path: Path, number: int, line: str) -> Session:
    try:
        entry = json.loads(line)
        ids = np.array(entry["hash_ids"], np.int64).reshape(-1)
        tokens = int(entry["input_length"])
        request = Request(tokens, max(1, int(entry["output_length"])), ids)
        if len(ids) != -(-tokens // _MOONCAKE_BLOCK_TOKENS):
            raise ValueError(f"{len(ids)} hash_ids for {tokens} tokens")
        return Session(f"line {number}", (request,), float(entry["timestamp"]) / 1000)
    except _DAMAGE as error:
        raise BenchError(f"{path}, line {number}: {error!r}") from None


def _check_chained(path: Path, requests: Iterable[Request]) -> None:
    """Raise BenchError if an ID follows two different IDs."""
    prompts = [one.blocks for one in requests if len(one.blocks)]
    if not prompts:
        return
    before = np.concatenate([np.concatenate(([-1], one[:-1])) for one in prompts])
    names, numbers = np.unique(np.concatenate(prompts), return_inverse=True)
    one_of = np.empty(len(names), np.int64)
    one_of[numbers] = before
    if (one_of[numbers] != before).any():
        raise BenchError(f"{path}: a hash ID follows two different prefixes")
