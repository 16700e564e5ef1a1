# SPDX-License-Identifier: Apache-2.0
"""A real file system that is unmounted at the end of its test, even if the test is killed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# A mount that is left behind cannot be removed by pytest's next runs, and one of them is CI's.
_MOUNT_UNTIL_STDIN_ENDS = 'mount "$@" || exit 1; echo mounted; cat > /dev/null; umount -l "$0"'


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """`mount ARGUMENTS place`. Skips the test where that is not permitted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    command = ["sh", "-c", _MOUNT_UNTIL_STDIN_ENDS, str(place), *arguments, str(place)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the tests
    ) as keeper:
        assert keeper.stdout and keeper.stderr and keeper.stdin
        if not keeper.stdout.readline():
            pytest.skip(f"mounting is not permitted here: {keeper.stderr.read().strip()}")
        yield place
        keeper.stdin.close()
        assert keeper.wait() == 0, "umount failed"


@contextmanager
def tmpfs(place: Path, size_bytes: int) -> Iterator[Path]:
    """A file system in memory of so many bytes."""
    with mounted(place, "-t", "tmpfs", "-o", f"size={size_bytes}", "vnvme-test"):
        yield place
