# SPDX-License-Identifier: Apache-2.0
"""The contract of lengths and checksums: each operation has a payload length of its own, and a
write may bring the CRC that the copy into staging made.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from crc32c import crc32c

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE
from vllm_nvmeof_offload.units import HEADER_BYTES, slot_stride_bytes

from .rig import PAYLOAD_BYTES, Rig, content, name

MakeRig = Callable[..., Rig]
SLOTS = 16
#: None, one byte, around a page, and all of the slot; the others by chance.
LENGTHS = [0, 1, 4095, 4096, 4097, PAYLOAD_BYTES]


def slot_bytes(rig: Rig, staging_slot: int) -> bytes:
    start = staging_slot * rig.pool.slot_bytes
    return bytes(rig.memory[start : start + rig.pool.slot_bytes])


@pytest.mark.parametrize("seed", range(3))
def test_operations_of_different_lengths_run_side_by_side(make_rig: MakeRig, seed: int) -> None:
    """They bring back what was written, and nothing behind it is touched."""
    dice = random.Random(seed)
    rig = make_rig(targets=2)
    lengths = LENGTHS + [dice.randrange(PAYLOAD_BYTES) for _ in range(SLOTS - len(LENGTHS))]
    dice.shuffle(lengths)
    writes = []
    for slot, length in enumerate(lengths):
        rig.fill(slot, name(slot))
        crc = crc32c(content(name(slot))[:length]) if dice.random() < 0.5 else None
        write = rig.write(slot, slot, name(slot), payload_bytes=length, payload_crc=crc)
        writes.append(write)
    assert [c.outcome for c in rig.run(*writes)] == [OK] * SLOTS
    order = dice.sample(range(SLOTS), SLOTS)
    reads = []
    for staging, slot in enumerate(order, SLOTS):
        rig.zero(staging)
        reads.append(rig.read(slot, staging, name(slot), payload_bytes=lengths[slot]))
    assert [c.outcome for c in rig.run(*reads)] == [OK] * SLOTS
    for staging, slot in enumerate(order, SLOTS):
        found = slot_bytes(rig, staging)
        end = HEADER_BYTES + lengths[slot]
        assert found[HEADER_BYTES:end] == content(name(slot))[: lengths[slot]]
        assert not any(found[slot_stride_bytes(lengths[slot]) :])


@pytest.mark.parametrize("asked", [PAYLOAD_BYTES - 1, 4096, 5001, 0])
def test_an_intact_slot_of_another_length_is_stale(make_rig: MakeRig, asked: int) -> None:
    rig = make_rig()
    rig.fill(0, name(1))
    assert rig.run(rig.write(5, 0, name(1), payload_bytes=5000))[0].outcome == OK
    assert rig.run(rig.read(5, 1, name(1), payload_bytes=asked))[0].outcome == STALE
    assert rig.run(rig.read(5, 1, name(1), payload_bytes=5000))[0].outcome == OK


def test_a_write_seals_the_same_bytes_with_and_without_a_crc(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.fill(0, name(1))
    rig.fill(1, name(1))
    crc = crc32c(content(name(1)))
    assert rig.run(rig.write(3, 0, name(1)))[0].outcome == OK
    assert rig.run(rig.write(3, 1, name(1), payload_crc=crc))[0].outcome == OK
    assert slot_bytes(rig, 0) == slot_bytes(rig, 1)


def test_a_crc_of_other_bytes_is_found_by_the_next_read(make_rig: MakeRig) -> None:
    """Bytes that change between the copy and the write are not signed: they never verify."""
    rig = make_rig()
    crc = crc32c(content(name(1)))
    rig.fill(0, name(2))
    assert rig.run(rig.write(3, 0, name(1), payload_crc=crc))[0].outcome == OK
    assert rig.run(rig.read(3, 1, name(1)))[0].outcome == CHECKSUM_MISMATCH
