# SPDX-License-Identifier: Apache-2.0
"""A pool on a failing file system is refused with the cause, and no chunk is lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.slots import write_slot
from tests.unit.pool.kit import SLOT_BYTES
from vllm_nvmeof_offload.errors import OK, PoolError
from vllm_nvmeof_offload.io.base import HintRecord
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import EVERY_MEMBER
from vllm_nvmeof_offload.units import PAGE_BYTES

from .fuse_mount import FaultyMount
from .kit import Bench, adopted, make_spec, name

SLOTS = 6
STORED = {slot: name(slot) for slot in range(SLOTS)}


@pytest.fixture
def spec(faulty_mount: FaultyMount) -> PoolSpec:
    """A pool on the faulty target, filled."""
    spec = make_spec(faulty_mount.place / "t", slots=SLOTS, o_direct="off")
    pool = Pool.open(spec)
    for slot, identity in STORED.items():
        memory = memoryview(bytearray(pool.slot_bytes))
        assert write_slot(pool, memory, slot, identity).ok
    pool.close()
    return spec


def found(spec: PoolSpec) -> object:
    pool = Pool.open(spec)
    try:
        return adopted(pool)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("open", "slab"),
        ("open", "table"),
        ("fallocate", "slab"),
        ("fallocate", "table"),
        ("fsync", "slab"),
        ("fsync", "table"),
        ("write", "lease"),
        ("fsync", "lease"),
        ("read", "lease"),
        ("read", "superblock"),
    ],
)
def test_a_start_that_fails_names_the_cause_and_loses_nothing(
    spec: PoolSpec, faulty_mount: FaultyMount, op: str, path: str
) -> None:
    faulty_mount.rules({"op": op, "path": path, "do": "errno", "value": errno.EIO, "count": 1})
    with pytest.raises(PoolError, match=str(faulty_mount.place)):
        Pool.open(spec)
    assert faulty_mount.fired() == 1
    assert found(spec) == STORED


@pytest.mark.parametrize("op", ["create", "write", "fsync"])
def test_a_superblock_that_cannot_be_replaced_leaves_the_old_one(
    spec: PoolSpec, faulty_mount: FaultyMount, op: str
) -> None:
    rule = {"op": op, "path": "superblock.new", "do": "errno", "value": errno.EIO, "count": 1}
    faulty_mount.rules(rule)
    with pytest.raises(PoolError, match=str(faulty_mount.place)):
        Pool.open(make_spec(*spec.targets, slots=SLOTS, o_direct="off", adopt=False))
    assert faulty_mount.fired() == 1
    assert found(spec) == STORED


def test_a_table_that_cannot_be_read_is_rebuilt_from_headers(
    spec: PoolSpec, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules(
        {"op": "read", "path": "table", "do": "errno", "value": errno.EIO, "count": 1}
    )
    assert found(spec) == STORED
    assert faulty_mount.fired() == 1


def test_a_table_that_is_read_in_pieces_is_read_whole(
    spec: PoolSpec, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules({"op": "read", "path": "table", "do": "short", "value": 100})
    assert found(spec) == STORED
    assert faulty_mount.fired() > 1


def test_headers_that_cannot_be_read_lose_only_their_slots(
    spec: PoolSpec, faulty_mount: FaultyMount
) -> None:
    (table,) = faulty_mount.backing.glob("t/*/engine-0/rank-0/table")
    table.write_bytes(b"")
    faulty_mount.rules({"op": "read", "do": "errno", "value": errno.EIO, "count": 2})
    kept = found(spec)
    assert isinstance(kept, dict)
    assert faulty_mount.fired() == 2
    assert len(kept) == SLOTS - 2
    assert kept.items() <= STORED.items()


def test_without_fallocate_the_slab_is_sparse(tmp_path: Path, faulty_mount: FaultyMount) -> None:
    faulty_mount.rules(
        {"name": "slab", "op": "fallocate", "do": "errno", "value": errno.EOPNOTSUPP},
        {
            "name": "table",
            "op": "fallocate",
            "path": "table",
            "do": "errno",
            "value": errno.EOPNOTSUPP,
        },
    )
    pool = Pool.open(make_spec(faulty_mount.place / "t", slots=SLOTS, o_direct="off"))
    assert faulty_mount.fired("slab") + faulty_mount.fired("table") >= 1
    assert pool.slots == SLOTS
    assert (pool.directories[0] / "slab").stat().st_blocks == 0
    pool.close()


def test_a_log_that_hangs_holds_up_nothing_else(faulty_mount: FaultyMount, tmp_path: Path) -> None:
    """Hints and the exchange of a target come from the pipeline's thread. Table and log of a target
    have one thread, so its writes end late."""
    targets = faulty_mount.place / "t", tmp_path / "healthy"
    pages = 16
    pool_bytes = 2 * (SLOTS * (SLOT_BYTES + ENTRY_BYTES) + pages * PAGE_BYTES)
    shape = {"o_direct": "off", "log_pages": pages, "pool_bytes": pool_bytes}
    pool = Pool.open(make_spec(*targets, **shape))
    bench = Bench("threads", pool)
    faulty_mount.rules({"op": "write", "path": "log", "do": "hang"})
    record = HintRecord(bytes(16), 1, EVERY_MEMBER, 1, 1)
    bench.engine.hint(0, record)
    faulty_mount.wait_hanging(1)
    for _ in range(100):
        bench.engine.hint(0, record)
    bench.engine.replace_target(0)
    bench.store((slot, name(slot)) for slot in range(1, SLOTS, 2))  # on the other target
    late = bench.write(0, 1, name(0))
    bench.submit(late)
    faulty_mount.rules()
    assert [one.outcome for one in bench.wait(bool)] == [OK]
    assert bench.engine.close(60.0)
    pool.close()
