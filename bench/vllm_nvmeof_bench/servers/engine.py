# SPDX-License-Identifier: Apache-2.0
"""The engine of the installed vLLM, and the environment that its processes start with."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from vllm_nvmeof_offload.units import GIB

#: Appears only in vLLM's log: every engine here states its number of blocks as well.
_KV_CACHE_BYTES = 2 * GIB
#: The share of a GPU's memory that must be free when an engine starts.
_FREE_AT_START = 0.1


def has_cpu_engine() -> bool:
    """Whether this vLLM is a build for CPUs: as vLLM itself does, read it from the version."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False


def engine_memory() -> dict[str, int | float]:
    """Return the arguments of `LLM` about GPU memory; none for vLLM's CPU engine.

    With `kv_cache_memory_bytes` vLLM does not measure how much memory is left for the KV cache.
    The measurement takes seconds, and it ends the engine if another process on the same GPU
    frees memory meanwhile. The caller must set the number of GPU blocks: vLLM then allocates as
    many, and `gpu_memory_utilization` only says how much memory must be free at the start.
    """
    if has_cpu_engine():
        return {}
    return {
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        "gpu_memory_utilization": _FREE_AT_START,
    }


def vllm_command() -> tuple[str, ...]:
    """Return the command of vLLM under this Python, also where no script is beside it."""
    script = Path(sys.executable).parent / "vllm"
    if script.exists():
        return (str(script),)
    return (sys.executable, "-m", "vllm.entrypoints.cli.main")


def engine_environment(cores_reserved: int = 0) -> dict[str, str]:
    """Return this process's environment with what an engine of random float32 models needs.

    cores_reserved: cores that vLLM's CPU engine leaves to everything but its math.
    """
    env = dict(os.environ)
    # Without compiled bytecode three processes compile some 2,000 modules at every start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # Told to be one for CPUs, vLLM's build for GPUs looks for kernels that it does not have.
    env.pop("VLLM_TARGET_DEVICE", None)
    env |= {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # A benchmark's pool is small, and most machines have their files on one disk.
        "VLLM_NVMEOF_ALLOW_ROOT_FILE_SYSTEM": "true",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Its messages are read by people and by tests; both want no escape codes.
        "NO_COLOR": "1",
    }
    if has_cpu_engine():
        env |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": str(cores_reserved),
        }
    else:
        # Triton's attention would compute float32 products in TF32, of 10 bits: what is compared
        # with what is loaded must not hang on where a prompt was cut.
        env["TRITON_F32_DEFAULT"] = "ieee"
        # vLLM's sampler imports FlashInfer on CUDA unless this variable forbids it, and no engine
        # starts where FlashInfer is missing.
        if find_spec("flashinfer") is None:
            env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return env
