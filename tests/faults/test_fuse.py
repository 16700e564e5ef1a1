# SPDX-License-Identifier: Apache-2.0
"""Each engine over a real file system with real faults: `fuse_server`.

Pool slots with even numbers are on the faulty target, the others on a second, healthy target.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slots import read_slot
from vllm_nvmeof_offload.errors import (
    CHECKSUM_MISMATCH,
    OK,
    STALE,
    OutcomeKind,
    io_error,
)
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.units import HEADER_BYTES

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
