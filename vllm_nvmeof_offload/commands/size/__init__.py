# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-nvmeof size`: a model's KV bytes, sessions that fit, bandwidth to load them.

All figures are computed from config.json and a description of the hardware, without vLLM or torch.
"""
