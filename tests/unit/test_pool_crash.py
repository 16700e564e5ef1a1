# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of a real process at random moments: what was acknowledged is there, and right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE
from vllm_nvmeof_offload.io.transfer import read_slot
from vllm_nvmeof_offload.pool.keyspace import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES

ROUNDS = int(os.environ.get("VLLM_NVMEOF_CRASH_ROUNDS", "24"))
PAYLOAD_BYTES = 100_000
SLOTS = 12

# Writes generation after generation into pseudo-random slots, and names each one when its
# engine reported it. Several writes are in flight at any time.
CHILD = """
import mmap, pathlib, random, select, sys
import numpy as np
from vllm_nvmeof_offload.io.base import IoKind, IoOp
from vllm_nvmeof_offload.io.threads import ThreadsIoEngine
from vllm_nvmeof_offload.pool.keyspace import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import IoClass, SlotIdentity

target, generation, size, slots = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
spec = PoolSpec((target,), slots * (size + 9000), size, Keyspace.of({"m": 1}))
pool = Pool.open(spec)
memory = mmap.mmap(-1, 4 * pool.slot_bytes)
view = memoryview(memory)
base = np.frombuffer(memory, np.uint8).ctypes.data
engine = ThreadsIoEngine(pool, view, base, threads=4)
dice = random.Random(generation)
free, busy = [0, 1, 2, 3], {}
while True:
    while free:
        slot = dice.choice([s for s in range(pool.slots) if s not in {b[1] for b in busy.values()}])
        place, generation = free.pop(), generation + 1
        start = place * pool.slot_bytes + 4096
        view[start : start + size] = bytes([generation % 251]) * size
        identity = SlotIdentity(f"key-{slot}".encode(), generation)
        busy[generation] = (place, slot)
        print("begin", slot, generation)
        engine.submit([IoOp(generation, IoKind.WRITE_SLOT, IoClass.WRITE_BEHIND, slot,
                            base + place * pool.slot_bytes, identity)])
    sys.stdout.flush()
    select.select([engine], [], [])
    for completion in engine.poll():
        assert completion.outcome.ok, completion
        place, slot = busy.pop(completion.token)
        free.append(place)
        print("done", slot, completion.token)
"""


def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    seed = int(os.environ.get("VLLM_NVMEOF_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"VLLM_NVMEOF_SEED={seed}")
    dice = random.Random(seed)
    generation = 0
    acknowledged: dict[int, int] = {}  # slot → generation
    begun: dict[int, set[int]] = {slot: set() for slot in range(SLOTS)}
    served = torn = 0
    for _ in range(ROUNDS):
        lines = run_child(tmp_path, generation, kill_after=dice.randrange(1, 120))
        for what, slot, number in lines:
            generation = max(generation, number)
            if what == "begin":
                begun[slot].add(number)
            else:
                acknowledged[slot] = max(number, acknowledged.get(slot, 0))
        found = check_pool(tmp_path)
        torn += sum(right is None for right in found.values())
        for slot, last in acknowledged.items():
            # Only a later write, cut off by the kill, may have taken its place.
            later = {number for number in begun[slot] if number > last}
            assert (slot in found and found[slot] == last) or later, (slot, last)
            if slot in found and found[slot] is not None:
                assert found[slot] == last or found[slot] in later
                acknowledged[slot] = found[slot]
                served += 1
        generation += 100  # what the child began without our hearing of it
    assert served > ROUNDS
    print(f"{served} chunks served, {torn} cut off and refused")


def run_child(target: Path, generation: int, kill_after: int) -> list[tuple[str, int, int]]:
    """Run the writer until it has said `kill_after` lines; return all that it said."""
    command = [sys.executable, "-c", CHILD, str(target), str(generation)]
    command += [str(PAYLOAD_BYTES), str(SLOTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            if len(lines) == kill_after:
                child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(word[0], int(word[1]), int(word[2])) for word in words if len(word) == 3]


def check_pool(target: Path) -> dict[int, int | None]:
    """Adopt; return slot → generation that it serves, None if it refuses. Checks content."""
    spec = PoolSpec(
        (target,),
        SLOTS * (PAYLOAD_BYTES + 9000),
        PAYLOAD_BYTES,
        Keyspace.of({"m": 1}),
        o_direct="off",
    )
    pool = Pool.open(spec)
    assert pool.engine_index == 0
    assert pool.slots == SLOTS
    adopted = pool.adopt()
    found: dict[int, int | None] = {}
    slot_memory = bytearray(pool.slot_bytes)
    for slot, generation, key in zip(
        adopted.pool_slots.tolist(), adopted.generations.tolist(), adopted.keys, strict=True
    ):
        assert key == f"key-{slot}".encode()
        outcome = read_slot(pool, memoryview(slot_memory), slot, SlotIdentity(key, generation))
        assert outcome in (OK, STALE, CHECKSUM_MISMATCH)
        found[slot] = generation if outcome.ok else None
        if outcome.ok:
            payload = slot_memory[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
            assert payload == bytes([generation % 251]) * PAYLOAD_BYTES
    pool.close()
    return found
