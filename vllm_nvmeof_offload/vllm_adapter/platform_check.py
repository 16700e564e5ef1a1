# SPDX-License-Identifier: Apache-2.0
"""Refuses platforms that no copy engine serves, and GPUs whose packages are missing, early.

Before the model loads, and in one line; each worker finds out again when it opens its GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.errors import ConfigError

__all__ = ["REMEDY", "refuse_platform"]

REMEDY = "pip install 'vllm-nvmeof-offload[cuda]'"


def refuse_platform(config: OffloadConfig, platform: Any) -> None:
    """platform: vLLM's `current_platform`.

    Raises:
        ConfigError: neither an NVIDIA GPU nor the CPU, or a GPU and a package is missing.
    """
    if platform.is_cpu():
        return
    if not platform.is_cuda():
        raise ConfigError(
            "--kv-offloading-backend",
            "nvmeof",
            f"vLLM runs on {platform.device_type!r} here; this version serves NVIDIA GPUs and "
            "vLLM's CPU engine: serve without offloading",
        )
    if not _is_there("cuda.bindings"):
        raise ConfigError(
            "copy_backend", config.copy_backend, f"copies to a GPU need cuda-bindings: {REMEDY}"
        )
    if config.copy_backend == "kernel" and not _is_there("cuda.core"):
        raise ConfigError(
            "copy_backend", "kernel", f'needs cuda-core: {REMEDY}, or say "dma" or "auto"'
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
