# SPDX-License-Identifier: Apache-2.0
"""Mooncake's traces: a JSON line a request, in the order of their arrival.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}

Timestamps are milliseconds, blocks have 512 tokens, and ids stand for a prefix over the whole
file; the last one of a prompt may be of a part of a block. Requests arrive by the clock: nobody
waits for an answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.traces.model import Ids, Request, Session, Trace, is_chained

__all__ = ["BLOCK_TOKENS", "read_lines"]

BLOCK_TOKENS = 512


def read_lines(path: Path) -> Trace:
    """Raises:
    BenchError: it cannot be read, or a line is not one of these; names the file and the line.
    """
    sessions: list[Session] = []
    prompts: list[Ids] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    session, request = _session(path, number, line)
                    sessions.append(session)
                    prompts.append(request.blocks)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: cannot be read ({error})") from None
    if not sessions:
        raise BenchError(f"{path}: no requests in it")
    if not is_chained(prompts):
        raise BenchError(f"{path}: a hash id stands behind two different prefixes")
    return Trace(path.stem, BLOCK_TOKENS, tuple(sessions))


def _session(path: Path, number: int, line: str) -> tuple[Session, Request]:
    try:
        entry = json.loads(line)
        ids = np.array(entry["hash_ids"], np.int64).reshape(-1)
        request = Request(
            input_tokens=int(entry["input_length"]),
            output_tokens=max(1, int(entry["output_length"])),
            blocks=ids,
        )
        start_s = float(entry["timestamp"]) / 1000
        needed = -(-request.input_tokens // BLOCK_TOKENS)
        if len(ids) != needed:
            raise ValueError(f"{len(ids)} hash_ids for {request.input_tokens} tokens")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BenchError(f"{path}, line {number}: {error!r}") from None
    return Session(f"line {number}", (request,), start_s), request
