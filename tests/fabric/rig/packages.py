# SPDX-License-Identifier: Apache-2.0
"""What the guest is made of: Debian packages, downloaded and unpacked beside the system.

apt works on lists and a cache of its own, so that nothing is installed, no root is needed, and
the system's own state stays as it is. What the system has already is not downloaded.
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

#: Beside the kernel: the emulator; what makes the initramfs; what the scenarios call.
TOOLS = ("qemu-system-x86", "busybox-static", "kmod", "xfsprogs", "iproute2", "dmsetup")
KERNEL = "linux-image-amd64"
APT_TIMEOUT_S = 600
#: Changes with the set of packages or how they are unpacked: the cache is then filled anew.
EDITION = "1"


class RigUnavailableError(Exception):
    """The guest cannot be had here; the message has the reason and the remedy."""


def cache_place() -> Path:
    """Where the packages are kept; filled once per machine (about 500 MB)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-nvmeof" / "fabric-rig"


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """One process at a time fills `place`."""
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
    """apt's options for lists and a cache of its own in `place`, which are made and filled.

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
    """Every package that is needed and not installed, and the kernel."""
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
    """What `command` says; RigUnavailableError if it does not work."""
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
    """Like dpkg-deb -x, but what a package has in /lib goes to usr/lib, where /lib leads."""
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
