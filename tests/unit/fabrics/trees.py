# SPDX-License-Identifier: Apache-2.0
"""Builds trees like /sys and files like /proc's, with links as the kernel lays them."""

from __future__ import annotations

from pathlib import Path

from vllm_nvmeof_offload.fabric import TargetFabric, discover

NQN = "nqn.2026-01.test:pool"
UUID = "11111111-2222-3333-4444-555555555555"
#: The sysfs files of a connected nvme-tcp controller on Linux 6.1 with default timeouts.
TCP = {
    "transport": "tcp",
    "state": "live",
    "subsysnqn": NQN,
    "hostnqn": "nqn.2014-08.org.nvmexpress:uuid:aaaa",
    "model": "KV pool   ",
    "serial": "S1",
    "queue_count": "9",
    "sqsize": "127",
    "kato": "5",
    "ctrl_loss_tmo": "600",
    "fast_io_fail_tmo": "off",
    "reconnect_delay": "10",
    "numa_node": "-1",
}
LIMITS = {
    "queue/logical_block_size": "512",
    "queue/max_hw_sectors_kb": "2048",
    "queue/max_sectors_kb": "1280",
    "queue/dma_alignment": "3",
}


class Tree:
    """One machine below `root`: sysfs and a mount table."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sysfs = root / "sys"
        self.mountinfo = root / "mountinfo"
        for name in ("class/block", "class/nvme", "class/nvme-subsystem", "class/net", "dev/block"):
            (self.sysfs / name).mkdir(parents=True)
        self.mountinfo.write_text("1 1 0:1 / / rw - rootfs rootfs rw\n")

    def write(self, directory: Path, attributes: dict[str, str]) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in attributes.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(f"{text}\n")
        return directory

    def link(self, name: str, to: Path) -> None:
        path = self.sysfs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(to)

    def block(self, directory: Path, number: str | None, **attributes: str) -> Path:
        """A block device; number None: a hidden one."""
        shown = {"size": "2048", **LIMITS, **attributes}
        self.write(directory, shown)
        self.link(f"class/block/{directory.name}", directory)
        if number:
            self.link(f"dev/block/{number}", directory)
        return directory

    def disk(self, name: str, number: str) -> Path:
        return self.block(self.sysfs / "devices/virtual/block" / name, number)

    def partition(self, disk: Path, number: str) -> Path:
        directory = self.write(disk / f"{disk.name}p1", {"partition": "1", "size": "1024"})
        self.link(f"class/block/{directory.name}", directory)
        self.link(f"dev/block/{number}", directory)
        return directory

    def dm(self, name: str, number: str, over: list[Path], mapped: str = "kv") -> Path:
        directory = self.block(self.sysfs / "devices/virtual/block" / name, number)
        self.write(directory / "dm", {"name": mapped})
        (directory / "slaves").mkdir()
        for below in over:
            (directory / "slaves" / below.name).symlink_to(below)
        return directory

    def controller(self, name: str, **attributes: str) -> Path:
        directory = self.sysfs / "devices/virtual/nvme-fabrics/ctl" / name
        address = f"traddr=10.0.{name[-1]}.2,trsvcid=4420"
        self.write(directory, {**TCP, "address": address, **attributes})
        self.link(f"class/nvme/{name}", directory)
        return directory

    def subsystem(self, controllers: list[Path], **attributes: str) -> Path:
        directory = self.sysfs / "devices/virtual/nvme-subsystem/nvme-subsys0"
        self.write(directory, {"subsysnqn": NQN, "model": "KV pool", "serial": "S1", **attributes})
        for controller in controllers:
            (directory / controller.name).symlink_to(controller)
        self.link("class/nvme-subsystem/nvme-subsys0", directory)
        return directory

    def namespace(self, parent: Path, name: str, number: str) -> Path:
        """Below a subsystem (native multipath) or a controller (without)."""
        directory = self.block(
            parent / name, number, nsid="1", wwid=f"uuid.{UUID}", uuid=UUID, nguid="0" * 32
        )
        (directory / "device").symlink_to(parent)
        return directory

    def path(self, controller: Path, name: str, ana: str | None = "optimized") -> Path:
        shown = {} if ana is None else {"ana_state": ana, "ana_grpid": "1"}
        return self.write(controller / name, shown)

    def nic(self, name: str, speed: str = "25000", **card: str) -> Path:
        """A physical interface, in a PCIe slot with the attributes of `card`."""
        address = f"0000:0{len(list((self.sysfs / 'class/net').iterdir()))}:00.0"
        slot = self.write(self.sysfs / "devices/pci0000:00" / address, card)
        directory = self.write(slot / "net" / name, {"speed": speed})
        (directory / "device").symlink_to(slot)
        self.link(f"class/net/{name}", directory)
        return directory

    def rdma_port(self, device: str, interface: str, *gids: str, state: str = "4: ACTIVE") -> Path:
        """A port with GIDs from index 1 on, each as ADDRESS or ADDRESS/TYPE; 0 is not set."""
        port = self.sysfs / "class/infiniband" / device / "ports/1"
        self.write(port, {"state": state, "gids/0": "0000:0000:0000:0000:0000:0000:0000:0000"})
        (port / "gid_attrs/ndevs").mkdir(parents=True)
        for index, gid in enumerate(gids, 1):
            address, _, kind = gid.partition("/")
            attributes = {f"ndevs/{index}": interface, f"types/{index}": kind or "RoCE v2"}
            self.write(port, {f"gids/{index}": address})
            self.write(port / "gid_attrs", attributes)
        return port

    def nodes(self, *cpulists: str) -> None:
        for number, cpulist in enumerate(cpulists):
            self.write(self.sysfs / f"devices/system/node/node{number}", {"cpulist": cpulist})

    def mount(
        self,
        point: str,
        number: str,
        source: str = "/dev/x",
        options: str = "rw,noatime",
        file_system: str = "xfs",
    ) -> None:
        lines = self.mountinfo.read_text()
        line = f"{lines.count(chr(10)) + 20} 1 {number} / {point} {options} shared:7 - "
        self.mountinfo.write_text(f"{lines}{line}{file_system} {source} {options},attr2\n")

    def discover(self, target: str = "/mnt/kv") -> TargetFabric:
        return discover(target, str(self.sysfs), str(self.mountinfo))


def two_paths(
    tree: Tree, iopolicy: str = "numa", ana: tuple[str | None, str | None] = ("optimized",) * 2
) -> tuple[Path, Path]:
    """NVMe/TCP, native multipath, xfs on the head; returns both controllers."""
    first, second = tree.controller("nvme0", cntlid="1"), tree.controller("nvme1", cntlid="2")
    subsystem = tree.subsystem([first, second], iopolicy=iopolicy)
    tree.namespace(subsystem, "nvme0n1", "259:1")
    tree.path(first, "nvme0c0n1", ana[0])
    tree.path(second, "nvme0c1n1", ana[1])
    tree.mount("/mnt/kv", "259:1", "/dev/nvme0n1")
    return first, second


def one_path(tree: Tree, **attributes: str) -> Path:
    controller = tree.controller("nvme0", **attributes)
    tree.namespace(tree.subsystem([controller], iopolicy="numa"), "nvme0n1", "259:1")
    tree.path(controller, "nvme0c0n1")
    tree.mount("/mnt/kv", "259:1", "/dev/nvme0n1")
    return controller


def without_multipath(tree: Tree) -> Path:
    """A kernel whose nvme_core.multipath is N: nvme0n1 is below its controller."""
    controller = tree.controller("nvme0")
    tree.subsystem([controller])
    tree.namespace(controller, "nvme0n1", "259:1")
    tree.mount("/mnt/kv", "259:1", "/dev/nvme0n1")
    return controller


def local_nvme(tree: Tree, **card: str) -> Path:
    """A PCIe drive; card: attributes of its slot."""
    link = {
        "current_link_speed": "16.0 GT/s PCIe",
        "max_link_speed": "16.0 GT/s PCIe",
        "current_link_width": "4",
        "max_link_width": "4",
        "numa_node": "0",
    }
    slot = tree.write(tree.sysfs / "devices/pci0000:00/0000:01:00.0", {**link, **card})
    controller = tree.write(
        slot / "nvme/nvme0",
        {"transport": "pcie", "state": "live", "address": "0000:01:00.0", "model": "SSD"},
    )
    (controller / "device").symlink_to(slot)
    tree.link("class/nvme/nvme0", controller)
    tree.subsystem([controller])
    tree.namespace(controller, "nvme0n1", "259:1")
    tree.mount("/mnt/kv", "259:1", "/dev/nvme0n1")
    return controller
