# SPDX-License-Identifier: Apache-2.0
"""What llm-d's router makes of vLLM's KV events: whose prefix is where, and what it scores.

Written after its sources of September 2026 (pkg/kvevents, pkg/kvcache), as far as one pod and one
model go. A medium is compared in lower case. An event whose KV cache group is of no kind that it
indexes is dropped. Without tokens an event only adds a tier to blocks whose tokens an earlier event
brought. A removal counts once as many removals came as stores did. A prompt's score is the sum of
its leading blocks' best tiers; a tier that is not listed is worth nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

#: The defaults since 2026-09-11, and those that also list vLLM's own medium.
WITHOUT_STORAGE = {"gpu": 1.0, "cpu": 0.8, "shared_storage": 0.4, "object_store": 0.2}
WITH_STORAGE = {**WITHOUT_STORAGE, "storage": 0.3}
_INDEXED = {"full_attention", "mla_attention", "sink_full"}


class PrefixIndex:
    """Events come as they are on the wire: mappings that have a `type`."""

    def __init__(self) -> None:
        self._tokens: dict[Any, tuple[int, ...]] = {}  # block hash → the prompt up to its end
        self._tiers: dict[tuple[int, ...], set[str]] = {}
        self._stores: Counter[tuple[Any, str]] = Counter()
        self._kinds: dict[int, str] = {}
        self.localities: set[tuple[str, str | None]] = set()
        self.dropped = 0

    def apply(self, event: dict[str, Any]) -> None:
        tier = (event.get("medium") or "gpu").lower()
        if event["type"] == "BlockStored":
            self.localities.add((tier, event.get("locality")))
            self._stored(event, tier)
        elif event["type"] == "BlockRemoved":
            self._removed(event, tier)

    def score(self, tokens: Sequence[int], block: int, weights: dict[str, float]) -> float:
        total = 0.0
        for end in range(block, len(tokens) + 1, block):
            tiers = self._tiers.get(tuple(tokens[:end]))
            if not tiers:
                break
            total += max(weights.get(tier, 0.0) for tier in tiers)
        return round(total, 6)

    def _stored(self, event: dict[str, Any], tier: str) -> None:
        group, hashes, tokens = event.get("group_idx"), event["block_hashes"], event["token_ids"]
        kind = event.get("kv_cache_spec_kind") or self._kinds.get(group, "")
        if group is not None:
            self._kinds[group] = kind
            if kind not in _INDEXED:
                self.dropped += 1
                return
        if tokens and len(tokens) != len(hashes) * event["block_size"]:
            self.dropped += 1
            return
        parent = event.get("parent_block_hash")
        if tokens and parent is not None and parent not in self._tokens:
            self.dropped += 1
            return
        before = self._tokens.get(parent, ())
        for number, one in enumerate(hashes):
            if tokens:
                self._tokens[one] = before + tuple(tokens[: (number + 1) * event["block_size"]])
            if one in self._tokens:
                self._tiers.setdefault(self._tokens[one], set()).add(tier)
                self._stores[one, tier] += 1
            else:
                self.dropped += 1

    def _removed(self, event: dict[str, Any], tier: str) -> None:
        if self._kinds.get(event.get("group_idx"), "full_attention") not in _INDEXED:
            self.dropped += 1
            return
        for one in event["block_hashes"]:
            self._stores[one, tier] -= 1
            if self._stores[one, tier] <= 0 and one in self._tokens:
                self._tiers.get(self._tokens[one], set()).discard(tier)
