# SPDX-License-Identifier: Apache-2.0
"""Checks of the I/O path on this machine: the native core, io_uring, locked memory, targets.

Each one tries the real thing. Nothing is left behind: a target's probe file is removed.

What O_DIRECT asks of buffers and offsets here, by statx(STATX_DIOALIGN), Linux 6.1.

This touches the target, so it is for `doctor` alone.

`doctor --calibrate`: compares DMA and the copy kernel on every GPU of this machine.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vllm_nvmeof_offload.config import TargetInfo, check_targets, judge_access, parse_config
from vllm_nvmeof_offload.copy.calibration import calibrate_again
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.copy.select import Backend, best_of
from vllm_nvmeof_offload.errors import ConfigError, EngineError, PoolError
from vllm_nvmeof_offload.fabric.machine import Finding, Severity
from vllm_nvmeof_offload.io.choose import explain_denial
from vllm_nvmeof_offload.io.uring import UringDeniedError
from vllm_nvmeof_offload.native import WHY_NOT, core
from vllm_nvmeof_offload.pool.slab import probe_o_direct
from vllm_nvmeof_offload.units import GIB, MIB, PAGE_BYTES, format_bytes

__all__ = [
    "DirectAlignment",
    "calibrate_gpus",
    "check_host",
    "check_huge_pages",
    "check_target",
    "direct_alignment",
    "judge_alignment",
]


_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MEMORY_AT, _OFFSET_AT = 152, 156

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """Both in bytes; both 0: the file system has no O_DIRECT."""

    memory_bytes: int
    offset_bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def direct_alignment(directory: str) -> DirectAlignment | None:
    """For a new file in `directory`; None: the kernel or the file system does not tell.

    Raises:
        OSError: no file can be made there.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        found = ctypes.create_string_buffer(_STATX_BYTES)
        try:
            call = _libc.statx
        except AttributeError:
            return None
        if call(file.fileno(), b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found) != 0:
            return None
    if not struct.unpack_from("=I", found)[0] & _STATX_DIOALIGN:
        return None
    return DirectAlignment(
        struct.unpack_from("=I", found, _MEMORY_AT)[0],
        struct.unpack_from("=I", found, _OFFSET_AT)[0],
    )


_HOST = "host"
_PROBE_BYTES = 16 * MIB
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CAP_IPC_LOCK = 14


def check_host(staging_bytes: int) -> list[Finding]:
    """Check what the machine offers for a server with so much pinned memory."""
    if core is None:
        remedy = "install g++, liburing-dev and libisal-dev, and this package again"
        return [Finding("native_core", _HOST, Severity.WARNING, WHY_NOT, remedy)]
    findings = [Finding("native_core", _HOST, Severity.OK, "loads"), check_huge_pages()]
    ring = _try_ring(registered=False)
    if ring is not None:
        evidence, _, remedy = explain_denial(ring, _PROBE_BYTES).partition("; ")
        evidence += "; the threads engine runs instead"
        findings.append(Finding("io_uring", _HOST, Severity.WARNING, evidence, remedy))
        return findings
    findings.append(Finding("io_uring", _HOST, Severity.OK, "allowed"))
    findings.append(_check_registration(staging_bytes))
    return findings


def check_huge_pages(setting: Path = _HUGE_PAGES) -> Finding:
    """Staging asks for huge pages. In 4 KiB pages each transfer is many pieces for the device:
    on a virtio disk reads ran at half the speed, and writes at 0.7 of it.
    """
    try:
        chosen = setting.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        chosen = "not in this kernel"
    if chosen in ("always", "madvise"):
        return Finding("huge_pages", _HOST, Severity.OK, f"transparent_hugepage is {chosen}")
    evidence = f"transparent_hugepage is {chosen}: staging lies in 4 KiB pages, and I/O is slower"
    return Finding("huge_pages", _HOST, Severity.WARNING, evidence, f"echo madvise > {setting}")


def _check_registration(staging_bytes: int) -> Finding:
    denied = _try_ring(registered=True)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    small = limit != resource.RLIM_INFINITY and limit < staging_bytes and not _may_lock_anything()
    if denied is None and not small:
        evidence = f"works; staging of {format_bytes(staging_bytes)} fits the locked-memory limit"
        return Finding("io_uring_registration", _HOST, Severity.OK, evidence)
    error = denied or UringDeniedError("io_uring_register_buffers", errno.ENOMEM)
    evidence, _, remedy = explain_denial(error, staging_bytes).partition("; ")
    evidence += "; io_uring runs unregistered, at several times the CPU cost"
    return Finding("io_uring_registration", _HOST, Severity.WARNING, evidence, remedy)


def _try_ring(*, registered: bool) -> UringDeniedError | None:
    """Set a ring up and down again; None: that worked."""
    assert core is not None
    memory = mmap.mmap(-1, _PROBE_BYTES)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    fd = os.memfd_create("nvmeof-doctor", os.MFD_CLOEXEC)
    try:
        core.probe_ring(fd, address, _PROBE_BYTES, registered)
    except OSError as error:
        return UringDeniedError(str(error.strerror), error.errno or 0)
    finally:
        os.close(fd)
    return None


def _may_lock_anything() -> bool:
    """Does this process have CAP_IPC_LOCK? Then no limit counts."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def check_target(target: str) -> list[Finding]:
    """Check one directory for a pool. Makes it, as a server's start would, if it is missing."""
    try:
        (info,) = check_targets(parse_config({"targets": [target]}, {}))
    except ConfigError as error:
        evidence, _, remedy = error.remedy.partition("; ")
        return [Finding("target", target, Severity.ERROR, evidence, remedy)]
    return [_check_access(info), _check_o_direct(info), _check_space(info)]


def _check_access(info: TargetInfo) -> Finding:
    problem, remedy = judge_access(info.path)
    if problem:
        return Finding("target_access", info.path, Severity.WARNING, problem, remedy)
    evidence = "no other user can remove or rename the pool"
    return Finding("target_access", info.path, Severity.OK, evidence)


def _check_o_direct(info: TargetInfo) -> Finding:
    try:
        probe_o_direct(Path(info.path))
        needed = direct_alignment(info.path)
    except (OSError, PoolError) as error:
        evidence = f"does not work on {info.file_system}: {error}; buffered I/O runs instead"
        remedy = "put the pool on xfs or ext4"
        return Finding("o_direct", info.path, Severity.WARNING, evidence, remedy)
    return judge_alignment(info, needed)


def judge_alignment(info: TargetInfo, needed: DirectAlignment | None) -> Finding:
    """Whether 4 KiB pages, which is what the pool works with, are fine enough for O_DIRECT."""
    if needed is None:
        evidence = f"works on {info.file_system}; the alignment that it asks for is unknown"
        return Finding("o_direct", info.path, Severity.OK, evidence)
    evidence = (
        f"works on {info.file_system}, aligned to {format_bytes(needed.memory_bytes)} in memory "
        f"and {format_bytes(needed.offset_bytes)} in the file"
    )
    if max(needed.memory_bytes, needed.offset_bytes) > PAGE_BYTES:
        evidence += f"; the pool aligns to {format_bytes(PAGE_BYTES)}: buffered I/O runs instead"
        remedy = "a file system with blocks of 4 KiB on a namespace formatted with those"
        return Finding("o_direct", info.path, Severity.WARNING, evidence, remedy)
    return Finding("o_direct", info.path, Severity.OK, evidence)


def _check_space(info: TargetInfo) -> Finding:
    evidence = f"{format_bytes(info.free_bytes)} free on {info.file_system}"
    if info.free_bytes < GIB:
        remedy = "free some space, or name another target"
        return Finding("free_space", info.path, Severity.WARNING, evidence, remedy)
    return Finding("free_space", info.path, Severity.OK, evidence)


_CHECK = "copy_table"


def calibrate_gpus(open_gpu: Callable[[int], Cuda] = Cuda) -> list[Finding]:
    """A finding for each GPU, or one if there is none."""
    findings: list[Finding] = []
    while True:
        try:
            cuda = open_gpu(len(findings))
        except EngineError as error:
            is_last = isinstance(error, CudaError) and error.name == "CUDA_ERROR_INVALID_DEVICE"
            if not findings or not is_last:
                findings.append(_failed("host", error))
            return findings
        findings.append(_calibrate(cuda, f"GPU {len(findings)}"))
        cuda.release()


def _calibrate(cuda: Cuda, subject: str) -> Finding:
    try:
        cells = calibrate_again(cuda)
    except EngineError as error:
        return _failed(subject, error)
    wins = Counter(best_of(cell) for cell in cells)
    spread = max(cell.spread for cell in cells)
    shown = (
        f"of {len(cells)} kinds of transfer the kernel takes {wins[Backend.KERNEL]}, DMA with the "
        f"overlap hint {wins[Backend.OVERLAP]}; times varied by up to {spread:.0%}"
    )
    return Finding(_CHECK, subject, Severity.OK, shown)


def _failed(subject: str, error: EngineError) -> Finding:
    shown = f"DMA and the copy kernel were not compared: {error}"
    remedy = "DMA carries every transfer until a comparison succeeds"
    return Finding(_CHECK, subject, Severity.WARNING, shown, remedy)
