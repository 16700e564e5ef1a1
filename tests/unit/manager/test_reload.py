# SPDX-License-Identifier: Apache-2.0
"""The ReloadScheduler's commands, by recorded sequences of events, on a shelf that only notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm_nvmeof_offload.manager.handshake import Capacity, CoreConfig
from vllm_nvmeof_offload.manager.hold_and_prefetch import Reason, ReloadScheduler
from vllm_nvmeof_offload.manager.index import Source

from .bench import keys_of

CPU, POOL = Source.CPU, Source.POOL


class FakeShelf:
    """Notes what it is told; a fetch is under way until the test says that it has ended."""

    def __init__(self) -> None:
        self.fetching = 0
        self.counts = dict.fromkeys(Reason, 0)
        self.where: dict[bytes, Source] = {}
        self.held: dict[bytes, Reason] = {}
        self.under_way: set[bytes] = set()
        self.room = 1 << 30
        self.looks = 0
        self._log: list[str] = []

    def put(self, source: Source | None, numbers: Iterable[int]) -> None:
        for key in keys_of(*numbers):
            self.where.pop(key, None)
            if source is not None:
                self.where[key] = source

    def did(self) -> list[str]:
        """What it was told since the last call."""
        log, self._log = self._log, []
        return log

    def source(self, key: bytes) -> Source | None:
        self.looks += 1
        return self.where.get(key)

    def hold(self, key: bytes, reason: Reason) -> bool:
        assert self.where[key] is CPU and key not in self.held
        return self._keep("hold", key, reason)

    def fetch(self, key: bytes, reason: Reason) -> bool:
        assert self.where[key] is POOL and key not in self.held
        if not self._keep("fetch", key, reason):
            return False
        self.where[key] = CPU
        self.under_way.add(key)
        self.fetching += 1
        return True

    def drop(self, key: bytes) -> None:
        if key not in self.held:
            return
        verb = "cancel" if key in self.under_way else "drop"
        self._log.append(f"{verb} {key.decode()}")
        if verb == "cancel":
            self.where[key] = POOL
        self.lose(key)

    def ended(self, *numbers: int) -> None:
        """These fetches have brought their chunks."""
        for key in keys_of(*numbers):
            self.under_way.remove(key)
            self.fetching -= 1
            if self.held[key] is Reason.PROBE:
                self.lose(key)

    def lose(self, key: bytes) -> None:
        """It is held no more."""
        self.counts[self.held.pop(key)] -= 1
        if key in self.under_way:
            self.under_way.remove(key)
            self.fetching -= 1

    def _keep(self, verb: str, key: bytes, reason: Reason) -> bool:
        if len(self.held) >= self.room:
            return False
        self.held[key] = reason
        self.counts[reason] += 1
        self._log.append(f"{verb} {key.decode()}")
        return True


def not_in_gpu(_chunk: int) -> bool:
    return False


class Desk:
    """A scheduler over a fake shelf, with a clock; budgets in cache slots."""

    def __init__(self, reload: int = 16, queue: int = 16, slot_bytes: int = 1 << 20) -> None:
        self.now_s = 0.0
        self.shelf = FakeShelf()
        config = CoreConfig(reload_cache_share=reload / 1024, prefetch_cache_share=queue / 1024)
        self.scheduler = ReloadScheduler(
            config,
            Capacity(1024, 0, 1, slot_bytes),
            self.shelf,  # type: ignore[arg-type]
            lambda: self.now_s,
        )

    def preempted(
        self, name: str, numbers: Iterable[int], in_gpu: Callable[[int], bool] = not_in_gpu
    ) -> None:
        self.scheduler.follow(name, keys_of(*numbers), in_gpu)

    def queued(self, name: str, numbers: Iterable[int], order: tuple[float, ...] = ()) -> None:
        self.scheduler.follow(name, keys_of(*numbers), not_in_gpu, order)

    def turn(self) -> list[str]:
        self.scheduler.turn()
        return self.shelf.did()

    def left(self, *names: str) -> list[str]:
        for name in names:
            self.scheduler.left(name)
        return self.shelf.did()


def test_a_victims_cached_chunks_are_held_and_the_others_fetched_in_prefix_order() -> None:
    desk = Desk()
    desk.shelf.put(CPU, [0, 1])
    desk.shelf.put(POOL, [2, 3])
    desk.preempted("a", range(4))
    assert desk.turn() == ["hold 0", "hold 1", "fetch 2", "fetch 3"]
    assert desk.turn() == [], "done once"
    desk.shelf.ended(2)
    assert desk.left("a") == ["drop 0", "drop 1", "drop 2", "cancel 3"]
    assert (len(desk.scheduler), desk.left("a")) == (0, [])


def test_what_follows_a_missing_chunk_is_of_no_use() -> None:
    desk = Desk()
    desk.shelf.put(POOL, [0, 2, 3])
    desk.preempted("a", range(4))
    assert desk.turn() == ["fetch 0"]


def test_chunks_in_gpu_memory_are_passed_over_but_held_if_the_cpu_tier_has_them() -> None:
    desk = Desk()
    desk.shelf.put(CPU, [0])
    desk.shelf.put(POOL, [1, 2])
    desk.preempted("a", range(3), lambda chunk: chunk < 2)
    assert desk.turn() == ["hold 0", "fetch 2"]


def test_a_new_request_is_fetched_for_and_what_is_cached_is_not_held_for_it() -> None:
    desk = Desk()
    desk.shelf.put(CPU, [0])
    desk.shelf.put(POOL, [1])
    desk.queued("a", range(2))
    assert desk.turn() == ["fetch 1"]
    assert desk.left("a") == ["cancel 1"]


def test_many_preempted_at_once_the_shortest_remaining_goes_first_and_the_queue_last() -> None:
    desk = Desk(reload=6)
    desk.shelf.put(POOL, range(100))
    desk.queued("new", [50, 51])
    desk.preempted("long", range(10, 14))
    desk.preempted("short", [20])
    desk.preempted("middle", [30, 31])
    assert desk.turn() == [
        *("fetch 20", "fetch 30", "fetch 31", "fetch 10", "fetch 11", "fetch 12"),
        *("fetch 50", "fetch 51"),
    ]


def test_what_remains_counts_and_not_how_long_a_request_is() -> None:
    desk = Desk(reload=6)
    desk.shelf.put(POOL, range(100))
    desk.preempted("a", range(8))
    assert len(desk.turn()) == 6  # 2 remain
    desk.preempted("b", [20, 21, 22])
    desk.scheduler.follow("c", keys_of(30), not_in_gpu)
    assert desk.turn() == [], "the budget is spent"
    assert desk.left("a") == [f"cancel {n}" for n in range(6)]
    assert desk.turn() == ["fetch 30", "fetch 20", "fetch 21", "fetch 22"]


def test_the_queue_is_served_in_its_order_and_equals_as_they_came() -> None:
    desk = Desk(queue=3)
    desk.shelf.put(POOL, range(100))
    desk.queued("low", [10, 11], (1, 0.0))
    desk.queued("high", [20, 21], (0, 5.0))
    desk.queued("too", [30], (0, 5.0))
    assert desk.turn() == ["fetch 20", "fetch 21", "fetch 30"]
    assert desk.left("too", "high") == ["cancel 30", "cancel 20", "cancel 21"]
    desk.queued("first", [40], (-1, 9.0))
    assert desk.turn() == ["fetch 40", "fetch 10", "fetch 11"]


def test_one_that_left_while_it_stood_in_line_is_passed_over() -> None:
    desk = Desk(queue=1)
    desk.shelf.put(POOL, range(10))
    for name, number in (("a", 0), ("b", 1), ("c", 2)):
        desk.queued(name, [number])
    assert desk.turn() == ["fetch 0"]
    assert desk.left("b", "a") == ["cancel 0"]
    assert desk.turn() == ["fetch 2"]


def test_two_that_want_one_prefix_share_it_till_the_last_has_left() -> None:
    desk = Desk(reload=3, queue=3)
    desk.shelf.put(POOL, range(10))
    desk.preempted("a", [0, 1, 2])
    desk.queued("b", [0, 1, 5])
    assert desk.turn() == ["fetch 0", "fetch 1", "fetch 2", "fetch 5"]
    assert desk.shelf.counts[Reason.QUEUE] == 1, "shared chunks are on the victim's account"
    assert desk.left("a") == ["cancel 2"]
    desk.shelf.ended(0)
    assert desk.left("b") == ["drop 0", "cancel 1", "cancel 5"]
    assert set(desk.shelf.counts.values()) == {0}


def test_preempted_during_its_load_it_starts_over() -> None:
    desk = Desk()
    desk.shelf.put(POOL, range(3))
    desk.preempted("a", range(3))
    assert len(desk.turn()) == 3
    desk.shelf.ended(0, 1)
    assert desk.left("a") == ["drop 0", "drop 1", "cancel 2"]  # its load was planned
    desk.preempted("a", range(3))
    assert desk.turn() == ["hold 0", "hold 1", "fetch 2"]
    assert len(desk.scheduler) == 1


def test_preempted_again_before_it_ran_it_wants_what_it_has_now() -> None:
    desk = Desk()
    desk.shelf.put(POOL, range(6))
    desk.preempted("a", range(2))
    assert desk.turn() == ["fetch 0", "fetch 1"]
    desk.shelf.ended(0, 1)
    desk.preempted("a", range(3))
    assert desk.shelf.did() == ["drop 0", "drop 1"]
    assert desk.turn() == ["hold 0", "hold 1", "fetch 2"]
    assert len(desk.left("a")) == 3


def test_a_queued_request_that_ran_and_was_preempted_is_one_request() -> None:
    desk = Desk()
    desk.shelf.put(POOL, range(3))
    desk.queued("a", range(2))
    desk.preempted("a", range(3))  # before any turn
    assert desk.turn() == ["fetch 0", "fetch 1", "fetch 2"]
    assert desk.shelf.counts[Reason.QUEUE] == 0


def test_aborts_before_and_between_turns_leave_nothing() -> None:
    desk = Desk(reload=2)
    desk.shelf.put(POOL, range(9))
    desk.preempted("a", range(3))
    assert desk.left("a") == []
    desk.preempted("b", range(3, 6))
    assert desk.turn() == ["fetch 3", "fetch 4"]
    desk.preempted("c", range(6, 9))
    assert desk.left("c") == []
    assert desk.left("b") == ["cancel 3", "cancel 4"]
    assert desk.turn() == []
    assert (desk.shelf.held, desk.shelf.fetching, len(desk.scheduler)) == ({}, 0, 0)
