# SPDX-License-Identifier: Apache-2.0
"""What runs per chunk, in C++.

`Tiers` and `Batch`, the manager's index and both tiers, need only a C++ compiler, and nothing works
without them. `core`, the io_uring engine, also needs liburing and ISA-L; without it `core` is None
and `WHY_NOT` names the cause, and the engine on threads takes over.
"""

from __future__ import annotations

from types import ModuleType

from vllm_nvmeof_offload.native._tiers import (
    Batch,
    CacheGeometry,
    Foreign,
    ForeignReader,
    ForeignRegion,
    ForeignWriter,
    Geometry,
    InstantLanes,
    LookUps,
    Machine,
    OwnerRecord,
    Tiers,
    choose_lane,
    meter_unlocked,
    set_words_bytes,
    unlocked_s,
)

__all__ = [
    "WHY_NOT",
    "Batch",
    "CacheGeometry",
    "Foreign",
    "ForeignReader",
    "ForeignRegion",
    "ForeignWriter",
    "Geometry",
    "InstantLanes",
    "LookUps",
    "Machine",
    "OwnerRecord",
    "Tiers",
    "choose_lane",
    "core",
    "meter_unlocked",
    "set_words_bytes",
    "unlocked_s",
]

core: ModuleType | None
WHY_NOT: str
try:
    from vllm_nvmeof_offload.native import _native as _core
except ImportError as error:
    core, WHY_NOT = None, f"the native I/O core does not load: {error}"
else:
    core, WHY_NOT = _core, ""
