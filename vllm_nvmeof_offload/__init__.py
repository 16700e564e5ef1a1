# SPDX-License-Identifier: Apache-2.0
"""KV-cache offloading for vLLM: pinned CPU memory and a file pool on NVMe-over-Fabrics.

Importing the package imports neither vLLM nor torch.
"""

import logging

__all__ = ["__version__"]

__version__ = "0.1.0"

# The names by which vLLM finds this package.
BACKEND = "nvmeof"
CONNECTOR_NAME = "NVMeoFOffloadingConnector"
CONNECTOR_MODULE = "vllm_nvmeof_offload.connector"
SPEC_NAME = "NVMeoFOffloadingSpec"
SPEC_MODULE = "vllm_nvmeof_offload.spec"
#: Combines our connector with others, as vLLM's `MultiConnector` does.
MULTI_CONNECTOR_NAME = "NVMeoFMultiConnector"
MULTI_CONNECTOR_MODULE = "vllm_nvmeof_offload.multi_connector"
#: vLLM's own connector, which `vllm_adapter.configure` replaces if it has our spec.
STOCK_CONNECTOR_NAME = "OffloadingConnector"

#: A child of vLLM's logger, so that our lines have the same format and destination.
LOGGER_NAME = "vllm.nvmeof_offload"
logger = logging.getLogger(LOGGER_NAME)
