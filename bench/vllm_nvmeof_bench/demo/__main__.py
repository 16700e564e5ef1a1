# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nvmeof_bench.demo`: the same as `vllm-nvmeof demo`."""

import sys

from vllm_nvmeof_offload.cli import app

if __name__ == "__main__":
    app(["demo", *sys.argv[1:]])
