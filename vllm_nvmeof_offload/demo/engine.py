# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's engines is installed here, and what its processes are to be started with."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

__all__ = ["engine_environment", "gpu_share", "has_cpu_engine", "vllm_command"]

#: Of a GPU's memory, for all servers together: vLLM's own default for one.
_GPU_MEMORY = 0.9


def has_cpu_engine() -> bool:
    """Whether this vLLM is a build for CPUs: its version says so, by which vLLM goes as well."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False


def gpu_share(servers: int) -> float | None:
    """What one of so many servers at once may have of a GPU's memory; None on a CPU's engine."""
    return None if has_cpu_engine() else round(_GPU_MEMORY / servers, 3)


def vllm_command() -> tuple[str, ...]:
    """Return what starts vLLM under this Python, also where no script lies beside it."""
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
