# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-nvmeof doctor`, which checks this machine, its targets and their paths."""
