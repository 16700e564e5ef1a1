# SPDX-License-Identifier: Apache-2.0
"""The devices under a target: mount, block devices, NVMe namespaces, subsystems, controllers.

None means unknown: the kernel does not show the value, or shows nonsense. An unknown value is
never replaced by a likely one. Attributes have the kernel's names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LIVE = "live"
OPTIMIZED = "optimized"
#: State of a controller that has no directory in sysfs any more.
ABSENT = "absent"
#: A timeout that sysfs shows as "off"; with `ctrl_loss_tmo` off, reconnecting never ends.
OFF = -1


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. options: of the mount; super_options: of the file system.

    device: "major:minor"; major 0 if there is no single block device.
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
    """Limits of a block device. dma_alignment: a mask (3: addresses are multiples of 4)."""

    logical_block_bytes: int | None = None
    max_hw_sectors_kb: int | None = None
    max_sectors_kb: int | None = None
    dma_alignment: int | None = None


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """One device of a stack. kind: disk, partition, dm, md or loop; path: its sysfs directory.

    over: names of the devices directly below it.
    """

    name: str
    kind: str
    path: str
    size_bytes: int | None
    limits: QueueLimits
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PcieLink:
    """A PCIe link. Speeds are in GT/s per lane, widths in lanes."""

    address: str
    speed: float | None
    speed_max: float | None
    width: int | None
    width_max: int | None
    numa_node: int | None

    @property
    def is_slow(self) -> bool:
        """Known to run at a lower speed than it can."""
        return self.speed is not None and self.speed < (self.speed_max or 0)

    @property
    def is_narrow(self) -> bool:
        """Known to run on fewer lanes than it can."""
        return self.width is not None and self.width < (self.width_max or 0)

    @property
    def current(self) -> str:
        """Speed and width now, such as `32 GT/s x16`."""
        return _shape(self.speed, self.width)

    @property
    def maximum(self) -> str:
        return _shape(self.speed_max, self.width_max)


def _shape(speed: float | None, width: int | None) -> str:
    lanes = "?" if width is None else width
    return f"{'unknown' if speed is None else f'{speed:g}'} GT/s x{lanes}"


@dataclass(frozen=True, slots=True)
class Controller:
    """One controller. Times are in seconds, or `OFF`.

    state: live, connecting, resetting, deleting, dead or new. sqsize: the kernel's number, which
    is one less than the entries. tls, dhchap: "on" or "off"; of a secret only its presence is
    read.
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
        """The address for people."""
        port = f":{self.trsvcid}" if self.trsvcid else ""
        return f"{self.traddr}{port}" if self.traddr else "address unknown"


@dataclass(frozen=True, slots=True)
class Path:
    """A path from this host to a namespace. path: its sysfs directory, with the ANA state.

    ana_state: optimized, non-optimized, inaccessible, persistent-loss or change; a target
    without ANA shows none.
    """

    name: str
    controller: str
    path: str
    ana_state: str | None
    ana_group: int | None


@dataclass(frozen=True, slots=True)
class Subsystem:
    """An NVMe subsystem. controllers: all of this host's, also those without a path now.

    iopolicy: numa, round-robin or queue-depth; None without native multipath.
    """

    name: str | None
    nqn: str | None
    iopolicy: str | None
    model: str | None
    serial: str | None
    controllers: tuple[Controller, ...]


@dataclass(frozen=True, slots=True)
class Namespace:
    """An NVMe namespace. device: such as nvme0n1. multipath: the device joins all its paths."""

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
    """The fabric of one target. devices: from the mounted one down; namespaces: at their end.

    device_gone: the mounted block device has disappeared; its file system is dead until it is
    unmounted and mounted again. sysfs: the root that was read.
    """

    target: str
    mount: Mount | None
    devices: tuple[BlockDevice, ...]
    namespaces: tuple[Namespace, ...]
    device_gone: bool = False
    sysfs: str = "/sys"

    @property
    def over_fabric(self) -> bool:
        """Whether any controller is reached over a fabric."""
        return any(one.over_fabric for one in self.controllers)

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """All controllers, each once; several namespaces may share one."""
        found = {one.name: one for each in self.namespaces for one in each.subsystem.controllers}
        return tuple(found.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ControllerState:
    """A controller's state that changes: `Controller.state` or `ABSENT`; ana: by path name."""

    state: str | None
    ana: dict[str, str | None]

    @property
    def carries_io(self) -> bool:
        """Whether nothing shows that it is not live or has no open path; unknown shows nothing."""
        open_states = (None, OPTIMIZED, "non-optimized")
        return self.state in (LIVE, None) and (
            not self.ana or any(one in open_states for one in self.ana.values())
        )

    @property
    def is_best(self) -> bool:
        """Whether it is live and every path with a known state is optimized."""
        return self.state == LIVE and all(one in (None, OPTIMIZED) for one in self.ana.values())
