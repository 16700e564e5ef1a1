# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers for benchmarks, the demo and tests."""
