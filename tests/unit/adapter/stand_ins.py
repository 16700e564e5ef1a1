# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that behave differently from the imported vLLM; the self-test must catch each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import GPULoadStoreSpec


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """Two blocks of every load come back in each other's place."""
    stock = OffloadingConnectorWorker.start_kv_transfers

    def start(self: Any, metadata: Any) -> None:
        for job in metadata.load_jobs.values():
            ids = job.dst_spec.block_ids
            ids[[0, 1]] = ids[[1, 0]]
        stock(self, metadata)

    with patch.object(OffloadingConnectorWorker, "start_kv_transfers", start):
        yield


@contextlib.contextmanager
def stored_exchanged() -> Iterator[None]:
    """Blocks are given to stores in another order than to loads."""
    stock = OffloadingConnectorWorker.prepare_store_kv

    def prepare(self: Any, metadata: Any) -> None:
        for job in metadata.store_jobs.values():
            spec = job.src_spec
            assert isinstance(spec, GPULoadStoreSpec)
            spec.block_ids = spec.block_ids[::-1].copy()
        stock(self, metadata)

    with patch.object(OffloadingConnectorWorker, "prepare_store_kv", prepare):
        yield


@contextlib.contextmanager
def failures_ignored() -> Iterator[None]:
    """The scheduler does not look at blocks that were not loaded."""

    def ignore(self: Any, *given: Any) -> set[str]:
        return set()

    with patch.object(Scheduler, "_handle_invalid_blocks", ignore):
        yield


@contextlib.contextmanager
def no_reset() -> Iterator[None]:
    """A reset does not reach the connector."""
    with patch.object(Scheduler, "reset_connector_cache", lambda self: True):
        yield


@contextlib.contextmanager
def new_call() -> Iterator[None]:
    """The scheduler demands what the test does not give."""
    stock = Scheduler.update_from_output

    def update(self: Any, output: Any, model_output: Any, clock: float) -> Any:
        return stock(self, output, model_output)

    with patch.object(Scheduler, "update_from_output", update):
        yield


STAND_INS: tuple[Callable[[], Any], ...] = (
    *(exchanged, stored_exchanged, failures_ignored, no_reset, new_call),
)
