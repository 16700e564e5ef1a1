# SPDX-License-Identifier: Apache-2.0
"""Holders of a lock that were killed and are not gone yet.

A flock ends with the last thread of its process, and a thread that waits in the kernel for a
slow device outlives SIGKILL until the device has answered. A supervisor starts the next server
at once: it is to find the pool of the one that died, and not to take another directory, empty,
on a disk that may be full.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.pool.lock import Holder, read_holder

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ENDING_WAIT_S_MAX", "ending_holder", "is_ending"]

#: For how long a claim waits for them; the device may never answer.
ENDING_WAIT_S_MAX = 30.0
_PROC = Path("/proc")
_SIGKILL_BIT = 1 << 8


def ending_holder(engines: Sequence[Path]) -> Path | None:
    """Return a rank directory below `engines` whose holder is ending; None if there is none.

    Ask it of directories that are held: a name that a dead process left behind says nothing.
    """
    me = Holder.myself()
    for rank in (rank for engine in engines for rank in sorted(engine.glob("rank-*"))):
        holder = read_holder(rank / "lock")
        if holder is not None and holder.shares_kernel_with(me) and is_ending(holder.pid):
            return rank
    return None


def is_ending(pid: int, proc: Path = _PROC) -> bool:
    """Whether process `pid` has been killed, or its first thread has ended, and it is there yet.

    In a container it may be the number of another process than was meant; then a claim waits
    once, and goes on.
    """
    try:
        # The name of a process is bytes, whatever they are.
        status = (proc / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if facts.get("State", "").strip()[:1] in ("Z", "X"):
        return True
    pending = int(facts.get("SigPnd", "0"), 16) | int(facts.get("ShdPnd", "0"), 16)
    return bool(pending & _SIGKILL_BIT)
