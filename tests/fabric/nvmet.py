# SPDX-License-Identifier: Apache-2.0
"""A real NVMe/TCP or NVMe/RDMA fabric within the guest's one kernel, and the knobs that break it.

Two veth pairs are the two paths to the target. Its namespaces are on device-mapper devices over
RAM disks, so that a test can hang, slow or break the medium. The initiator is the kernel's, with
native multipath. RDMA is soft-RoCE: RoCE v2 packets, made in software, over the same veth pairs.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

NQN = "nqn.2026-11.test.vllm-nvmeof:pool"
HOST_ID = "11111111-2222-3333-4444-555555555555"
HOST_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"
UUIDS = {number: f"00000000-0000-0000-0000-00000000000{number}" for number in (1, 2)}
NVMET = Path("/sys/kernel/config/nvmet")
SUBSYSTEM = NVMET / "subsystems" / NQN
CLASS = Path("/sys/class/nvme")
PATHS = (1, 2)
PORT = 4420
IO_QUEUES = 2
#: Programs that scenarios start.
PROGRAMS = ("dmsetup", "ip", "ln", "mkfs.xfs", "mount", "nsenter", "tc", "umount")
APPEAR_S_MAX = 20.0

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


@dataclass(frozen=True)
class Timeouts:
    """Options of a connection, with the kernel's names, in seconds; None: the kernel's default."""

    ctrl_loss_tmo: int | None = 60
    fast_io_fail_tmo: int | None = None
    keep_alive_tmo: int | None = 2
    reconnect_delay: int | None = 1


def run(*command: str) -> str:
    """Run a program of the guest; return its output.

    There is no time limit: the guest's clock may jump by hours while a file is read from a busy
    outer machine. The outer machine stops a boot that hangs.
    """
    # The guest has no udev, so device mapper makes its own nodes. LC_ALL=C needs no locale files.
    environment = {**os.environ, "DM_DISABLE_UDEV": "1", "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr or done.stdout}"
    return done.stdout


def take_into_memory(*programs: str) -> None:
    """Copy these programs and their libraries into the guest's layer in memory.

    Reading a program from the outer machine takes guest time, more on a busy machine: during a
    scenario its timeouts would pass.
    """
    places = [found for program in programs if (found := shutil.which(program))]
    assert len(places) == len(programs), f"some are missing: {programs}"
    libraries = re.findall(r"(/\S+) \(0x", run("ldd", *places))
    for place in {os.path.realpath(each) for each in (*places, *libraries, "/etc/ld.so.cache")}:
        os.utime(place)  # any change makes overlayfs copy the whole file up


class TcpLinks:
    """Two veth pairs from `near<path>` to `far<path>`, which is in the namespace "target"."""

    def __init__(self) -> None:
        run("ip", "netns", "add", "target")
        for path in PATHS:
            near, far = f"near{path}", f"far{path}"
            run("ip", "link", "add", near, "type", "veth", "peer", far, "netns", "target")
            run("ip", "addr", "add", f"10.99.{path}.1/24", "dev", near)
            run("ip", "link", "set", near, "up")
            run("ip", "-n", "target", "addr", "add", f"10.99.{path}.2/24", "dev", far)
            run("ip", "-n", "target", "link", "set", far, "up")

    #: What runs a command in the target's network.
    in_target: tuple[str, ...] = ("nsenter", "--net=/run/netns/target")

    def cut(self, path: int) -> None:
        set_link(f"near{path}", up=False)

    def mend(self, path: int) -> None:
        set_link(f"near{path}", up=True)


class RdmaLinks:
    """The same pairs with a soft-RoCE device on each end: `rnear<path>` and `rfar<path>`.

    Linux 6.1 sends the packets of each such device from the first network namespace only. So both
    ends are in it, and rules keep packets between them from taking the loopback interface.
    """

    #: Leaves room for an RDMA MTU of 4096.
    MTU = 4200
    in_target: tuple[str, ...] = ()

    def __init__(self) -> None:
        for path in PATHS:
            near, far = f"near{path}", f"far{path}"
            run("ip", "link", "add", near, "type", "veth", "peer", far)
            for name, number, other in ((near, 1, 2), (far, 2, 1)):
                # The source of what arrives is an address of this host, too.
                _put(Path(f"/proc/sys/net/ipv4/conf/{name}/accept_local"), "1")
                run("ip", "rule", "add", "pref", "1", "iif", name, "lookup", "local")
                run("ip", "link", "set", name, "mtu", str(self.MTU), "up")
                ours, theirs = f"10.99.{path}.{number}", f"10.99.{path}.{other}"
                run("ip", "addr", "add", f"{ours}/32", "dev", name)
                run("ip", "route", "add", theirs, "dev", name, "src", ours)
                run("rdma", "link", "add", f"r{name}", "type", "rxe", "netdev", name)
        run("ip", "rule", "add", "pref", "2", "to", "10.99.0.0/16", "lookup", "main")
        run("ip", "rule", "add", "pref", "3", "lookup", "local")
        run("ip", "rule", "del", "pref", "0")

    @staticmethod
    def cut(path: int) -> None:
        for name in (f"near{path}", f"far{path}"):
            run("tc", "qdisc", "replace", "dev", name, "root", "netem", "loss", "100%")

    @staticmethod
    def mend(path: int) -> None:
        for name in (f"near{path}", f"far{path}"):
            with suppress(AssertionError):  # it is not cut
                run("tc", "qdisc", "del", "dev", name, "root")


LINKS: dict[str, type[TcpLinks | RdmaLinks]] = {"tcp": TcpLinks, "rdma": RdmaLinks}


class Fabric:
    """Target and initiator. Namespace n is the disk `disk<n>` over /dev/ram<n - 1>.

    transport: "tcp" or "rdma".
    """

    def __init__(self, transport: str = "tcp") -> None:
        """Set up links, disks, subsystem, namespaces 1 and 2, and one port per path."""
        take_into_memory(*PROGRAMS)
        self.transport, self.links = transport, LINKS[transport]()
        SUBSYSTEM.mkdir()
        _put(SUBSYSTEM / "attr_allow_any_host", "1")
        _put(SUBSYSTEM / "attr_serial", "FABRICTEST")
        for number in (1, 2):
            self.slow_disk(number, 0, create=True)
            self._add_namespace(number)
        for path in PATHS:
            port = NVMET / "ports" / str(path)
            port.mkdir()
            _put(port / "addr_trtype", transport)
            _put(port / "addr_adrfam", "ipv4")
            _put(port / "addr_traddr", address(path))
            _put(port / "addr_trsvcid", str(PORT))
            self.add_port(path)

    # -- the target's side ------------------------------------------------------------

    def _add_namespace(self, number: int) -> None:
        place = SUBSYSTEM / "namespaces" / str(number)
        place.mkdir()
        _put(place / "device_path", f"/dev/mapper/disk{number}")
        _put(place / "device_uuid", UUIDS[number])
        self.enable_namespace(number)

    def enable_namespace(self, number: int, *, on: bool = True) -> None:
        _put(SUBSYSTEM / "namespaces" / str(number) / "enable", str(int(on)))

    def replace_disk(self, number: int, device: Path) -> None:
        """Let a namespace, which no initiator has, be another block device."""
        self.enable_namespace(number, on=False)
        _put(SUBSYSTEM / "namespaces" / str(number) / "device_path", str(device))
        self.enable_namespace(number)

    def add_port(self, path: int) -> None:
        """Offer the subsystem on this path; the symlink is made in the target's network."""
        place = NVMET / "ports" / str(path) / "subsystems" / NQN
        run(*self.links.in_target, "ln", "-s", str(SUBSYSTEM), str(place))

    def remove_port(self, path: int) -> None:
        (NVMET / "ports" / str(path) / "subsystems" / NQN).unlink()

    def set_ana(self, path: int, state: str) -> None:
        """state: optimized, non-optimized, inaccessible, persistent-loss or change."""
        _put(NVMET / "ports" / str(path) / "ana_groups" / "1" / "ana_state", state)

    def part_paths(self) -> None:
        """Give each namespace the path of its number alone: each is in an ANA group of its own."""
        for path in PATHS:
            groups = NVMET / "ports" / str(path) / "ana_groups"
            (groups / "2").mkdir()
            for group in (1, 2):
                state = "optimized" if group == path else "inaccessible"
                _put(groups / str(group) / "ana_state", state)
        _put(SUBSYSTEM / "namespaces" / "2" / "ana_grpid", "2")

    def join_paths(self) -> None:
        """Let both namespaces have both paths, and the links their speed, as at the start."""
        _put(SUBSYSTEM / "namespaces" / "2" / "ana_grpid", "1")
        for path in PATHS:
            self.set_ana(path, "optimized")
            group = NVMET / "ports" / str(path) / "ana_groups" / "2"
            if group.exists():
                group.rmdir()
                with suppress(AssertionError):  # it has no limit
                    run("tc", "-n", "target", "qdisc", "del", "dev", f"far{path}", "root")

    def slow_disk(self, number: int, delay_ms: int, *, create: bool = False) -> None:
        """Make every operation on a disk take at least `delay_ms`."""
        target, place = "delay" if delay_ms else "linear", f"/dev/ram{number - 1} 0"
        self._map_disk(number, f"{target} {place} {delay_ms or ''}", create=create)

    def break_disk(self, number: int) -> None:
        """Make every operation on a disk fail, until `slow_disk`."""
        self._map_disk(number, "error")

    def _map_disk(self, number: int, target: str, *, create: bool = False) -> None:
        sectors = int((Path("/sys/block") / f"ram{number - 1}" / "size").read_text())
        name, table = f"disk{number}", f"0 {sectors} {target}"
        if create:
            run("dmsetup", "create", name, "--table", table)
            return
        run("dmsetup", "reload", name, "--table", table)
        run("dmsetup", "resume", name)

    def hang_disk(self, number: int, *, on: bool = True) -> None:
        """Make all operations on a disk hang until it is resumed."""
        disk = f"disk{number}"
        if on:
            run("dmsetup", "suspend", disk, "--noflush", "--nolockfs")
        else:
            run("dmsetup", "resume", disk)

    # -- the links --------------------------------------------------------------------

    def cut(self, *paths: int) -> None:
        """Cut links: packets on them are lost without an error."""
        for path in paths:
            self.links.cut(path)

    def mend(self, *paths: int) -> None:
        for path in paths:
            self.links.mend(path)

    def limit(self, path: int, bytes_per_s: int) -> None:
        """Let a link move so much towards the initiator, and lose nothing of what waits."""
        waits = ("burst", "64kb", "limit", "8mb")
        tbf = ("root", "tbf", "rate", f"{8 * bytes_per_s}bit", *waits)
        run("tc", "-n", "target", "qdisc", "add", "dev", f"far{path}", *tbf)

    def received_bytes(self, path: int) -> int:
        """What a link has moved towards the initiator, with all headers."""
        return int(_get(Path(f"/sys/class/net/near{path}/statistics/rx_bytes")))

    # -- the initiator's side -----------------------------------------------------------

    def connect(self, timeouts: Timeouts, paths: tuple[int, ...] = PATHS) -> None:
        """Connect, and wait for the paths and namespaces."""
        given = {key: value for key, value in asdict(timeouts).items() if value is not None}
        for path in paths:
            options = {
                "transport": self.transport,
                "traddr": address(path),
                "trsvcid": PORT,
                "nqn": NQN,
                "hostnqn": HOST_NQN,
                "hostid": HOST_ID,
                "nr_io_queues": IO_QUEUES,
                **given,
            }
            line = ",".join(f"{key}={value}" for key, value in options.items())
            self._connect(line)
        self.wait_devices()

    def _connect(self, line: str) -> None:
        """Connect one path; over RDMA again and again, while the target resets the connection.

        It does so for a moment after an outage, with what has arrived late from before.
        """
        end_s = time.monotonic() + APPEAR_S_MAX
        while True:
            try:
                with open("/dev/nvme-fabrics", "r+b", buffering=0) as file:
                    file.write(line.encode())
            except ConnectionResetError:
                if self.transport == "tcp" or time.monotonic() > end_s:
                    raise
                time.sleep(0.5)
            else:
                return

    def disconnect(self) -> None:
        """Delete every controller."""
        for controller in self.controllers():
            with suppress(OSError):
                _put(CLASS / controller / "delete_controller", "1")

    def reset(self, controller: str) -> None:
        _put(CLASS / controller / "reset_controller", "1")

    def controllers(self) -> dict[str, str]:
        """Controller name → state, in the order of the paths."""
        found = {}
        for place in CLASS.glob("nvme*"):
            with suppress(OSError):
                found[place.name] = (_get(place / "address"), _get(place / "state"))
        return {name: state for name, (_, state) in sorted(found.items(), key=lambda i: i[1][0])}

    def states(self) -> dict[str, str]:
        """The states that change: controllers, ANA, and the existing namespaces."""
        found = {f"controller {name}": state for name, state in self.controllers().items()}
        for place in CLASS.glob("nvme*/nvme*c*n*/ana_state"):
            with suppress(OSError):
                found[f"path {place.parent.name}"] = _get(place)
        for number in (1, 2):
            device = self.device(number)
            found[f"namespace {number}"] = device.name if device else "not there"
        return found

    def device(self, number: int) -> Path | None:
        """The multipath device of a namespace; its name may change with each connection."""
        for place in Path("/sys/block").glob("nvme*n*"):
            if "c" in place.name.removeprefix("nvme"):
                continue  # the hidden device of one path, which cannot be opened
            with suppress(OSError):
                if _get(place / "wwid") == f"uuid.{UUIDS[number]}":
                    return Path("/dev") / place.name
        return None

    def wait_devices(self) -> None:
        end_s = time.monotonic() + APPEAR_S_MAX
        while not (self.device(1) and self.device(2)):
            assert time.monotonic() < end_s, f"no devices: {self.states()}"
            time.sleep(0.05)


def address(path: int) -> str:
    """The address at which the target listens on a path."""
    return f"10.99.{path}.2"


def _put(place: Path, value: str) -> None:
    """Write an attribute with one call, which sysfs and configfs require."""
    fd = os.open(place, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _get(place: Path) -> str:
    return place.read_text().strip()


def set_link(name: str, *, up: bool) -> None:
    """Like `ip link set`, without loading a program during a measurement."""
    request = struct.Struct("16sH22x")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request.pack(name.encode(), 0))
        flags = request.unpack(answer)[1]
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request.pack(name.encode(), flags))
