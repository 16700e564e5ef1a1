# SPDX-License-Identifier: Apache-2.0
"""Two groups of tests run side by side (`make test-e2e`), so that no server may own a core."""

from __future__ import annotations

import os

# With one math thread it computes the same wherever the scheduler puts it. Left to itself vLLM
# binds it to a core: to the same core in every server.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["OMP_NUM_THREADS"] = "1"
# Faults are injected by their control files, in servers that these tests start.
os.environ["VLLM_NVMEOF_ALLOW_FAULT_INJECTION"] = "1"
