# SPDX-License-Identifier: Apache-2.0
"""Memory arguments, command and environment for the installed vLLM."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from vllm_nvmeof_offload.units import GIB

#: Appears only in vLLM's log, because every engine here is also given its number of blocks.
_KV_CACHE_BYTES = 2 * GIB
#: The share of a GPU's memory that must be free when an engine starts.
_FREE_AT_START = 0.1


def has_cpu_engine() -> bool:
    """Return whether this vLLM is a CPU build, judging by its version as vLLM itself does."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False


def engine_memory() -> dict[str, int | float]:
    """Return the arguments of `LLM` for GPU memory; none if vLLM's engine is for the CPU.

    With `kv_cache_memory_bytes`, vLLM does not measure the memory available for the KV cache. The
    measurement takes seconds, and stops the engine if another process frees memory on the same GPU
    in that time. The caller must set the number of GPU blocks, which vLLM then allocates;
    `gpu_memory_utilization` only determines how much memory must be free at the start.
    """
    if has_cpu_engine():
        return {}
    return {
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        "gpu_memory_utilization": _FREE_AT_START,
    }


def vllm_command() -> tuple[str, ...]:
    """Return the command that runs vLLM with this Python, even if its script is missing."""
    script = Path(sys.executable).parent / "vllm"
    if script.exists():
        return (str(script),)
    return (sys.executable, "-m", "vllm.entrypoints.cli.main")


def engine_environment(cores_reserved: int = 0) -> dict[str, str]:
    """Return this process's environment, adapted to engines that run random float32 models.

    cores_reserved: the number of cores that vLLM's CPU engine must not use for its math.
    """
    env = dict(os.environ)
    # Without cached bytecode, three processes compile about 2,000 modules at every start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # If this variable is set to cpu, a GPU build looks for kernels that it does not contain.
    env.pop("VLLM_TARGET_DEVICE", None)
    env |= {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # A benchmark's pool is small, and most machines have only one disk.
        "VLLM_NVMEOF_ALLOW_ROOT_FILE_SYSTEM": "true",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Neither those who read the log nor the tests need escape codes.
        "NO_COLOR": "1",
    }
    if has_cpu_engine():
        env |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": str(cores_reserved),
        }
    else:
        # Triton's attention would compute float32 products in TF32, with 10 bits, but a comparison
        # with loaded KV must not depend on where a prompt was split.
        env["TRITON_F32_DEFAULT"] = "ieee"
        # On CUDA, vLLM's sampler imports FlashInfer unless this variable forbids it; without
        # FlashInfer, the engine would not start.
        if find_spec("flashinfer") is None:
            env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return env
