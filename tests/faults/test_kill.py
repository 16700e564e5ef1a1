# SPDX-License-Identifier: Apache-2.0
"""Hundreds of SIGKILLs of a real process: acknowledged chunks are found with correct bytes.

The page cache survives the kill, so no chunk that was acknowledged and not overwritten since may
be missing, and every chunk that is found must be right. Replay the choices with VLLM_NVMEOF_SEED;
the kernel's scheduler decides the moment of the kill within a choice.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("VLLM_NVMEOF_SEED", "0")) or random.SystemRandom().getrandbits(32)
ROUNDS = int(os.environ.get("VLLM_NVMEOF_KILL_ROUNDS", "120"))
PAYLOAD_BYTES = 100_000
TARGETS = 2
LINE_S = 60.0


class Zygote:
    """The process whose forks are killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.kill_zygote"],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._rest = b""

    def live(self, job: dict[str, object], lines_max: int, seconds_max: float) -> list[list[str]]:
        """Run a life and kill it after so many lines or seconds; return all its lines."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        pid = int(self._line(LINE_S)[1])
        end_s = time.monotonic() + seconds_max
        lines: list[list[str]] = []
        while len(lines) < lines_max and (left_s := end_s - time.monotonic()) > 0:
            if line := self._line(left_s):
                lines.append(line)
                if line[0] == "dead":
                    break
        else:
            os.kill(pid, signal.SIGKILL)
        while not lines or lines[-1][0] != "dead":
            lines.append(self._line(LINE_S))
            assert lines[-1], "the zygote prints nothing"
        return lines

    def _line(self, seconds: float) -> list[str]:
        """The next line's words; empty if no line is printed in time."""
        assert self._process.stdout is not None
        end_s = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready = select.select([self._process.stdout], [], [], max(end_s - time.monotonic(), 0))
            if not ready[0]:
                return []
            block = os.read(self._process.stdout.fileno(), 1 << 16)
            assert block, "the zygote has ended"
            self._rest += block
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode().split(" ", 3 if not line.startswith(b"error") else 1)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@dataclass
class Slot:
    """What a start may find in a pool slot, and what it must find (0: nothing in particular)."""

    must: int = 0
    may: set[int] = field(default_factory=set)


@dataclass
class Ledger:
    """The lines that the lives printed; checks the chunks that the next life finds."""

    slots: dict[int, Slot] = field(default_factory=lambda: {n: Slot() for n in range(8 * TARGETS)})
    generation: int = 0
    named: bool = True
    counts: Counter[str] = field(default_factory=Counter)

    def live(self, lines: list[list[str]]) -> None:
        found: set[int] = set()
        self.named = True
        for what, *words in lines:
            self.counts[what] += 1
            if what == "open":
                assert words == ["0"], "a dead owner's directory is taken over at once"
            elif what == "found":
                found.add(int(words[0]))
                self._found(*map(int, words[:2]), words[2])
            elif what == "adopted":
                for number in set(self.slots) - found:
                    assert not self.slots[number].must, f"slot {number} is lost: {self.slots}"
                    self.slots[number].may.clear()
            elif what in ("begin", "done"):
                self._write(what, *map(int, words))
            elif what in ("resetting", "reset"):
                self._reset(what, words[0] == "1")
            else:
                assert what == "dead", " ".join(words).replace("\\n", "\n")
                assert int(words[0]) == signal.SIGKILL

    def _found(self, number: int, generation: int, outcome: str) -> None:
        slot = self.slots[number]
        assert generation in slot.may, f"slot {number}: {generation} came back, {slot}"
        if slot.must:
            assert (generation, outcome) == (slot.must, "ok"), f"slot {number}: {slot}"
            self.counts["kept"] += 1
        assert outcome in ("ok", "stale", "checksum_mismatch")
        slot.may = {generation}
        slot.must = generation if outcome == "ok" else 0
        self.counts[outcome] += 1

    def _write(self, what: str, number: int, generation: int) -> None:
        self.generation = max(self.generation, generation)
        slot = self.slots[number]
        if what == "begin":
            slot.must = 0
            slot.may |= {generation} if self.named else set()
        elif self.named:
            slot.must, slot.may = generation, {generation}
        else:
            slot.must, slot.may = 0, set()

    def _reset(self, what: str, named: bool) -> None:
        for slot in self.slots.values():
            slot.must = 0
            if what == "reset":
                slot.may.clear()
        if what == "reset":
            self.named = named


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


def play(zygote: Zygote, engine: str, path: Path, rounds: int, **more: object) -> Ledger:
    """Play this many lives over one pool; the ledger checks each."""
    print(f"VLLM_NVMEOF_SEED={SEED}")
    dice = random.Random(f"{SEED} {engine}")
    ledger = Ledger()
    targets = [str(path / f"target-{n}") for n in range(TARGETS)]
    for _ in range(rounds):
        job = {
            "seed": dice.getrandbits(32),
            "generation": ledger.generation + 1000,  # above writes whose lines were never printed
            "engine": engine,
            "targets": targets,
            "payload_bytes": PAYLOAD_BYTES,
            **more,
        }
        # Some kills come early: while the pool is opened, adopted and read.
        early = dice.random() < 0.3
        lines = dice.randrange(1, 20) if early else dice.randrange(20, 150)
        ledger.live(zygote.live(job, lines, dice.uniform(0, 0.06) if early else 0.5))
    print(f"{engine}: {dict(ledger.counts)}")
    return ledger


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_acknowledged_chunks_survive_sigkill(
    zygote: Zygote, engine_name: str, tmp_path: Path
) -> None:
    ledger = play(zygote, engine_name, tmp_path, ROUNDS)
    assert ledger.counts["dead"] == ROUNDS
    assert ledger.counts["kept"] > ROUNDS
    assert ledger.counts["reset"] > 0


def test_an_engine_that_acknowledges_early_is_detected(zygote: Zygote, tmp_path: Path) -> None:
    """Control: a life fails to read back its write, or the next life misses the chunk."""
    with pytest.raises(AssertionError, match=r"is lost|came back|Completion|wrong bytes"):
        play(zygote, "threads", tmp_path, 20, sabotage=True)


def test_the_ledger_sees_a_lost_and_a_wrong_chunk() -> None:
    """Control of the ledger itself."""
    end = ["dead", str(int(signal.SIGKILL))]
    first = [["begin", "3", "1"], ["done", "3", "1"], end]
    for second in ([["adopted"]], [["found", "3", "2", "ok"]], [["found", "3", "1", "stale"]]):
        ledger = Ledger()
        ledger.live(first)
        with pytest.raises(AssertionError, match="slot 3"):
            ledger.live([*second, end])
    ledger = Ledger()
    ledger.live(first)
    ledger.live([["resetting", "1", "0"], ["reset", "1", "0"], end])
    with pytest.raises(AssertionError, match="came back"):
        ledger.live([["found", "3", "1", "ok"], end])
