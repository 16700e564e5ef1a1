# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers for benchmarks, the demo and tests.

server  one `vllm serve` process: start, wait, stop, kill
client  a client of the server's HTTP API and of its /metrics
engine  the vLLM that is installed here, and the settings of its processes
model   a small random model, made here
"""
