# SPDX-License-Identifier: Apache-2.0
"""Which engine a directory `engine-K` belongs to, so that all ranks of one engine share one.

Each rank claims its own directory, in a process of its own. Two servers that start at the same
time would otherwise each get some ranks' directories of both, and adopt nothing. So ranks claim
one at a time, and leave their engine's name in `engine-K/owner`; who finds another name there
goes on to the next directory if any rank of that engine still lives. The name of a dead engine
means nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool.holders import probe_lock
from vllm_nvmeof_offload.pool.lock import Holder, foreign_holder_error
from vllm_nvmeof_offload.pool.slab import open_private
from vllm_nvmeof_offload.pool.survey import disk_bytes, find

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from vllm_nvmeof_offload.pool.silence import Silence

__all__ = [
    "OWNER_FILE",
    "bytes_of_others",
    "bytes_of_pools",
    "held_by_another",
    "one_at_a_time",
    "read_owner",
    "write_owner",
]

OWNER_FILE = "owner"
CLAIM_WAIT_S_MAX = 30.0
_POLL_S = 0.01
_OWNER_BYTES = 256


@contextlib.contextmanager
def one_at_a_time(spaces: Sequence[Path]) -> Iterator[None]:
    """Keep other claims in these keyspaces out meanwhile: an flock on the directories.

    Raises:
        OSError: a directory cannot be opened or locked.
        PoolError: somebody else has been claiming for too long.
    """
    with contextlib.ExitStack() as stack:
        # In one order everywhere, or two servers would wait for each other.
        for space in sorted({os.path.realpath(space) for space in spaces}):
            fd = os.open(space, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            _lock(fd, space)
        yield


def _lock(fd: int, space: str) -> None:
    limit_s = time.monotonic() + CLAIM_WAIT_S_MAX
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() > limit_s:
            raise PoolError(
                f"another server has been claiming a directory in {space} for "
                f"{CLAIM_WAIT_S_MAX:.0f} s: its storage hangs, or it was stopped; end it first"
            )
        time.sleep(_POLL_S)


def held_by_another(directory: Path, engine: str, rank: int, silence: Silence) -> bool:
    """Whether ranks of another engine live in `directory`, apart from `rank`'s, which is locked.

    Raises:
        OSError: a lock file cannot be read.
        PoolLockedError: they live on another host.
        UnsettledError: `silence` cannot tell yet whether they do.
    """
    if read_owner(directory) == engine:
        return False
    for sibling in sorted(directory.glob("rank-*")):
        if sibling.name == f"rank-{rank}":
            continue
        state = probe_lock(sibling)
        path, holder = sibling / "lock", state.holder
        if state.kind == "old" and holder is not None and silence.is_dead(path, holder):
            continue
        if not state.live and state.kind != "old":
            continue
        if holder is not None and not holder.shares_kernel_with(Holder.myself()):
            raise foreign_holder_error(path, holder, state.heartbeat_age_s or 0.0)
        return True
    return False


def bytes_of_pools(targets: Sequence[Path]) -> int:
    """Bytes on `targets` that rank directories occupy. No other file there is looked at.

    Raises:
        PoolError: a directory cannot be listed.
    """
    return sum(disk_bytes(one.path) for one in find([x for x in targets if x.is_dir()]))


def bytes_of_others(targets: Sequence[Path], server: str = "") -> int:
    """Bytes on `targets` that belong to engines that live, but to none of `server`'s.

    server: what the names of its engines have before the slash.

    Raises:
        PoolError: a directory cannot be listed.
        OSError: a lock file cannot be read.
    """
    return sum(
        disk_bytes(one.path)
        for one in find([target for target in targets if target.is_dir()])
        if probe_lock(one.path).live
        and not (server and read_owner(one.path.parent).partition("/")[0] == server)
    )


def read_owner(directory: Path) -> str:
    """The engine that was the last to claim `directory`; "": none that has a name."""
    try:
        with (directory / OWNER_FILE).open("rb") as file:
            return file.read(_OWNER_BYTES).decode(errors="replace").strip("\0 ")
    except OSError:
        return ""


def write_owner(directory: Path, engine: str) -> None:
    """Name the engine that has claimed `directory`, in place: a full disk has room for that.

    Raises:
        OSError: it cannot be written.
    """
    fd = open_private(directory / OWNER_FILE, os.O_WRONLY)
    try:
        os.pwrite(fd, engine.encode()[:_OWNER_BYTES].ljust(_OWNER_BYTES), 0)
    finally:
        os.close(fd)
