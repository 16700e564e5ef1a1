# SPDX-License-Identifier: Apache-2.0
"""The server's side of the follower."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vllm_nvmeof_offload.child import Companion, child_command
from vllm_nvmeof_offload.follow.owners import BYTES_PER_SLOT, ROWS_MIN, SLOTS_MAX
from vllm_nvmeof_offload.limits import memory_bytes
from vllm_nvmeof_offload.native import ForeignWriter

#: A follower that was killed has a successor after this time.
_RESTART_S = 5.0
#: The interval of scans, in milliseconds. Half of it passes in the median until a write is seen;
#: looks at ten idle regions then take 0.34 % of a core (docs/benchmarks.md). A follower whose looks
#: take longer waits longer, so that they take 2 % at most.
FOLLOW_MS = 100.0
#: What is followed takes at most this part of memory: eight engines of a host, a quarter of it.
_MEMORY_PART = 32


def start_follower(
    targets: Sequence[Path],
    keyspace: str,
    engine_index: int,
    ranks_followed: int,
    fd: int,
    follow_ms: float = FOLLOW_MS,
) -> Companion:
    """Follow the other engines of a keyspace on our targets.

    targets: ours, in the order of our places. keyspace: its digest. engine_index: ours.
    ranks_followed: the size of the largest set of our ranks; 1: there are no sets. fd: of an empty
    memfd, which has a table at return, so that a reader can be opened; the caller may close it at
    any time. follow_ms: interval of scans.
    """
    ForeignWriter(fd, ROWS_MIN)
    settings = {
        "targets": [str(target) for target in targets],
        "keyspace": keyspace,
        "engine_index": engine_index,
        "ranks": ranks_followed,
        "follow_ms": follow_ms,
        "slots_max": min(SLOTS_MAX, memory_bytes() // _MEMORY_PART // BYTES_PER_SLOT),
    }
    command = [*child_command("follow.follower"), json.dumps(settings)]
    return Companion("follower of shared pools", command, fd, _RESTART_S)
