# SPDX-License-Identifier: Apache-2.0
"""The names under which vLLM finds us."""

BACKEND = "nvmeof"
CONNECTOR_NAME = "NVMeoFOffloadingConnector"
CONNECTOR_MODULE = "vllm_nvmeof_offload.connector"
SPEC_NAME = "NVMeoFOffloadingSpec"
SPEC_MODULE = "vllm_nvmeof_offload.spec"
#: vLLM's own connector, which `transfer_config` replaces where it names our spec.
STOCK_CONNECTOR_NAME = "OffloadingConnector"
#: Below vLLM's own logger, so that our lines look like, and go where, vLLM's go.
LOGGER_NAME = "vllm.nvmeof_offload"
