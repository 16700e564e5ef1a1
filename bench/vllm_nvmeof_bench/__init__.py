# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of vllm_nvmeof_offload, run by `vllm-nvmeof bench …`."""
