# SPDX-License-Identifier: Apache-2.0
"""Agentic coding sessions of kv-cache-tester: a JSON file a session, or a folder of them.

    {"id": …, "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "in": 25259, "out": 86, "hash_ids": [1, 2, …], "api_time": 4.1,
         "think_time": 0.0, "type": "s", …},
        {"t": 9.0, "type": "subagent", "requests": [the same], …}]}

Read are the fields that a replay needs; the others may be there or not. `hash_ids` are of whole
blocks; ids of scope "local" mean something in their file alone. As in kv-cache-tester's own
replay, sub-agents that stand in a row run side by side, and their parent waits for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.traces.model import Ids, Request, Session, Step, Trace, is_chained

__all__ = ["read_folder"]

#: Ids of two files stay apart: each file has a range of its own.
_SCOPE = "local"
_SUBAGENT = "subagent"


def read_folder(path: Path) -> Trace:
    """A folder of session files, in the order of their names; or one such file.

    Raises:
        BenchError: a file cannot be read, or is not one of these; names the file and the place.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise BenchError(f"{path}: no *.json files in this folder")
    sessions: list[Session] = []
    block_tokens, first_id = 0, 0
    for file in files:
        reader = _File(file, first_id)
        session = reader.session()
        if block_tokens not in (0, reader.block_tokens):
            raise BenchError(
                f"{file}: block_size {reader.block_tokens}, but {block_tokens} in the files before"
            )
        block_tokens = reader.block_tokens
        first_id = reader.next_id
        sessions.append(session)
    return Trace(path.stem, block_tokens, tuple(sessions))


class _File:
    def __init__(self, file: Path, first_id: int) -> None:
        self._file = file
        self._first_id = first_id
        self.next_id = first_id
        self.block_tokens = 0
        self._prompts: list[Ids] = []

    def session(self) -> Session:
        content = self._parse()
        try:
            self.block_tokens = int(content["block_size"])
            scope = content.get("hash_id_scope", _SCOPE)
            entries = list(content["requests"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BenchError(f"{self._file}: not a session of kv-cache-tester: {error!r}") from None
        if self.block_tokens < 1:
            raise BenchError(f"{self._file}: block_size {self.block_tokens} is not positive")
        if scope != _SCOPE:
            self._first_id = 0
        steps = self._steps(entries, "requests")
        if not is_chained(self._prompts):
            raise BenchError(f"{self._file}: a hash id stands behind two different prefixes")
        return Session(self._file.stem, steps)

    def _parse(self) -> Any:
        try:
            return json.loads(self._file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise BenchError(f"{self._file}, line {error.lineno}: {error.msg}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"{self._file}: cannot be read ({error})") from None

    def _steps(self, entries: list[Any], where: str) -> tuple[Step, ...]:
        steps: list[Step] = []
        children: list[Session] = []
        ended_s = 0.0
        for number, entry in enumerate(entries):
            place = f"{where}[{number}]"
            try:
                if entry.get("type") == _SUBAGENT:
                    name = str(entry.get("agent_id", place))
                    children.append(Session(name, self._steps(list(entry["requests"]), place)))
                    continue
                if children:
                    steps.append(tuple(children))
                    children = []
                begun_s = float(entry["t"])
                request = self._request(entry, max(0.0, begun_s - ended_s) if number else 0.0)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise BenchError(f"{self._file}, {place}: {error!r}") from None
            ended_s = begun_s + request.service_s
            steps.append(request)
        if children:
            steps.append(tuple(children))
        return tuple(steps)

    def _request(self, entry: dict[str, Any], gap_s: float) -> Request:
        """gap_s: since the answer before, where the file does not say what was thinking."""
        ids = np.array(entry["hash_ids"], np.int64).reshape(-1)
        if len(ids) and int(ids.min()) < 0:
            raise ValueError(f"hash id {int(ids.min())} is negative")
        if len(ids) > int(entry["in"]) // self.block_tokens + 1:
            raise ValueError(f"{len(ids)} hash_ids for {entry['in']} tokens")
        ids += self._first_id
        if len(ids):
            self.next_id = max(self.next_id, int(ids.max()) + 1)
            self._prompts.append(ids)
        think = entry.get("think_time")
        return Request(
            input_tokens=int(entry["in"]),
            output_tokens=max(1, int(entry["out"])),
            blocks=ids,
            think_s=gap_s if think is None else max(0.0, float(think)),
            service_s=max(0.0, float(entry.get("api_time") or 0.0)),
        )
