# SPDX-License-Identifier: Apache-2.0
"""From the index to a router: vLLM's own tracker and publisher, and a real subscriber."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="events are vLLM's")

from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, make_offload_key

from tests.e2e.router import Router
from tests.wait import wait_until
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.protocol import AdoptedEntries, place_of
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager

from .bench import GROUPS, hello

CHUNKS = 10_000


def test_a_router_receives_adopted_chunks_and_a_reset() -> None:
    """Events are published in parts, and the engine keeps stepping until all of them are."""
    keys = [make_offload_key(b"%032d" % number, 0) for number in range(CHUNKS)]
    manager = NVMeoFOffloadingManager(CoreConfig(kv_events=True))
    places = place_of(0, 0) + np.arange(CHUNKS)
    entries = AdoptedEntries(places, np.ones(CHUNKS, np.uint64), b"".join(keys))
    one = replace(hello(0, 4, CHUNKS, ()), adopted=entries)
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
        wait_until("a router that agrees", lambda: router.counts() == (0, CHUNKS, CHUNKS))
        manager.reset_cache()
        step_until_published()
        wait_until("a router that agrees", lambda: router.counts() == (0, 0, 0))
        publisher.shutdown()
    assert router.removed["STORAGE"] == CHUNKS
