# SPDX-License-Identifier: Apache-2.0
"""The native I/O core, where it was built and loads; else why not.

Without it everything works, but slower: `core` is then None, and `WHY_NOT` names the cause.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["WHY_NOT", "core"]

core: ModuleType | None
WHY_NOT: str
try:
    from vllm_nvmeof_offload.native import _native as _core
except ImportError as error:
    core, WHY_NOT = None, f"the native I/O core does not load: {error}"
else:
    core, WHY_NOT = _core, ""
