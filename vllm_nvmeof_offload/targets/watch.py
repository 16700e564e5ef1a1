# SPDX-License-Identifier: Apache-2.0
"""What sysfs shows of one target's device and controllers, again and again, at little cost."""

from __future__ import annotations

import os

from vllm_nvmeof_offload.fabric.discover import discover, read_states
from vllm_nvmeof_offload.fabric.mounts import MOUNTINFO
from vllm_nvmeof_offload.fabric.topology import ABSENT, TargetFabric
from vllm_nvmeof_offload.targets.health import PathStates

__all__ = ["TargetWatch"]


class TargetWatch:
    """Of the file system that is mounted at `target` when it is first asked, or after `renew`.

    What is mounted over it later is not what the server has open, and says nothing of it.
    """

    def __init__(self, target: str, sysfs: str = "/sys", mountinfo: str = MOUNTINFO) -> None:
        """target: absolute, without links."""
        self.target = target
        self._sysfs = sysfs
        self._mountinfo = mountinfo
        self._attachment = 0
        self._fabric: TargetFabric | None = None
        self._fabric_of = 0  # the attachment that it is of
        self._most = 0  # controllers that were there at a time
        self._device = ""  # its directory in sysfs; "": there is none to watch

    def renew(self) -> None:
        """Another file system serves from now on. On any thread; the rest is the watcher's."""
        self._attachment += 1

    def states(self) -> PathStates:
        fabric, attachment = self._fabric, self._attachment
        if fabric is None or self._fabric_of != attachment:
            fabric = self._fabric = discover(self.target, self._sysfs, self._mountinfo)
            self._fabric_of, self._most = attachment, 0
            self._device = self._device_of(fabric)
        states = read_states(fabric)
        if any(one.state == ABSENT for one in states.values()):
            # Reconnected, controllers have other names.
            again = discover(self.target, self._sysfs, self._mountinfo)
            if again.mount == fabric.mount and again.namespaces:
                self._fabric = again
                states = read_states(again)
        # One that is lost is removed after ctrl_loss_tmo: its path is missing all the same.
        self._most = max(self._most, len(states))
        return PathStates(
            known=self._most,
            carrying=sum(one.carries_io for one in states.values()),
            best=sum(one.at_its_best for one in states.values()),
            device=not self._device or os.path.isdir(self._device),
            attachment=attachment,
        )

    def _device_of(self, fabric: TargetFabric) -> str:
        if fabric.mount is None:
            return ""
        place = os.path.join(self._sysfs, "dev/block", fabric.mount.device)
        return place if os.path.isdir(place) else ""
