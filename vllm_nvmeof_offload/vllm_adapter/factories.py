# SPDX-License-Identifier: Apache-2.0
"""Registers our connector and spec with vLLM's factories, so that JSON may name them bare."""

from __future__ import annotations

import sys

from vllm_nvmeof_offload.names import CONNECTOR_MODULE, CONNECTOR_NAME, SPEC_MODULE, SPEC_NAME

__all__ = ["register_loaded"]

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.factory"
_SPECS = "vllm.v1.kv_offload.factory"


def register_loaded() -> None:
    """Register with those of the two factories that this process has imported.

    Importing them here would cost a second where nobody offloads. Where they are imported later,
    our names come with module paths, which `transfer_config` fills in.
    """
    connectors = getattr(sys.modules.get(_CONNECTORS), "KVConnectorFactory", None)
    if connectors is not None and CONNECTOR_NAME not in connectors._registry:
        connectors.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    specs = getattr(sys.modules.get(_SPECS), "OffloadingSpecFactory", None)
    if specs is not None and SPEC_NAME not in specs._registry:
        specs.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)
