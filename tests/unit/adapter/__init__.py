# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapter to vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


Run = Callable[[list[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


def _run(arguments: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=dict(env), capture_output=True, text=True, timeout=280
    )


def run_child(
    module: str,
    scratch: Path,
    env: Mapping[str, str],
    *more: str,
    run: Run = _run,
    **shape: int,
) -> dict[str, Any]:
    """What a module of this package finds with the vLLM of `env`, and the directory of its pool.
    shape: of the model, where it differs."""
    model, pool = scratch / "model", scratch / "pool"
    for folder in (model, pool):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps({**MODEL, **shape}))
    done = run(["-m", f"{__name__}.{module}", str(model), str(pool), *more], env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and len(lines) == 1, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return {**found, "pool": str(pool)}
