# SPDX-License-Identifier: Apache-2.0
"""The keyspace: the facts under which KV bytes are interchangeable, as one digest.

Two servers share a pool directory only if every fact is equal. Facts describe the model and
the geometry; nothing of a prompt reaches a name on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_nvmeof_offload.pool.format import SLOT_LAYOUT

DIGEST_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Keyspace:
    """Canonical JSON of the facts. Build it with `of`; equal facts give equal digests."""

    canonical: str

    @staticmethod
    def of(facts: Mapping[str, object]) -> Keyspace:
        """Freeze `facts` (JSON values) together with the layout of slots on disk.

        Raises:
            TypeError, ValueError: a value is not JSON (NaN included).
        """
        return Keyspace.exactly({"slot_layout": SLOT_LAYOUT, **facts})

    @staticmethod
    def exactly(facts: Mapping[str, object]) -> Keyspace:
        """Freeze facts read from disk, which an earlier release may have written."""
        return Keyspace(json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False))

    @property
    def digest(self) -> str:
        """32 hex digits: the name of the keyspace's directory; superblocks repeat it."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:DIGEST_HEX_DIGITS]
