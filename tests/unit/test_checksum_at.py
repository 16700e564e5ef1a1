# SPDX-License-Identifier: Apache-2.0
"""What `checksum_at` makes of a worker, and what the worker says of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vllm_nvmeof_offload.config import EXPERIMENT, parse_config
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.protocol import RankHello
from vllm_nvmeof_offload.units import MIB
from vllm_nvmeof_offload.worker.build import RankIdentity, build_worker

BLOCKS = 8
ODD = "checksums: on the CPU (a block has 3000 contiguous bytes; the GPU needs multiples of 512)"


def _hello(directory: Path, checksum_at: str, *pages: int) -> RankHello:
    cache = [np.zeros((BLOCKS, page), np.uint8) for page in pages]
    tensors = [
        CacheTensor(one.ctypes.data, page, page, BLOCKS)
        for one, page in zip(cache, pages, strict=True)
    ]
    geometry = CacheGeometry([(Group(0, GroupKind.FULL, 32, 2), tensors)])
    keys = {
        "staging_bytes": 2 * MIB,
        "targets": [str(directory / "target")],
        "allow_root_file_system": True,
        "pool_bytes": 2 * MIB,
    }
    env = {EXPERIMENT: json.dumps({"stream_slots": 2, "checksum_at": checksum_at})}
    identity = RankIdentity(Keyspace.of({"test": "checksums"}), 0, 1)
    parts, hello = build_worker(parse_config(keys, env), geometry, identity, "cpu")
    parts.runner.stop()
    if parts.watcher is not None:
        parts.watcher.stop()
    assert parts.io.close()
    parts.copy.close()
    assert parts.pool is not None
    parts.pool.close()
    parts.staging.close()
    return hello


@pytest.mark.parametrize(
    ("checksum_at", "pages", "there", "odd"),
    [
        ("cpu", (4096, 4096), False, False),
        ("gpu", (4096, 4096), True, False),
        ("gpu", (4096, 3000), False, True),
        ("cpu", (3000,), False, False),
    ],
)
def test_the_copies_make_checksums_where_they_can(
    tmp_path: Path, checksum_at: str, pages: tuple[int, ...], there: bool, odd: bool
) -> None:
    hello = _hello(tmp_path, checksum_at, *pages)
    assert hello.copy_engine.endswith(", checksums there") == there
    assert (ODD in hello.fallbacks) == odd
