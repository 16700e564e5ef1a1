# SPDX-License-Identifier: Apache-2.0
"""Remembers the files of each adapter, and notices one that came again with other files.

vLLM's block hashes hold an adapter's name and path. An adapter that is unloaded, overwritten and
loaded again has another number and the same hashes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.vllm_adapter.weights import weights_stamp

__all__ = ["Adapters", "stamp_of"]

#: Beyond it all are forgotten, and so counts as new whatever was stored under any of them.
_ADAPTERS_MAX = 1 << 16


class Adapters:
    """The adapters of one engine, by name and path."""

    def __init__(self, adapters_max: int = _ADAPTERS_MAX) -> None:
        self._max = adapters_max
        #: Number and stamp; an empty stamp is of files that cannot be known.
        self._known: dict[tuple[str, str], tuple[int, str]] = {}

    def knows(self, lora: Any) -> bool:
        """Whether this very adapter, by its number too, is the one that was noted last."""
        known = self._known.get((lora.lora_name, lora.lora_path))
        return known is not None and known[0] == lora.lora_int_id

    def note(self, lora: Any, stamp: str) -> bool:
        """Note an adapter that is being loaded; whether what is stored may be of other files."""
        name = (lora.lora_name, lora.lora_path)
        known = self._known.get(name)
        forgotten = known is None and len(self._known) >= self._max
        if forgotten:
            self._known.clear()
        self._known[name] = (lora.lora_int_id, stamp)
        return forgotten or (known is not None and (not stamp or known[1] != stamp))


def stamp_of(lora: Any) -> str:
    """The stamp of an adapter's files; empty where they are not local or cannot be read."""
    path = Path(os.path.expanduser(lora.lora_path))
    try:
        return weights_stamp(path) if path.exists() else ""
    except OSError:
        return ""
