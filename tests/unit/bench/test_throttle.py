# SPDX-License-Identifier: Apache-2.0
"""The disk and the control group of a made-up machine; and the real kernel throttles."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_nvmeof_bench.throttle import (
    Throttle,
    ThrottleError,
    device_of,
    find_hierarchy,
    processes_of,
)

V1 = "33 22 0:27 / /sys/fs/cgroup/blkio rw,relatime - cgroup cgroup rw,blkio\n"
V1_INSIDE = "33 22 0:27 /docker/abc /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n"
V2 = "34 22 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
MIB = 1 << 20


class Machine:
    """A root directory with the files that the code reads."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, text: str = "") -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def groups(self, mountinfo: str, own: str, *directories: str) -> None:
        self.file("proc/self/mountinfo", mountinfo)
        self.file("proc/self/cgroup", own)
        for directory in directories:
            (self.root / "sys/fs/cgroup" / directory).mkdir(parents=True, exist_ok=True)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


def number_of(path: Path) -> str:
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def test_a_whole_disk_is_its_own_disk(machine: Machine, tmp_path: Path) -> None:
    machine.file(f"sys/dev/block/{number_of(tmp_path)}/dev", number_of(tmp_path))
    assert device_of(tmp_path, machine.root) == number_of(tmp_path)


def test_limits_of_a_partition_are_its_disk_s(machine: Machine, tmp_path: Path) -> None:
    machine.file("sys/devices/pci0/nvme0n1/dev", "259:0\n")
    machine.file("sys/devices/pci0/nvme0n1/nvme0n1p2/partition", "2\n")
    link = machine.root / "sys/dev/block" / number_of(tmp_path)
    link.parent.mkdir(parents=True)
    link.symlink_to(machine.root / "sys/devices/pci0/nvme0n1/nvme0n1p2")
    assert device_of(tmp_path, machine.root) == "259:0"


def test_a_directory_on_no_disk_is_refused_with_the_remedy(
    machine: Machine, tmp_path: Path
) -> None:
    with pytest.raises(ThrottleError, match="give a directory on a disk"):
        device_of(tmp_path, machine.root)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_a_tmpfs_is_called_by_its_name() -> None:
    with pytest.raises(ThrottleError, match="tmpfs, which no block device holds"):
        device_of(Path("/dev/shm"))


def test_v1_groups_are_made_below_our_own(machine: Machine) -> None:
    machine.groups(V1, "9:pids:/\n7:blkio:/a/b\n", "blkio/a/b")
    found = find_hierarchy(machine.root)
    assert found.version == 1
    assert found.parent == machine.root / "sys/fs/cgroup/blkio/a/b"


@pytest.mark.parametrize("own", ["/docker/abc/job", "/elsewhere"])
def test_v1_in_a_container_stays_inside_what_is_mounted(machine: Machine, own: str) -> None:
    machine.groups(V1_INSIDE, f"7:blkio:{own}\n", "blkio/job")
    inside = "blkio/job" if own.endswith("job") else "blkio"
    assert find_hierarchy(machine.root).parent == machine.root / "sys/fs/cgroup" / inside


def test_v2_takes_the_nearest_group_that_gives_io_to_its_children(machine: Machine) -> None:
    machine.groups(V2, "0::/user.slice/me.scope\n", "user.slice/me.scope")
    machine.file("sys/fs/cgroup/cgroup.controllers", "cpu io memory\n")
    machine.file("sys/fs/cgroup/cgroup.subtree_control", "cpu io\n")
    machine.file("sys/fs/cgroup/user.slice/cgroup.subtree_control", "cpu io\n")
    machine.file("sys/fs/cgroup/user.slice/me.scope/cgroup.subtree_control", "\n")
    found = find_hierarchy(machine.root)
    assert (found.version, found.enables_io) == (2, None)
    assert found.parent == machine.root / "sys/fs/cgroup/user.slice"


def test_v2_without_io_below_the_top_enables_it_there(machine: Machine) -> None:
    machine.groups(V2, "0::/\n")
    machine.file("sys/fs/cgroup/cgroup.controllers", "cpu io\n")
    machine.file("sys/fs/cgroup/cgroup.subtree_control", "\n")
    found = find_hierarchy(machine.root)
    assert found.parent == found.enables_io == machine.root / "sys/fs/cgroup"


@pytest.mark.parametrize("mountinfo", ["", V2])
def test_without_an_io_controller_the_error_names_the_remedy(
    machine: Machine, mountinfo: str
) -> None:
    machine.groups(mountinfo, "0::/\n", "")
    with pytest.raises(ThrottleError, match="cgroup v2's io controller"):
        find_hierarchy(machine.root)


def test_v2_limits_are_one_line_of_io_max(machine: Machine, tmp_path: Path) -> None:
    machine.groups(V2, "0::/\n")
    machine.file("sys/fs/cgroup/cgroup.subtree_control", "io\n")
    machine.file(f"sys/dev/block/{number_of(tmp_path)}/dev", number_of(tmp_path))
    throttle = Throttle(tmp_path, read_bytes_per_s=5_000_000, root=machine.root)
    assert throttle.kind == "cgroup v2 io.max"
    with throttle:
        (io_max,) = (machine.root / "sys/fs/cgroup").glob("vllm-nvmeof-*/io.max")
        assert io_max.read_text() == f"{number_of(tmp_path)} rbps=5000000 wbps=max\n"
        throttle.limit(write_bytes_per_s=7)
        assert io_max.read_text() == f"{number_of(tmp_path)} rbps=max wbps=7\n"
        io_max.unlink()  # a real control group takes its files along
    assert list((machine.root / "sys/fs/cgroup").glob("vllm-nvmeof-*")) == []


def test_without_permission_the_error_names_the_remedy(machine: Machine, tmp_path: Path) -> None:
    machine.groups(V1, "7:blkio:/\n", "blkio")
    machine.file(f"sys/dev/block/{number_of(tmp_path)}/dev", number_of(tmp_path))
    throttle = Throttle(tmp_path, root=machine.root)
    (machine.root / "sys/fs/cgroup/blkio").rmdir()
    with pytest.raises(ThrottleError, match="run as root"), throttle:
        pass


def direct_read_s(path: Path, count: int) -> float:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, MIB) as buffer:
            begin_s = time.perf_counter()
            for number in range(count):
                assert os.preadv(fd, [buffer], number * MIB) == MIB
            return time.perf_counter() - begin_s
    finally:
        os.close(fd)


def test_the_real_kernel_throttles_and_releases_us(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(os.urandom(16 * MIB))
        os.fsync(file.fileno())
    before = Path("/proc/self/cgroup").read_text()
    try:
        throttle = Throttle(tmp_path, read_bytes_per_s=20 * MIB)
        with throttle:
            throttle.add(os.getpid())
            throttled_s = direct_read_s(path, 16)
            assert Path("/proc/self/cgroup").read_text() != before
    except ThrottleError as error:
        pytest.skip(f"cannot throttle here: {error}")
    # What the kernel's first slice allows, 2 MiB, passes at once; a slice more is its slack.
    assert throttled_s > 0.5
    assert Path("/proc/self/cgroup").read_text() == before
    assert direct_read_s(path, 16) < throttled_s


def test_a_group_of_processes_is_throttled_and_put_back(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    groups = Path(f"/proc/{child.pid}/cgroup")
    try:
        before = groups.read_text()
        try:
            with Throttle(tmp_path) as throttle:
                throttle.add_group(child.pid)
                assert "vllm-nvmeof-throttle" in groups.read_text()
        except ThrottleError as error:
            pytest.skip(f"cannot throttle here: {error}")
        assert groups.read_text() == before
    finally:
        child.communicate(b"\n", timeout=60)


def test_a_process_group_is_found_whole() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        assert processes_of(child.pid) == [child.pid]
    finally:
        child.communicate(b"\n", timeout=60)
    assert processes_of(child.pid) == []
