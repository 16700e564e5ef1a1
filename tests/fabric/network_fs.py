# SPDX-License-Identifier: Apache-2.0
"""A network file system within the guest's one kernel: its NFS server, and two clients.

Each client is a host by all that NFS knows: it has a link, a host name, and so a page cache, locks
and delegations that the other client does not share. The server runs without daemons: what mountd
would answer is written into the kernel's caches, and NFS 4.2 needs nothing else.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from pathlib import Path

from .nvmet import run, set_link, take_into_memory

#: The clients, by number.
CLIENTS = (1, 2)
#: Programs that a mount starts.
PROGRAMS = ("mount", "nsenter", "sh", "umount", "unshare")
#: What the server lets a client have that it has not heard of, in seconds; its least.
LEASE_S = 10
UNMOUNT_S_MAX = 60.0

_NFSD = Path("/proc/fs/nfsd")
_CACHES = Path("/proc/net/rpc")
#: The kernel's own record of clients, for which it needs no daemon.
_RECORD = Path("/var/lib/nfs/v4recovery")
_NEVER = 2**31 - 1
_NOBODY = 65534
#: Any port, no check of subtrees, and the file system's id is the last number.
_FLAGS = 0x2 | 0x400 | 0x2000
_THREADS = 4
_CLONE_NEWNS, _CLONE_NEWUTS, _MS_BIND = 0x20000, 0x4000000, 0x1000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NetworkFs:
    """A directory that the NFS server exports, which both clients can mount."""

    def __init__(self, directory: Path) -> None:
        """directory: on a file system that can be exported. Starts the server and the links."""
        self._directory = directory
        self._mounted: list[Path] = []
        take_into_memory(*PROGRAMS)
        for client in CLIENTS:
            near, far, space = f"srv{client}", f"cli{client}", f"client{client}"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", near, "type", "veth", "peer", far, "netns", space)
            run("ip", "addr", "add", f"{_server(client)}/24", "dev", near)
            run("ip", "link", "set", near, "up")
            run("ip", "-n", space, "addr", "add", f"{_client(client)}/24", "dev", far)
            run("ip", "-n", space, "link", "set", far, "up")
        _RECORD.mkdir(parents=True, exist_ok=True)
        if not (_NFSD / "threads").exists():
            run("mount", "-t", "nfsd", "nfsd", str(_NFSD))
            _put(_NFSD / "versions", "-3 +4 -4.0 -4.1 +4.2")
            _put(_NFSD / "nfsv4leasetime", str(LEASE_S))
            _put(_NFSD / "nfsv4gracetime", str(LEASE_S))
        self.start_server()

    # -- the server -------------------------------------------------------------------

    def start_server(self) -> None:
        """Export the directory. Clients of the server's last run have `LEASE_S` to come back."""
        for client in CLIENTS:
            _put(_CACHES / "auth.unix.ip/channel", f"nfsd {_client(client)} {_NEVER} clients")
        directory = f"clients {self._directory} {_NEVER} {_FLAGS} {_NOBODY} {_NOBODY} 0"
        _put(_CACHES / "nfsd.export/channel", directory)
        _put(_CACHES / "nfsd.fh/channel", f"clients 1 \\x00000000 {_NEVER} {self._directory}")
        _put(_NFSD / "portlist", "tcp 2049")
        _put(_NFSD / "threads", str(_THREADS))

    def stop_server(self) -> None:
        """Nobody listens any more, and what the server knew of its clients is gone."""
        _put(_NFSD / "threads", "0")

    def let_in(self) -> None:
        """End the time in which only clients of the server's last run are served."""
        _put(_NFSD / "v4_end_grace", "Y")

    # -- the clients ------------------------------------------------------------------

    def mount(self, client: int, options: str = "") -> Path:
        """Mount the directory on a client; return where. options: of NFS, beside the usual ones."""
        place = Path(f"/mnt/client{client}")
        place.mkdir(exist_ok=True)
        usual = f"vers=4.2,noatime,addr={_server(client)},clientaddr={_client(client)}"
        every = f"{usual},{options}" if options else usual
        what = f"exec mount -i -t nfs4 -o {every} {_server(client)}:/ {place}"
        name = f"echo client{client} >/proc/sys/kernel/hostname"
        network = f"--net=/run/netns/client{client}"
        run("nsenter", network, "unshare", "--uts", "sh", "-c", f"{name} && {what}")
        self._mounted.append(place)
        return place

    def cut(self, client: int) -> None:
        """Take a client's link down: packets are lost without an error."""
        set_link(f"srv{client}", up=False)

    def mend(self, client: int) -> None:
        set_link(f"srv{client}", up=True)

    def close(self) -> None:
        """Unmount everything, in whatever state it is, and stop the server."""
        for place in self._mounted:
            command = ["umount", "-f", "-l", str(place)]
            subprocess.run(command, capture_output=True, timeout=UNMOUNT_S_MAX)
        self.stop_server()
        for client in CLIENTS:
            run("ip", "link", "del", f"srv{client}")
            run("ip", "netns", "del", f"client{client}")


def become(client: int) -> None:
    """Give this process, and those that it starts, the host name and boot id of a client."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"client{client}")
    boot_id = Path(f"/run/boot-id-{client}")
    boot_id.write_text(f"{client}" * 8 + "-0000-0000-0000-000000000000")
    if libc.mount(os.fsencode(boot_id), os.fsencode(_BOOT_ID), None, _MS_BIND, None):
        raise OSError(ctypes.get_errno(), "mount", str(_BOOT_ID))


def _server(client: int) -> str:
    """The server's address on a client's link."""
    return f"10.98.{client}.1"


def _client(client: int) -> str:
    return f"10.98.{client}.2"


def _put(place: Path, line: str) -> None:
    """Write a whole line with one call, which the kernel requires."""
    fd = os.open(place, os.O_WRONLY)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)
