# SPDX-License-Identifier: Apache-2.0
"""Peers that lie, hurry, stop and die: nothing wrong is accepted, and every read ends in time."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.contract.rig import Rig
from vllm_nvmeof_offload.errors import OK

from .conftest import MakePair
from .kit import D_SLOTS, P_SLOTS, Puller, Serving

WITHIN_S = 1.0


@pytest.mark.parametrize(
    ("how", "kind"),
    [("another", "stale"), ("flipped", "checksum_mismatch"), ("stale", "stale")],
)
def test_a_peer_that_lies_is_refused(make_pair: MakePair, how: str, kind: str) -> None:
    _, puller = make_pair(how=how)
    puller.wait_usable()
    puller.run(*[puller.read(number) for number in range(D_SLOTS)])
    assert puller.kinds() == {kind: D_SLOTS}


def test_a_peer_that_uses_its_lent_slots_is_refused(make_pair: MakePair) -> None:
    """OK means the right bytes, which `Puller.take` compares."""
    _, puller = make_pair(how="hasty")
    puller.wait_usable()
    for _ in range(3):
        if puller.clients.state(0).usable:
            puller.run(*[puller.read(number) for number in range(D_SLOTS)])
    kinds = puller.kinds()
    assert kinds["stale"] + kinds["checksum_mismatch"] >= 1, kinds


class Rounds:
    """Reads all the time, while something happens to the peer."""

    def __init__(self, store: Rig, seed: int) -> None:
        self._store = store
        self.dice = random.Random(seed)
        self.kinds: Counter[str] = Counter()

    def run(self, serving: Serving, *signals: tuple[float, signal.Signals]) -> None:
        """signals: each so many seconds after the one before."""
        puller = Puller(self._store, serving.address)
        puller.wait_usable()
        waiting = list(signals)
        next_s = time.monotonic() + waiting[0][0]
        while waiting or len(puller.free) < P_SLOTS:
            if waiting and time.monotonic() >= next_s:
                serving.signal(waiting.pop(0)[1])
                next_s = time.monotonic() + (waiting[0][0] if waiting else 0.0)
            state = puller.clients.state(0)
            room = min(len(puller.free), state.credits - (P_SLOTS - len(puller.free)))
            if waiting and state.usable and room > 0:
                numbers = [self.dice.randrange(16) for _ in range(room)]
                puller.ask(*[puller.read(number, within_s=WITHIN_S) for number in numbers])
            assert time.monotonic() < next_s + 30.0
            puller.pause()
        puller.at_rest()
        assert puller.kinds()["stale"] == puller.kinds()["checksum_mismatch"] == 0
        self.kinds += puller.kinds()
        puller.close()


def stop_rounds(store: Rig, path: Path, transport: str, count: int, seed: int) -> None:
    """Half of the stops are so short that the session survives them."""
    serving = Serving(store, path / "d", transport)
    rounds = Rounds(store, seed)
    for _ in range(count):
        stop_s = rounds.dice.choice((rounds.dice.uniform(0.0, 0.3), rounds.dice.uniform(0.6, 2.0)))
        rounds.run(
            serving,
            (rounds.dice.uniform(0.0, 0.2), signal.SIGSTOP),
            (stop_s, signal.SIGCONT),
        )
    assert rounds.kinds["ok"] > 0
    puller = Puller(store, serving.address)
    puller.wait_usable()
    assert puller.run(*[puller.read(number) for number in range(D_SLOTS)]) == [OK] * D_SLOTS
    puller.until(lambda: serving.ask()["free"] == D_SLOTS)
    puller.close()
    serving.close()


def kill_rounds(store: Rig, path: Path, transport: str, count: int, seed: int) -> None:
    rounds = Rounds(store, seed)
    for number in range(count):
        serving = Serving(store, path / f"d{number}", transport)
        rounds.run(serving, (rounds.dice.uniform(0.0, 0.3), signal.SIGKILL))
        serving.kill()
    assert rounds.kinds["ok"] > 0


def test_every_read_ends_in_time_while_the_peer_is_stopped(
    store: Rig, tmp_path: Path, transport: str
) -> None:
    stop_rounds(store, tmp_path, transport, 3, seed=20261125)


def test_every_read_ends_in_time_when_the_peer_is_killed(
    store: Rig, tmp_path: Path, transport: str
) -> None:
    kill_rounds(store, tmp_path, transport, 2, seed=20261125)


@pytest.mark.soak
def test_every_read_ends_in_time_at_two_hundred_moments(
    store: Rig, tmp_path: Path, transport: str
) -> None:
    seed = time.monotonic_ns()
    print(f"seed {seed}")
    stop_rounds(store, tmp_path / "stop", transport, 150, seed)
    kill_rounds(store, tmp_path / "kill", transport, 50, seed)
