# SPDX-License-Identifier: Apache-2.0
"""Block sizes of the 15 models in vLLM's table (blog, January 2026), by this package's sizing.

A *fragment* is what lies together with a tensor a layer, keys and values apart (vLLM 0.11); a
*block* is all layers of a block (0.12 and later, and what our connector asks for).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_nvmeof_offload.commands.size.config_json import preset
from vllm_nvmeof_offload.commands.size.kv import Deployment, KvSizes

__all__ = ["ModelBlock", "model_blocks"]

#: As the table states them: tensor parallel size, tokens in a block.
_MODELS = (
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 2, 16),
    ("deepseek-ai/DeepSeek-V2-Lite-Chat", 1, 64),
    ("meta-llama/Llama-3.1-8B-Instruct", 1, 16),
    ("meta-llama/Llama-3.2-1B-Instruct", 1, 16),
    # The table says 1; its sizes are those of 4.
    ("meta-llama/Llama-3.1-70B-Instruct", 4, 16),
    ("mistralai/Mistral-7B-Instruct-v0.2", 1, 16),
    ("mistralai/Mistral-Small-24B-Instruct-2501", 1, 16),
    ("Qwen/Qwen2.5-3B-Instruct", 1, 16),
    ("Qwen/Qwen3-0.6B", 1, 16),
    ("Qwen/Qwen2.5-7B-Instruct", 1, 16),
    ("Qwen/Qwen3-4B-Instruct-2507", 1, 16),
    ("Qwen/Qwen2.5-1.5B-Instruct", 1, 16),
    # The table has 28 KiB and 1.97 MiB, which no tensor parallel size gives.
    ("Qwen/Qwen3-8B", 1, 16),
    ("Qwen/Qwen3-1.7B", 1, 16),
    ("Qwen/Qwen3-32B", 2, 16),
)


@dataclass(frozen=True, slots=True)
class ModelBlock:
    """Bytes of one rank."""

    name: str
    tensor_parallel: int
    fragment_bytes: int
    block_bytes: int


def model_blocks() -> tuple[ModelBlock, ...]:
    """In the table's order."""
    found = []
    for name, tensor_parallel, block_tokens in _MODELS:
        model = preset(name)
        deployment = Deployment(tensor_parallel=tensor_parallel, block_tokens=block_tokens)
        sizes = KvSizes(model, deployment)
        fragment = sizes.fragment_bytes(model.groups[0])
        found.append(ModelBlock(name, tensor_parallel, fragment, sizes.block_bytes()))
    return tuple(found)
