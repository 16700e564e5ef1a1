# SPDX-License-Identifier: Apache-2.0
"""vLLM's general plugin: the `nvmeof` backend, and the configuration check before model load.

vLLM calls `register` in every process: the command line before it builds its arguments, each
API server, the engine core, each worker. It changes three things, each once:

* `nvmeof` becomes a value of `CacheConfig.kv_offloading_backend`, so of the flag, of `--help`,
  of YAML files and of `LLM(...)`;
* `VllmConfig` completes and checks a KV transfer configuration that names our backend;
* the names of our connector and spec are registered where their factories are loaded.

When vLLM is not as expected, nothing is changed and one line says so; the JSON form of
`--kv-transfer-config` with module paths needs no plugin. A vLLM that we do not know at all is
refused once our backend is asked for (`integration/known_vllm.py`), and not before: others use
this vLLM too.

Makes `nvmeof` a value of `CacheConfig.kv_offloading_backend`.

vLLM derives the choices of `--kv-offloading-backend` from that field's `Literal`, and pydantic
validates against it. Both read the field's type, so it is extended there, and the dataclass and
vLLM's table of arguments, if it exists already, are built anew.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, get_args

from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.names import BACKEND, LOGGER_NAME

__all__ = [
    "expect_backend_choice",
    "install_backend_choice",
    "register",
]


_FIELD = "kv_offloading_backend"


def _field() -> Any:
    from vllm.config.cache import CacheConfig

    return CacheConfig.__dataclass_fields__.get(_FIELD)


def expect_backend_choice() -> None:
    """Raise `IntegrationError` where `install` would not work."""
    field = _field()
    if field is None or "native" not in get_args(field.type):
        raise IntegrationError(f"CacheConfig.{_FIELD} is not a choice of backends")


def install_backend_choice() -> None:
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


logger = logging.getLogger(LOGGER_NAME)

_warned = False


def register() -> None:
    """Add the backend to the vLLM of this process. Idempotent; raises nothing."""
    global _warned
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - a plugin that raises would end vLLM's start
        if not _warned:
            logger.warning("nvmeof backend not available: %s", _explain(error))
        _warned = True


def _explain(error: Exception) -> str:
    from vllm_nvmeof_offload.vllm_adapter import supported

    unknown = supported.unknown_version()
    if unknown is not None:
        return f"{unknown} ({_reason(error)})"
    return (
        f"vLLM {supported.version()} is not as expected ({_reason(error)}). --kv-transfer-config "
        "with kv_connector_module_path and spec_module_path still works."
    )


def _register() -> None:
    from vllm_nvmeof_offload.vllm_adapter import configure

    # Check all expectations before anything changes: a flag that is accepted must also work.
    expect_backend_choice()
    configure.expect()
    install_backend_choice()
    configure.install()
    configure.register_loaded()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, IntegrationError) else f"{type(error).__name__}: {text}"
