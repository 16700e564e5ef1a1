# SPDX-License-Identifier: Apache-2.0
"""Runs the self-test on the imported vLLM, whole and with stand-ins; prints what it said as JSON.

Usage: self_test_child.py MODEL_DIRECTORY POOL_DIRECTORY
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from tests.unit.adapter.pull_request_56076 import pointing
from vllm_nvmeof_offload.vllm_adapter import self_test
from vllm_nvmeof_offload.vllm_adapter.device_pointers import PointersWorker


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


@contextlib.contextmanager
def device_pointers() -> Iterator[None]:
    """The worker gets device pointers; everything else is as before."""
    stock, made = PointersWorker.submit_load, []

    def submit_load(self: Any, *given: Any, **named: Any) -> bool:
        made.append(self)
        return stock(self, *given, **named)

    with pointing(), patch.object(PointersWorker, "submit_load", submit_load):
        yield
    assert len(made) == 3, "three loads by pointers"


@contextlib.contextmanager
def pointers_exchanged() -> Iterator[None]:
    """Device pointers, and two blocks of every load in each other's place."""
    with pointing(), exchanged():
        yield


STAND_INS: tuple[Callable[[], Any], ...] = (
    *(exchanged, stored_exchanged, failures_ignored, no_reset, new_call),
    *(device_pointers, pointers_exchanged),
)


def attempt(config: Any) -> dict[str, Any]:
    lines: list[str] = []

    def remember(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    log = logging.getLogger("vllm.nvmeof_offload")
    log.addFilter(remember)
    began_s = time.process_time()
    error = ""
    try:
        self_test.run(config)
    except Exception as raised:  # noqa: BLE001 - the case under test
        error = f"{type(raised).__name__}: {raised}"
    finally:
        log.removeFilter(remember)
    return {"error": error, "cpu_s": time.process_time() - began_s, "log": lines}


def main(model: str, pool: str) -> None:
    transfer = KVTransferConfig(
        kv_connector="NVMeoFOffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"targets": [pool], "staging_bytes": 1 << 26},
    )
    config = EngineArgs(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        kv_transfer_config=transfer,
    ).create_engine_config()
    with set_current_vllm_config(config):
        found = {"whole": attempt(config), "again": attempt(config)}
        for stand_in in STAND_INS:
            with stand_in():
                found[stand_in.__name__] = attempt(config)
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
