# SPDX-License-Identifier: Apache-2.0
"""What a target stands on: mount, block devices, NVMe namespaces, subsystems, controllers, paths.

None is "unknown": the kernel does not show it, or what it shows makes no sense. Nothing
unknown is ever replaced by a likely value. Names of attributes are the kernel's; a number
that sysfs gives as "off" is `OFF`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "ABSENT",
    "LIVE",
    "OFF",
    "OPTIMIZED",
    "BlockDevice",
    "Controller",
    "ControllerState",
    "Mount",
    "Namespace",
    "Path",
    "PcieLink",
    "QueueLimits",
    "Subsystem",
    "TargetFabric",
]

LIVE = "live"
OPTIMIZED = "optimized"
#: State of a controller whose directory in sysfs is gone.
ABSENT = "absent"
#: A timeout that is switched off: for `ctrl_loss_tmo`, reconnecting never ends.
OFF = -1


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. options: of the mount; super_options: of the file system.

    device: "major:minor"; major 0 where no single block device is behind it.
    """

    mount_id: int
    parent_id: int
    device: str
    root: str
    point: str
    options: tuple[str, ...]
    file_system: str
    source: str
    super_options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """A block device's limits; dma_alignment is a mask (3: addresses are multiples of 4)."""

    logical_block_bytes: int | None = None
    max_hw_sectors_kb: int | None = None
    max_sectors_kb: int | None = None
    dma_alignment: int | None = None


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """One device of a stack. kind: disk, partition, dm, md or loop; over: what it lies on.

    path: its directory in sysfs, absolute below the root that was given.
    """

    name: str
    kind: str
    path: str
    size_bytes: int | None
    limits: QueueLimits
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PcieLink:
    """Speeds in GT/s a lane, widths in lanes."""

    address: str
    speed: float | None
    speed_max: float | None
    width: int | None
    width_max: int | None
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Controller:
    """One controller. Times are in seconds, `OFF` where switched off.

    state: live, connecting, resetting, deleting, dead, new. sqsize: as the kernel gives it,
    which is one less than the entries. tls, dhchap: "on", "off", None is unknown; a secret is
    never read further than whether it is there.
    """

    name: str
    transport: str | None
    traddr: str | None
    trsvcid: str | None
    host_traddr: str | None
    host_iface: str | None
    src_addr: str | None
    state: str | None
    cntlid: int | None
    hostnqn: str | None
    queue_count: int | None
    sqsize: int | None
    kato: int | None
    ctrl_loss_tmo: int | None
    fast_io_fail_tmo: int | None
    reconnect_delay: int | None
    numa_node: int | None
    tls: str | None
    dhchap: str | None
    pcie: PcieLink | None = None

    @property
    def over_fabric(self) -> bool:
        return self.transport not in (None, "pcie", "apple-nvme")

    @property
    def address(self) -> str:
        """For people: where this controller is."""
        port = f":{self.trsvcid}" if self.trsvcid else ""
        return f"{self.traddr}{port}" if self.traddr else "address unknown"


@dataclass(frozen=True, slots=True)
class Path:
    """A way from this host to a namespace. path: its directory in sysfs, which has ANA's state.

    ana_state: optimized, non-optimized, inaccessible, persistent-loss, change; None: unknown
    (a target without ANA shows none).
    """

    name: str
    controller: str
    path: str
    ana_state: str | None
    ana_group: int | None


@dataclass(frozen=True, slots=True)
class Subsystem:
    """controllers: all that this host has to the subsystem, also those without a path now.

    iopolicy: numa, round-robin, queue-depth; None where the kernel has no native multipath.
    """

    name: str | None
    nqn: str | None
    iopolicy: str | None
    model: str | None
    serial: str | None
    controllers: tuple[Controller, ...]


@dataclass(frozen=True, slots=True)
class Namespace:
    """device: such as nvme0n1. multipath: the kernel joins its paths into this one device."""

    device: str
    nsid: int | None
    wwid: str | None
    uuid: str | None
    nguid: str | None
    size_bytes: int | None
    limits: QueueLimits
    multipath: bool
    subsystem: Subsystem
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class TargetFabric:
    """All of one target. devices: from the mounted one down; namespaces: what those end in.

    device_gone: the mounted block device is no more; the file system above it is dead until it
    is unmounted, and mounted again. sysfs: the root that it was read from.
    """

    target: str
    mount: Mount | None
    devices: tuple[BlockDevice, ...]
    namespaces: tuple[Namespace, ...]
    device_gone: bool = False
    sysfs: str = "/sys"

    @property
    def over_fabric(self) -> bool:
        """Does anything of it lie behind NVMe-over-Fabrics?"""
        return any(one.over_fabric for one in self.controllers)

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """Each once, though several namespaces may share one."""
        found = {one.name: one for each in self.namespaces for one in each.subsystem.controllers}
        return tuple(found.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ControllerState:
    """What changes: state as in `Controller`, or `ABSENT`; ana: by the path's name."""

    state: str | None
    ana: dict[str, str | None]

    @property
    def carries_io(self) -> bool:
        """Nothing says that it is not live or its paths are closed; unknown is neither."""
        open_states = (None, OPTIMIZED, "non-optimized")
        return self.state in (LIVE, None) and (
            not self.ana or any(one in open_states for one in self.ana.values())
        )

    @property
    def at_its_best(self) -> bool:
        """Live, and no path of it says anything but optimized."""
        return self.state == LIVE and all(one in (None, OPTIMIZED) for one in self.ana.values())
