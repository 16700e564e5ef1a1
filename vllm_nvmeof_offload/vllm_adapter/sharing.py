# SPDX-License-Identifier: Apache-2.0
"""Chunks of other servers: the foreign table's memory, its follower, and the core's access.

The follower is a separate process that reads other engines' tables and writes the foreign table.
The core reads the table in place. Neither ever waits for the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_nvmeof_offload.fabric.topology import discover
from vllm_nvmeof_offload.follow.follower import start_follower
from vllm_nvmeof_offload.manager.handshake import Agreement
from vllm_nvmeof_offload.native import Foreign
from vllm_nvmeof_offload.protocol import RankHello

#: The reason if a server starts with weights or hashes that its keyspace does not name.
NAMELESS = "its weights or block hashes have no name that other servers know"


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """The settings for sharing. `one_host`: all ranks run on this host. `group` has servers on any
    hosts; empty for those of this host."""

    one_host: bool = True
    group: str = ""


def why_not(hellos: Sequence[RankHello], agreement: Agreement, settings: ShareSettings) -> str:
    """Return why these ranks cannot share, for display; empty if they can."""
    if not agreement.capacity.pool_slots_total:
        return "there is no pool"
    if not settings.one_host:
        return "its ranks are on several hosts"
    if not agreement.tag:
        return NAMELESS
    for target in hellos[0].targets:
        # The ranks have just opened their pools there, so no path hangs.
        if not settings.group and discover(os.path.realpath(target)).is_network_file_system:
            return (
                f"{target} is on a network file system, or on one that may be: other hosts may use "
                'it too; give the servers that use it one name, as in share: "team-a"'
            )
    return ""


class Sharing:
    """A foreign table and the follower that keeps it; `stop` ends the follower."""

    def __init__(
        self, hellos: Sequence[RankHello], agreement: Agreement, settings: ShareSettings
    ) -> None:
        """Requires that `why_not` has no reason. OSError: no memory, or no descriptor."""
        first = hellos[0]
        fd = os.memfd_create("vllm-nvmeof-foreign", os.MFD_CLOEXEC)
        try:
            self._follower = start_follower(
                [Path(target) for target in first.targets],
                first.keyspace,
                first.engine_index,
                # If ranks share copies, each member of a set has some that no other has.
                max(agreement.capacity.set_sizes),
                fd,
            )
            self.foreign = Foreign(fd)
        finally:
            os.close(fd)

    def stop(self) -> None:
        """End the follower. May be called again."""
        self._follower.stop()
