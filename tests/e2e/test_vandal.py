# SPDX-License-Identifier: Apache-2.0
"""Random damage to the files of two servers that share a pool, and SIGKILLs, change no token.

Bytes are flipped, slots exchanged, pages cleared, files cut and removed, at random and while the
servers read and write. They may lose chunks; they may not stop, except when killed, nor answer
differently.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import LOADED

SECONDS = 300


class Vandal:
    """Damages files below `pool` at random. `acts` counts the acts by name and file."""

    def __init__(self, pool: Path, seed: int) -> None:
        self.acts: Counter[str] = Counter()
        self._pool, self._rng = pool, random.Random(seed)

    def act(self) -> None:
        name = self._rng.choice(("flip", "flip", "flip", "exchange", "exchange", "clear", "cut"))
        name = "remove" if self._rng.random() < 0.03 else name
        files = [path for path in self._pool.rglob("*") if path.is_file() and path.stat().st_size]
        slabs = [path for path in files if path.name == "slab"]
        if name == "exchange" and not slabs:  # all were removed, and no server has started since
            name = "flip"
        path = self._rng.choice(slabs if name == "exchange" else files)
        getattr(self, f"_{name}")(path)
        self.acts[f"{name} {path.name}"] += 1

    def _flip(self, path: Path) -> None:
        """Flip one bit in each of 64 random bytes, so that some are in slots that are read."""
        with path.open("r+b", buffering=0) as file:
            for _ in range(64):
                place = self._rng.randrange(path.stat().st_size)
                byte = os.pread(file.fileno(), 1, place)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << self._rng.randrange(8)]), place)

    def _exchange(self, path: Path) -> None:
        """Put whole slots, with intact headers and payloads, in each other's place."""
        with path.open("r+b", buffering=0) as file:
            slots = path.stat().st_size // rig.SLOT_BYTES
            for _ in range(16):
                one, other = (self._rng.randrange(slots) * rig.SLOT_BYTES for _ in range(2))
                first = os.pread(file.fileno(), rig.SLOT_BYTES, one)
                os.pwrite(file.fileno(), os.pread(file.fileno(), rig.SLOT_BYTES, other), one)
                os.pwrite(file.fileno(), first, other)

    def _clear(self, path: Path) -> None:
        with path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes(4096), self._rng.randrange(path.stat().st_size))

    def _cut(self, path: Path) -> None:
        """Remove the end for a moment, while it may be read, and bring it back empty."""
        size = path.stat().st_size
        os.truncate(path, self._rng.randrange(size))
        time.sleep(0.2)
        os.truncate(path, size)

    def _remove(self, path: Path) -> None:
        path.unlink()


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_damage_and_kills_change_no_token(seed: int, tmp_path: Path) -> None:
    reference = rig.reference()
    pool = tmp_path / "pool"
    spec: ServerSpec = rig.spec(pool, share="host", weights_never_change=True)
    rng, vandal = random.Random(seed), Vandal(pool, seed)
    answered, loaded, killed = 0, 0.0, 0
    with ExitStack() as stack:
        servers: list[Server] = [
            stack.enter_context(rig.start(spec, f"vandal-{name}-{seed}")) for name in "ab"
        ]
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            at = rng.randrange(2)
            asked = rng.sample(range(len(reference.prompts)), 4)
            for _ in range(rng.randrange(3)):
                vandal.act()
            if rng.random() < 0.3:
                rig.forget_gpu(servers[at])
            answers = rig.ask(servers[at], [reference.prompts[one] for one in asked])
            assert rig.same(answers, [reference.answers[one] for one in asked]), vandal.acts
            answered += len(answers)
            if rng.random() < 0.04:
                loaded += rig.metrics(servers[at]).value(LOADED)
                servers[at].kill()
                killed += 1
                servers[at] = stack.enter_context(rig.start(spec, f"vandal-{at}-{seed}-{killed}"))
        assert all(server.running for server in servers)
        loaded += sum(rig.metrics(server).value(LOADED) for server in servers)
    print(f"{answered} answers, {loaded:.0f} tokens loaded, {killed} kills, {dict(vandal.acts)}")
    assert min(answered / 100, loaded / 10_000, killed) > 1, "otherwise little of it was played"
