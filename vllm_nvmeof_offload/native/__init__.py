# SPDX-License-Identifier: Apache-2.0
"""The C++ code that runs once per chunk.

`core` contains the I/O engine and the pool's on-disk format and checksums. The other names belong
to the manager's tiers, the foreign table, and the worker's transfer machine.
"""

from __future__ import annotations

from vllm_nvmeof_offload.native import _native as core
from vllm_nvmeof_offload.native._tiers import (
    Batch,
    CacheGeometry,
    Foreign,
    ForeignReader,
    ForeignRegion,
    ForeignWriter,
    Holds,
    InstantLanes,
    LookUps,
    Machine,
    MachineOptions,
    OwnerRecord,
    PythonLanes,
    Tiers,
    Wanted,
    Whereabouts,
    choose_lane,
    meter_unlocked,
    set_words_bytes,
    unlocked_s,
)

__all__ = [
    "Batch",
    "CacheGeometry",
    "Foreign",
    "ForeignReader",
    "ForeignRegion",
    "ForeignWriter",
    "Holds",
    "InstantLanes",
    "LookUps",
    "Machine",
    "MachineOptions",
    "OwnerRecord",
    "PythonLanes",
    "Tiers",
    "Wanted",
    "Whereabouts",
    "choose_lane",
    "core",
    "meter_unlocked",
    "set_words_bytes",
    "unlocked_s",
]
