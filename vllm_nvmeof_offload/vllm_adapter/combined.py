# SPDX-License-Identifier: Apache-2.0
"""Our connector as one of several in vLLM's `MultiConnector`.

vLLM makes each one from a mapping of its own among the `connectors`, loads from the first that has
something, and saves with all. Ours is completed there as it is when it stands alone. Beside it can
be what hands nothing over at start (vLLM passes the first connector's handshake to all), and what
never reports a load as failed: the KV of such a request would have been stored by then.
"""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.names import CONNECTOR_NAME, SPEC_NAME, STOCK_CONNECTOR_NAME

__all__ = ["check_others", "find_ours", "names_us"]

_COMBINED = "MultiConnector"
_ALONE = f"use it, or {CONNECTOR_NAME}, alone"


def names_us(connector: Any, extra: Any) -> bool:
    """Whether a connector of this name and configuration is ours."""
    if connector == CONNECTOR_NAME:
        return True
    spec = extra.get("spec_name") if isinstance(extra, dict) else None
    return bool(connector == STOCK_CONNECTOR_NAME and spec == SPEC_NAME)


def find_ours(transfer: Any) -> dict[str, Any] | None:
    """The mapping among those of a `MultiConnector` that makes our connector, or None.

    Raises:
        ConfigError: there are two.
    """
    ours = [child for child in _children(transfer) if _is_ours(child)]
    if len(ours) > 1:
        raise ConfigError("connectors", CONNECTOR_NAME, f"name it once among those of {_COMBINED}")
    return ours[0] if ours else None


def check_others(transfer: Any) -> None:
    """Refuse by name what cannot stand beside ours.

    Raises:
        ConfigError: naming the connector.
    """
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    for child in _children(transfer):
        if _is_ours(child):
            continue
        name = str(child.get("kv_connector"))
        try:
            found = KVConnectorFactory.get_connector_class(KVTransferConfig(**child))
        except Exception:  # noqa: BLE001 - vLLM makes it next, and says what is wrong
            continue
        if issubclass(found, OffloadingConnector):
            raise ConfigError("connectors", name, f"offloads as {CONNECTOR_NAME} does; {_ALONE}")
        for method, reason in (
            (
                "get_handshake_metadata",
                "hands metadata over at start, as ours does: vLLM mixes them up",
            ),
            ("get_block_ids_with_load_errors", "may fail to load what ours has stored by then"),
        ):
            if getattr(found, method) is not getattr(KVConnectorBase_V1, method):
                raise ConfigError("connectors", name, f"{reason}; {_ALONE}")


def _children(transfer: Any) -> list[dict[str, Any]]:
    if transfer is None or transfer.kv_connector != _COMBINED:
        return []
    children = transfer.kv_connector_extra_config.get("connectors")
    if not isinstance(children, list):
        return []
    return [child for child in children if isinstance(child, dict)]


def _is_ours(child: dict[str, Any]) -> bool:
    return names_us(child.get("kv_connector"), child.get("kv_connector_extra_config"))
