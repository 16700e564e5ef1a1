# SPDX-License-Identifier: Apache-2.0
"""Mounts `fuse_server` for a test, sends it the faults to inject, and always unmounts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


class FaultyMount:
    """A mounted passthrough file system at `place` over `backing`."""

    def __init__(self, path: Path, *options: str) -> None:
        """Mount, or skip the test with the reason why mounting is impossible here."""
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            pytest.skip("/dev/fuse does not exist or may not be opened")
        if os.geteuid() != 0:
            pytest.skip("mounting a FUSE file system without fusermount needs root")
        self.place = path / "faulty"
        self.backing = path / "backing"
        self._options = options
        self._beneath: list[subprocess.Popen[str]] = []
        self.place.mkdir()
        self.backing.mkdir()
        self.mount()

    def mount(self) -> None:
        """Mount: the first time, again after `unmount`, or over a mount. No rule is set then."""
        command = [sys.executable, "-m", "tests.faults.fuse_server"]
        self._server = subprocess.Popen(
            [*command, str(self.backing), str(self.place), *self._options],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = self._answer()
        if "error" in answer:
            self.close()
            pytest.skip(f"mounting is not permitted here: {answer['error']}")

    def mount_over(self) -> None:
        """Mount the same files again over the first mount, even while operations hang there."""
        self._beneath.append(self._server)
        self.mount()

    def kill_beneath(self) -> None:
        """End the operations that hang in mounts below others."""
        for server in self._beneath:
            server.kill()
            server.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        answer = json.loads(self._server.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    def _send(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def rules(self, *rules: dict[str, Any]) -> None:
        """Replace all rules; requests that hang because of the old ones continue."""
        if self._server.returncode is not None:
            return
        self._send({"rules": [{"name": "it", "path": "slab", **rule} for rule in rules]})

    def fired(self, rule: str = "it") -> int:
        count = self._send({})["fired"].get(rule, 0)
        assert isinstance(count, int)
        return count

    def lengths(self, rule: str = "it") -> list[int]:
        """The lengths of the requests that the rule struck, in bytes."""
        return list(self._send({})["lengths"].get(rule, []))

    def wait_hanging(self, count: int) -> None:
        end_s = time.monotonic() + WAIT_S
        while self._send({})["hanging"] < count:
            assert time.monotonic() < end_s, f"fewer than {count} requests hang"

    def wait_fired(self, *rules: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while not all(self.fired(rule) for rule in rules):
            assert time.monotonic() < end_s, f"rules that have not struck: {rules}"

    def kill(self) -> None:
        """Remove the device: every request fails, also those that hang."""
        self._server.kill()
        self._server.wait()

    def unmount(self) -> None:
        """Unmount as an operator does, after `kill`; fails if a process keeps a file open."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        end_s = time.monotonic() + WAIT_S
        while True:  # a process that looks at the path makes it busy for an instant
            done = subprocess.run(["umount", str(self.place)], capture_output=True, text=True)
            if done.returncode == 0:
                return
            assert time.monotonic() < end_s, done.stderr

    def close(self) -> None:
        """Unmount. The server's end aborts the connection and all requests that hang in it."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self.kill()
        self.kill_beneath()
        self._server.stdin.close()
        self._server.stdout.close()
        for _ in range(1 + len(self._beneath)):
            subprocess.run(["umount", "-l", str(self.place)], capture_output=True)
        assert not os.path.ismount(self.place)
