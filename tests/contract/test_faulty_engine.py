# SPDX-License-Identifier: Apache-2.0
"""Each fault knob fires and has its documented effect."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.faults import KNOBS, FaultPlan, FaultyIoEngine

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, OK, ConfigError, io_error
from vllm_nvmeof_offload.io.base import Completion, ForeignSlab
from vllm_nvmeof_offload.units import slot_stride_bytes

from .rig import ENGINES, PAYLOAD_BYTES, WAIT_S, Rig, content, name
from .test_io_engine import copy_of, exchange, holds

EIO = io_error(errno.EIO)


@pytest.fixture(params=["faulty-threads", "faulty-uring"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = ENGINES[request.param](tmp_path)
    for number in range(4):
        rig.store(number, name(number))
    yield rig
    assert rig.engine.close(WAIT_S)
    rig.pool.close()


def plan_of(rig: Rig) -> FaultPlan:
    assert isinstance(rig.engine, FaultyIoEngine)
    return rig.engine.plan


def outcomes(rig: Rig, numbers: range) -> list[object]:
    return [c.outcome for c in rig.run(*(rig.read(n, 10 + n, name(n)) for n in numbers))]


def test_read_eio_strikes_as_often_as_its_knob_says(rig: Rig) -> None:
    plan_of(rig).set(read_eio=2)
    assert outcomes(rig, range(4)) == [EIO, EIO, OK, OK]
    assert plan_of(rig).fired == {"read_eio": 2}


@pytest.mark.parametrize(
    ("knob", "number"), [("write_eio", errno.EIO), ("enospc_writes", errno.ENOSPC)]
)
def test_failing_writes_write_nothing(rig: Rig, knob: str, number: int) -> None:
    plan_of(rig).set(**{knob: 1})
    rig.fill(0, name(0, 2))
    assert rig.run(rig.write(0, 0, name(0, 2))) == [Completion(rig.tokens, io_error(number))]
    assert plan_of(rig).fired == {knob: 1}
    assert outcomes(rig, range(1)) == [OK]


def test_a_probability_repeats_with_its_seed() -> None:
    def draw(seed: int) -> list[bool]:
        plan = FaultPlan({"read_eio": 0.5}, seed=seed)
        return [plan.strikes("read_eio") for _ in range(64)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert 10 < sum(draw(1)) < 54


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_delay_delays(rig: Rig, what: str) -> None:
    rig.fill(10, name(0, 2))
    plan_of(rig).set(**{f"{what}_delay_ms": 60})
    op = rig.read(0, 10, name(0)) if what == "read" else rig.write(0, 10, name(0, 2))
    start_s = time.monotonic()
    assert [c.outcome for c in rig.run(op)] == [OK]
    assert time.monotonic() - start_s >= 0.06
    assert plan_of(rig).fired == {f"{what}_delay_ms": 1}


def test_reads_share_a_link_of_so_many_bytes_per_second(rig: Rig) -> None:
    """However fast the machine is, none ends before the link has moved it; writes do not use it."""
    rig.fill(20, name(9))
    period_s = 0.05
    plan_of(rig).set(bytes_per_s=slot_stride_bytes(PAYLOAD_BYTES) / period_s)
    ops = [rig.read(number, 10 + number, name(number)) for number in range(4)]
    write = rig.write(9, 20, name(9))
    start_s = time.monotonic()
    rig.submit(*ops, write)
    ended: list[int] = []
    while len(ended) < 5:
        found = rig.wait(bool)
        assert {one.outcome for one in found} == {OK}
        ended += [one.token for one in found]
        reads = len(set(ended) - {write.token})
        assert time.monotonic() - start_s >= reads * period_s
    assert plan_of(rig).fired == {"bytes_per_s": 4}


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_hang_ends_when_its_knob_is_cleared(rig: Rig, what: str) -> None:
    """What is given up meanwhile then ends without having run."""
    rig.fill(10, name(0, 2))
    rig.fill(11, name(1, 2))
    plan_of(rig).set(**{f"hang_{what}s": True})
    make, generation = (rig.read, 1) if what == "read" else (rig.write, 2)
    wanted, given_up = make(0, 10, name(0, generation)), make(1, 11, name(1, generation))
    rig.submit(wanted, given_up)
    assert rig.engine.cancel([given_up.token]) == []
    assert rig.engine.poll() == []
    plan_of(rig).set(**{f"hang_{what}s": False})
    found = rig.wait(lambda completions: len(completions) == 2)
    assert {(c.token, c.outcome) for c in found} == {
        (wanted.token, OK),
        (given_up.token, CANCELLED),
    }
    assert plan_of(rig).fired == {f"hang_{what}s": 2}
    assert outcomes(rig, range(1, 2)) == [OK], "the slot has what it had"


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_hung_write_does_not_touch_the_files_that_replaced_its_target(
    rig: Rig, tmp_path: Path, what: str
) -> None:
    """The write was submitted to the old files: only those stay open for it."""
    rig.fill(10, name(9))
    plan_of(rig).set(**{f"hang_{what}s": True})
    op = rig.read(0, 11, name(0)) if what == "read" else rig.write(9, 10, name(9))
    rig.submit(op)
    new = copy_of(rig, 0, tmp_path / "new")
    close = exchange(rig, 0, new)
    plan_of(rig).set(**{f"hang_{what}s": False})
    assert [c.outcome for c in rig.wait(bool)] == [io_error(errno.ESTALE)]
    close()
    assert holds(rig.pool.directories[0], name(9)) == (False, False)
    assert holds(tmp_path / "new", name(9)) == (False, False)
    assert outcomes(rig, range(2)) == [OK, OK]


def test_a_flipped_byte_is_caught_by_the_engine(rig: Rig) -> None:
    plan_of(rig).set(flip_byte_on_read=1)  # strikes at submission, so the first one
    assert outcomes(rig, range(2)) == [CHECKSUM_MISMATCH, OK]
    assert plan_of(rig).fired == {"flip_byte_on_read": 1}


def test_no_byte_is_flipped_in_another_engines_region(rig: Rig, tmp_path: Path) -> None:
    theirs = ENGINES["threads-buffered"](tmp_path)
    theirs.store(0, name(1))
    slab, place = theirs.pool.directories[0] / "slab", theirs.pool.superblocks[0].place(0)
    before = slab.read_bytes()
    flags = os.O_RDWR | (os.O_DIRECT if rig.pool.direct else 0)  # so that a write would succeed
    fd = os.open(slab, flags)
    rig.engine.attach_region(1, 0, ForeignSlab(fd, place.region_uuid, place.rank))
    plan_of(rig).set(flip_byte_on_read=True)
    assert rig.run(rig.read(0, 10, name(1), owner=1))[0].outcome == OK
    assert slab.read_bytes() == before
    plan_of(rig).set(read_eio=1)
    assert rig.run(rig.read(0, 10, name(1), owner=1))[0].outcome == EIO, "other faults strike"
    assert theirs.engine.close(WAIT_S)
    theirs.pool.close()
    os.close(fd)


def test_negative_control_a_wrong_byte_passes_as_ok(rig: Rig) -> None:
    plan_of(rig).set(flip_with_valid_crc=1)
    for number in range(2):
        assert outcomes(rig, range(number, number + 1)) == [OK]
    wrong = sum(a != b for a, b in zip(rig.payload(10), content(name(0)), strict=True))
    assert wrong == 1
    assert rig.payload(11) == content(name(1))
    assert plan_of(rig).fired == {"flip_with_valid_crc": 1}


def test_a_byte_is_flipped_only_where_the_copy_checks(rig: Rig) -> None:
    plan_of(rig).set(flip_before_copy=True)
    assert outcomes(rig, range(1)) == [OK]
    assert rig.payload(10) == content(name(0))
    assert rig.run(rig.read(1, 11, name(1), header_only=True))[0].outcome == OK
    assert rig.payload(11) != content(name(1))
    assert plan_of(rig).fired == {"flip_before_copy": 1}


def test_negative_control_a_swapped_slot_passes_as_ok(rig: Rig) -> None:
    plan_of(rig).set(swap_slots=1)
    for number in range(3):
        assert outcomes(rig, range(number, number + 1)) == [OK]
    assert rig.payload(10) == content(name(0))
    assert rig.payload(11) == content(name(0))
    assert rig.payload(12) == content(name(2))
    assert plan_of(rig).fired == {"swap_slots": 1}


@pytest.mark.parametrize("knob", sorted(KNOBS))
def test_every_knob_fires_and_can_be_cleared(rig: Rig, knob: str) -> None:
    plan_of(rig).set(**{knob: 10**7 if knob == "bytes_per_s" else 5})
    rig.fill(10, name(2, 2))
    reads = [rig.read(0, 11, name(0)), rig.read(1, 12, name(1), header_only=True)]
    ops = [*reads, rig.write(2, 10, name(2, 2))]
    rig.submit(*ops)
    before = rig.engine.poll()
    if knob.startswith("hang_"):
        plan_of(rig).set(**{knob: 0})
    rig.wait(lambda found: len(before) + len(found) == len(ops))
    assert set(plan_of(rig).fired) == {knob}
    plan_of(rig).set(**{knob: 0})
    assert outcomes(rig, range(3, 4)) == [OK]


def test_a_control_file_changes_faults_while_running(tmp_path: Path) -> None:
    rig = ENGINES["faulty-threads"](tmp_path)
    control = tmp_path / "faults.json"
    engine = FaultyIoEngine(
        rig.engine,
        FaultPlan(control_path=control),
        rig.pool,
        memoryview(rig.memory),
        rig.base_address,
    )
    rig.engine = engine
    rig.store(0, name(0))
    control.write_text(json.dumps({"seed": 3, "read_eio": True}))
    read_until(rig, EIO)
    fired = json.loads((tmp_path / "faults.json.fired").read_text())
    assert fired["read_eio"] >= 1
    control.write_text("{half")  # as a reader sees a file that is being written
    assert outcomes(rig, range(1)) == [EIO]
    control.unlink()
    read_until(rig, OK)
    assert engine.close(WAIT_S)
    rig.pool.close()


def read_until(rig: Rig, wanted: object) -> None:
    end_s = time.monotonic() + WAIT_S
    while outcomes(rig, range(1)) != [wanted]:
        assert time.monotonic() < end_s


@pytest.mark.parametrize("knobs", [{"read_eoi": 1}, {"read_eio": "often"}, {"read_eio": -1}])
def test_a_bad_knob_is_refused_by_name(knobs: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(knobs))):
        FaultPlan(knobs)
