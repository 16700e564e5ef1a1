# SPDX-License-Identifier: Apache-2.0
"""Random sequences of events leave the ReloadScheduler's accounts consistent."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_nvmeof_offload.manager.hold_and_prefetch import Reason

from .bench import key as bench_key
from .bench import keys_of
from .test_reload import CPU, POOL, ReloadRig

_NAMES = [f"r{number}" for number in range(6)]
_FETCHES_MAX = 4

names = st.sampled_from(_NAMES)
#: Prefixes: requests that begin alike share chunks.
chunks = st.builds(
    lambda base, count: tuple(range(base * 10, base * 10 + count)),
    st.integers(0, 2),
    st.integers(0, 7),
)
orders = st.tuples(st.integers(0, 1), st.integers(0, 2))
sources = st.sampled_from([CPU, POOL, 0])


class ReloadMachine(RuleBasedStateMachine):
    """Every fetch is counted from its start to its single end."""

    @initialize(
        reload=st.sampled_from([0, 1, 3, 9]),
        queue=st.sampled_from([0, 1, 3, 9]),
        where=st.dictionaries(st.integers(0, 29), st.sampled_from([CPU, POOL]), min_size=10),
    )
    def begin(self, reload: int, queue: int, where: dict[int, object]) -> None:
        self.limits = {Reason.RELOAD: reload, Reason.QUEUE: queue, Reason.PROBE: 4}
        self.rig = ReloadRig(reload, queue, slot_bytes=64 << 20)
        self.holds = self.rig.holds
        for number, source in where.items():
            self.holds.put(source, [number])  # type: ignore[arg-type]
        # requests that are followed, by this test's own account
        self.keys: dict[str, set[bytes]] = {}
        self.in_gpu: set[int] = set()
        self.begun = self.ended = 0

    def count(self) -> None:
        for line in self.holds.did():
            self.begun += line.startswith("fetch")
            self.ended += line.startswith("cancel")

    @rule(name=names, numbers=chunks, order=orders)
    def queued(self, name: str, numbers: tuple[int, ...], order: tuple[int, int]) -> None:
        self.left(name)  # vLLM never adds a request that it has
        in_gpu = self.in_gpu
        self.rig.scheduler.follow(
            name, keys_of(*numbers), lambda chunk: numbers[chunk] in in_gpu, order
        )
        self.keys[name] = set(keys_of(*numbers))

    @rule(name=names, numbers=chunks)
    def preempted(self, name: str, numbers: tuple[int, ...]) -> None:
        in_gpu = self.in_gpu
        self.rig.preempted(name, numbers, lambda chunk: numbers[chunk] in in_gpu)
        self.keys[name] = set(keys_of(*numbers))
        self.count()

    @rule(name=names)
    def left(self, name: str) -> None:
        self.rig.scheduler.left(name)
        self.keys.pop(name, None)
        self.count()

    @rule(name=names, local=st.integers(0, 7))
    def looked_up(self, name: str, local: int) -> None:
        self.rig.scheduler.looked_up(name, local)

    @rule(numbers=st.sets(st.integers(0, 29)))
    def gpu_memory_changed(self, numbers: set[int]) -> None:
        self.in_gpu.clear()
        self.in_gpu |= numbers

    @rule(seconds=st.sampled_from([0.1, 3.0, 6.0]), room=st.sampled_from([0, 2, 99]))
    def turn(self, seconds: float, room: int) -> None:
        self.rig.now_s += seconds
        self.holds.room = max(room, len(self.holds.kept))
        self.rig.scheduler.turn()
        self.count()

    @rule(numbers=chunks)
    def probe(self, numbers: tuple[int, ...]) -> None:
        self.rig.scheduler.probe(keys_of(*numbers))
        self.count()

    @precondition(lambda self: self.holds.under_way)
    @rule(data=st.data(), ok=st.booleans())
    def fetch_ended(self, data: st.DataObject, ok: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.holds.under_way)))
        if ok:
            self.holds.ended(int(key[:8]))
        else:
            self.holds.lose(key)
            self.holds.put(0, [int(key[:8])])
        self.ended += 1

    @rule(number=st.integers(0, 29), source=sources)
    def moved(self, number: int, source: object) -> None:
        key = bench_key(number)
        if key in self.holds.under_way or (key in self.holds.kept and source is POOL):
            return  # what is held is not evicted
        if not source and key in self.holds.kept:
            self.holds.lose(key)  # doomed
        self.holds.put(source, [number])  # type: ignore[arg-type]

    @rule()
    def reset(self) -> None:
        self.ended += len(self.holds.under_way)
        for key in list(self.holds.kept):
            self.holds.lose(key)
        self.holds.where.clear()
        self.rig.scheduler.reset()
        self.keys.clear()

    @invariant()
    def budgets_are_kept(self) -> None:
        for reason, limit in self.limits.items():
            assert 0 <= self.holds.counts[reason] <= limit
        assert len(self.holds.under_way) == self.holds.fetching <= _FETCHES_MAX + 4
        assert self.begun - self.ended == self.holds.fetching

    @invariant()
    def what_is_held_somebody_wants(self) -> None:
        for key, reason in self.holds.kept.items():
            wanted = any(key in keys for keys in self.keys.values())
            assert wanted or reason is Reason.PROBE, key

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for name in _NAMES:
            self.left(name)
        for key in sorted(self.holds.under_way):  # probes belong to no request
            self.holds.ended(int(key[:8]))
            self.ended += 1
        assert (self.holds.kept, len(self.rig.scheduler)) == ({}, 0)
        assert self.begun == self.ended
        looks = self.holds.looks
        assert self.rig.turn() == []
        assert self.holds.looks == looks, "no request is in line any more"


TestReloadMachine = ReloadMachine.TestCase
TestReloadMachine.settings = settings(max_examples=150, stateful_step_count=40)
