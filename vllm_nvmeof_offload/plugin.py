# SPDX-License-Identifier: Apache-2.0
"""A vLLM general plugin that adds the `nvmeof` backend and checks its configuration early.

vLLM calls `register` in every process: the command line (before it builds its arguments), each API
server, the engine core and each worker. `register` makes three changes, each once:

* `CacheConfig.kv_offloading_backend` accepts `nvmeof`, and with it the flag, `--help`, YAML files
  and `LLM(...)`;
* `VllmConfig` completes and checks a KV transfer configuration that names our backend;
* the factories that are already imported know our connector and spec by name.

If vLLM is not as expected, nothing is changed and one warning is logged; the JSON form of
`--kv-transfer-config` with module paths needs no plugin. An unknown vLLM can serve without our
backend, so it is refused only when the backend is requested (`vllm_adapter.vllm_release`). A vLLM
with this backend in its own tree (`tools/graft.sh`) is not changed.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, get_args

from vllm_nvmeof_offload import BACKEND, logger
from vllm_nvmeof_offload.errors import IntegrationError

__all__ = ["register"]


#: This backend's folder in a vLLM that contains it; two copies would register everything twice.
_IN_TREE = "v1/kv_offload/nvmeof"
_FIELD = "kv_offloading_backend"
_warned = False


def register() -> None:
    """Add the backend to this process's vLLM. Idempotent; never raises."""
    global _warned
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - an exception here would abort vLLM's start
        if not _warned:
            logger.warning("nvmeof backend not available: %s", _explain(error))
        _warned = True


def _register() -> None:
    import vllm

    if any(os.path.isdir(os.path.join(place, _IN_TREE)) for place in vllm.__path__):
        return
    from vllm_nvmeof_offload.vllm_adapter import configure

    # The first two calls check before anything changes, because an accepted flag must work.
    configure.expect()
    _install_backend_choice()
    configure.install()
    configure.register_loaded()


def _explain(error: Exception) -> str:
    from vllm_nvmeof_offload.vllm_adapter import vllm_release

    reason = " ".join(str(error).split())
    if not isinstance(error, IntegrationError):
        reason = f"{type(error).__name__}: {reason}"
    unknown = vllm_release.unknown_version()
    if unknown is not None:
        return f"{unknown} ({reason})"
    return (
        f"vLLM {vllm_release.version()} is not as expected ({reason}). --kv-transfer-config "
        "with kv_connector_module_path and spec_module_path still works."
    )


def _install_backend_choice() -> None:
    """Make `nvmeof` a value of `CacheConfig.kv_offloading_backend`, once.

    vLLM derives the flag's choices from the field's `Literal` type, and pydantic validates against
    the same type. Extend the type, rebuild the dataclass, and discard vLLM's cached arguments.
    """
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import cache as module

    field = module.CacheConfig.__dataclass_fields__[_FIELD]
    choices = get_args(field.type)
    if "native" not in choices:
        raise IntegrationError(f"CacheConfig.{_FIELD} does not list the backend 'native'")
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
    # The command line may already have computed its arguments.
    arguments: Any = getattr(sys.modules.get("vllm.engine.arg_utils"), "_compute_kwargs", None)
    if hasattr(arguments, "cache_clear"):
        arguments.cache_clear()
