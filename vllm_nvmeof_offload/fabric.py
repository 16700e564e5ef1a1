# SPDX-License-Identifier: Apache-2.0
"""A read-only inventory of this machine and of the fabric under its targets; findings of checks.

The devices under a target are the mount, block devices, NVMe namespaces, subsystems and
controllers. They are discovered only from sysfs and the mount table. Nothing here opens, stats or
resolves the target itself, because the call might never return on a hung mount. A target is
therefore given as an absolute path without symbolic links.

None means unknown: the kernel shows no value or a nonsensical one, or the device was removed during
the read. Fields are named after the kernel's attributes.

With native multipath, nvme0n1 is a head below the subsystem, and each path is a hidden device below
its controller: nvme0c1n1 is the path of head nvme0n1 through controller nvme1. Without native
multipath, nvme1n1 is below controller nvme1 and is the only path.

A RoCE port has a GID for each address of its network interface. A connection uses the GID of its
own address, whose type decides which packets carry the connection.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_nvmeof_offload.mounts import MOUNTINFO, Mount, mount_of, read_mounts

# -- findings -----------------------------------------------------------------------------

HOST = "host"


class Severity(enum.IntEnum):
    """The severities. A command exits with the worst one that it found."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `check` is the check's stable name. `subject` is a target's path,
    "GPU 0" or `HOST`. `evidence` gives the numbers and names found. `remedy` is empty if there is
    nothing to do."""

    check: str
    subject: str
    severity: Severity
    evidence: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.name.lower()}


def ok(check: str, evidence: str, remedy: str = "", subject: str = HOST) -> Finding:
    return Finding(check, subject, Severity.OK, evidence, remedy)


def warning(check: str, evidence: str, remedy: str, subject: str = HOST) -> Finding:
    return Finding(check, subject, Severity.WARNING, evidence, remedy)


def error(check: str, evidence: str, remedy: str = "") -> Finding:
    return Finding(check, HOST, Severity.ERROR, evidence, remedy)


def worst(findings: Sequence[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)


# -- devices under a target ---------------------------------------------------------------

LIVE = "live"
OPTIMIZED = "optimized"
#: ANA states in which I/O is possible; None is an unknown state.
OPEN = (None, OPTIMIZED, "non-optimized")
#: The state of a controller whose directory has disappeared from sysfs.
ABSENT = "absent"
#: A timeout that sysfs shows as "off". With `ctrl_loss_tmo` off, the kernel reconnects forever.
OFF = -1


#: Single-host file systems without a block device's number: in-memory file systems, those that span
#: devices, and overlay.
_LOCAL_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "rootfs", "btrfs", "bcachefs", "zfs", "overlay"})
#: File systems that several hosts can mount from one block device.
_CLUSTER_FILE_SYSTEMS = frozenset({"gfs2", "ocfs2"})


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of a block device. `dma_alignment` is a mask (3: addresses are multiples of 4)."""

    logical_block_bytes: int | None = None
    max_hw_sectors_kb: int | None = None
    max_sectors_kb: int | None = None
    dma_alignment: int | None = None


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A block device in a stack. `kind` is disk, partition, dm, md or loop. `path` is its sysfs
    directory. `over` names the devices directly below."""

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
        return self.speed is not None and self.speed < (self.speed_max or 0)

    @property
    def is_narrow(self) -> bool:
        return self.width is not None and self.width < (self.width_max or 0)

    @property
    def current(self) -> str:
        """Return speed and width, such as `32 GT/s x16`."""
        return _shape(self.speed, self.width)

    @property
    def maximum(self) -> str:
        return _shape(self.speed_max, self.width_max)


def _shape(speed: float | None, width: int | None) -> str:
    lanes = "?" if width is None else width
    return f"{'unknown' if speed is None else f'{speed:g}'} GT/s x{lanes}"


@dataclass(frozen=True, slots=True)
class Controller:
    """An NVMe controller. Times are in seconds, or `OFF`.

    `state` is live, connecting, resetting, deleting, dead or new. `sqsize` is one less than the
    number of entries. `tls` and `dhchap` are "on" or "off"; no secret is stored.
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
        port = f":{self.trsvcid}" if self.trsvcid else ""
        return f"{self.traddr}{port}" if self.traddr else "address unknown"


@dataclass(frozen=True, slots=True)
class Path:
    """A path from this host to a namespace. `path` is its sysfs directory. `ana_state` is
    optimized, non-optimized, inaccessible, persistent-loss or change; None if the target does not
    use ANA."""

    name: str
    controller: str
    path: str
    ana_state: str | None
    ana_group: int | None


@dataclass(frozen=True, slots=True)
class Subsystem:
    """An NVMe subsystem. `controllers` are all of this host's, even those without a path now.
    `iopolicy` is numa, round-robin or queue-depth; None without native multipath."""

    name: str | None
    nqn: str | None
    iopolicy: str | None
    model: str | None
    serial: str | None
    controllers: tuple[Controller, ...]


@dataclass(frozen=True, slots=True)
class Namespace:
    """An NVMe namespace. `device`, such as nvme0n1, combines all paths if `multipath`."""

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
    """The fabric under one target: `devices` from the mounted one down, and the `namespaces` at the
    bottom. With `device_gone` the mounted block device has disappeared, and its file system fails
    until it is remounted. `sysfs` is the directory that was read."""

    target: str
    mount: Mount | None
    devices: tuple[BlockDevice, ...]
    namespaces: tuple[Namespace, ...]
    device_gone: bool = False
    sysfs: str = "/sys"

    @property
    def over_fabric(self) -> bool:
        return any(one.over_fabric for one in self.controllers)

    @property
    def is_remote(self) -> bool | None:
        """Return whether the data is on another machine; None if unknown."""
        if self.namespaces:
            return self.over_fabric
        if self.devices:
            return False
        kind = self.mount.file_system if self.mount else ""
        if self.is_network_file_system:
            return None if not kind or kind.startswith("fuse") else True
        return False if kind == "tmpfs" else None

    @property
    def is_network_file_system(self) -> bool:
        """Return whether other hosts may also mount the file system, with separate page caches:
        True unless a block device of this host or the file system's type rules it out."""
        if self.mount is None:
            return True
        if self.mount.device.startswith("0:"):
            return self.mount.file_system not in _LOCAL_FILE_SYSTEMS
        return self.mount.file_system in _CLUSTER_FILE_SYSTEMS

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """Return all controllers, each once, even if several namespaces share it."""
        found = {one.name: one for each in self.namespaces for one in each.subsystem.controllers}
        return tuple(found.values())


@dataclass(frozen=True, slots=True)
class ControllerState:
    """A controller's current state: `Controller.state` or `ABSENT`, and ANA states by path name."""

    state: str | None
    ana: dict[str, str | None]

    @property
    def carries_io(self) -> bool:
        """Return False if the controller is known not to be live or to have no usable path."""
        return self.state in (LIVE, None) and (
            not self.ana or any(one in OPEN for one in self.ana.values())
        )

    @property
    def is_best(self) -> bool:
        """Return whether the controller is live and all known paths are optimized."""
        return self.state == LIVE and all(one in (None, OPTIMIZED) for one in self.ana.values())


_BYTES_MAX = 4096
_PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_NUMBER = re.compile(r"^[0-9]{1,20}$")
_DECIMAL = re.compile(r"^[0-9]{1,6}(\.[0-9]{1,6})?")


def read_text(*parts: str) -> str | None:
    """Read an attribute and strip it. Return None if it is absent, unreadable or empty."""
    return _read(*parts) or None


def _read(*parts: str) -> str | None:
    try:
        fd = os.open(os.path.join(*parts), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            raw = os.read(fd, _BYTES_MAX)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
    text = raw.decode("utf-8", errors="replace").strip().strip("\0")
    return text if text.isprintable() else None


def read_number(*parts: str) -> int | None:
    """Read a decimal number. A negative number, which means "none" in sysfs, counts as unknown."""
    text = read_text(*parts) or ""
    return int(text) if _NUMBER.match(text) else None


def _read_timeout(*parts: str) -> int | None:
    return OFF if read_text(*parts) in ("off", "-1") else read_number(*parts)


def children(*parts: str) -> list[str]:
    """List a directory in natural order (nvme2 before nvme10); empty if it cannot be read."""
    try:
        return sorted(os.listdir(os.path.join(*parts)), key=_natural)
    except (OSError, ValueError):
        return []


def _natural(name: str) -> list[tuple[str, int]]:
    parts = re.findall(r"([^0-9]*)([0-9]*)", name)
    return [(text, int(number or -1)) for text, number in parts]


def _resolve(*parts: str) -> str | None:
    try:
        return os.path.realpath(os.path.join(*parts), strict=True)
    except (OSError, ValueError):
        return None


def read_pcie_link(device: str) -> PcieLink | None:
    """Read a device's PCIe link, incomplete for a virtual device; None if there is none."""
    path = _resolve(device)
    if path is None or not _PCI_ADDRESS.match(os.path.basename(path)):
        return None
    width_max = read_number(path, "max_link_width")
    return PcieLink(
        address=os.path.basename(path),
        speed=_speed(path, "current_link_speed"),
        speed_max=_speed(path, "max_link_speed"),
        width=read_number(path, "current_link_width") or None,
        # sysfs shows 255 for a device without a link.
        width_max=width_max if width_max and width_max <= 32 else None,
        numa_node=read_number(path, "numa_node"),
    )


def _speed(*parts: str) -> float | None:
    """Parse a speed such as "16.0 GT/s PCIe"."""
    match = _DECIMAL.match(read_text(*parts) or "")
    return float(match.group()) if match else None


_SECTOR_BYTES = 512  # the unit of `size`, whatever the size of a logical block
_DEVICES_MAX = 256


def device_of_mount(mount: Mount, sysfs: str) -> str | None:
    """Return the sysfs directory of the mounted block device; None if there is none. btrfs and
    similar file systems have separate device numbers, but the mount's source names the device."""
    if not mount.device.startswith("0:"):
        return _resolve(sysfs, "dev/block", mount.device)
    if not mount.source.startswith("/dev/"):
        return None
    name = os.path.basename(mount.source)
    if mount.source.startswith("/dev/mapper/"):
        blocks = os.path.join(sysfs, "class/block")
        for device in children(blocks):
            if device.startswith("dm-") and read_text(blocks, device, "dm/name") == name:
                return _resolve(blocks, device)
    return _resolve(sysfs, "class/block", name)


def block_stack(top: str) -> tuple[BlockDevice, ...]:
    """Return `top` (a sysfs directory) and all devices under it, from the top down."""
    found: dict[str, BlockDevice] = {}
    waiting = [top]
    while waiting and len(found) < _DEVICES_MAX:
        path = waiting.pop(0)
        if path not in found:
            found[path], below = _read_device(path)
            waiting += below
    return tuple(found.values())


def _read_device(path: str) -> tuple[BlockDevice, list[str]]:
    name, disk = os.path.basename(path), path
    match = re.match(r"(dm|md|loop)-?[0-9]", name)
    kind = match.group(1) if match else "disk"
    below = list(filter(None, (_resolve(path, "slaves", one) for one in children(path, "slaves"))))
    if os.path.exists(os.path.join(path, "partition")):
        kind, disk = "partition", os.path.dirname(path)
        below = [disk]
    sectors = read_number(path, "size")
    limits = QueueLimits(
        logical_block_bytes=read_number(disk, "queue/logical_block_size"),
        max_hw_sectors_kb=read_number(disk, "queue/max_hw_sectors_kb"),
        max_sectors_kb=read_number(disk, "queue/max_sectors_kb"),
        dma_alignment=read_number(disk, "queue/dma_alignment"),
    )
    size = None if sectors is None else sectors * _SECTOR_BYTES
    return BlockDevice(name, kind, path, size, limits, tuple(map(os.path.basename, below))), below


_HEAD = re.compile(r"^nvme([0-9]+)n([0-9]+)$")
_PATH = re.compile(r"^nvme([0-9]+)c[0-9]+n([0-9]+)$")
_CONTROLLER = re.compile(r"^nvme[0-9]+$")
_NONE = re.compile(r"^[0-]*$")  # an identifier of only zeros counts as none
#: The fields of `Controller` that are named after sysfs attributes.
_ADDRESSES = ("traddr", "trsvcid", "host_traddr", "host_iface", "src_addr")
_TEXTS = ("transport", "state", "hostnqn")
_NUMBERS = ("cntlid", "queue_count", "sqsize", "kato", "numa_node")
_TIMEOUTS = ("ctrl_loss_tmo", "fast_io_fail_tmo", "reconnect_delay")


def namespace_at(device: BlockDevice, sysfs: str) -> Namespace | None:
    """Read the NVMe namespace behind this block device; None if it is a different device."""
    path, name = device.path, device.name
    if not _HEAD.match(name):
        return None
    parent = _resolve(path, "device") or os.path.dirname(path)
    single = _CONTROLLER.match(os.path.basename(parent)) is not None
    if single:
        subsystem = _subsystem(_subsystem_of(os.path.basename(parent), sysfs), [parent])
        paths = [_path(path, os.path.basename(parent))]
    else:
        controllers = _controllers_of(parent, sysfs)
        subsystem = _subsystem(parent, controllers)
        paths = [one for directory in controllers for one in _paths(directory, name)]
    found = (read_text(path, "uuid"), read_text(path, "nguid"))
    uuid, nguid = (one if one and not _NONE.match(one) else None for one in found)
    return Namespace(
        device=name,
        nsid=read_number(path, "nsid"),
        wwid=read_text(path, "wwid"),
        uuid=uuid,
        nguid=nguid,
        size_bytes=device.size_bytes,
        limits=device.limits,
        multipath=not single,
        subsystem=subsystem,
        paths=tuple(paths),
    )


def _subsystem_of(controller: str, sysfs: str) -> str | None:
    directory = os.path.join(sysfs, "class/nvme-subsystem")
    names = (name for name in children(directory) if controller in children(directory, name))
    return next((_resolve(directory, name) for name in names), None)


def _controllers_of(subsystem: str, sysfs: str) -> list[str]:
    names = [name for name in children(subsystem) if _CONTROLLER.match(name)]
    found = (_resolve(subsystem, name) or _resolve(sysfs, "class/nvme", name) for name in names)
    return list(filter(None, found))


def _paths(controller: str, head: str) -> list[Path]:
    """Return the path of `head` through a controller, if there is one."""
    return [
        _path(os.path.join(controller, name), os.path.basename(controller))
        for name in children(controller)
        if _PATH.match(name) and _PATH.sub(r"nvme\1n\2", name) == head
    ]


def _path(directory: str, controller: str) -> Path:
    return Path(
        name=os.path.basename(directory),
        controller=controller,
        path=directory,
        ana_state=read_text(directory, "ana_state"),
        ana_group=read_number(directory, "ana_grpid"),
    )


def _subsystem(directory: str | None, controllers: list[str]) -> Subsystem:
    """Read a subsystem. If its directory is unknown, most fields are read from a controller."""
    places = [*([directory] if directory else []), *controllers]

    def first(attribute: str) -> str | None:
        return next(filter(None, (read_text(place, attribute) for place in places)), None)

    return Subsystem(
        name=os.path.basename(directory) if directory else None,
        nqn=first("subsysnqn"),
        iopolicy=read_text(directory, "iopolicy") if directory else None,
        model=first("model"),
        serial=first("serial"),
        controllers=tuple(_controller(one) for one in controllers),
    )


def _controller(directory: str) -> Controller:
    where = _address(read_text(directory, "address") or "")
    found: dict[str, Any] = {name: where.get(name) for name in _ADDRESSES}
    found |= {name: read_text(directory, name) for name in _TEXTS}
    found |= {name: read_number(directory, name) for name in _NUMBERS}
    found |= {name: _read_timeout(directory, name) for name in _TIMEOUTS}
    return Controller(
        name=os.path.basename(directory),
        tls=_tls(directory),
        dhchap=_dhchap(directory),
        pcie=read_pcie_link(os.path.join(directory, "device")),
        **found,
    )


def _address(text: str) -> dict[str, str]:
    """Parse "traddr=10.0.0.1,trsvcid=4420,…"; a PCI address has no "="."""
    if "=" not in text:
        return {"traddr": text} if text else {}
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs if value.strip()}


def _tls(directory: str) -> str | None:
    """Return "on" or "off"; None if unknown. With TLS, the kernel shows the key's serial number."""
    key = _read(directory, "tls_key")
    return None if key is None else "off" if _NONE.match(key) else "on"


def _dhchap(directory: str) -> str | None:
    """Read whether there is a secret, without returning the secret."""
    secret = read_text(directory, "dhchap_secret")
    if secret == "none":
        return "off"
    return "on" if secret is not None and secret.startswith("DHHC-1:") else None


def discover(target: str, sysfs: str = "/sys", mountinfo: str = MOUNTINFO) -> TargetFabric:
    """Discover the devices under `target`, an absolute path without links, which need not exist.
    Never raises."""
    mount = mount_of(target, read_mounts(mountinfo))
    top = device_of_mount(mount, sysfs) if mount else None
    devices = block_stack(top) if top else ()
    found = [namespace_at(device, sysfs) for device in devices if not device.over]
    return TargetFabric(
        target=target,
        mount=mount,
        devices=devices,
        namespaces=tuple(one for one in found if one is not None),
        # Without sysfs it is unknown whether the device exists.
        device_gone=mount is not None
        and top is None
        and not mount.device.startswith("0:")
        and os.path.isdir(os.path.join(sysfs, "dev/block")),
        sysfs=sysfs,
    )


def read_states(fabric: TargetFabric) -> dict[str, ControllerState]:
    """Return the current states of the controllers of `fabric`, by name; two reads per path.

    The list of controllers is not updated. Call `discover` again if one is `ABSENT`: after a
    reconnect it can have a different name, even another controller's former name.
    """
    states: dict[str, ControllerState] = {}
    for controller in fabric.controllers:
        directory = os.path.join(fabric.sysfs, "class/nvme", controller.name)
        state = read_text(directory, "state")
        if state is None and not os.path.isdir(directory):
            state = ABSENT
        ana = {
            path.name: read_text(path.path, "ana_state")
            for namespace in fabric.namespaces
            for path in namespace.paths
            if path.controller == controller.name
        }
        states[controller.name] = ControllerState(state, ana)
    return states


def shared_devices(targets: Sequence[str]) -> dict[str, list[str]]:
    """Return the lowest devices, or file systems without a device, that hold several targets, each
    with its targets. The targets need not exist."""
    found: dict[str, list[str]] = {}
    for target in targets:
        fabric = discover(os.path.realpath(target))
        names = [one.name for one in fabric.devices if not one.over]
        if not names and fabric.mount is not None:
            names = [f"{fabric.mount.file_system} at {fabric.mount.point}"]
        for name in names:
            found.setdefault(name, []).append(target)
    return {name: held for name, held in found.items() if len(held) > 1}


# -- RDMA ports -----------------------------------------------------------------------------

ACTIVE = "ACTIVE"
ROCE_V2 = "RoCE v2"
#: The header bytes that the kernel reserves in a RoCE frame, and the sizes that a payload can have.
ROCE_HEADER_BYTES = 96
_PAYLOADS = (4096, 2048, 1024, 512, 256)


@dataclass(frozen=True, slots=True)
class Gid:
    """A GID of a RoCE port. `kind` is `ROCE_V2`, or "IB/RoCE v1" (packets without IP)."""

    index: int
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    kind: str | None
    interface: str


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device. `state` is `ACTIVE`, DOWN, INIT or ARMED. `gids` is empty for an
    InfiniBand port, whose GIDs belong to no network interface."""

    device: str
    number: str
    state: str | None
    gids: tuple[Gid, ...]

    def on(self, interface: str) -> list[Gid]:
        return [gid for gid in self.gids if gid.interface == interface]


def read_rdma_ports(sysfs: str = "/sys") -> list[RdmaPort]:
    found = []
    top = os.path.join(sysfs, "class/infiniband")
    for device in children(top):
        for number in children(top, device, "ports"):
            port = os.path.join(top, device, "ports", number)
            state = (read_text(port, "state") or "").rpartition(" ")[2]  # such as "4: ACTIVE"
            found.append(RdmaPort(device, number, state or None, tuple(_gids(port))))
    return found


def _gids(port: str) -> list[Gid]:
    found = []
    for index in children(port, "gid_attrs/ndevs"):
        interface = read_text(port, "gid_attrs/ndevs", index)  # an error where there is no GID
        raw = read_text(port, "gids", index)
        if interface is None or raw is None:
            continue
        address = ipaddress.IPv6Address(raw)
        kind = read_text(port, "gid_attrs/types", index)
        found.append(Gid(int(index), address.ipv4_mapped or address, kind, interface))
    return found


def roce_payload_bytes(mtu: int) -> int:
    """Return the payload bytes of a RoCE packet on an interface with this Ethernet MTU."""
    fits = [one for one in _PAYLOADS if one + ROCE_HEADER_BYTES <= mtu]
    return fits[0] if fits else 0


# -- this machine -------------------------------------------------------------------------

#: The GT/s per lane of each PCIe generation.
_SPEEDS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0, 7: 128.0}
#: From this performance state on, a GPU is idle, and its link may be slow.
_IDLE_FROM = 3


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `numa_node` is None if it is unknown or there is only one node. `uuid` is 32 hex
    digits. `pcie` has the maxima that both GPU and slot support. With `is_idle` the link may be
    slow to save power. `driver` is the NVIDIA driver's version, such as 580.95.05."""

    index: int
    numa_node: int | None
    name: str = ""
    uuid: str = ""
    pcie: PcieLink | None = None
    is_idle: bool = False
    driver: str = ""


def read_gpus(sysfs: str = "/sys") -> tuple[Gpu, ...]:
    """Return all GPUs; none without `pynvml` or a working driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ()
    with contextlib.suppress(nvml.NVMLError):  # no driver, or a different version
        nvml.nvmlInit()
        try:
            return tuple(_gpu(nvml, index, sysfs) for index in range(nvml.nvmlDeviceGetCount()))
        finally:
            nvml.nvmlShutdown()
    return ()


def _gpu(nvml: Any, index: int, sysfs: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    domain, _, rest = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    # NVML's domain has eight digits, sysfs's four.
    address = f"{os.path.basename(domain)[-4:]}:{os.path.basename(rest)}"
    node = read_number(sysfs, "bus/pci/devices", address, "numa_node")
    state = _query(nvml, "nvmlDeviceGetPerformanceState", handle)
    uuid = _text(_query(nvml, "nvmlDeviceGetUUID", handle))
    link = PcieLink(
        address=address,
        speed=_SPEEDS.get(_query(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle)),
        speed_max=_SPEEDS.get(_query(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        width=_query(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        width_max=_query(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        numa_node=node,
    )
    return Gpu(
        index=index,
        numa_node=node,
        name=_text(_query(nvml, "nvmlDeviceGetName", handle)),
        uuid=uuid.removeprefix("GPU-").replace("-", ""),
        pcie=link,
        is_idle=state is not None and state >= _IDLE_FROM,
        driver=_text(_query(nvml, "nvmlSystemGetDriverVersion")),
    )


def _query(nvml: Any, call: str, *arguments: Any) -> Any:
    """Call NVML. Return None if the GPU, such as a virtual one, does not support the call."""
    with contextlib.suppress(AttributeError, nvml.NVMLError):
        return getattr(nvml, call)(*arguments)


def _text(value: bytes | str | None) -> str:
    return value.decode("ascii", errors="replace") if isinstance(value, bytes) else value or ""


_NODE = re.compile(r"^node([0-9]+)$")
_RANGE = re.compile(r"^([0-9]{1,6})(?:-([0-9]{1,6}))?$")


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine: CPUs by NUMA node, this process's `cpus`, and `kernel`, such as (6, 12)."""

    nodes: dict[int, frozenset[int]]
    cpus: frozenset[int]
    gpus: tuple[Gpu, ...]
    kernel: tuple[int, int]
    release: str

    @property
    def own_nodes(self) -> frozenset[int]:
        return frozenset(node for node, cpus in self.nodes.items() if cpus & self.cpus)


def read_machine(sysfs: str = "/sys") -> Machine:
    """Read this machine. Never raises: unknown facts are empty, and an unknown kernel is (0, 0)."""
    release = os.uname().release
    version = re.match(r"([0-9]+)\.([0-9]+)", release)
    kernel = (int(version.group(1)), int(version.group(2))) if version else (0, 0)
    directory = os.path.join(sysfs, "devices/system/node")
    nodes = {
        int(match.group(1)): parse_cpus(read_text(directory, name, "cpulist"))
        for name in children(directory)
        if (match := _NODE.match(name))
    }
    return Machine(nodes, frozenset(os.sched_getaffinity(0)), read_gpus(sysfs), kernel, release)


def parse_cpus(text: str | None) -> frozenset[int]:
    """Parse a list such as "0-3,8"; skip malformed parts."""
    found: set[int] = set()
    for part in (text or "").split(","):
        match = _RANGE.match(part.strip())
        if match:
            first = int(match.group(1))
            found.update(range(first, int(match.group(2) or first) + 1))
    return frozenset(found)


def judge_gpus(machine: Machine) -> list[Finding]:
    """Check each GPU's link and NUMA node. Unknown facts yield no finding."""
    found = (one for gpu in machine.gpus for one in (_judge_link(gpu), _judge_node(gpu, machine)))
    return [one for one in found if one is not None]


def gpu_warnings(uuid: str) -> tuple[str, ...]:
    """Return warnings about the link and NUMA node of this GPU. `uuid` is 32 hex digits."""
    machine = read_machine()
    machine = replace(machine, gpus=tuple(gpu for gpu in machine.gpus if gpu.uuid == uuid))
    slow = [one for one in judge_gpus(machine) if one.severity is not Severity.OK]
    return tuple(f"{one.subject}: {one.evidence}; {one.remedy}" for one in slow)


def _judge_link(gpu: Gpu) -> Finding | None:
    link, subject = gpu.pcie, f"GPU {gpu.index}"
    if link is None or (link.speed is None and link.width is None):
        return None
    shown = f"{gpu.name or 'it'} runs at {link.current}"
    if not (link.is_slow or link.is_narrow):
        return ok("gpu_link", shown, subject=subject)
    shown += f", but supports {link.maximum}"
    if gpu.is_idle and not link.is_narrow:
        shown += "; it is idle, and its link may be slow to save power"
        return ok("gpu_link", shown, "check again while it computes", subject)
    remedy = (
        f"reseat the GPU or use another slot; lspci -vv -s {link.address} shows LnkCap and LnkSta"
    )
    return warning("gpu_link", shown, remedy, subject)


def _judge_node(gpu: Gpu, machine: Machine) -> Finding | None:
    node, subject = gpu.numa_node, f"GPU {gpu.index}"
    if len(machine.nodes) < 2 or node is None:
        return None
    own = ", ".join(map(str, sorted(machine.own_nodes))) or "none known"
    shown = f"on node {node}; this process may run on node {own}"
    if node in machine.own_nodes:
        return ok("gpu_node", shown, subject=subject)
    remedy = (
        f"use numactl --cpunodebind={node} vllm serve …; pinned memory is on this node in any case"
    )
    return warning("gpu_node", shown, remedy, subject)
