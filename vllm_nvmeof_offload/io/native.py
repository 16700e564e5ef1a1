# SPDX-License-Identifier: Apache-2.0
"""The former name of `io.choose_engine`, which the benchmarks still import."""

from vllm_nvmeof_offload.io.choose_engine import choose_io_engine

__all__ = ["choose_io_engine"]
