# SPDX-License-Identifier: Apache-2.0
"""Memory arguments, command and environment for the installed vLLM."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from vllm_nvmeof_offload.units import GIB

#: Affects only vLLM's log, because every engine here also gets its number of blocks.
_KV_CACHE_BYTES = 2 * GIB
#: The share of a GPU's memory that must be free when an engine starts.
_FREE_AT_START = 0.1


def has_cpu_engine() -> bool:
    """Return whether the installed vLLM is a CPU build, judging by its version, as vLLM does."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False


def engine_memory() -> dict[str, int | float]:
    """Return the arguments of `LLM` for GPU memory; none for a CPU build.

    With `kv_cache_memory_bytes`, vLLM does not measure the available memory, which takes seconds
    and fails if another process frees memory on the same GPU meanwhile. The caller must set the
    number of GPU blocks. `gpu_memory_utilization` is the share that must be free at the start.
    """
    if has_cpu_engine():
        return {}
    return {
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        "gpu_memory_utilization": _FREE_AT_START,
    }


def vllm_command() -> tuple[str, ...]:
    """Return the command that runs vLLM with this Python."""
    script = Path(sys.executable).parent / "vllm"
    if script.exists():
        return (str(script),)
    return (sys.executable, "-m", "vllm.entrypoints.cli.main")


def engine_environment(cores_reserved: int = 0) -> dict[str, str]:
    """Return this process's environment, adapted to engines with random float32 models.
    cores_reserved: the number of cores that vLLM's CPU engine does not use for math."""
    env = dict(os.environ)
    # Without cached bytecode, three processes compile about 2,000 modules per start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # With the value cpu, a GPU build would look for kernels that it does not contain.
    env.pop("VLLM_TARGET_DEVICE", None)
    env |= {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # Benchmarks' pools are small, and most machines have only one disk.
        "VLLM_NVMEOF_ALLOW_ROOT_FILE_SYSTEM": "true",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Logs are easier to read and to test without escape codes.
        "NO_COLOR": "1",
    }
    if has_cpu_engine():
        env |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": str(cores_reserved),
        }
    else:
        # In TF32, which has a 10-bit mantissa, results of Triton's attention would depend on where
        # a prompt is split, and would differ after a load.
        env["TRITON_F32_DEFAULT"] = "ieee"
        # Otherwise vLLM's sampler would import FlashInfer, and the engine would not start.
        if find_spec("flashinfer") is None:
            env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return env
