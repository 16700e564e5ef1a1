# SPDX-License-Identifier: Apache-2.0
"""Runs the self-test on the imported vLLM, and prints what it said as JSON.

Usage: self_test_child.py MODEL_DIRECTORY POOL_DIRECTORY [stand-ins]

With the third argument it also runs on every stand-in.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import time
from typing import Any

from vllm.config import KVEventsConfig, KVTransferConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from vllm_nvmeof_offload.vllm_adapter import self_test


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


def _with_settings(config: Any) -> Any:
    """Settings of a user's that concern no made-up request."""
    config = copy.deepcopy(config)
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 2
    config.cache_config.prefix_match_unit = 128
    config.cache_config.enable_prefix_caching = False
    config.scheduler_config.policy = "priority"
    config.scheduler_config.max_num_batched_tokens = 32
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config


def main(model: str, pool: str, *more: str) -> None:
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
        found = {"whole": attempt(config)}
        if more:
            from tests.unit.adapter.stand_ins import STAND_INS

            found["again"] = attempt(config)
            found["settings"] = attempt(_with_settings(config))
            for stand_in in STAND_INS:
                with stand_in():
                    found[stand_in.__name__] = attempt(config)
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
