# SPDX-License-Identifier: Apache-2.0
"""A session's retained chunks stay in both tiers until it expires or is dropped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_nvmeof_offload.manager.core import SessionIds, Source
from vllm_nvmeof_offload.native import Tiers
from vllm_nvmeof_offload.protocol import SavedSessions, SessionsCommand, slot_of

from .bench import KEY_BYTES, Bench, keys_of, numbers_of
from .test_entry_memory import resident_bytes

A, B, OTHER = SessionIds(1, 7), SessionIds(2, 7), SessionIds(3, 8)


class Serving:
    """Requests whose chunks are stored and written at once, in 16 cache slots."""

    def __init__(self, pool: int = 32, **config: Any) -> None:
        self.bench = Bench(cache=16, pool=pool, **config)

    @property
    def files(self) -> list[bytes]:
        """What the commands wrote to the file of sessions."""
        return [one.content for one in self.bench.core.others if isinstance(one, SessionsCommand)]

    def serve(self, *numbers: int, session: SessionIds | None = None, **asked: Any) -> None:
        self.bench.core.turn()
        plan = self.bench.core.prepare_store(keys_of(*numbers))
        if plan.command is not None:
            self.bench.done(plan.command.op)
        self.bench.write_all()
        core = self.bench.core
        core.ended(keys_of(*numbers))
        if session is not None:
            how = {"seconds": 60, "priority": 50, **asked}
            core.retain(keys_of(*numbers), None, session, how["seconds"], how["priority"])
        core.turn()
        self.bench.write_all()

    def press(self, requests: int = 40, first: int = 1000) -> None:
        """Serve requests with other chunks, more than both tiers hold."""
        for number in range(first, first + 2 * requests, 2):
            self.serve(number, number + 1)

    def found(self, *numbers: int) -> list[int]:
        return self.bench.hits(numbers)

    def in_cpu(self, *numbers: int) -> list[int]:
        return [one for one in numbers if self.bench.source(one) is Source.CPU]

    @property
    def sessions(self) -> float:
        return self.bench.core.gauges()["sessions"]

    @property
    def retained(self) -> tuple[float, float]:
        gauges = self.bench.core.gauges()
        return gauges["slots_retained", "cache"], gauges["slots_retained", "pool"]


def test_a_later_request_extends_its_session_and_adds_to_it() -> None:
    serving = Serving()
    serving.serve(1, 2, session=A, seconds=60)
    serving.bench.now_s += 59
    serving.serve(1, 2, 3, session=A, seconds=6000)
    serving.serve(9, session=A, seconds=6000)  # another branch
    serving.bench.now_s += 5999
    serving.press()
    assert serving.found(1, 2, 3, 9) == [1, 2, 3, 9]
    serving.serve(1, session=A, seconds=1)  # the last request decides
    serving.bench.now_s += 1
    serving.press(first=2000)
    assert serving.found(1, 2, 3, 9) == []


def test_one_client_retains_no_more_than_its_share_and_takes_nothing_from_another() -> None:
    serving = Serving(retain_share=0.25)
    serving.serve(1, 2, session=OTHER)
    for number in range(10, 40, 2):
        serving.serve(number, number + 1, session=SessionIds(number, 7))
    assert serving.retained[1] == 32 * 0.25 + 2
    assert serving.retained[0] <= 16 * 0.5
    serving.press()
    assert serving.found(1, 2) == [1, 2]
    assert len(serving.found(*range(10, 40))) == 32 * 0.25
    assert serving.found(*range(10, 18)) == [*range(10, 18)], "those that came first"


def test_a_session_of_a_higher_priority_takes_room_from_the_ends_of_lower_ones() -> None:
    serving = Serving(retain_share=0.25)
    serving.serve(1, 2, 3, 4, session=A, priority=10)
    serving.serve(5, 6, 7, session=B, priority=30)
    serving.serve(20, 21, 22, 23, 24, session=SessionIds(4, 7), priority=30)
    serving.serve(8, 9, session=OTHER, priority=1)
    serving.press()
    assert serving.found(1, 2, 3, 4) == []
    assert serving.found(5, 6, 7, 20, 21, 22, 23, 24) == [5, 6, 7, 20, 21, 22, 23, 24]
    assert serving.found(8, 9) == [8, 9], "another client's priorities do not count"
    serving.serve(30, session=SessionIds(5, 7), priority=31)
    serving.press(first=2000)
    assert serving.found(5, 6, 7, 20, 21, 22, 23, 24, 30) in (
        [5, 6, 7, 20, 21, 22, 23, 30],
        [5, 6, 20, 21, 22, 23, 24, 30],
    )


def test_what_is_retained_is_evicted_rather_than_refuse_a_store() -> None:
    serving = Serving(retain_share=0.5)
    serving.serve(*range(1, 9), session=A)
    serving.serve(*range(11, 19), session=OTHER)
    plan = serving.bench.core.prepare_store(keys_of(*range(100, 110)))
    assert not plan.refused


def test_one_client_has_a_bounded_number_of_sessions() -> None:
    """All of them retain the same chunk, which costs nothing of the share."""
    serving = Serving(retain_share=0.25)
    for number in range(200):
        serving.serve(1, session=SessionIds(100 + number, 7))
    assert serving.sessions == 8 * 32 * 0.25
    serving.serve(2, session=OTHER)
    assert serving.sessions == 8 * 32 * 0.25 + 1
    serving.bench.now_s += 60
    serving.bench.core.turn()
    assert serving.sessions == 0
    serving.serve(1, session=A)
    assert serving.sessions == 1


def test_a_reset_ends_all_sessions_and_a_share_of_0_retains_nothing() -> None:
    serving = Serving()
    serving.serve(1, 2, session=A)
    serving.bench.core.reset()
    assert serving.sessions == 0
    serving = Serving(retain_share=0.0)
    serving.serve(1, 2, session=A)
    assert serving.sessions == 0
    serving.press()
    assert serving.found(1, 2) == []


def saved(serving: Serving) -> bytes:
    """The last content of the file of sessions."""
    serving.bench.now_s += 1000  # whatever bounds the period
    serving.bench.write_all()
    return serving.files[-1]


def restarted(before: Serving, sessions: bytes, later_s: float = 0.0, **config: Any) -> Serving:
    """The next server on the same pool; its clock starts from zero again."""
    pooled = [entry for entry in before.bench.core.entries() if entry.place >= 0]
    entries = [(slot_of(e.place), e.generation, numbers_of(e.key)[0]) for e in pooled]
    wall_s = before.bench.now_s + later_s
    after = Serving(entries=sorted(entries), sessions=sessions, wall_s=wall_s, **config)
    assert after.bench.core.gauges()["entries"] == len(entries)
    return after


def test_a_session_survives_a_restart_until_its_time_has_passed() -> None:
    serving = Serving()
    serving.serve(1, 2, 3, session=A, seconds=5000)
    serving.serve(3, 4, session=B, seconds=5060)
    serving.serve(5, 6, session=SessionIds(4, 7), seconds=5000)
    serving.serve(7, 8)
    serving.bench.core.drop_session(SessionIds(4, 7))
    after = restarted(serving, saved(serving))
    assert (after.sessions, after.retained) == (2, (0, 4))
    after.press()
    assert after.found(*range(1, 9)) == [1, 2, 3, 4]
    after.bench.now_s += 4000  # 1000 have passed before the restart
    after.press(first=2000)
    assert after.found(1, 2, 3, 4) == [3, 4]
    late = restarted(serving, saved(serving), later_s=3030)  # 2000 have passed before the outage
    assert late.sessions == 1
    late.press()
    assert late.found(1, 2, 3, 4) == [3, 4]


def test_sessions_come_back_with_their_clients_priorities_and_names() -> None:
    serving = Serving(retain_share=0.25)
    serving.serve(1, 2, 3, 4, session=A, seconds=5000, priority=10)
    serving.serve(5, 6, session=OTHER, seconds=5000)
    after = restarted(serving, saved(serving), retain_share=0.25)
    after.serve(*range(10, 16), session=B, priority=20)
    after.press()
    assert after.found(1, 2, 3, 4) == [1, 2], "from the end of the one of lower priority"
    assert after.found(*range(10, 16), 5, 6) == [*range(10, 16), 5, 6]
    after.bench.core.drop_session(A)
    after.press(first=2000)
    assert after.found(1, 2, 5, 6) == [5, 6]


def test_what_is_not_adopted_is_not_retained_and_a_clock_set_back_keeps_nothing_for_years() -> None:
    serving = Serving()
    serving.serve(1, 2, session=A, seconds=5000)
    content = saved(serving)
    serving.bench.core.reset()
    assert restarted(serving, content).sessions == 0
    assert Serving(sessions=content[:-1] + b"x").sessions == 0
    serving = Serving()
    serving.serve(1, 2, session=A, seconds=7 * 24 * 3600)
    after = restarted(serving, saved(serving), later_s=-1e5, retain_share=0.5)
    assert after.sessions == 1
    after.bench.now_s += 7 * 24 * 3600
    after.bench.core.turn()
    assert after.sessions == 0
    assert restarted(serving, saved(serving), retain_share=0.0).sessions == 0


def test_sessions_are_saved_at_once_but_not_twice_a_second() -> None:
    serving = Serving(pool=1024, retain_share=0.5)
    serving.serve(1, session=A)
    assert len(serving.files) == 1
    for number in range(2, 12):
        serving.serve(number, session=B)
    assert len(serving.files) == 1
    assert serving.bench.core.has_pending_work(), "so that the rest is saved without a request"
    assert not serving.bench.core.has_pending_work(count_writes=False)
    serving.bench.core._save_s += 5  # as after a save of many chunks
    assert not serving.bench.core.has_pending_work(), "or an idle engine would step all the time"
    serving.bench.now_s += 5
    assert serving.bench.core.has_pending_work()
    serving.bench.now_s += 1
    serving.serve()
    assert len(serving.files) == 2
    assert SavedSessions.decode(serving.files[-1]).sessions["chunks"].tolist() == [1, 10]
    serving.bench.now_s += 10
    serving.serve(50)
    serving.bench.core.drop_session(SessionIds(99, 7))
    serving.serve(51)
    assert len(serving.files) == 2, "nothing has changed"
    serving.bench.core.drop_session(A)
    serving.serve(52)
    assert SavedSessions.decode(serving.files[-1]).sessions["id"].tolist() == [B.session]


def test_a_clock_that_was_never_set_costs_the_sessions_and_nothing_else() -> None:
    serving = Serving(wall_s=-1e6)
    serving.serve(1, session=A)
    assert SavedSessions.decode(serving.files[-1]).sessions["until"].tolist() == [0]


def test_nothing_is_saved_without_a_pool() -> None:
    serving = Serving(pool=0)
    serving.serve(1, session=A)
    assert (serving.sessions, serving.files) == (1, [])
    assert not serving.bench.core.has_pending_work()


@pytest.mark.parametrize("seed", range(8))
def test_at_random_retained_chunks_are_counted_and_bounded(seed: int) -> None:
    """Against sets: no live session's chunk is evicted, and no other one is retained. The pool is
    larger than twice the CPU tier: else it may evict what the CPU tier has, which stays there."""
    rng = np.random.default_rng(seed)
    serving = Serving(pool=64)
    until, chunks = dict[int, int](), dict[int, set[int]]()
    for _ in range(300):
        name = int(rng.integers(4))
        serving.bench.now_s += int(rng.integers(3))
        until = {one: end for one, end in until.items() if end > serving.bench.now_s}
        chunks = {one: chunks[one] for one in until}
        action = rng.integers(4)
        if action == 0:
            seconds, first = int(rng.integers(1, 30)), 3 * name
            numbers = range(first, first + int(rng.integers(1, 4)))
            serving.serve(*numbers, session=SessionIds(name, 7), seconds=seconds)
            until[name] = int(serving.bench.now_s) + seconds
            chunks[name] = chunks.get(name, set()) | set(numbers)
        elif action == 1 and name in until:
            serving.bench.core.drop_session(SessionIds(name, 7))
            del until[name], chunks[name]
            serving.bench.core.turn()
        else:
            number = int(rng.integers(1000, 1040))
            serving.serve(number, number + 50)
        wanted = sorted(set().union(*chunks.values()))
        assert serving.found(*wanted) == wanted
        assert serving.retained[1] == len(wanted)
        assert serving.sessions == len(until)


#: More than a session costs, and less than two objects of Python would.
SESSION_BYTES_MAX = 100
SESSIONS = 100_000


def main() -> None:
    """Retain a chunk per session, and print the bytes per session."""
    tiers = Tiers(16, [2 * SESSIONS], key_bytes=KEY_BYTES, retain_share=0.5)
    places = np.arange(SESSIONS, dtype=np.int64) + (255 << 40)
    keys = keys_of(*range(SESSIONS))
    assert tiers.adopt(places, np.arange(SESSIONS, dtype=np.uint64), b"".join(keys)) == SESSIONS
    rng = np.random.default_rng(1)
    ids = rng.integers(1 << 63, size=SESSIONS).tolist()
    ends = rng.integers(1, 7 * 24 * 3600, size=SESSIONS).tolist()
    before = resident_bytes()
    for key, name, until in zip(keys, ids, ends, strict=True):
        tiers.retain([key], name, 7, until, 50)
    after = resident_bytes()
    assert tiers.sessions == SESSIONS and tiers.retained == (0, SESSIONS)
    print(f"{(after - before) / SESSIONS:.1f} bytes per session")


def test_a_hundred_thousand_sessions_are_light() -> None:
    module = [sys.executable, "-m", "tests.unit.manager.test_sessions"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        module, capture_output=True, text=True, cwd=root, env=os.environ, check=True
    )
    size = float(done.stdout.split()[0])
    assert 20 < size <= SESSION_BYTES_MAX, done.stdout


if __name__ == "__main__":
    main()
