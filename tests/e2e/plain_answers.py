# SPDX-License-Identifier: Apache-2.0
"""A model's answers without vLLM, from its plain PyTorch implementation in a child process.

As a program it takes the model's directory as argument and reads from stdin a JSON list of prompts
(token ids) and the number of tokens to generate; it prints the answers on the last line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.servers.client import Answer

ROOT = Path(__file__).resolve().parents[2]


def plain_answers(model: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
    """Greedy answers with log-probabilities and the gaps to the runner-up, float32."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.plain_answers", str(model)],
        input=json.dumps({"prompts": list(prompts), "tokens": tokens}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return [Answer(sent=0.0, **answer) for answer in answers]


def _answer(model: Any, prompt: list[int], tokens: int) -> dict[str, list[Any]]:
    import torch

    out: dict[str, list[Any]] = {"tokens": [], "logprobs": [], "gaps": []}
    past, given = None, torch.tensor([prompt])
    for _ in range(tokens):
        seen = model(given, past_key_values=past, use_cache=True)
        past = seen.past_key_values
        top = torch.log_softmax(seen.logits[0, -1].double(), -1).topk(2)
        out["tokens"].append(int(top.indices[0]))
        out["logprobs"].append(float(top.values[0]))
        out["gaps"].append(float(top.values[0] - top.values[1]))
        given = top.indices[:1][None]
    return out


def main(directory: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        answers = [_answer(model, prompt, asked["tokens"]) for prompt in asked["prompts"]]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
