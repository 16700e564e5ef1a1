# SPDX-License-Identifier: Apache-2.0
"""The demo: a real `vllm serve` on this machine, a client, and the benefit of offloading.

Nothing here imports vLLM or this package's connector. The server is a separate process, and
everything about it is read over HTTP.
"""
