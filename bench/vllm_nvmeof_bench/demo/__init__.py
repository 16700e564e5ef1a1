# SPDX-License-Identifier: Apache-2.0
"""The demo: a real `vllm serve` on this machine, measured by a client over HTTP, with and without
offloading. No module here imports vLLM or the connector."""
