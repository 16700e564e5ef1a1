# SPDX-License-Identifier: Apache-2.0
"""Memory is bounded by the container's limit, and a pool leaves part of each file system free."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_nvmeof_offload.commands.doctor.host import check_target
from vllm_nvmeof_offload.config import check_space, check_targets, parse_config
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.fabric import Severity
from vllm_nvmeof_offload.limits import memory_bytes, memory_left_bytes, space_bytes
from vllm_nvmeof_offload.staging import Staging, populate
from vllm_nvmeof_offload.units import GIB, MIB

LIMIT_BYTES = 300 * MIB
#: The ioctl EXT4_IOC_SHUTDOWN: every later operation fails with EIO, as after a lost device.
EXT4_SHUTDOWN = 0x8004587D

#: In the group: what the defaults and the checks are then, and a start that does not fit.
CHILD = """
from vllm_nvmeof_offload.config import ConfigError, check_memory, check_memory_left, parse_config
from vllm_nvmeof_offload.limits import memory_bytes, memory_left_bytes

config = parse_config({}, {"HOME": "/nowhere"})
print(memory_bytes(), memory_left_bytes(), config.staging_bytes)
check_memory(config)
for check in (
    lambda: check_memory(parse_config({"staging_bytes": "1GiB"}, {"HOME": "/nowhere"})),
    lambda: check_memory_left(299 << 20),
):
    try:
        check()
    except ConfigError as refusal:
        print(refusal)
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory control group with a limit."""
    own = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line),
        "",
    )
    parents = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory" + own.rpartition(":")[2])]
    for parent in parents:
        if not (parent / "cgroup.procs").exists():
            continue
        group = parent / f"nvmeof-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
            (group / name).write_text(str(LIMIT_BYTES))
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("this process may make no control group that limits memory")


def test_sizes_go_by_the_limit_of_the_control_group(limited: Path) -> None:
    enter = f"echo $$ > {limited}/cgroup.procs && exec {sys.executable} -c '{CHILD}'"
    done = subprocess.run(["sh", "-c", enter], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    sizes, too_large, too_full = done.stdout.splitlines()
    limit, left, staging = map(int, sizes.split())
    assert limit == LIMIT_BYTES
    assert left < limit, "this process uses some"
    assert staging == LIMIT_BYTES // 4
    assert too_large.startswith("staging_bytes='1.0 GiB': this machine has only 300.0 MiB")
    assert "memory left" in too_full


def test_there_is_memory() -> None:
    assert 0 < memory_left_bytes() <= memory_bytes()


def test_prompts_kv_is_in_no_core_dump() -> None:
    staging = Staging(1 << 20, 6, 2)
    address, inside = staging.map.base_address, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapped := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(mapped[1], 16) <= address < int(mapped[2], 16)
        elif inside and line.startswith("VmFlags"):
            assert "dd" in line.split(), "core dumps have it"
    staging.close()


@pytest.mark.parametrize(
    ("size_bytes", "kept_bytes"),
    [
        (8 * MIB, 8 * MIB // 10),
        (15 * GIB, GIB),
        (100 * GIB, 5 * GIB),
        (30_000 * GIB, 64 * GIB),
    ],
)
def test_a_pool_leaves_a_part_of_a_file_system(
    size_bytes: int, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = SimpleNamespace(f_blocks=size_bytes // 512, f_bavail=7, f_frsize=512)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    assert space_bytes(Path("/dev/shm")) == (7 * 512, kept_bytes)


def test_the_root_file_system_keeps_more(monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(f_blocks=60 * GIB // 512, f_bavail=0, f_frsize=512)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    assert space_bytes(Path("/no such/place")) == (0, 4 * GIB)


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 30 * GIB + 80 * MIB  # 25.08 GiB besides the reserve: what is named must fit
    status = SimpleNamespace(f_blocks=100 * GIB // 512, f_bavail=free // 512, f_frsize=512)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    two = {"targets": ["/dev/shm/a", "/dev/shm/b"]}
    check_space(parse_config({**two, "pool_bytes": "25GiB"}, {}), [0, 0])
    larger = parse_config({**two, "pool_bytes": "26GiB"}, {})
    why = r"pool_bytes='26.0 GiB'.*26.0 GiB.*/dev/shm/a.*30.1 GiB.*5.0 GiB.*at most 25680 MiB"
    with pytest.raises(ConfigError, match=why):
        check_space(larger, [0, 0])
    check_space(parse_config({**two, "pool_bytes": "25680 MiB"}, {}), [0, 0])
    check_space(larger, [GIB // 2, GIB // 2])
    status.f_bavail = 0
    check_space(larger, [13 * GIB, 13 * GIB])  # others have filled the disk since


def test_memory_that_cannot_be_had_ends_no_process() -> None:
    with pytest.raises(OSError, match="cannot get pinned memory"):
        populate(0x1000, 4096, lambda done, total: None)  # no page may be there


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_mounted_directory_of_another_file_system_needs_permission(tmp_path: Path) -> None:
    """In a container, an unmounted target is a directory that the host has mounted in."""
    place = Path("/dev/shm") / f"nvmeof-test-{os.getpid()}"
    (place / "0").mkdir(parents=True)
    bound = tmp_path / "kv"
    bound.mkdir()
    try:
        done = subprocess.run(["mount", "--bind", place, bound], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no mount is possible here: {done.stderr}")
        try:
            config = parse_config({"targets": str(bound / "0")}, {})
            with pytest.raises(ConfigError, match="in a directory of another file system"):
                check_targets(config)
            allowed = config.model_copy(update={"allow_root_file_system": True})
            assert len(check_targets(allowed)) == 1
        finally:
            subprocess.run(["umount", bound], check=True)
    finally:
        shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_doctor_and_a_start_refuse_a_mounted_file_system_that_has_died(tmp_path: Path) -> None:
    image, target = tmp_path / "image", tmp_path / "kv"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, target]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device here: {error}")
    try:
        assert Severity.ERROR not in {one.severity for one in check_target(str(target))}
        fd = os.open(target, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_SHUTDOWN, struct.pack("I", 2))
        finally:
            os.close(fd)
        (finding,) = check_target(str(target))
        assert finding.severity is Severity.ERROR
        assert "cannot be written (Input/output error)" in finding.evidence
        with pytest.raises(ConfigError, match="cannot be written"):
            check_targets(parse_config({"targets": str(target)}, {}))
    finally:
        subprocess.run(["umount", target], check=True)


def test_a_target_on_the_root_file_system_needs_permission(tmp_path: Path) -> None:
    if tmp_path.stat().st_dev != os.stat("/").st_dev:
        pytest.skip("the temporary directory is on a file system of its own")
    missing = tmp_path / "not" / "mounted"
    with pytest.raises(ConfigError, match="would be created on the root file system"):
        check_targets(parse_config({"targets": str(missing)}, {}))
    assert not missing.parent.exists()
    allowed = parse_config({"targets": str(missing), "allow_root_file_system": True}, {})
    (info,) = check_targets(allowed, create=False)
    assert info.path == str(missing)
    assert not missing.parent.exists(), "a check creates nothing"
    check_targets(allowed)
    with pytest.raises(ConfigError, match="is on the root file system"):
        check_targets(parse_config({"targets": str(missing)}, {}))
