# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-nvmeof top`, which reads servers' metrics and nothing else."""
