# SPDX-License-Identifier: Apache-2.0
"""One copy for ranks with equal KV: samples, dooming and adoption."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.chunks import cache_member
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.manager.telemetry import FailureLog
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    AdoptedEntries,
    ChunkBatch,
    OpReport,
    RankHello,
    ResetCommand,
    StoreCommand,
    WriteCommand,
    place_of,
)

from .bench import TAG
from .bench import hello as plain_hello

GROUPS = (Group(0, GroupKind.FULL, 16), Group(3, GroupKind.WINDOW, 16, reach_chunks=2))
EQUAL_MIN, SAMPLE_EVERY = 2, 5


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(4, "big") + group.to_bytes(4, "big")


def hello(
    rank: int, set_sizes: Sequence[int] = (2, 1), adopted: AdoptedEntries | None = None
) -> RankHello:
    groups = zip(GROUPS, set_sizes, strict=True)
    of_rank = tuple(RankGroup(group, 4096, set_size) for group, set_size in groups)
    one = plain_hello(rank, 8, 8, (), groups=of_rank)
    return replace(one, adopted=adopted or AdoptedEntries())


class Ranks:
    """A core, and ranks that execute every command."""

    def __init__(self, hellos: Sequence[RankHello]) -> None:
        self.count = len(hellos)
        self.core = ManagerCore(
            CoreConfig(
                world_size=self.count,
                key_bytes=8,
                groups=GROUPS,
                equal_min=EQUAL_MIN,
                sample_every=SAMPLE_EVERY,
            ),
            agree(hellos),
        )
        self.set_size = self.core.capacity.set_sizes[0]

    def store(self, *keys: bytes, crcs: Sequence[int] | None = None) -> ChunkBatch:
        """crcs: by rank, of the samples; None: all are equal."""
        ends = np.arange(1, len(keys) + 1) * 16
        command = self.core.prepare_store(keys, ends).command
        assert isinstance(command, StoreCommand)
        self.report_store(command, crcs)
        return command.batch

    def report_store(self, command: StoreCommand, crcs: Sequence[int] | None = None) -> None:
        batch = command.batch
        samples = [
            group == 0 and self.set_size > 1 and cache_member(cache) == EVERY_MEMBER
            for cache, group in zip(batch.cache.tolist(), batch.groups.tolist(), strict=True)
        ]
        for rank in range(self.count):
            crc = 7 if crcs is None else crcs[rank]
            found = np.full(sum(samples), crc, np.uint32) if any(samples) else None
            self.core.report([OpReport(command.op, crcs=found, rank=rank)])

    def write(self) -> list[int]:
        """Do the writes that wait; return their places."""
        places: list[int] = []
        for command in self.core.take_commands():
            assert isinstance(command, WriteCommand)
            places += command.batch.places.tolist()
            self.core.report([OpReport(command.op)] * self.count)
        return places


def members(batch: ChunkBatch) -> list[int]:
    return [cache_member(cache) for cache in batch.cache.tolist()]


def test_a_difference_voids_the_pool_and_ends_members(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks([hello(rank) for rank in range(2)])
    core = ranks.core
    failures = FailureLog(core, ["/pool"])
    ranks.store(key(1), key(2), key(1, 3))
    ranks.store(key(11), key(12))
    ranks.write()
    before = {entry.key for entry in core.entries()}
    assert {key(11), key(12)} <= before
    ranks.store(key(13), key(14))
    command = core.prepare_store([key(15)], np.array([16])).command
    assert isinstance(command, StoreCommand)
    assert members(command.batch) == [EVERY_MEMBER], "it is a sample"
    ranks.report_store(command, crcs=(1, 2))
    assert not core.entries(), "what two ranks share is nothing to one of them"
    reset = core.take_commands()[-1]
    assert isinstance(reset, ResetCommand), "later starts and other engines have to know, too"
    assert (reset.tag, reset.named) == (TAG, True), "the weights are what they were"
    ranks.core.report([OpReport(reset.op)] * 2)
    with caplog.at_level(logging.WARNING):
        failures.log_new()
        failures.log_new()
    assert caplog.text.count("stored different bytes of KV cache group 0") == 1
    assert members(ranks.store(*map(key, range(20, 24)))) == [EVERY_MEMBER] * 4
    ranks.write()
    assert core.gauges()["ops"] == 0
    assert core.gauges()["cache_slots_orphaned"] == core.gauges()["pool_slots_orphaned"] == 0


def test_ranks_are_compared_again_after_a_reset() -> None:
    ranks = Ranks([hello(rank) for rank in range(2)])
    ranks.store(key(1), key(2))
    assert members(ranks.store(key(3))) == [0]
    ranks.core.reset()
    assert members(ranks.store(key(1), key(2))) == [EVERY_MEMBER] * 2, "of other weights, perhaps"
    assert members(ranks.store(key(3))) != [EVERY_MEMBER]


def test_a_sample_that_failed_on_a_rank_proves_nothing() -> None:
    ranks = Ranks([hello(rank) for rank in range(2)])
    command = ranks.core.prepare_store([key(1), key(2)], np.array([16, 32])).command
    assert isinstance(command, StoreCommand)
    codes, errnos = np.array([0, 1], np.uint8), np.array([0, 5], np.int16)
    one = np.array([9], np.uint32)
    ranks.core.report(
        [
            OpReport(command.op, np.arange(2, dtype=np.uint32), codes, errnos, crcs=one, rank=0),
            OpReport(command.op, crcs=np.array([9, 9], np.uint32), rank=1),
        ]
    )
    assert members(ranks.store(key(3))) == [EVERY_MEMBER]
    assert members(ranks.store(key(4))) == [0]


def found(*entries: tuple[int, int, int, bytes]) -> AdoptedEntries:
    """Slot, member, generation, key."""
    return AdoptedEntries(
        np.array([place_of(0, slot, member) for slot, member, _, _ in entries], np.int64),
        np.array([generation for _, _, generation, _ in entries], np.uint64),
        b"".join(name for *_, name in entries),
    )


def test_single_copies_are_adopted_from_their_holders() -> None:
    everywhere = (0, EVERY_MEMBER, 1, key(1))
    only_some = (1, EVERY_MEMBER, 2, key(2))
    single, other = (2, 0, 3, key(3)), (2, 1, 4, key(4))
    lost = (3, 1, 5, key(5))
    of_ranks = [
        found(everywhere, only_some, single),
        found(everywhere, other, lost),
        found(everywhere, only_some, single),
        found(everywhere, other),
    ]
    agreement = agree([hello(rank, adopted=of_ranks[rank]) for rank in range(4)])
    entries = agreement.entries
    assert sorted(entries.generations.tolist()) == [1, 3, 4]
    assert (np.diff(entries.places) > 0).all()
    assert agreement.unadopted == 2
    ranks = Ranks([hello(rank, adopted=of_ranks[rank]) for rank in range(4)])
    places = {entry.key: entry.place for entry in ranks.core.entries()}
    assert places == {
        key(1): place_of(0, 0),
        key(3): place_of(0, 2, 0),
        key(4): place_of(0, 2, 1),
    }
    assert ranks.core.gauges()["slots_used", "pool"] == 2, "two parts share a slot"
