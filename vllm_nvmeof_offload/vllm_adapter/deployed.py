# SPDX-License-Identifier: Apache-2.0
"""Describes the deployment of this process's vLLM: adds what only vLLM's own modules know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_nvmeof_offload.vllm_adapter.deployment import Deployment, describe, process_began_s

__all__ = ["deployed", "foreign_formats"]


def deployed(vllm_config: Any, stamps: Mapping[str, str]) -> Deployment:
    """What this process runs. stamps: of the weights before they were read, by model."""
    from vllm.version import __version__

    return describe(
        vllm_config,
        __version__,
        stamps=stamps,
        began_s=process_began_s(),
        foreign_formats=foreign_formats(),
    )


def foreign_formats() -> frozenset[str]:
    """Load formats whose loader a plugin has added, or put in the place of vLLM's own."""
    from vllm.model_executor import model_loader

    return frozenset(
        name
        for name, loader in model_loader._LOAD_FORMAT_TO_MODEL_LOADER.items()
        if not loader.__module__.startswith(f"{model_loader.__name__}.")
    )
