# SPDX-License-Identifier: Apache-2.0
"""Makes the guest's kernel and initramfs from the unpacked packages.

The kernel is extracted from its compressed image, because unpacking it is the slowest part of an
emulated boot. The initramfs holds busybox, `init.sh` and the modules that `MODULES` names.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .packages import RigUnavailableError

#: Modules loaded at boot in this order, with their dependencies.
MODULES = (
    *("virtio_pci", "virtio_rng", "9pnet_virtio", "9p", "overlay"),
    *("crc32c_generic", "crc32c_intel", "xfs", "brd", "null_blk", "loop", "dm_mod", "dm_delay"),
    *("nvme_core", "nvme_fabrics", "nvme_tcp", "nvmet", "nvmet_tcp"),
    *("veth", "sch_tbf", "sch_netem"),
    *("nfsd", "nfsv4"),
    *("crc32_generic", "rdma_rxe", "ib_uverbs", "nvme_rdma", "nvmet_rdma"),
)
INIT = Path(__file__).with_name("init.sh")
DEPMOD_TIMEOUT_S = 120


@dataclass(frozen=True)
class Image:
    kernel: Path
    initramfs: Path


def build_image(place: Path, root: Path) -> Image:
    """Make the two files in `place` if their sources have changed.

    root: the unpacked packages (`packages.tools_root`).
    """
    image = Image(place / "vmlinux", place / "initramfs")
    recipe = INIT.read_bytes() + Path(__file__).read_bytes() + (place / "packages").read_bytes()
    digest = hashlib.sha256(recipe).hexdigest()
    stamp = place / "image"
    if stamp.exists() and stamp.read_text() == digest:
        return image
    compressed = next((place / "kernel" / "boot").glob("vmlinuz-*"))
    image.kernel.write_bytes(_uncompressed(compressed.read_bytes()))
    staging = place / "initramfs.d"
    shutil.rmtree(staging, ignore_errors=True)
    _fill(staging, place / "kernel" / "lib" / "modules", root)
    with image.initramfs.open("wb") as file:
        for name, path in sorted((str(p.relative_to(staging)), p) for p in staging.rglob("*")):
            file.write(
                _member(name, path.stat().st_mode, b"" if path.is_dir() else path.read_bytes())
            )
        file.write(_member("TRAILER!!!", 0, b""))
    shutil.rmtree(staging)
    stamp.write_text(digest)
    return image


def _uncompressed(image: bytes) -> bytes:
    """The ELF file within a bzImage that is packed with xz; otherwise the image itself, which also
    boots, but more slowly."""
    setup_sectors = image[0x1F1]
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if not payload.startswith(b"\xfd7zX"):
        return image
    return lzma.LZMADecompressor().decompress(payload)


def _fill(staging: Path, modules: Path, root: Path) -> None:
    (version,) = (path.name for path in modules.iterdir())
    into = staging / "lib" / "modules" / version
    for folder in ("bin", "proc", "sys", "dev", "lower", "tools", "rw", "newroot"):
        (staging / folder).mkdir(parents=True)
    shutil.copy(program(root, "busybox"), staging / "bin" / "busybox")
    shutil.copy(INIT, staging / "init")
    (staging / "init").chmod(0o755)
    (staging / "modules").write_text("\n".join(MODULES) + "\n")
    source = modules / version
    _depmod(root, modules.parents[1], version)
    wanted = _with_dependencies(source)
    for name in wanted:
        copied = into / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        packed = (source / name).read_bytes()
        if name.endswith(".xz"):
            copied.with_suffix("").write_bytes(lzma.decompress(packed))
        else:
            copied.write_bytes(packed)
    for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
        shutil.copy(source / name, into / name)
    _depmod(root, staging, version)


def _with_dependencies(source: Path) -> list[str]:
    """The files of `MODULES` and their dependencies, relative to `source`."""
    needs: dict[str, list[str]] = {}
    paths: dict[str, str] = {}
    for line in (source / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        paths[Path(path).name.split(".")[0].replace("-", "_")] = path
    builtin = (source / "modules.builtin").read_text().replace("-", "_")
    found: dict[str, None] = {}
    for module in MODULES:
        if module in paths:
            found |= dict.fromkeys([paths[module], *needs[paths[module]]])
        elif f"/{module}.ko" not in builtin:
            raise RigUnavailableError(f"Debian's kernel {source.name} has no module {module}")
    return list(found)


def _depmod(root: Path, base: Path, version: str) -> None:
    # depmod runs by this name: the link of that name leads out of `root`.
    subprocess.run(
        ["depmod", "-b", str(base), version],
        executable=program(root, "kmod"),
        env={**os.environ, "LD_LIBRARY_PATH": f"{root}/usr/lib/x86_64-linux-gnu"},
        check=True,
        timeout=DEPMOD_TIMEOUT_S,
    )


def program(root: Path, name: str) -> str:
    """The path of a program in the unpacked packages, or on the system."""
    places = [str(root / "usr" / folder) for folder in ("bin", "sbin")]
    found = shutil.which(name, path=os.pathsep.join([*places, "/usr/bin", "/usr/sbin", "/bin"]))
    if found is None:
        raise RigUnavailableError(f"{name} is neither in the guest's packages nor on this system")
    return found


def _member(name: str, mode: int, data: bytes) -> bytes:
    """One entry of a cpio archive in the "newc" format, which the kernel unpacks."""
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
