# SPDX-License-Identifier: Apache-2.0
"""The guest's Debian packages, downloaded and unpacked outside the system.

apt uses separate lists and a separate cache, so that nothing is installed, no root is needed, and
the system's state stays unchanged. Packages that the system has are not downloaded.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Packages besides the kernel: the emulator, tools for the initramfs, programs of the scenarios,
#: and the library that lets a process use soft-RoCE.
TOOLS = (
    *("qemu-system-x86", "busybox-static", "kmod", "xfsprogs", "iproute2", "dmsetup"),
    "ibverbs-providers",
)
KERNEL = "linux-image-amd64"
APT_TIMEOUT_S = 600
#: Change it with the set of packages or their unpacking: the cache is then filled again.
EDITION = "2"


class RigUnavailableError(Exception):
    """The guest cannot be had on this machine; the message has the reason and the remedy."""


def cache_place() -> Path:
    """The directory that keeps the packages (about 500 MB), filled once per machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-nvmeof" / "fabric-rig"


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Hold the lock of `place`: one process at a time fills it."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tools_root(place: Path) -> Path:
    """A directory with the unpacked packages, laid out like `/`, and the kernel in `kernel/`.

    Raises:
        RigUnavailableError: with the reason and the remedy.
    """
    root = place / "root"
    stamp = place / "packages"
    if stamp.exists() and stamp.read_text().startswith(f"{EDITION}\n"):
        return root
    if os.uname().machine != "x86_64" or shutil.which("apt-get") is None:
        raise RigUnavailableError(
            "the emulated guest is made of Debian packages for x86-64, and this system has no "
            "apt-get or is not x86-64; run the fabric tests on Debian 12 or in a container of it"
        )
    for old in ("root", "kernel", "apt"):
        shutil.rmtree(place / old, ignore_errors=True)
    archives = _download(place)
    root.mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):  # as on every Debian since 12
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for archive in archives:
        unpack(archive, place / "kernel" if archive.name.startswith("linux-image") else root)
    shutil.rmtree(place / "apt")
    stamp.write_text("\n".join([EDITION, *sorted(a.name for a in archives)]) + "\n")
    return root


def apt_in(place: Path) -> list[str]:
    """apt's options for separate lists and a cache in `place`, which this call makes and fills.

    Raises:
        RigUnavailableError: with the reason and the remedy.
    """
    lists, archives = place / "apt" / "lists", place / "apt" / "archives"
    for folder in (lists, archives):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State::lists": lists,
        "Dir::Cache": place / "apt",
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "root",  # apt's own user may not look into the cache
    }
    apt = [f"-o{key}={value}" for key, value in options.items()]
    run_tool(["apt-get", *apt, "-qq", "update"], place)
    return apt


def _download(place: Path) -> list[Path]:
    """Download the kernel and every needed package that is not installed; return the archives."""
    apt, archives = apt_in(place), place / "apt" / "archives"
    depends = run_tool(["apt-cache", *apt, "depends", KERNEL], place)
    found = re.search(r"Depends: (linux-image-[0-9]\S*)", depends)
    if found is None:
        raise RigUnavailableError(
            f"apt knows no {KERNEL}; the guest's kernel is Debian's: use Debian 12 or later"
        )
    install = ["install", "--download-only", "--no-install-recommends", "--yes"]
    run_tool(["apt-get", *apt, "-qq", *install, *TOOLS], place)
    run_tool(["apt-get", *apt, "-qq", "download", found[1]], archives)
    return sorted(archives.glob("*.deb"))


def run_tool(command: list[str], place: Path) -> str:
    """The output of `command`; RigUnavailableError if it fails."""
    try:
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, timeout=APT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RigUnavailableError(f"{command[0]} does not work here: {error}") from error
    if done.returncode:
        raise RigUnavailableError(
            f"`{command[0]}` could not get the Debian packages: "
            f"{' '.join((done.stderr or done.stdout).split())[-300:]}; "
            "give this machine access to a Debian mirror (/etc/apt/sources.list)"
        )
    return done.stdout


def unpack(archive: Path, into: Path) -> None:
    """Like dpkg-deb -x, but a package's /lib is unpacked to usr/lib, to which /lib is a link."""
    into.mkdir(exist_ok=True)
    dpkg = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE)
    tar = ["tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", str(into)]
    try:
        subprocess.run(tar, stdin=dpkg.stdout, check=True, timeout=APT_TIMEOUT_S)
    finally:
        assert dpkg.stdout is not None
        dpkg.stdout.close()
        if dpkg.wait():
            raise RigUnavailableError(f"dpkg-deb cannot unpack {archive.name}")
