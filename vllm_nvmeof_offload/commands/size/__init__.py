# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof size`: KV bytes of a model, sessions that fit, bandwidth that loads them in time.

Arithmetic over a model's config.json and a description of the hardware; nothing is measured
and neither vLLM nor torch is imported.

    deployment  the hardware and the load, with their options
    model       config.json, or a preset → the memory that each layer keeps
    kv          bytes of a block, a session, a chunk's slot; sessions that fit and that load
    report      all figures with their formulas, as values and as tables
"""
