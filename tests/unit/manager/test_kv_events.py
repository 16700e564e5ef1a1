# SPDX-License-Identifier: Apache-2.0
"""Our KV events, through vLLM's own tracker and wire format, in a router that weighs tiers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="events are vLLM's")

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import (
    OffloadingKVEventsConfig,
    OffloadKey,
    get_offload_group_idx,
    make_offload_key,
)

from tests.e2e.router import Router
from tests.process import wait_until
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.manager.ledger import State
from vllm_nvmeof_offload.protocol import AdoptedEntries, place_of
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager

from .bench import GROUPS, attached, hello, report

#: The defaults since 2026-09-11, and those that also list vLLM's own medium.
WITHOUT_STORAGE = {"gpu": 1.0, "cpu": 0.8, "shared_storage": 0.4, "object_store": 0.2}
WITH_STORAGE = {**WITHOUT_STORAGE, "storage": 0.3}
_INDEXED = {"full_attention", "mla_attention", "sink_full"}


class PrefixIndex:
    """What llm-d's router makes of vLLM's KV events: whose prefix is where, and what it scores.

    Written after its sources of September 2026 (pkg/kvevents, pkg/kvcache), as far as one pod and
    one model go. Events come as they are on the wire: mappings that have a `type`. A medium is
    compared in lower case. An event whose KV cache group is of no kind that it indexes is dropped.
    Without tokens an event only adds a tier to blocks whose tokens an earlier event brought. A
    removal counts once as many removals came as stores did. A prompt's score is the sum of its
    leading blocks' best tiers; a tier that is not listed is worth nothing.
    """

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


# -- from the index to a real subscriber ----------------------------------------------


ADOPTED = 10_000


def test_a_router_receives_adopted_chunks_and_a_reset() -> None:
    """Events are published in parts, and the engine keeps stepping until all of them are."""
    keys = [make_offload_key(b"%032d" % number, 0) for number in range(ADOPTED)]
    manager = NVMeoFOffloadingManager(CoreConfig(kv_events=True))
    places = place_of(0, 0) + np.arange(ADOPTED)
    entries = AdoptedEntries(places, np.ones(ADOPTED, np.uint64), b"".join(keys))
    one = replace(hello(0, 4, ADOPTED, ()), adopted=entries)
    manager.attach([one], len(keys[0]), GROUPS)
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, False))
    with Router() as router:
        endpoints = {key: value for key, value in router.config.items() if "endpoint" in key}
        publisher = ZmqEventPublisher(data_parallel_rank=0, **endpoints)

        def step_until_published() -> int:
            """Step as vLLM's scheduler does; return the steps until no event is left."""
            steps = 0
            while manager.has_events:
                assert manager.has_pending_work()
                events = list(tracker.take_events(manager.take_events()))
                publisher.publish(KVEventBatch(ts=0.0, events=events))
                steps += 1
            return steps

        assert step_until_published() > 1, "not all in one step"
        wait_until("a router that agrees", lambda: router.counts() == (0, ADOPTED, ADOPTED))
        manager.reset_cache()
        step_until_published()
        wait_until("a router that agrees", lambda: router.counts() == (0, 0, 0))
        publisher.shutdown()
    assert router.removed["STORAGE"] == ADOPTED


# -- what a router scores -------------------------------------------------------------


BLOCK, BLOCKS_PER_CHUNK, CHUNKS = 16, 2, 3
CHUNK = BLOCK * BLOCKS_PER_CHUNK
TOKENS = list(range(100, 100 + CHUNK * CHUNKS))
#: One block hash per block, as a request has them.
HASHES = [BlockHash(b"%032d" % number) for number in range(len(TOKENS) // BLOCK)]
REQUEST = SimpleNamespace(block_hashes=HASHES, all_token_ids=TOKENS, lora_request=None)
GROUP = SimpleNamespace(
    group_idx=0,
    sliding_window_size_in_chunks=None,
    hashes_per_chunk=BLOCKS_PER_CHUNK,
    tokens_per_chunk=CHUNK,
    tokens_per_block=BLOCK,
    kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
)
KEYS = [make_offload_key(HASHES[(n + 1) * BLOCKS_PER_CHUNK - 1], 0) for n in range(CHUNKS)]


@dataclass
class Engine:
    """Our manager, vLLM's tracker and the router behind them."""

    self_describing: bool
    remote: tuple[bool | None, ...] = (True,)
    cache_slots: int = CHUNKS
    router: Any = field(default_factory=PrefixIndex)
    groups: tuple[Group, ...] = (Group(0, GroupKind.FULL, CHUNK),)
    adopted: OffloadKey | None = None

    def __post_init__(self) -> None:
        self.manager = NVMeoFOffloadingManager(CoreConfig(kv_events=True))
        groups = tuple(RankGroup(group, 1024) for group in self.groups)
        one = hello(0, self.cache_slots, 8, (), remote=self.remote, groups=groups)
        if self.adopted is not None:
            place, generation = np.array([place_of(0, 0)], np.int64), np.ones(1, np.uint64)
            one = replace(one, adopted=AdoptedEntries(place, generation, self.adopted))
        self.bench = attached(self.manager, one, len(KEYS[0]), self.groups)
        config = OffloadingKVEventsConfig(True, self.self_describing)
        self.tracker = OffloadingEventsTracker(config)

    def computed(self) -> None:
        """vLLM reports blocks in GPU memory, always with their tokens."""
        event = BlockStored(
            block_hashes=list(HASHES),
            parent_block_hash=None,
            token_ids=TOKENS,
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
        self._publish([event])

    def left_the_gpu(self) -> None:
        self._publish([BlockRemoved(block_hashes=list(HASHES), medium="GPU", group_idx=0)])

    def store(self, keys: list[OffloadKey], request: Any = REQUEST) -> None:
        """keys: of the request's first chunks."""
        plan = self.manager.core.prepare_store(keys)
        assert plan.command is not None
        for number, key in enumerate(keys):
            self.tracker.record_store(request, GROUP, number, key)
        self.bench.done(plan.command.op)
        self.published()

    def published(self) -> None:
        self._publish(list(self.tracker.take_events(self.manager.take_events())))

    def score(self, weights: dict[str, float]) -> float:
        return self.router.score(TOKENS, BLOCK, weights)

    def _publish(self, events: list[Any]) -> None:
        packed = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
        _, received, *_ = msgspec.msgpack.decode(packed)
        for event in received:
            self.router.apply(event)


def test_a_prefix_scores_by_the_best_tier_that_has_each_block() -> None:
    engine = Engine(self_describing=True)
    engine.computed()
    assert engine.score(WITH_STORAGE) == len(HASHES) * 1.0
    engine.store(KEYS)
    engine.left_the_gpu()
    assert engine.score(WITH_STORAGE) == pytest.approx(len(HASHES) * 0.8)
    engine.bench.write_all()
    engine.published()
    other = [make_offload_key(b"%032d" % n, 0) for n in range(1000, 1000 + CHUNKS)]
    assert engine.manager.core.prepare_store(other).command is not None  # evicts the CPU tier
    engine.published()
    assert engine.score(WITH_STORAGE) == pytest.approx(len(HASHES) * 0.3)
    assert engine.score(WITHOUT_STORAGE) == 0.0, "a router that does not list it gives nothing"
    assert engine.router.localities == {("gpu", None), ("cpu", "LOCAL"), ("storage", "REMOTE")}
    engine.manager.reset_cache()
    engine.published()
    assert engine.score(WITH_STORAGE) == 0.0
    assert engine.router.dropped == 0


@dataclass
class Consumer:
    """A consumer of events, to which a block is there until removed as often as stored.

    A block is known by its medium, group and hash. A removal of what is not there is ignored: a
    reset may remove a chunk whose arrival was not published yet.
    """

    _stores: Counter[tuple[str, int, Any]] = field(default_factory=Counter)

    @property
    def blocks(self) -> set[tuple[str, int, Any]]:
        return {block for block, count in self._stores.items() if count > 0}

    def apply(self, event: dict[str, Any]) -> None:
        for one in event["block_hashes"]:
            block = event["medium"], event["group_idx"], one
            if event["type"] == "BlockStored" or self._stores[block]:
                self._stores[block] += 1 if event["type"] == "BlockStored" else -1


class Life:
    """Random stores, evictions, writes and resets of chunks that share blocks.

    blocks: per chunk of group 0, all but the last of which occur in other chunks too. A chunk of
    group 1, a window, has the hash of the last block of a chunk of group 0.
    """

    def __init__(self, seed: int, blocks: int) -> None:
        self._random, self._blocks = random.Random(seed), blocks
        groups = Group(0, GroupKind.FULL, CHUNK), Group(1, GroupKind.WINDOW, CHUNK, 1, 1, CHUNK)
        self.engine = Engine(True, cache_slots=4, router=Consumer(), groups=groups)
        self._hashes: dict[bytes, list[bytes]] = {}

    def step(self) -> None:
        engine, draw = self.engine, self._random.random()
        if draw < 0.05:
            engine.manager.reset_cache()
            engine.published()  # as the connector does, because vLLM then forgets the blocks
            engine.tracker.reset()
        elif draw < 0.4:
            for command in engine.bench.writes():
                rows = range(len(command.batch))
                engine.manager.core.report([report(command.op, rows=rows)])
        else:
            self._store(self._random.randrange(12), self._random.randrange(2))

    def _store(self, number: int, group: int) -> None:
        shared = [b"%032d" % (900 + number % 2 + 2 * at) for at in range(self._blocks - 1)]
        hashes = [BlockHash(one) for one in (*shared, b"%032d" % number)]
        key = make_offload_key(hashes[-1], group)
        plan = self.engine.manager.core.prepare_store([key], np.array([CHUNK], np.int64))
        if plan.command is None:
            return
        tokens = list(range(BLOCK * self._blocks))
        request = SimpleNamespace(block_hashes=hashes, all_token_ids=tokens, lora_request=None)
        shape = {
            "sliding_window_size_in_chunks": None if group == 0 else 1,
            "group_idx": group,
            "hashes_per_chunk": self._blocks,
            "tokens_per_chunk": len(tokens),
        }
        self.engine.tracker.record_store(
            request, SimpleNamespace(**{**vars(GROUP), **shape}), 0, key
        )
        self._hashes[key] = [*hashes] if group == 0 else [hashes[-1]]
        self.engine.bench.done(plan.command.op)

    def index(self) -> set[tuple[str, int, Any]]:
        """The blocks of the chunks in each tier of the index."""
        media = {
            "CPU": {State.CACHED, State.WRITING, State.BOTH},
            "STORAGE": {State.BOTH, State.POOLED, State.FETCHING},
        }
        return {
            (medium, get_offload_group_idx(OffloadKey(entry.key)), maybe_convert_block_hash(one))
            for medium, states in media.items()
            for entry in self.engine.manager.core.entries()
            if entry.state in states
            for one in self._hashes[entry.key]
        }


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_consumer_that_counts_has_the_blocks_of_the_index(blocks: int, steps: int) -> None:
    removed = 0
    for seed in range(12):
        life = Life(seed, blocks)
        for _ in range(150 // steps):
            before = life.engine.router.blocks
            for _ in range(steps):
                life.step()
            life.engine.published()
            index = life.index()
            assert life.engine.router.blocks == index
            removed += len(before - index)
    assert removed > 300, "blocks leave the tiers"
