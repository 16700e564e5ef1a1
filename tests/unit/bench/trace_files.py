# SPDX-License-Identifier: Apache-2.0
"""Tiny made-up traces in the two public formats, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def entry(t: float, ids: list[int], out: int = 5, **more: Any) -> dict[str, Any]:
    """A request in kv-cache-tester's format, 10 tokens longer than its whole blocks of 64."""
    common = {"t": t, "type": "s", "model": "m", "in": 64 * len(ids) + 10, "out": out}
    return {**common, "hash_ids": ids, "input_types": ["text"], "stop": "", **more}


def session_file(folder: Path, name: str, requests: list[Any], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    content = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}
    path.write_text(json.dumps({**content, **more}))
    return path


def agentic(folder: Path) -> Path:
    """Two sessions; the first has two sub-agents side by side between its requests."""
    children = [
        {"t": 20.0, "type": "subagent", "agent_id": name, "requests": [entry(0.0, ids)]}
        for name, ids in (("a", [9, 10]), ("b", [9, 11]))
    ]
    first = [
        entry(0.0, [1, 2], api_time=4.0, think_time=0.0),
        *children,
        entry(30.0, [1, 2, 3], api_time=2.0, think_time=6.0),
        entry(41.0, [1, 2, 3, 4]),
    ]
    session_file(folder, "trace_1", first)
    session_file(folder, "trace_2", [entry(0.0, [1, 2, 3]), entry(7.0, [1, 2, 3, 4, 5])])
    return folder


def mooncake(path: Path) -> Path:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1500, "output_length": 900, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
