# SPDX-License-Identifier: Apache-2.0
"""Each engine over a real file system with real faults: `fuse_server`.

Pool slots with even numbers are on the faulty target, the others on a second, healthy target.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slots import read_slot, write_slot
from tests.unit.pool.kit import SLOT_BYTES
from vllm_nvmeof_offload.errors import (
    CHECKSUM_MISMATCH,
    ERRORS,
    OK,
    STALE,
    OutcomeKind,
    PoolError,
    Scope,
    io_error,
)
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES

from .fuse_mount import FaultyMount
from .kit import PAYLOAD_BYTES, WAIT_S, Bench, adopted, make_spec, name

EIO = io_error(errno.EIO)
FAULTY, HEALTHY = range(0, 16, 2), range(1, 16, 2)


@pytest.fixture(params=["direct", "buffered"])
def bench(
    request: pytest.FixtureRequest, engine_name: str, faulty_mount: FaultyMount, tmp_path: Path
) -> Iterator[Bench]:
    """A pool over both targets; slots 0 to 7 hold `name(slot)`."""
    o_direct = "on" if request.param == "direct" else "off"
    spec = make_spec(faulty_mount.place / "t", tmp_path / "healthy", slots=8, o_direct=o_direct)
    bench = Bench(engine_name, Pool.open(spec))
    bench.store((slot, name(slot)) for slot in range(8))
    yield bench
    faulty_mount.rules()
    assert bench.close()


def reopened(bench: Bench) -> Pool:
    """Open the pool as the next process would."""
    assert bench.close()
    spec = make_spec(
        *(directory.parents[2] for directory in bench.pool.directories), slots=8, o_direct="off"
    )
    bench.pool = Pool.open(spec)
    return bench.pool


def test_every_operation_succeeds_without_faults(bench: Bench, faulty_mount: FaultyMount) -> None:
    faulty_mount.rules(
        {"op": "read", "do": "delay", "value": 0.0}, {"op": "write", "do": "delay", "value": 0.0}
    )
    for slot in FAULTY[:4]:
        assert bench.run(bench.read(slot, 1, name(slot)))[0].outcome == OK
        assert bench.right(1, name(slot))
    bench.store([(8, name(8))])
    lengths = faulty_mount.lengths()
    assert sum(lengths) == 5 * bench.pool.slot_bytes
    assert (max(lengths) < bench.pool.slot_bytes) is bench.in_pieces
    assert adopted(reopened(bench)) == {slot: name(slot) for slot in range(9)}


def test_a_read_that_fails_is_an_io_error(bench: Bench, faulty_mount: FaultyMount) -> None:
    for number, slot in enumerate((0, 2)):
        faulty_mount.rules({"op": "read", "do": "errno", "value": errno.EIO, "count": 1})
        ops = [bench.read(slot, 0, name(slot)), bench.read(slot + 1, 1, name(slot + 1))]
        assert [completion.outcome for completion in bench.run(*ops)] == [EIO, OK]
        assert bench.right(1, name(slot + 1))
        assert faulty_mount.fired() == number + 1
    # The device failed, not the bytes: the same slots serve again.
    for slot in (0, 2):
        assert bench.run(bench.read(slot, 1, name(slot)))[0].outcome == OK
        assert bench.right(1, name(slot))


def test_a_write_that_fails_is_not_adopted(bench: Bench, faulty_mount: FaultyMount) -> None:
    for path in ("slab", "table"):
        for number in (errno.EIO, errno.ENOSPC, errno.EROFS):
            fault = {"op": "write", "path": path, "do": "errno", "value": number, "count": 1}
            faulty_mount.rules({"name": f"{path} {number}", **fault})
            ops = [bench.write(8, 1, name(8)), bench.write(9, 2, name(9))]
            assert [c.outcome for c in bench.run(*ops)] == [io_error(number), OK]
            assert faulty_mount.fired(f"{path} {number}") == 1
    kept = {slot: name(slot) for slot in (*range(8), 9)}
    assert adopted(reopened(bench)) == kept


def test_a_hang_that_is_given_up_gives_the_buffer_later(
    bench: Bench, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules(
        {"name": "reads", "op": "read", "do": "hang"},
        {"name": "writes", "op": "write", "do": "hang"},
    )
    late = [bench.read(0, 0, name(0))]
    late.append(bench.write(8, 1, name(8)))
    late.append(bench.write(6, 4, name(6, 2)))  # overwrites another chunk
    bench.submit(*late)
    faulty_mount.wait_fired("reads", "writes")
    assert bench.engine.poll() == []
    # Some may not have started: threads, and a ring that seals one write after the other.
    held = {op.token for op in late} - set(bench.engine.cancel([op.token for op in late]))
    assert held
    # The other target continues, in both directions, and more than once.
    for slot in HEALTHY[:4]:
        ops = [bench.read(slot, 2, name(slot)), bench.write(slot + 8, 3, name(slot + 8))]
        assert [c.outcome for c in bench.run(*ops)] == [OK, OK]
        assert bench.right(2, name(slot))
    faulty_mount.rules()
    found = bench.wait(lambda completions: len(completions) == len(held))
    assert {c.token for c in found} == held
    assert bench.run(bench.read(2, 0, name(2)))[0].outcome == OK
    (completion,) = bench.run(bench.read(6, 5, name(6)))
    assert completion.outcome in (OK, STALE, CHECKSUM_MISMATCH)
    assert completion.outcome != OK or bench.right(5, name(6))
    # The late writes had missed their deadlines: they must not be adopted as entries.
    kept = {slot: name(slot) for slot in (*range(8), *(slot + 8 for slot in HEALTHY[:4]))}
    assert adopted(reopened(bench)) == kept


def test_many_hanging_operations_do_not_stop_the_other_target(
    bench: Bench, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules({"op": "read", "do": "hang"})
    late = [
        bench.read(slot, place, name(slot)) for place, slot in enumerate([0, 2, 4, 6, 0, 2, 4, 6])
    ]
    bench.submit(*late)
    faulty_mount.wait_hanging(1)
    held = 8
    for _ in range(3):  # a thread that takes the place of a lost one may begin the next
        held -= len(bench.engine.cancel([op.token for op in late]))
    for slot in HEALTHY[:4]:
        assert bench.run(bench.read(slot, 9, name(slot)))[0].outcome == OK
        assert bench.right(9, name(slot))
    assert held >= 1
    assert faulty_mount.fired() >= 1
    faulty_mount.rules()
    found = bench.wait(lambda completions: len(completions) == held)
    assert {c.token for c in found} <= {op.token for op in late}
    for slot in (0, 2, 4, 6):  # enough threads are left there
        assert bench.run(bench.read(slot, 9, name(slot)))[0].outcome == OK


def test_close_does_not_wait_for_a_hang(bench: Bench, faulty_mount: FaultyMount) -> None:
    faulty_mount.rules({"op": "read", "do": "hang"})
    op = bench.read(0, 0, name(0))
    bench.submit(op)
    faulty_mount.wait_hanging(1)
    start_s = time.monotonic()
    assert not bench.engine.close(timeout_s=0.1)
    assert time.monotonic() - start_s < 5
    faulty_mount.rules()
    assert bench.engine.close(timeout_s=WAIT_S)
    tokens = [c.token for c in bench.engine.poll()]
    assert tokens.count(op.token) <= 1


def test_a_delay_is_not_a_fault(bench: Bench, faulty_mount: FaultyMount) -> None:
    faulty_mount.rules(
        {"name": "reads", "op": "read", "do": "delay", "value": 0.08},
        {"name": "writes", "op": "write", "do": "delay", "value": 0.08},
    )
    ops = [bench.read(slot, slot, name(slot)) for slot in (0, 2, 1)]
    ops.append(bench.write(8, 8, name(8)))
    start_s = time.monotonic()
    assert {c.outcome for c in bench.run(*ops)} == {OK}
    assert time.monotonic() - start_s >= 0.08
    assert faulty_mount.fired("reads") >= 2
    assert faulty_mount.fired("writes") >= 1
    assert all(bench.right(slot, name(slot)) for slot in (0, 1, 2))


SHORT = [HEADER_BYTES, 8192, 20_000, PAYLOAD_BYTES + HEADER_BYTES]


def test_a_short_read_is_completed(bench: Bench, faulty_mount: FaultyMount) -> None:
    for number, value in enumerate(SHORT):
        slot = FAULTY[number]
        faulty_mount.rules({"op": "read", "do": "short", "value": value, "count": 1})
        assert bench.run(bench.read(slot, 1, name(slot)))[0].outcome == OK
        assert bench.right(1, name(slot))
        assert faulty_mount.fired() == number + 1


def test_a_short_write_is_completed_or_fails(bench: Bench, faulty_mount: FaultyMount) -> None:
    """FUSE turns a short asynchronous write into EIO before io_uring sees it."""
    kept = {slot: name(slot) for slot in range(8)}
    for number, value in enumerate(SHORT):
        slot = 8 + FAULTY[number]
        faulty_mount.rules({"op": "write", "do": "short", "value": value, "count": 1})
        (completion,) = bench.run(bench.write(slot, 1, name(slot)))
        assert completion.outcome == OK or (completion.outcome == EIO and bench.is_uring)
        if completion.outcome == OK:
            kept[slot] = name(slot)
        assert faulty_mount.fired() == number + 1
    pool = reopened(bench)
    assert adopted(pool) == kept
    for slot, identity in kept.items():
        memory = memoryview(bytearray(pool.slot_bytes))
        assert read_slot(pool, memory, slot, identity, pool.stamp.tag) == OK


def test_a_short_write_that_the_kernel_reports_is_completed(
    engine_name: str, tmp_path: Path
) -> None:
    faulty_mount = FaultyMount(tmp_path, "sync")
    try:
        bench = Bench(engine_name, Pool.open(make_spec(faulty_mount.place / "t", o_direct="off")))
        faulty_mount.rules({"op": "write", "do": "short", "value": 20_000, "count": 3})
        bench.store((slot, name(slot)) for slot in range(4))
        assert faulty_mount.fired() == 3
        for slot in range(4):
            assert bench.run(bench.read(slot, 1, name(slot)))[0].outcome == OK
            assert bench.right(1, name(slot))
        assert bench.close()
    finally:
        faulty_mount.close()


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_transfer_without_progress_is_an_error_not_an_endless_loop(
    bench: Bench, faulty_mount: FaultyMount, what: str
) -> None:
    faulty_mount.rules({"op": what, "do": "short", "value": 0})
    op = bench.read(0, 1, name(0)) if what == "read" else bench.write(8, 1, name(8))
    (completion,) = bench.run(op)
    assert completion.outcome in (EIO, io_error(0), io_error(errno.EAGAIN))
    assert 1 <= faulty_mount.fired() <= 100
    faulty_mount.rules()
    assert adopted(reopened(bench)) == {slot: name(slot) for slot in range(8)}


def test_a_target_that_goes_away_is_an_error_at_once(
    bench: Bench, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules({"op": "read", "do": "hang"})
    bench.submit(bench.read(0, 0, name(0)))
    faulty_mount.wait_hanging(1)
    faulty_mount.kill()
    (completion,) = bench.wait(bool)
    assert completion.outcome.kind is OutcomeKind.IO_ERROR
    for op in (bench.read(2, 0, name(2)), bench.write(8, 1, name(8))):
        (completion,) = bench.run(op)
        assert completion.outcome.kind is OutcomeKind.IO_ERROR
    assert bench.run(bench.read(1, 0, name(1)))[0].outcome == OK


def test_a_reset_that_cannot_be_written_is_an_io_error(
    bench: Bench, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules(
        {"op": "write", "path": "superblock.new", "do": "errno", "value": errno.EIO, "count": 1}
    )
    assert bench.reset() == [EIO, OK]
    assert faulty_mount.fired() == 1
    assert bench.reset() == [OK, OK]
    bench.store([(3, name(3, 2))])
    assert adopted(reopened(bench)) == {3: name(3, 2)}


# -- each row of `errors.ERRORS` that storage can return ------------------------------

#: errno → retryable, scope. As in the kernel (`blk_path_error`), an operation that the device
#: itself refused is not retried.
ROWS = {
    errno.EIO: (True, Scope.SLOT),
    errno.ENODATA: (False, Scope.SLOT),
    errno.EREMOTEIO: (False, Scope.TARGET),
    errno.EILSEQ: (False, Scope.SLOT),
    errno.EBADE: (False, Scope.TARGET),
    errno.ENOSPC: (False, Scope.SLOT),
    errno.EOPNOTSUPP: (False, Scope.TARGET),
    errno.ENOLINK: (True, Scope.TARGET),
    errno.ENODEV: (False, Scope.TARGET),
    errno.ENXIO: (False, Scope.TARGET),
    errno.ESHUTDOWN: (False, Scope.TARGET),
    errno.EROFS: (False, Scope.TARGET),
    errno.ETIMEDOUT: (True, Scope.TARGET),
}


@pytest.fixture
def two_chunks(engine_name: str, faulty_mount: FaultyMount) -> Iterator[Bench]:
    bench = Bench(engine_name, Pool.open(make_spec(faulty_mount.place / "t", slots=4)))
    bench.store((slot, name(slot)) for slot in range(2))
    yield bench
    faulty_mount.rules()
    assert bench.close()


def test_errnos_are_reported_with_their_meaning(
    two_chunks: Bench, faulty_mount: FaultyMount
) -> None:
    bench, rows = two_chunks, dict(ROWS)
    if bench.is_uring:
        # Linux 6.18 retries such an operation forever on a file that can be polled. FUSE's files
        # can be polled; those of block devices and disk file systems cannot (io_read,
        # io_wq_submit_work).
        del rows[errno.EOPNOTSUPP]
    for number, row in rows.items():
        for what in ("read", "write"):
            faulty_mount.rules({"op": what, "do": "errno", "value": number})
            op = bench.read(0, 0, name(0)) if what == "read" else bench.write(3, 1, name(3))
            (completion,) = bench.run(op)
            assert completion.outcome == io_error(number), (what, os.strerror(number))
            assert (completion.outcome.retryable, completion.outcome.scope) == row
            assert errno.errorcode[number] in str(completion.outcome)
            assert number in ERRORS


def test_a_read_of_no_bytes_has_no_errno_and_the_targets_scope(
    engine_name: str, tmp_path: Path
) -> None:
    """As on a namespace that is disabled under an open file: `pread` returns 0 forever."""
    two_chunks = Bench(engine_name, Pool.open(make_spec(tmp_path, slots=2)))
    two_chunks.store([(1, name(1))])
    os.truncate(two_chunks.pool.directories[0] / "slab", 0)
    (completion,) = two_chunks.run(two_chunks.read(1, 0, name(1)))
    assert completion.outcome == io_error(0)
    assert completion.outcome.kind is OutcomeKind.IO_ERROR
    assert (completion.outcome.retryable, completion.outcome.scope) == (False, Scope.TARGET)
    assert "no bytes" in str(completion.outcome)
    assert 0 in ERRORS
    assert two_chunks.close()


def test_an_errno_outside_the_table_has_the_slots_scope_and_is_final() -> None:
    outcome = io_error(errno.ELOOP)
    assert (outcome.retryable, outcome.scope) == (False, Scope.SLOT)


# -- a pool on a failing file system --------------------------------------------------

SIX_SLOTS = 6
SIX = {slot: name(slot) for slot in range(SIX_SLOTS)}


@pytest.fixture
def spec(faulty_mount: FaultyMount) -> PoolSpec:
    """A pool on the faulty target, filled."""
    spec = make_spec(faulty_mount.place / "t", slots=SIX_SLOTS, o_direct="off")
    pool = Pool.open(spec)
    for slot, identity in SIX.items():
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
    assert found(spec) == SIX


@pytest.mark.parametrize("op", ["create", "write", "fsync"])
def test_a_superblock_that_cannot_be_replaced_leaves_the_old_one(
    spec: PoolSpec, faulty_mount: FaultyMount, op: str
) -> None:
    rule = {"op": op, "path": "superblock.new", "do": "errno", "value": errno.EIO, "count": 1}
    faulty_mount.rules(rule)
    with pytest.raises(PoolError, match=str(faulty_mount.place)):
        Pool.open(make_spec(*spec.targets, slots=SIX_SLOTS, o_direct="off", adopt=False))
    assert faulty_mount.fired() == 1
    assert found(spec) == SIX


def test_a_table_that_cannot_be_read_is_rebuilt_from_headers(
    spec: PoolSpec, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules(
        {"op": "read", "path": "table", "do": "errno", "value": errno.EIO, "count": 1}
    )
    assert found(spec) == SIX
    assert faulty_mount.fired() == 1


def test_a_table_that_is_read_in_pieces_is_read_whole(
    spec: PoolSpec, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules({"op": "read", "path": "table", "do": "short", "value": 100})
    assert found(spec) == SIX
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
    assert len(kept) == SIX_SLOTS - 2
    assert kept.items() <= SIX.items()


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
    pool = Pool.open(make_spec(faulty_mount.place / "t", slots=SIX_SLOTS, o_direct="off"))
    assert faulty_mount.fired("slab") + faulty_mount.fired("table") >= 1
    assert pool.slots == SIX_SLOTS
    assert (pool.directories[0] / "slab").stat().st_blocks == 0
    pool.close()


def test_a_log_that_hangs_holds_up_nothing_else(faulty_mount: FaultyMount, tmp_path: Path) -> None:
    """The records of resets and the exchange of a target come from the pipeline's thread. Table and
    log of a target have one thread, so its writes end late."""
    targets = faulty_mount.place / "t", tmp_path / "healthy"
    pages = 16
    pool_bytes = 2 * (SIX_SLOTS * (SLOT_BYTES + ENTRY_BYTES) + pages * PAGE_BYTES)
    shape = {"o_direct": "off", "log_pages": pages, "pool_bytes": pool_bytes}
    pool = Pool.open(make_spec(*targets, **shape))
    bench = Bench("threads", pool)
    faulty_mount.rules({"op": "write", "path": "log", "do": "hang"})
    log_reset = bench.engine._core.log_reset
    log_reset(0, 1)
    faulty_mount.wait_hanging(1)
    for _ in range(100):
        log_reset(0, 1)
    bench.engine.replace_target(0)
    bench.store((slot, name(slot)) for slot in range(1, SIX_SLOTS, 2))  # on the other target
    late = bench.write(0, 1, name(0))
    bench.submit(late)
    faulty_mount.rules()
    assert [one.outcome for one in bench.wait(bool)] == [OK]
    assert bench.engine.close(60.0)
    pool.close()
