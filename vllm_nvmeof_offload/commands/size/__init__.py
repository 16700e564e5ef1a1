# SPDX-License-Identifier: Apache-2.0
"""How much KV cache a model makes, where it fits, and what bandwidth brings it back in time.

Arithmetic over a model's config.json and a description of the hardware; nothing is measured
and neither vLLM nor torch is imported. `report.build` is the way in.

    config_json → model    what each layer keeps      layer_kinds, state, weights, presets
    kv, slots              bytes of a block, a session, a chunk's slot
    capacity, bandwidth    what fits where; what loads in time, and what is in the way
    published              figures of others, beside ours
"""

from __future__ import annotations
