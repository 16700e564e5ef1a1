# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks, end to end: hits, faults on one rank, tenants, and a restart after
one rank has lost its table and headers, and the other the end of its slab.

The tests run in this order, on one server and then on its successor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import FAILED, HITS, LOADED
from vllm_nvmeof_offload.pool.format import decode_table, read_superblock
from vllm_nvmeof_offload.pool.recovery import read_table
from vllm_nvmeof_offload.units import HEADER_BYTES

#: Shares of the slots in use: how much is cut off the end of rank 0's slab, and where the loss of
#: every LOST_EACH-th header of rank 1 begins. The tenants' chunks come before that.
CUT_SHARE, LOST_FROM_SHARE, LOST_EACH = 0.15, 0.6, 4


@dataclass(frozen=True)
class Place:
    """The directory of the servers' pool, and the options of the servers."""

    directory: Path
    faults: rig.Faults
    spec: ServerSpec

    def rank(self, rank: int) -> Path:
        (found,) = self.directory.glob(f"pool/*/engine-0/rank-{rank}")
        return found


@dataclass(frozen=True)
class Damage:
    """used: slots that both ranks could adopt. lost: those of them that rank 1 has lost."""

    used: int
    cut: int
    lost: int


def damage(place: Place) -> Damage:
    """Cut rank 0's slab; delete rank 1's table and some of its headers."""
    used = _used(place.rank(0))
    assert used == _used(place.rank(1))
    first_cut = int(len(used) * (1 - CUT_SHARE))
    with (place.rank(0) / "slab").open("r+b") as slab:
        slab.truncate(used[first_cut] * rig.SLOT_BYTES)
    (place.rank(1) / "table").unlink()
    lost = used[int(len(used) * LOST_FROM_SHARE) : first_cut : LOST_EACH]
    with (place.rank(1) / "slab").open("r+b") as slab:
        for slot in lost:
            slab.seek(slot * rig.SLOT_BYTES)
            slab.write(bytes(HEADER_BYTES))
    return Damage(len(used), len(used) - first_cut, len(lost))


def _used(directory: Path) -> list[int]:
    """The pool slots that a start adopts, by this rank's table, ascending."""
    superblock = read_superblock(directory)
    assert superblock is not None
    with (directory / "table").open("rb") as file:
        raw = read_table(file.fileno(), superblock.slots)
    table = decode_table(raw, np.arange(superblock.slots, dtype=np.int64))
    usable = table.valid & (table.epochs == superblock.epoch)
    return [int(slot) for slot in np.flatnonzero(usable)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    directory = tmp_path_factory.mktemp("parallel")
    faults = rig.Faults(directory / "faults.json")
    option = "--tensor-parallel-size"
    # Chunks that are stored after a reset may then be adopted by the successor.
    never = {"weights_never_change": True}
    spec = rig.split_spec(directory / "pool", option, fault_injection=str(faults.path), **never)
    return Place(directory, faults, spec)


def _impatient(spec: ServerSpec) -> ServerSpec:
    """The spec with a read deadline that a hanging read misses."""
    assert spec.offload is not None
    extra = {**spec.offload.extra, "read_deadline_ms": rig.SHORT_DEADLINES["read_deadline_ms"]}
    return replace(spec, offload=replace(spec.offload, extra=extra))


@pytest.fixture(scope="module")
def reference() -> rig.Reference:
    return rig.split_reference()


@pytest.fixture(scope="module")
def server(place: Place, reference: rig.Reference) -> Iterator[Server]:
    with rig.start(_impatient(place.spec), "parallel-before") as server:
        yield server


@pytest.fixture(scope="module")
def damaged(server: Server, place: Place, reference: rig.Reference) -> Damage:
    """Write every chunk to the pool, end the server, and damage its files."""
    _all_in_the_pool(server, reference)
    server.stop()
    return damage(place)


@pytest.fixture(scope="module")
def successor(damaged: Damage, place: Place) -> Iterator[Server]:
    with rig.start(place.spec, "parallel-after") as server:
        yield server


def _all_in_the_pool(server: Server, reference: rig.Reference) -> None:
    rig.store_all(server, reference, rig.split_ask)


def test_returning_prompts_are_found(server: Server, reference: rig.Reference) -> None:
    _all_in_the_pool(server, reference)
    before = rig.metrics(server)
    assert rig.same(rig.split_ask(server, reference.prompts), reference.answers)
    assert rig.grown(server, before, HITS) > 0.45 * sum(map(rig.whole, reference.prompts))
    assert rig.grown(server, before, LOADED, source="pool") > 0
    rig.forget_gpu(server)
    before = rig.metrics(server)
    assert rig.same(rig.split_ask(server, reference.prompts[-1:]), reference.answers[-1:])
    assert rig.grown(server, before, LOADED, source="cpu") > 0
    assert rig.metrics(server).value(FAILED) == 0


@pytest.mark.parametrize(
    ("rank", "knob", "value"),
    [(1, "read_eio", 0.5), (0, "flip_byte_on_read", 0.3), (1, "hang_reads", 2)],
)
def test_a_fault_on_one_rank_only(
    server: Server, place: Place, reference: rig.Reference, rank: int, knob: str, value: float
) -> None:
    _all_in_the_pool(server, reference)
    before, fired = rig.metrics(server), [place.faults.fired(knob, r) for r in (0, 1)]
    place.faults.set(rank=rank, **{knob: value})
    assert rig.same(rig.split_ask(server, reference.prompts), reference.answers)
    place.faults.set()
    struck = [place.faults.fired(knob, r) - fired[r] for r in (0, 1)]
    assert struck[rank] > 0
    assert struck[1 - rank] == 0, "the other rank has completed all of its reads"
    assert rig.grown(server, before, FAILED) > 0
    assert rig.grown(server, before, HITS) > 0, "chunks that did not fail are still loaded"
    rig.wait_for(server, "a usable target", rig.is_usable)


def test_writes_that_fail_on_one_rank_only(
    server: Server, place: Place, reference: rig.Reference
) -> None:
    rig.forget_all(server)
    before = rig.metrics(server)
    # Errors return at once, successes after the disk's write: eight errors would mean gone.
    place.faults.set(rank=0, write_eio=5)
    _all_in_the_pool(server, reference)
    place.faults.set()
    assert rig.grown(server, before, FAILED) == 5
    assert rig.same(rig.split_ask(server, reference.prompts), reference.answers)
    assert rig.grown(server, before, LOADED, source="pool") > 0


def test_the_comparison_detects_wrong_bytes_on_one_rank(
    server: Server, place: Place, reference: rig.Reference
) -> None:
    """Negative control: the tests above do compare the bytes of that rank."""
    for rank in (0, 1):
        _all_in_the_pool(server, reference)
        fired = place.faults.fired("swap_slots", rank)
        place.faults.set(rank=rank, swap_slots=True)
        answers = rig.split_ask(server, reference.prompts)
        place.faults.set()
        assert place.faults.fired("swap_slots", rank) > fired
        assert not rig.same(answers, reference.answers)
        rig.forget_all(server)  # the wrong chunks were promoted into both caches


def exchange_slabs(place: Place) -> None:
    """Exchange the slabs, as a script that moves files or faulty storage could."""
    slabs = [place.rank(rank) / "slab" for rank in (0, 1)]
    for slab, other in zip(slabs, [slab.read_bytes() for slab in reversed(slabs)], strict=True):
        with slab.open("r+b") as file:
            file.write(other)
            os.fsync(file.fileno())


def test_slabs_that_are_exchanged_between_the_ranks_serve_nothing(
    server: Server, place: Place, reference: rig.Reference
) -> None:
    """Key, generation and slot are equal on both ranks, but the bytes differ."""
    _all_in_the_pool(server, reference)
    exchange_slabs(place)
    before = rig.metrics(server)
    assert rig.same(rig.split_ask(server, reference.prompts), reference.answers)
    assert rig.grown(server, before, FAILED, outcome="stale") > 0
    rig.forget_all(server)


def test_tenants_find_nothing_of_each_other(server: Server, reference: rig.Reference) -> None:
    """One prompt with two salts and without one, in the CPU tier and in the pool."""
    prompt, answer = reference.prompts[:1], reference.answers[:1]

    def hits(salt: str | None, source: str = "") -> float:
        rig.forget_gpu(server)
        before = rig.metrics(server)
        assert rig.same(rig.split_ask(server, prompt, cache_salt=salt), answer)
        rig.settle(server)  # so that the next one's chunks find room
        if source:
            return rig.grown(server, before, LOADED, source=source)
        assert rig.grown(server, before, "vllm:prefix_cache_hits_total") == 0
        return rig.grown(server, before, HITS)

    whole = rig.whole(prompt[0])
    rig.forget_all(server)
    assert hits(None) == 0
    assert hits(None, "cpu") == whole
    assert hits("one") == 0, "chunks without a salt are not shared with tenants"
    assert hits("one", "cpu") == whole
    assert hits("two") == 0
    _all_in_the_pool(server, rig.Reference(reference.prompts[1:], reference.answers[1:]))
    assert hits("three") == 0
    assert hits("one", "pool") == whole
    assert hits(None, "pool") == whole


def test_a_start_adopts_the_chunks_that_all_ranks_have(successor: Server, damaged: Damage) -> None:
    assert min(damaged.cut, damaged.lost) > 3
    now = rig.wait_for(successor, "figures", rig.has_figures)
    assert now.value("vllm:nvmeof_entries") == damaged.used - damaged.lost
    log = successor.log()
    assert f"dropped {damaged.lost} pool entries of rank 0 that another rank lacks" in log
    assert "table entries from slots" in log


def test_tenants_find_nothing_of_each_other_after_a_restart(
    successor: Server, reference: rig.Reference
) -> None:
    prompt, answer = reference.prompts[:1], reference.answers[:1]
    for salt, found in (("four", False), ("one", True), ("two", True), (None, True)):
        before = rig.metrics(successor)
        assert rig.same(rig.split_ask(successor, prompt, cache_salt=salt), answer)
        loaded = rig.grown(successor, before, LOADED, source="pool")
        assert loaded == (rig.whole(prompt[0]) if found else 0), salt
        assert rig.grown(successor, before, HITS) == loaded


def test_chunks_that_one_rank_has_lost_are_recomputed(
    successor: Server, damaged: Damage, reference: rig.Reference
) -> None:
    before = rig.metrics(successor)
    # The prompts written last: rank 0's part of their chunks is cut off, rank 1's part is whole.
    answers = rig.split_ask(successor, reference.prompts[:1], cache_salt="three")
    assert rig.same(answers, reference.answers[:1])
    assert 0 < rig.grown(successor, before, FAILED) <= damaged.cut
    # Prompts whose headers rank 1 has partly lost: the rest of their chunks is not looked up.
    assert rig.same(rig.split_ask(successor, reference.prompts), reference.answers)
    found = rig.grown(successor, before, LOADED, source="pool")
    assert 0 < found <= (damaged.used - damaged.lost) * rig.CHUNK_TOKENS
    # A request does not store chunks that it tried to load, even if they were recomputed; the next
    # request stores them.
    for found in (None, rig.whole(reference.prompts[0])):
        rig.forget_gpu(successor)
        before = rig.metrics(successor)
        answers = rig.split_ask(successor, reference.prompts[:1], cache_salt="three")
        assert rig.same(answers, reference.answers[:1])
        assert rig.grown(successor, before, FAILED) == 0
        assert found is None or rig.grown(successor, before, HITS) == found
