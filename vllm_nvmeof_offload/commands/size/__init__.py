# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof size`: KV bytes of a model, sessions that fit, bandwidth that loads them in time.

Arithmetic over a model's config.json and a description of the hardware; nothing is measured
and neither vLLM nor torch is imported.
"""
