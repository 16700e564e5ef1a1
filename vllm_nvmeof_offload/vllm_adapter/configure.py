# SPDX-License-Identifier: Apache-2.0
"""Complete and check the KV transfer configuration for an engine that uses our backend.

vLLM converts its offloading flags to a `KVTransferConfig` in one method of `VllmConfig`, before it
loads a model. The plugin wraps the method; a vLLM with this package in its tree calls us there.
Configurations that name our backend or connector are completed here, all others by vLLM. Completion
is idempotent, because the method may run several times on one configuration.

**`MultiConnector`** creates each connector from a mapping in its `connectors`, loads with the first
connector that has a hit, and stores with all of them. Our mapping is completed as if it were a
separate configuration, and `multi_connector` replaces vLLM's class, which gives the first
connector's handshake to all. Another connector must not report failed loads, because we would
already have stored the request's KV. NIXL's connectors may, because a request runs, and is stored,
only after vLLM knows the outcome of the load.

**`kv_load_failure_policy`**: vLLM's default, "fail", ends a request whose load fails; ours is
"recompute". A `KVTransferConfig` does not record whether the user gave its value, so a given value
is replaced with an equal string of a special type. In an object created before the plugin is
loaded, as by `LLM(kv_transfer_config={…})`, the value counts as the default.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm_nvmeof_offload import (
    BACKEND,
    CONNECTOR_MODULE,
    CONNECTOR_NAME,
    MULTI_CONNECTOR_MODULE,
    MULTI_CONNECTOR_NAME,
    SPEC_MODULE,
    SPEC_NAME,
    STOCK_CONNECTOR_NAME,
    logger,
)
from vllm_nvmeof_offload.errors import ConfigError, IntegrationError, raise_all
from vllm_nvmeof_offload.units import GIB, format_bytes
from vllm_nvmeof_offload.vllm_adapter import vllm_release

# -- our connector among those of a MultiConnector ----------------------------------------

_COMBINED = "MultiConnector"
_COMBINING = (_COMBINED, MULTI_CONNECTOR_NAME)
_EITHER = f"use either that connector or {CONNECTOR_NAME}"
#: Connectors whose loads always finish before the requests run.
_LOADS_FIRST = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")


def _is_our_connector(connector: Any, extra: Any) -> bool:
    if connector == CONNECTOR_NAME:
        return True
    spec = extra.get("spec_name") if isinstance(extra, dict) else None
    return bool(connector == STOCK_CONNECTOR_NAME and spec == SPEC_NAME)


def _children(transfer: Any) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return a `MultiConnector`'s mapping for our connector, or None, and the other mappings."""
    found = transfer.kv_connector_extra_config.get("connectors")
    children = found if transfer.kv_connector in _COMBINING and isinstance(found, list) else []
    ours: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for child in (child for child in children if isinstance(child, dict)):
        extra = child.get("kv_connector_extra_config")
        is_ours = _is_our_connector(child.get("kv_connector"), extra)
        (ours if is_ours else others).append(child)
    if len(ours) > 1:
        raise ConfigError("connectors", CONNECTOR_NAME, f"give it only once in {_COMBINED}")
    return (ours[0] if ours else None), others


def _check_others(others: list[dict[str, Any]]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    for child in others:
        name = str(child.get("kv_connector"))
        try:
            found = KVConnectorFactory.get_connector_class(KVTransferConfig(**child))
        except Exception:  # noqa: BLE001 - vLLM will raise the same error
            continue
        if issubclass(found, OffloadingConnector):
            raise ConfigError("connectors", name, f"offloads KV too; {_EITHER}")
        if name in _LOADS_FIRST:
            continue
        stock = KVConnectorBase_V1.get_block_ids_with_load_errors
        if found.get_block_ids_with_load_errors is not stock:
            reason = "may report failed loads after our connector has stored the KV"
            raise ConfigError("connectors", name, f"{reason}; {_EITHER}")


# -- whether the user set kv_load_failure_policy ----------------------------------------

_FIELD = "kv_load_failure_policy"


class _Marked(str):
    """A marked string, which is the default in the dataclass field and a user's value in an
    object."""

    __slots__ = ()


def _is_given(policy: str | None) -> bool:
    from vllm.config.kv_transfer import KVTransferConfig

    # In a vLLM with this package in its tree, the default is None.
    if KVTransferConfig.__dataclass_fields__[_FIELD].default is None:
        return policy is not None
    return isinstance(policy, _Marked)


def _install_failure_policy() -> None:
    """Make new `KVTransferConfig` objects mark given values. Idempotent."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config.kv_transfer import KVTransferConfig

    field = KVTransferConfig.__dataclass_fields__.get(_FIELD)
    if field is None or not isinstance(field.default, str) or isinstance(field.default, _Marked):
        return
    before = field.default
    made = KVTransferConfig.__post_init__

    @functools.wraps(made)
    def mark(self: Any) -> None:
        policy = self.kv_load_failure_policy
        self.kv_load_failure_policy = before if isinstance(policy, _Marked) else _Marked(policy)
        made(self)

    field.default = _Marked(before)
    KVTransferConfig.__post_init__ = mark
    if rebuild_dataclass(KVTransferConfig, force=True, raise_errors=False) is False:
        field.default = before
        KVTransferConfig.__post_init__ = made


_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.factory"
_SPECS = "vllm.v1.kv_offload.factory"


def register_loaded() -> None:
    """Register our class names, so that JSON can use them, with the factories imported so far.

    The others are not imported here, because that takes a second even without offloading. They
    find our classes later, by the module paths from `complete`.
    """
    connectors = getattr(sys.modules.get(_CONNECTORS), "KVConnectorFactory", None)
    if connectors is not None and CONNECTOR_NAME not in connectors._registry:
        connectors.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    specs = getattr(sys.modules.get(_SPECS), "OffloadingSpecFactory", None)
    if specs is not None and SPEC_NAME not in specs._registry:
        specs.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)


# -- completing the configuration ---------------------------------------------------------

#: The fields of vLLM's `KVTransferConfig`, and the one that contains our keys.
TRANSFER_FIELDS = (
    *("kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port"),
    *("kv_connector_extra_config", "kv_connector_module_path", "enable_permute_local_kv"),
    "kv_load_failure_policy",
)
EXTRA = "kv_connector_extra_config"

_METHOD = "_post_init_kv_transfer_config"
_SIZE_FLAG = "--kv-offloading-size"
_BACKEND_FLAG = "--kv-offloading-backend"


def expect() -> None:
    for found in vllm_release.CONFIGURATION.differences():
        raise IntegrationError(found)


def install() -> None:
    from vllm.config import VllmConfig

    stock = getattr(VllmConfig, _METHOD)
    if getattr(stock, "_nvmeof", False):
        return
    _install_failure_policy()

    @functools.wraps(stock)
    def wrapped(self: Any) -> None:
        if not complete_if_ours(self):
            stock(self)

    wrapped._nvmeof = True  # type: ignore[attr-defined]
    setattr(VllmConfig, _METHOD, wrapped)


def complete_if_ours(vllm_config: Any) -> bool:
    """Complete a configuration that names our backend or connector; return False for any other. A
    vLLM with this package in its tree calls this function."""
    try:
        if not _is_ours(vllm_config):
            return False
        complete(vllm_config)
    except (ConfigError, IntegrationError) as error:
        if _is_command_line():
            # Print one line per error instead of vLLM's traceback; a program gets the exception.
            lines = (f"vllm: error: {line}" for line in str(error).splitlines())
            raise SystemExit("\n".join(lines)) from None
        raise
    return True


def _is_command_line() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = spec.name if spec is not None else ""
    return os.path.basename(sys.argv[0]) == "vllm" or name.startswith("vllm.entrypoints.")


def _is_ours(vllm_config: Any) -> bool:
    cache = vllm_config.cache_config
    if cache.kv_offloading_backend == BACKEND:
        return True
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return False
    name, extra = transfer.kv_connector, transfer.kv_connector_extra_config
    if not _is_our_connector(name, extra) and _children(transfer)[0] is None:
        return False
    if cache.kv_offloading_size is not None and cache.kv_offloading_backend != "native":
        raise ConfigError(
            _BACKEND_FLAG,
            cache.kv_offloading_backend,
            f"--kv-transfer-config names {CONNECTOR_NAME}; leave out one of the two options",
        )
    return True


def complete(vllm_config: Any) -> None:
    """Complete a configuration with our connector's names. Raises ConfigError if the configuration
    is refused."""
    from vllm.config import KVTransferConfig

    vllm_release.refuse_different()
    # Imported here, because most servers with the plugin do not use the backend, and an unknown
    # vLLM may lack names that the module imports.
    from vllm_nvmeof_offload.vllm_adapter.supported import precheck

    if vllm_config.kv_transfer_config is None:
        vllm_config.kv_transfer_config = KVTransferConfig()
    transfer = vllm_config.kv_transfer_config
    if not _is_given(transfer.kv_load_failure_policy):
        transfer.kv_load_failure_policy = "recompute"
    elif transfer.kv_load_failure_policy != "recompute":
        logger.warning("kv_load_failure_policy=fail: a failed load will end its request")
    child, others = _children(transfer)
    if child is None:
        _take_connector(transfer)
        extra = transfer.kv_connector_extra_config
    else:
        extra = _take_child(child)
        _check_others(others)
        transfer.kv_connector = _COMBINED
        transfer.kv_connector_module_path = MULTI_CONNECTOR_MODULE
    key = take_size(extra, vllm_config.cache_config.kv_offloading_size)
    precheck(vllm_config, extra, key)
    register_loaded()


def extra_of(values: Mapping[str, Any], has_flag: bool | None) -> dict[str, Any]:
    """Return our part of the --kv-transfer-config `values`, without importing vLLM.

    `has_flag` is whether `--kv-offloading-backend nvmeof` is also given; None if unknown. Raises
    ConfigError if vLLM or our backend would refuse `values`, or if they do not select our backend.
    """
    wrong = [
        ConfigError(
            name,
            value,
            f"not a field of --kv-transfer-config; put this package's keys into {EXTRA}; "
            f"vLLM's fields are {', '.join(TRANSFER_FIELDS)}",
        )
        for name, value in values.items()
        if name not in TRANSFER_FIELDS
    ]
    name, extra = values.get("kv_connector"), values.get(EXTRA, {})
    if not isinstance(extra, dict):
        raise ConfigError(EXTRA, extra, "not an object; give { … }")
    transfer = SimpleNamespace(kv_connector_module_path=None, kv_role=None, **{EXTRA: dict(extra)})
    transfer.__dict__.update({key: values[key] for key in values if key != EXTRA})
    transfer.kv_connector = name
    child, _ = _children(transfer)
    may_be_ours = has_flag is None and name in (None, STOCK_CONNECTOR_NAME)
    if child is None and not (has_flag or may_be_ours or _is_our_connector(name, extra)):
        remedy = f"another backend, or a typo; did you mean {CONNECTOR_NAME}?"
        if name in _COMBINING:
            remedy = f"none of its connectors is {CONNECTOR_NAME}"
        wrong.append(ConfigError("kv_connector", name, remedy))
    elif name is not None and transfer.kv_role is None:
        remedy = "vLLM needs a role with kv_connector; give kv_both"
        wrong.append(ConfigError("kv_role", None, remedy))
    raise_all(wrong)
    if child is not None:
        return extra_of({"kv_role": "kv_both", **child}, has_flag)
    _take_connector(transfer)
    return dict(transfer.kv_connector_extra_config)


def _take_child(child: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    made = KVTransferConfig(**{"kv_role": "kv_both", **child})
    _take_connector(made)
    for field in ("connector", "connector_module_path", "role", "connector_extra_config"):
        child[f"kv_{field}"] = getattr(made, f"kv_{field}")
    return made.kv_connector_extra_config


def _take_connector(transfer: Any) -> None:
    name = transfer.kv_connector
    extra = transfer.kv_connector_extra_config
    stock = name == STOCK_CONNECTOR_NAME and extra.get("spec_name", SPEC_NAME) == SPEC_NAME
    if name not in (None, CONNECTOR_NAME) and not stock:
        raise ConfigError(
            "kv_connector",
            name,
            f"{_BACKEND_FLAG} {BACKEND} uses the connector {CONNECTOR_NAME}; leave out the flag, "
            "or kv_connector in --kv-transfer-config (a MultiConnector must name ours among its "
            "connectors)",
        )
    if name != CONNECTOR_NAME or transfer.kv_connector_module_path is None:
        transfer.kv_connector = CONNECTOR_NAME
        transfer.kv_connector_module_path = CONNECTOR_MODULE
    transfer.kv_role = transfer.kv_role or "kv_both"
    if transfer.kv_role != "kv_both":
        remedy = "chunks are stored and loaded by the same engine; give kv_both"
        raise ConfigError("kv_role", transfer.kv_role, remedy)
    extra.setdefault("spec_name", SPEC_NAME)
    extra.setdefault("spec_module_path", SPEC_MODULE)


def take_size(extra: dict[str, Any], size_gib: float | None) -> str:
    """Set `staging_bytes` in `extra` if it is missing. Return the option that determines its
    value."""
    if "staging_bytes" in extra:
        return "staging_bytes"
    if size_gib is not None:
        if not 0 < size_gib < 1 << 30:  # excludes infinity; NaN compares false
            raise ConfigError(_SIZE_FLAG, size_gib, "give GiB of pinned memory, above 0")
        extra["staging_bytes"] = int(size_gib * GIB)
        return _SIZE_FLAG
    from vllm_nvmeof_offload.config import ENV_PREFIX, default_staging_bytes

    variable = ENV_PREFIX + "STAGING_BYTES"
    if variable in os.environ:
        return variable
    extra["staging_bytes"] = default_staging_bytes()
    logger.info(
        "nvmeof: no %s given; using %s of pinned memory for all ranks together",
        _SIZE_FLAG,
        format_bytes(extra["staging_bytes"]),
    )
    return "staging_bytes"


# -- blocks per chunk ---------------------------------------------------------------------


def choose_blocks_per_chunk(vllm_config: Any, kv_cache_config: Any) -> None:
    """Set vLLM's number of blocks per chunk, or check the configured number. The scheduler and all
    workers get the same result from the same inputs."""
    from vllm_nvmeof_offload.config import blocks_of_chunk, parse_config
    from vllm_nvmeof_offload.vllm_adapter.groups import blocks_of

    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    parallel = vllm_config.parallel_config
    groups = blocks_of(kv_cache_config, parallel.decode_context_parallel_size)
    size = sum(placed.size for placed in kv_cache_config.kv_cache_tensors[:1])  # 0: no KV layers
    block_bytes = size // max(1, kv_cache_config.num_blocks)
    config = parse_config(extra)
    stages = parallel.pipeline_parallel_size
    blocks, problem = blocks_of_chunk(config, groups, block_bytes, stages)
    if problem:
        logger.warning("nvmeof: %s", problem)
    if config.block_size is None:
        extra["blocks_per_chunk"] = blocks
