# SPDX-License-Identifier: Apache-2.0
"""Completes and checks the KV transfer configuration of an engine that uses our backend.

vLLM turns its offloading flags into a `KVTransferConfig` in one method of `VllmConfig`, before
any model is loaded. That method is wrapped: engines that name our backend or connector are
handled here, all others by vLLM alone. vLLM may run it several times on one configuration, so
completing twice equals completing once.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

from vllm_nvmeof_offload.errors import ConfigError, IntegrationError
from vllm_nvmeof_offload.names import (
    BACKEND,
    CONNECTOR_MODULE,
    CONNECTOR_NAME,
    LOGGER_NAME,
    SPEC_MODULE,
    SPEC_NAME,
    STOCK_CONNECTOR_NAME,
)
from vllm_nvmeof_offload.units import GIB, format_bytes
from vllm_nvmeof_offload.vllm_adapter import combined, factories, failure_policy, known_vllm

__all__ = ["expect", "install"]

logger = logging.getLogger(LOGGER_NAME)

_METHOD = "_post_init_kv_transfer_config"
_SIZE_FLAG = "--kv-offloading-size"
_BACKEND_FLAG = "--kv-offloading-backend"
_CACHE_FIELDS = ("kv_offloading_size", "kv_offloading_backend")
_TRANSFER_FIELDS = (
    "kv_connector",
    "kv_connector_module_path",
    "kv_connector_extra_config",
    "kv_role",
    "kv_load_failure_policy",
)


def expect() -> None:
    """Raise `IntegrationError` where `install` would not work."""
    from vllm.config import CacheConfig, KVTransferConfig, VllmConfig

    if not callable(getattr(VllmConfig, _METHOD, None)):
        raise IntegrationError(f"VllmConfig has no {_METHOD}")
    for cls, names in ((CacheConfig, _CACHE_FIELDS), (KVTransferConfig, _TRANSFER_FIELDS)):
        missing = [name for name in names if name not in cls.__dataclass_fields__]
        if missing:
            raise IntegrationError(f"{cls.__name__} has no {', '.join(missing)}")


def install() -> None:
    """Wrap vLLM's method, once."""
    from vllm.config import VllmConfig

    stock = getattr(VllmConfig, _METHOD)
    if getattr(stock, "_nvmeof", False):
        return
    failure_policy.install()

    @functools.wraps(stock)
    def wrapped(self: Any) -> None:
        try:
            if not _is_ours(self):
                stock(self)
                return
            complete(self)
        except (ConfigError, IntegrationError) as error:
            if _is_command_line():
                # One line instead of vLLM's traceback; a program gets the exception.
                raise SystemExit(f"vllm: error: {error}") from None
            raise

    wrapped._nvmeof = True  # type: ignore[attr-defined]
    setattr(VllmConfig, _METHOD, wrapped)


def _is_command_line() -> bool:
    """Whether this process is vLLM's own command, and not a program that imports vLLM."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = spec.name if spec is not None else ""
    return os.path.basename(sys.argv[0]) == "vllm" or name.startswith("vllm.entrypoints.")


def _names_us(transfer: Any) -> bool:
    if transfer is None:
        return False
    if combined.names_us(transfer.kv_connector, transfer.kv_connector_extra_config):
        return True
    return combined.find_ours(transfer) is not None


def _is_ours(vllm_config: Any) -> bool:
    cache = vllm_config.cache_config
    if cache.kv_offloading_backend == BACKEND:
        return True
    if not _names_us(vllm_config.kv_transfer_config):
        return False
    if cache.kv_offloading_size is not None and cache.kv_offloading_backend != "native":
        raise ConfigError(
            _BACKEND_FLAG,
            cache.kv_offloading_backend,
            f"--kv-transfer-config names {CONNECTOR_NAME}; leave out one of the two",
        )
    return True


def complete(vllm_config: Any) -> None:
    """Make `vllm_config` name our connector with a complete, checked configuration.

    Raises:
        ConfigError: the configuration cannot work.
        IntegrationError: this vLLM is none that we know.
    """
    from vllm.config import KVTransferConfig

    from vllm_nvmeof_offload.vllm_adapter.precheck import precheck

    known_vllm.require()

    if vllm_config.kv_transfer_config is None:
        vllm_config.kv_transfer_config = KVTransferConfig()
    transfer = vllm_config.kv_transfer_config
    if not failure_policy.named_by_user(transfer):
        transfer.kv_load_failure_policy = "recompute"
    elif transfer.kv_load_failure_policy != "recompute":
        logger.warning("kv_load_failure_policy=fail: a failed load will end its request")
    child = combined.find_ours(transfer)
    if child is None:
        _take_connector(transfer)
        extra = transfer.kv_connector_extra_config
    else:
        extra = _take_child(child)
        combined.check_others(transfer)
    key = _take_size(extra, vllm_config.cache_config.kv_offloading_size)
    precheck(vllm_config, extra, key)
    factories.register_loaded()


def _take_child(child: dict[str, Any]) -> dict[str, Any]:
    """Complete the mapping of which `MultiConnector` makes our connector; return its `extra`."""
    from vllm.config import KVTransferConfig

    made = KVTransferConfig(**{"kv_role": "kv_both", **child})
    _take_connector(made)
    child["kv_connector"] = made.kv_connector
    child["kv_connector_module_path"] = made.kv_connector_module_path
    child["kv_role"] = made.kv_role
    child["kv_connector_extra_config"] = made.kv_connector_extra_config
    extra: dict[str, Any] = made.kv_connector_extra_config
    return extra


def _take_connector(transfer: Any) -> None:
    name = transfer.kv_connector
    extra = transfer.kv_connector_extra_config
    stock = name == STOCK_CONNECTOR_NAME and extra.get("spec_name", SPEC_NAME) == SPEC_NAME
    if name not in (None, CONNECTOR_NAME) and not stock:
        raise ConfigError(
            "kv_connector",
            name,
            f"{_BACKEND_FLAG} {BACKEND} brings its own connector, {CONNECTOR_NAME}; leave out the "
            "flag, or kv_connector in --kv-transfer-config (a MultiConnector has to name ours "
            "among its connectors)",
        )
    if name != CONNECTOR_NAME or transfer.kv_connector_module_path is None:
        transfer.kv_connector = CONNECTOR_NAME
        transfer.kv_connector_module_path = CONNECTOR_MODULE
    transfer.kv_role = transfer.kv_role or "kv_both"
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            "kv_role",
            transfer.kv_role,
            "what is stored here is loaded here: leave it out, or kv_both",
        )
    extra.setdefault("spec_name", SPEC_NAME)
    extra.setdefault("spec_module_path", SPEC_MODULE)


def _take_size(extra: dict[str, Any], size_gib: float | None) -> str:
    """Put the staging size into `extra`, if it is not there; return what the user set it with."""
    from vllm_nvmeof_offload.config import ENV_PREFIX, default_staging_bytes

    if "staging_bytes" in extra:
        return "staging_bytes"
    if size_gib is not None:
        if not 0 < size_gib < 1 << 30:  # not infinite either; NaN compares false
            raise ConfigError(_SIZE_FLAG, size_gib, "give the GiB of pinned memory, above 0")
        extra["staging_bytes"] = int(size_gib * GIB)
        return _SIZE_FLAG
    variable = ENV_PREFIX + "STAGING_BYTES"
    if variable in os.environ:
        return variable
    extra["staging_bytes"] = default_staging_bytes()
    logger.info(
        "nvmeof: no %s given; taking %s of pinned memory over all ranks",
        _SIZE_FLAG,
        format_bytes(extra["staging_bytes"]),
    )
    return "staging_bytes"
