# SPDX-License-Identifier: Apache-2.0
"""Makes `nvmeof` a value of `CacheConfig.kv_offloading_backend`.

vLLM derives the choices of `--kv-offloading-backend` from that field's `Literal`, and pydantic
validates against it. Both read the field's type, so it is extended there, and the dataclass and
vLLM's table of arguments, if it exists already, are built anew.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args

from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.names import BACKEND

__all__ = ["expect", "install"]

_FIELD = "kv_offloading_backend"


def _field() -> Any:
    from vllm.config.cache import CacheConfig

    return CacheConfig.__dataclass_fields__.get(_FIELD)


def expect() -> None:
    """Raise `IntegrationError` where `install` would not work."""
    field = _field()
    if field is None or "native" not in get_args(field.type):
        raise IntegrationError(f"CacheConfig.{_FIELD} is not a choice of backends")


def install() -> None:
    """Extend the choices, once."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import cache as module

    field = _field()
    choices = get_args(field.type)
    if BACKEND in choices:
        return
    extended: Any = Literal[(*choices, BACKEND)]
    before = field.type
    field.type = module.CacheConfig.__annotations__[_FIELD] = extended
    if rebuild_dataclass(module.CacheConfig, force=True, raise_errors=False) is False:
        field.type = module.CacheConfig.__annotations__[_FIELD] = before
        rebuild_dataclass(module.CacheConfig, force=True)
        raise IntegrationError("pydantic cannot rebuild CacheConfig")
    module.KVOffloadingBackend = extended
    # The command line may have been laid out already.
    arguments: Any = getattr(sys.modules.get("vllm.engine.arg_utils"), "_compute_kwargs", None)
    if hasattr(arguments, "cache_clear"):
        arguments.cache_clear()
