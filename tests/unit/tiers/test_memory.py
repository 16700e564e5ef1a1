# SPDX-License-Identifier: Apache-2.0
"""Memory of the tiers: slots that hold nothing take none, also where sets of ranks divide them."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: So many that the rest of a huge page in each column counts little.
CHUNKS = 800_000
#: What docs/architecture.md promises for each chunk, by the members that share a slot.
CHUNK_BYTES_MAX = {1: 127, 2: 150, 8: 150}

#: Prints the bytes of resident memory that the tiers take at first, and once every slot is full.
CHILD = """
import sys
import numpy as np
from vllm_nvmeof_offload.native import Tiers
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, places_of

slots, members = map(int, sys.argv[1:])
chunks = slots * members
numbers = np.arange(chunks, dtype=np.int64)
each = numbers % members if members > 1 else np.full(chunks, EVERY_MEMBER)
places = places_of(0, numbers // members, each)
keys = np.zeros((chunks, 36), np.uint8)
keys[:, :8] = numbers.view(np.uint8).reshape(-1, 8)
generations = numbers.view(np.uint64) + 1
keys = keys.tobytes()


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


before = resident()
tiers = Tiers(16, [slots], key_bytes=36, set_sizes=[members])
empty = resident()
assert tiers.adopt(places, generations, keys) == chunks
print(empty - before, resident() - before)
"""


@pytest.mark.parametrize("members", CHUNK_BYTES_MAX)
def test_slots_take_memory_once_they_hold_a_chunk(members: int) -> None:
    slots = CHUNKS // members
    command = [sys.executable, "-c", CHILD, str(slots), str(members)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    empty, full = map(int, done.stdout.split())
    assert empty < slots * 8
    assert full < CHUNKS * CHUNK_BYTES_MAX[members]
