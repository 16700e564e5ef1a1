# SPDX-License-Identifier: Apache-2.0
"""The store under damage, from a printed seed: every load gives the right bytes or a miss.

A model remembers the only right payload of every identity. Between rounds the files are
changed as crashes and bad media change them: torn, lost, misdirected and flipped writes, in
slabs and tables. Adoption and loads must never give anything else than the model's bytes, and
what was not touched must still be there.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_nvmeof_offload.io.transfer import read_slot, write_slot
from vllm_nvmeof_offload.pool.keyspace import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES

SEED = int(os.environ.get("VLLM_NVMEOF_SEED", "0")) or random.SystemRandom().getrandbits(32)
ROUNDS = int(os.environ.get("VLLM_NVMEOF_FAULT_ROUNDS", "30"))
PAYLOAD_BYTES = 9000
SLOTS = 24
KEYS = 40


class Store:
    """A pool on two targets and the model of what it must hold."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        self.dice = dice
        self.spec = PoolSpec(
            targets=(path / "a", path / "b"),
            pool_bytes=SLOTS * (5 * 4096 + 64),
            payload_bytes=PAYLOAD_BYTES,
            keyspace=Keyspace.of({"m": 1}),
            o_direct="off",
        )
        self.pool = Pool.open(self.spec)
        self.generation = 0
        #: pool slot → what a load must find there, while nothing has damaged it.
        self.whole: dict[int, SlotIdentity] = {}
        self.misses = 0
        self.loads = 0

    def payload(self, identity: SlotIdentity) -> bytes:
        return random.Random(repr((identity.key, identity.generation))).randbytes(PAYLOAD_BYTES)

    def new_identity(self) -> SlotIdentity:
        self.generation += 1
        return SlotIdentity(f"key {self.dice.randrange(KEYS)}".encode(), self.generation)

    def write(self, slot: int) -> None:
        identity = self.new_identity()
        memory = bytearray(self.pool.slot_bytes)
        memory[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = self.payload(identity)
        view = memoryview(memory)
        assert write_slot(self.pool, view, slot, identity, self.pool.stamp, lambda: True).ok
        self.whole[slot] = identity

    def load(self, slot: int, identity: SlotIdentity) -> bool:
        """Load; True if it was served, and then it was right."""
        memory = bytearray(self.pool.slot_bytes)
        self.loads += 1
        if not read_slot(self.pool, memoryview(memory), slot, identity).ok:
            self.misses += 1
            return False
        assert memory[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] == self.payload(identity)
        return True

    def restart_and_check(self) -> None:
        self.pool.close()
        self.pool = Pool.open(self.spec)
        adopted = self.pool.adopt()
        assert len(set(adopted.keys)) == len(adopted)
        for slot, generation, key in zip(
            adopted.pool_slots.tolist(), adopted.generations.tolist(), adopted.keys, strict=True
        ):
            identity = SlotIdentity(key, generation)
            self.load(slot, identity)
        # What nothing has touched is adopted, at its slot or as a twin at a lower one.
        for slot, identity in self.whole.items():
            assert self.load(slot, identity)
            assert identity.key in adopted.keys
            where = int(adopted.pool_slots[adopted.keys.index(identity.key)])
            assert where <= slot

    def edit(self, descriptor: tuple[int, int], at: int, data: bytes) -> None:
        assert os.pwrite(descriptor[0], data, descriptor[1] + at) == len(data)

    def bytes_of(self, slot: int) -> bytes:
        fd, offset = self.pool.slab_fd(slot)
        return os.pread(fd, self.pool.slot_bytes, offset)


def torn_write(store: Store, slot: int) -> None:
    """A write that stopped at a 512-byte or 4-KiB boundary; its entry may be there or not."""
    before, entry = store.bytes_of(slot), os.pread(*_entry(store, slot))
    store.write(slot)
    after = store.bytes_of(slot)
    unit = store.dice.choice([512, 4096])
    sectors = range(0, len(after), unit)
    kept = set(store.dice.sample(sectors, store.dice.randrange(len(sectors))))
    torn = b"".join((after if at in kept else before)[at : at + unit] for at in sectors)
    store.edit(store.pool.slab_fd(slot), 0, torn)
    if store.dice.random() < 0.5:
        store.edit(store.pool.table_fd(slot), 0, entry)
    store.whole.pop(slot)


def lost_write(store: Store, slot: int) -> None:
    """The disk said yes and kept the old bytes; the table has the new entry."""
    before = store.bytes_of(slot)
    store.write(slot)
    store.edit(store.pool.slab_fd(slot), 0, before)
    store.whole.pop(slot)


def misdirected_write(store: Store, slot: int) -> None:
    """A slot's bytes landed in another slot; both are affected."""
    other = store.dice.choice([s for s in range(store.pool.slots) if s != slot])
    before = store.bytes_of(slot)
    store.write(slot)
    store.edit(store.pool.slab_fd(other), 0, store.bytes_of(slot))
    store.edit(store.pool.slab_fd(slot), 0, before)
    store.whole.pop(slot)
    store.whole.pop(other, None)


def flipped_bit(store: Store, slot: int) -> None:
    """One bit of header or payload; not in the padding, which carries nothing."""
    at = store.dice.randrange(HEADER_BYTES + PAYLOAD_BYTES)
    byte = store.bytes_of(slot)[at] ^ 1 << store.dice.randrange(8)
    store.edit(store.pool.slab_fd(slot), at, bytes([byte]))
    store.whole.pop(slot, None)


def flipped_entry(store: Store, slot: int) -> None:
    """Damage in the table alone loses nothing, unless the entry now looks never written."""
    at = store.dice.randrange(64)
    byte = os.pread(*_entry(store, slot))[at] ^ 1 << store.dice.randrange(8)
    store.edit(store.pool.table_fd(slot), at, bytes([byte]))


def swapped_entries(store: Store, slot: int) -> None:
    """Two table entries in each other's place: both are recovered from their headers."""
    other = store.dice.randrange(store.pool.slots)
    one, two = os.pread(*_entry(store, slot)), os.pread(*_entry(store, other))
    if any(one) and any(two):
        store.edit(store.pool.table_fd(slot), 0, two)
        store.edit(store.pool.table_fd(other), 0, one)


def lost_table(store: Store, slot: int) -> None:
    """One target's table is gone, or cut short."""
    table = store.pool.directories[slot % 2] / "table"
    os.truncate(table, min(table.stat().st_size, store.dice.choice([0, 64, 200])))


def _entry(store: Store, slot: int) -> tuple[int, int, int]:
    fd, offset = store.pool.table_fd(slot)
    return fd, 64, offset


FAULTS: dict[str, Callable[[Store, int], None]] = {
    fault.__name__: fault
    for fault in (
        torn_write,
        lost_write,
        misdirected_write,
        flipped_bit,
        flipped_entry,
        swapped_entries,
        lost_table,
    )
}


@pytest.mark.parametrize("only", [*FAULTS, "all"])
def test_a_load_gives_the_right_bytes_or_a_miss(tmp_path: Path, only: str) -> None:
    print(f"VLLM_NVMEOF_SEED={SEED}")
    dice = random.Random(f"{SEED} {only}")
    store = Store(tmp_path, dice)
    faults = list(FAULTS.values()) if only == "all" else [FAULTS[only]]
    for slot in range(store.pool.slots):
        store.write(slot)
    for _ in range(ROUNDS // (1 if only == "all" else 3)):
        for slot in dice.sample(range(store.pool.slots), 4):
            store.write(slot)
        chosen = dice.choices(faults, k=dice.randrange(1, 5))
        # A table is lost at the end of a round: a write after it would leave a hole of zeros
        # before its entry, which looks like slots that were never written (a miss, no more).
        chosen.sort(key=lambda fault: fault is lost_table)
        for fault, slot in zip(chosen, dice.sample(range(store.pool.slots), 4), strict=False):
            fault(store, slot)
        store.restart_and_check()
    harmless = only in ("flipped_entry", "swapped_entries", "lost_table")
    assert (store.misses == 0) is harmless
    assert store.loads - store.misses > 50
    store.pool.close()


def test_the_simulation_sees_an_unchecked_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own control: without the check of the payload the same run must fail."""
    import vllm_nvmeof_offload.io.transfer as transfer
    from vllm_nvmeof_offload.errors import OK

    monkeypatch.setattr(transfer, "verify", lambda slot, identity, payload_bytes: OK)
    with pytest.raises(AssertionError):
        test_a_load_gives_the_right_bytes_or_a_miss(tmp_path, "flipped_bit")
