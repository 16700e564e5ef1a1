# SPDX-License-Identifier: Apache-2.0
"""A `MultiConnector` for our connector and another, as on prefill and decode servers.

vLLM's class gives the first connector's handshake to all connectors; ours gives each its own. Our
class also has vLLM's name, because vLLM recognizes a `MultiConnector` by name, for example when it
checks whether all connectors support several KV cache groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.connector import NVMeoFOffloadingConnector

__all__ = ["MultiConnector", "NVMeoFMultiConnector"]


@dataclass
class NVMeoFMultiHandshake(KVConnectorHandshakeMetadata):
    """One worker's handshakes, by connector; None for a connector that sends no handshake."""

    parts: tuple[KVConnectorHandshakeMetadata | None, ...]


class NVMeoFMultiConnector(multi_connector.MultiConnector):
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return NVMeoFMultiHandshake(
            tuple(connector.get_handshake_metadata() for connector in self._connectors)
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Give each connector its own handshakes, by (pipeline rank, tensor rank)."""
        for number, connector in enumerate(self._connectors):
            own: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {}
            for rank, handshake in metadata.items():
                assert isinstance(handshake, NVMeoFMultiHandshake)
                part = handshake.parts[number]
                if part is not None:
                    own[rank] = part
            if own:
                connector.set_xfer_handshake_metadata_pp_aware(own)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that other connectors need. Ours supports any; BLHNC is fastest."""
        ours: str | None = None
        theirs: set[str] = set()
        for connector, config in cls._get_connector_classes_and_configs(vllm_config):
            layout = connector.get_required_kvcache_layout(config)
            if issubclass(connector, NVMeoFOffloadingConnector):
                ours = layout
            elif layout is not None:
                theirs.add(layout)
        if len(theirs) > 1:
            raise ValueError(f"the connectors need different KV cache layouts: {sorted(theirs)}")
        layout = next(iter(theirs), ours)
        if layout != ours:
            logger.warning(
                "nvmeof: another connector needs KV cache layout %s, so each block is copied in "
                "one piece per layer instead of a single piece",
                layout,
            )
        return layout


#: vLLM finds the class by this name.
MultiConnector = NVMeoFMultiConnector
