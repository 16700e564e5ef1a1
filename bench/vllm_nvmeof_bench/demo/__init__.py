# SPDX-License-Identifier: Apache-2.0
"""The main job on this machine: a real `vllm serve`, a client, and what offloading is worth.

Nothing here imports vLLM or this package's connector: the server is a process of its own, and
all that is known about it was read over HTTP.
"""
