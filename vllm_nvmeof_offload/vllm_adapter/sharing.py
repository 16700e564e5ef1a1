# SPDX-License-Identifier: Apache-2.0
"""Access to other servers' chunks through the foreign table.

The follower, a separate process, reads other engines' tables and writes the foreign table, which
the core reads in place. Neither process waits for the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_nvmeof_offload.child import Companion
from vllm_nvmeof_offload.fabric import discover
from vllm_nvmeof_offload.follow.follower import Scope, start_follower
from vllm_nvmeof_offload.manager.handshake import Agreement
from vllm_nvmeof_offload.native import Foreign
from vllm_nvmeof_offload.protocol import RankHello

#: The reason why a server whose weights or hashes cannot be identified shares nothing.
NAMELESS = "its weights or block hashes have no name that other servers know"


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """The settings for sharing. With `one_host`, all ranks run on this host. `group` is the name of
    a group of servers on any hosts; empty to share with this host's servers."""

    one_host: bool = True
    group: str = ""


def why_not(hellos: Sequence[RankHello], agreement: Agreement, settings: ShareSettings) -> str:
    """Return why these ranks cannot share, or an empty string if they can."""
    if not agreement.capacity.pool_slots_total:
        return "there is no pool"
    if not settings.one_host:
        return "its ranks are on several hosts"
    if not agreement.tag:
        return NAMELESS
    for target in hellos[0].targets:
        # The path does not hang, because the ranks have just opened their pools there.
        if not settings.group and discover(os.path.realpath(target)).is_network_file_system:
            return (
                f"{target} may be on a network file system that other hosts use; give the same "
                'group name to all servers that use it, as in share: "team-a"'
            )
    return ""


def start_sharing(hellos: Sequence[RankHello], agreement: Agreement) -> tuple[Foreign, Companion]:
    """Start the follower, and return the table that it updates; `why_not` must be empty. Raises
    OSError if memory or descriptors are exhausted."""
    first = hellos[0]
    fd = os.memfd_create("vllm-nvmeof-foreign", os.MFD_CLOEXEC)
    try:
        targets = tuple(map(Path, first.targets))
        # If ranks share copies, each member of a set has chunks that the others lack.
        ranks = max(agreement.capacity.set_sizes)
        scope = Scope(targets, first.keyspace, first.engine_index, ranks)
        follower = start_follower(scope, fd)  # gives the table its size
        return Foreign(fd), follower
    finally:
        os.close(fd)
