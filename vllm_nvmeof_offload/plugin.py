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
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.names import LOGGER_NAME

__all__ = ["register"]

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
    from vllm_nvmeof_offload.vllm_adapter import known_vllm

    unknown = known_vllm.unknown_version()
    if unknown is not None:
        return f"{unknown} ({_reason(error)})"
    return (
        f"vLLM {known_vllm.version()} is not as expected ({_reason(error)}). --kv-transfer-config "
        "with kv_connector_module_path and spec_module_path still works."
    )


def _register() -> None:
    from vllm_nvmeof_offload.vllm_adapter import backend_choice, factories, transfer_config

    steps: list[Any] = [backend_choice, transfer_config]
    for step in steps:  # all expectations first: a flag that is accepted must also work
        step.expect()
    for step in steps:
        step.install()
    factories.register_loaded()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, IntegrationError) else f"{type(error).__name__}: {text}"
