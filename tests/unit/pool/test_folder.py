# SPDX-License-Identifier: Apache-2.0
"""Files that another user put in place of ours are neither read nor written, and delay nothing."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.owners import reset
from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool.folder import Folder, open_private
from vllm_nvmeof_offload.pool.format import Keyspace, read_superblock
from vllm_nvmeof_offload.pool.lease import is_locked, lease_of, read_lease
from vllm_nvmeof_offload.pool.ownership import usable_bytes
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.takeover import Takeover
from vllm_nvmeof_offload.targets.prober import ProbeRequest, probe

from .kit import OTHER_TAG, fill, make_spec

WE, THEY = 23456, 12345
REFUSED = "not a regular file|other users can write it|symbolic links|No such device"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def as_user(uid: int, call: Callable[[], object], limit_s: float = 60.0) -> str:
    """Return `call`'s result, or its error, in a process of that user, to which 4 GiB are left."""
    answer, theirs = os.pipe()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = held + (4 << 30)
    pid = os.fork()
    if pid == 0:
        try:
            if uid != os.geteuid():
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            os.chdir("/")
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            text = repr(call())
        except BaseException as error:  # noqa: BLE001
            text = f"{type(error).__name__}: {error}"
        os.write(theirs, text.encode()[:1000])
        os._exit(0)
    os.close(theirs)
    end_s, never = time.monotonic() + limit_s, time.sleep
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(answer)
            return "hangs"
        never(0.01)
    with open(answer, "rb") as file:
        return file.read().decode()


@pytest.fixture
def target() -> Iterator[Path]:
    """A target on which all users may make directories, outside of pytest's private one."""
    path = Path(tempfile.mkdtemp(prefix="nvmeof-target-"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def plant_pipe(path: Path) -> None:
    os.mkfifo(path)


def plant_link(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(b"{}")
    path.symlink_to(path.with_name("elsewhere"))


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def plant_open_file(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0o622)


@pytest.mark.parametrize("plant", [plant_pipe, plant_link, plant_socket, plant_open_file, os.mkdir])
def test_what_is_no_file_of_ours_alone_is_refused_at_once(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    def refused() -> bool:
        for name in ("lock", "lease", "superblock", "file"):
            plant(tmp_path / name)
            (tmp_path / "elsewhere").unlink(missing_ok=True)
        with pytest.raises(OSError, match=REFUSED):
            open_private(tmp_path / "file", os.O_RDONLY)
        with pytest.raises(OSError, match=REFUSED):
            read_superblock(tmp_path)
        with pytest.raises(OSError, match=REFUSED):
            is_locked(tmp_path)
        with pytest.raises(OSError, match=REFUSED):
            read_lease(lease_of(tmp_path))
        return True

    assert as_user(os.geteuid(), refused) == "True"


def test_files_that_are_opened_block_as_others_do(tmp_path: Path) -> None:
    """An engine's read that finds no page in memory waits for the disk, and does not fail."""
    fd = open_private(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert os.get_blocking(fd)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)


def test_a_folder_is_the_directory_that_was_found(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(0o700)
    folder = Folder.open(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "moved")
    (tmp_path / "one").mkdir(0o700)
    (folder.place / "file").touch()
    assert (tmp_path / "moved" / "file").exists()
    folder.renew()
    assert not os.get_inheritable(folder.fd), "a child process would keep the file system busy"
    assert os.listdir(folder.place) == []
    folder.leave()
    with pytest.raises(NotADirectoryError):
        os.listdir(folder.place)
    fd = folder.fd
    del folder
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720])
def test_a_directory_that_others_can_write_is_no_folder(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="other users can write it"):
        Folder.open(tmp_path)


def exchange(pool: Pool) -> Path:
    """Put a copy in the place of a pool's keyspace; return where the real one is."""
    space = pool.directories[0].parents[1]
    away = space.with_name("away")
    space.rename(away)
    shutil.copytree(away, space)
    return away / pool.directories[0].relative_to(space)


def test_a_reset_reaches_the_directory_that_the_server_has(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path))
    before = pool.superblocks[0]
    ours = exchange(pool)
    assert reset(pool, OTHER_TAG).ok
    assert read_superblock(ours) == pool.superblocks[0]
    assert read_superblock(pool.directories[0]) == before, "a copy, which nobody has"
    pool.close()


@as_root
@pytest.mark.parametrize("theirs", ["rank-0", "slab", "superblock"])
def test_a_prober_does_not_take_what_is_another_users(tmp_path: Path, theirs: str) -> None:
    pool = Pool.open(make_spec(tmp_path))
    (superblock,), (directory,) = pool.superblocks, pool.directories
    pool.close()
    request = ProbeRequest(str(directory), superblock.encode().hex(), False, "", None)
    os.chown(directory if theirs == "rank-0" else directory / theirs, THEY, THEY)
    with pytest.raises(PermissionError, match=f"uid {THEY}"):
        probe(request)


def hide(_: Path) -> None:
    """Leave their pool as private as it is made."""


def put_pipe(lease: Path) -> None:
    lease.unlink()
    os.mkfifo(lease, 0o644)


def put_tebibyte(lease: Path) -> None:
    lease.write_bytes(b"{")
    os.truncate(lease, 1 << 40)


@as_root
@pytest.mark.parametrize("plant", [hide, put_pipe, put_tebibyte])
def test_other_users_directories_do_not_keep_a_server_from_its_start(
    target: Path, plant: Callable[[Path], None]
) -> None:
    other = replace(make_spec(target), keyspace=Keyspace.of({"model": "another"}))

    def make() -> None:
        pool = Pool.open(other)
        fill(pool)
        pool.close()
        directory = pool.directories[0]
        plant(directory / "lease")
        if plant is not hide:
            for path in (directory, *directory.parents[:2], directory / "lease"):
                path.chmod(0o755)

    def start() -> tuple[bool, int]:
        Pool.open(make_spec(target)).close()
        usable = usable_bytes([target])
        return usable > 0, usable // (1 << 20)

    assert as_user(THEY, make) == "None"
    assert as_user(WE, start) == "(True, 0)", "ours has less than a MiB"


@as_root
def test_a_keyspace_of_another_user_is_refused(target: Path) -> None:
    def make() -> None:
        Pool.open(make_spec(target)).close()

    assert as_user(THEY, make) == "None"
    refused = as_user(WE, make)
    assert refused.startswith(PoolError.__name__)
    assert "Permission denied" in refused or f"uid {THEY}" in refused


@as_root
def test_root_examines_a_pool_of_another_user(target: Path) -> None:
    def make() -> None:
        fill(pool := Pool.open(make_spec(target)))
        pool.close()

    assert as_user(THEY, make) == "None"
    (directory,) = target.glob("*/engine-0/rank-0")
    assert read_superblock(directory) is not None
    assert Takeover().look(directory).kind == "free"
    with pytest.raises(PermissionError):
        Folder.open(directory)
