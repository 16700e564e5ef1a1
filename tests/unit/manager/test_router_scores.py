# SPDX-License-Identifier: Apache-2.0
"""Our KV events, through vLLM's tracker and its wire format, in a router that weighs tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="events are vLLM's")

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, OffloadKey, make_offload_key

from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.vllm_adapter import manager as face
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager

from .bench import Bench, Core, hello
from .prefix_scores import WITH_STORAGE, WITHOUT_STORAGE, PrefixIndex

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
    router: PrefixIndex = field(default_factory=PrefixIndex)

    def __post_init__(self) -> None:
        self.manager = NVMeoFOffloadingManager(CoreConfig(kv_events=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(face, "ManagerCore", Core)
            one = hello(0, self.cache_slots, 8, (), remote=self.remote)
            self.manager.attach([one], len(KEYS[0]), (Group(0, GroupKind.FULL, CHUNK),))
        self.bench = Bench()
        assert isinstance(self.manager.core, Core)
        self.bench.core = self.manager.core
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


def test_without_their_tokens_only_the_last_block_of_each_chunk_is_known() -> None:
    """Why routers need `self_describing_kv_events` with chunks of several blocks."""
    engine = Engine(self_describing=False)
    engine.computed()
    engine.store(KEYS)
    engine.left_the_gpu()
    assert engine.score(WITH_STORAGE) == 0.0, "the first block of the first chunk is nowhere"
    cold = Engine(self_describing=False)
    cold.store(KEYS)
    assert cold.router.dropped == CHUNKS, "and nothing, if the router has not seen the tokens"


@pytest.mark.parametrize(
    ("remote", "locality"),
    [((False, False), "LOCAL"), ((False, True), "REMOTE"), ((False, None), None), ((), None)],
)
def test_the_pool_is_where_its_targets_are(
    remote: tuple[bool | None, ...], locality: str | None
) -> None:
    engine = Engine(self_describing=True, remote=remote)
    engine.store(KEYS[:1])
    engine.bench.write_all()
    engine.published()
    assert engine.router.localities == {("cpu", "LOCAL"), ("storage", locality)}


def test_a_block_of_two_chunks_is_in_a_tier_until_both_have_left() -> None:
    """Chunks that part in their second block both announce the first: a consumer must count."""
    engine = Engine(self_describing=True, cache_slots=2)
    parting = SimpleNamespace(
        block_hashes=[HASHES[0], BlockHash(b"%032d" % 900)],
        all_token_ids=[*TOKENS[:BLOCK], *range(900, 900 + BLOCK)],
        lora_request=None,
    )
    engine.store(KEYS[:1])
    engine.store([make_offload_key(parting.block_hashes[-1], 0)], parting)
    left = []
    for number in (1000, 1001):
        engine.bench.write_all()
        other = make_offload_key(b"%032d" % number, 0)
        plan = engine.manager.core.prepare_store([other])  # evicts the coldest chunk
        assert plan.command is not None
        engine.bench.done(plan.command.op)
        engine.published()
        left.append(engine.score(WITHOUT_STORAGE))
    assert left == [0.8, 0.0], "the first block is there until the second chunk has left too"
