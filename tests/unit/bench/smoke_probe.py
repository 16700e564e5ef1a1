# SPDX-License-Identifier: Apache-2.0
"""A real run of tiny sizes, in a separate process because it imports vLLM. Prints JSON.

Usage: smoke_probe.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from vllm_nvmeof_bench.pool import Settings, run

from vllm_nvmeof_offload.units import KIB, MIB

if __name__ == "__main__":
    settings = Settings(
        directory=Path(sys.argv[1]),
        blocks=(64 * KIB,),
        rounds=2,
        bytes_per_round=2 * MIB,
        single_bytes=MIB,
        queued_bytes=512 * KIB,
        episode_bytes=MIB,
        reads=3,
        read_gap_s=0.001,
        settle_s=0.0,
        beside_block_bytes=64 * KIB,
    )
    order: list[str] = []
    samples, conditions = run(settings, lambda done, total, what: order.append(what))
    found = {
        "samples": [asdict(one) for one in samples],
        "conditions": conditions,
        "order": order,
    }
    print(json.dumps(found))
