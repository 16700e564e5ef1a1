# SPDX-License-Identifier: Apache-2.0
"""Two engines' pipelines side by side on the same targets: one reads what the other has written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.pool.kit import make_spec
from tests.wait import wait_until
from vllm_nvmeof_offload.errors import OK, STALE, io_error
from vllm_nvmeof_offload.pool.format import Superblock, read_superblock, write_superblock
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import AttachCommand, DetachCommand
from vllm_nvmeof_offload.worker.regions import FoundPool, OpenRegions, RegionFiles

from .rig import WAIT_S, content, name
from .test_native_lanes import LANES, POOL_SLOTS, TARGETS, Rank

OWNER = 5
CHUNKS = range(8)


class Neighbours:
    """They have written the chunk n to pool slot n."""

    def __init__(self, engine: str, path: Path) -> None:
        patience = {"read_deadline_s": WAIT_S, "write_deadline_s": WAIT_S}
        self.theirs, self.ours = (Rank(engine, path, **patience) for _ in range(2))
        self.theirs.store(*((name(n), n) for n in CHUNKS))
        self.theirs.write(*((name(n), n, n) for n in CHUNKS))
        assert set(self.theirs.done()) == {OK}

    @property
    def superblock(self) -> Superblock:
        return self.theirs.rig.pool.superblocks[0]

    def attach(self) -> None:
        self.ours.attach(OWNER, self.theirs.rig.pool.engine_index, self.superblock.uuid)

    def open_files(self) -> list[str]:
        """Their slabs, as often as our regions have them open."""
        slabs = {str(path / "slab") for path in self.theirs.rig.pool.directories}
        readers = []
        for fd in Path("/proc/self/fd").iterdir():
            try:
                flags = Path(f"/proc/self/fdinfo/{fd.name}").read_text().split("flags:")[1].split()
                if os.readlink(fd) in slabs and int(flags[0], 8) & os.O_ACCMODE == os.O_RDONLY:
                    readers.append(os.readlink(fd))
            except FileNotFoundError:
                continue  # it was closed meanwhile
        return readers

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture(params=LANES)
def neighbours(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Neighbours]:
    both = Neighbours(request.param, tmp_path)
    yield both
    both.close()


def test_chunks_of_another_engine_are_streamed_and_land(neighbours: Neighbours) -> None:
    ours = neighbours.ours
    neighbours.attach()
    ours.load(*((name(n), None if n % 2 else n, n) for n in CHUNKS), owner=OWNER)
    ours.fetch((name(3), 19, 3), owner=OWNER)
    assert ours.done() == [OK] * (1 + len(CHUNKS) + 1)
    for n in CHUNKS:
        assert ours.pages[n].tobytes() == content(name(n))
    ours.load((name(3), 19, None), (name(4), 4, None))
    assert ours.done() == [OK, OK]
    assert ours.pages[0].tobytes() == content(name(3))
    assert ours.pages[1].tobytes() == content(name(4))


def test_a_slot_that_they_have_used_again_is_stale(neighbours: Neighbours) -> None:
    theirs, ours = neighbours.theirs, neighbours.ours
    neighbours.attach()
    theirs.store((name(100), 2))
    theirs.write((name(100), 2, 2))
    theirs.run()
    ours.load((name(2), None, 2), (name(1), None, 1), owner=OWNER)
    assert ours.done() == [OK, STALE, OK]
    theirs.reset(bytes(range(16)))  # of other weights
    theirs.store((name(2), 3))
    theirs.write((name(2), 3, 2))
    theirs.run()
    ours.load((name(2), None, 2), (name(1), None, 1), owner=OWNER)
    assert ours.done() == [STALE, OK]


def test_files_are_closed_after_a_detach_and_at_the_end(neighbours: Neighbours) -> None:
    ours = neighbours.ours
    neighbours.attach()
    assert ours.done() == [OK]
    assert len(neighbours.open_files()) == TARGETS
    neighbours.attach()  # again: the new files take the place of the old ones
    assert ours.done() == [OK]
    wait_until("the close", lambda: len(neighbours.open_files()) == TARGETS)
    ours.pipeline.command(DetachCommand(OWNER))
    ours.pipeline.step()
    wait_until("the close", lambda: not neighbours.open_files())
    ours.load((name(0), None, 0), owner=OWNER)
    assert ours.done() == [io_error(errno.ENOENT)]
    neighbours.attach()
    assert ours.done() == [OK]
    ours.regions.end()
    assert not neighbours.open_files()


def change(**fields: object) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        superblock = read_superblock(directory)
        assert superblock is not None
        write_superblock(directory, replace(superblock, **fields))  # type: ignore[arg-type]

    return rewrite


def damage(directory: Path) -> None:
    page = bytearray((directory / "superblock").read_bytes())
    page[130] ^= 1
    (directory / "superblock").write_bytes(page)


@pytest.mark.parametrize(
    ("what", "number"),
    [
        (lambda directory: (directory / "superblock").unlink(), errno.ENOENT),
        (lambda directory: (directory / "slab").unlink(), errno.ENOENT),
        (change(uuid=bytes(16)), errno.ENOENT),
        (damage, errno.ESTALE),
        (change(payload_bytes=4096), errno.ESTALE),
        (change(world_size=3), errno.ESTALE),
        (change(slots=POOL_SLOTS), errno.ESTALE),
    ],
    ids=["no superblock", "no slab", "uuid", "damaged", "payload", "ranks", "cut short"],
)
def test_what_is_not_that_pool_of_our_shape_is_not_read(
    neighbours: Neighbours, what: Callable[[Path], None], number: int
) -> None:
    uuid = neighbours.superblock.uuid
    for directory in neighbours.theirs.rig.pool.directories:
        what(directory)
    neighbours.ours.attach(OWNER, neighbours.theirs.rig.pool.engine_index, uuid)
    neighbours.ours.load((name(0), None, 0), owner=OWNER)
    assert neighbours.ours.done() == [io_error(number), io_error(errno.ENOENT)]
    assert not neighbours.open_files()


def test_each_rank_of_a_pool_has_a_uuid_of_its_own(tmp_path: Path) -> None:
    """The follower knows that of rank 0 only."""
    specs = [make_spec(tmp_path, rank=rank, world_size=2) for rank in (0, 1, 1)]
    first, theirs, ours = (Pool.open(spec) for spec in specs)
    assert first.superblocks[0].uuid != theirs.superblocks[0].uuid
    assert (first.engine_index, theirs.engine_index, ours.engine_index) == (0, 0, 1)
    files = RegionFiles(ours, lambda: None)
    answers: list[OpenRegions] = []
    files.open(AttachCommand(1, OWNER, 0, first.superblocks[0].uuid), [0])
    wait_until("the region", lambda: bool(answers.extend(files.take()) or answers))
    (answer,) = answers
    assert answer.error == 0
    slot = theirs.superblocks[0].place(0)
    assert (answer.by_target[0].uuid, answer.by_target[0].rank) == (slot.region_uuid, 1)
    files.end()
    for pool in (first, theirs, ours):
        pool.close()


def test_what_only_one_of_two_engines_can_change_may_differ(neighbours: Neighbours) -> None:
    for directory in neighbours.theirs.rig.pool.directories:
        differs = {"epoch": 77, "sequence": 99, "target_count": 5, "slots": 1, "target_index": 3}
        change(**differs)(directory)
    neighbours.attach()
    assert neighbours.ours.done() == [OK]


def test_an_owner_may_have_fewer_targets(neighbours: Neighbours) -> None:
    (neighbours.theirs.rig.pool.directories[1] / "superblock").unlink()
    neighbours.attach()
    neighbours.ours.load((name(0), None, 0), (name(1), None, 1), owner=OWNER)
    assert neighbours.ours.done() == [OK, OK, io_error(errno.EBADF)]
    assert not np.any(neighbours.ours.pages[1])


def test_a_region_is_found_by_its_uuid(neighbours: Neighbours) -> None:
    files, theirs = neighbours.ours.regions, neighbours.superblock
    files.look_for(bytes(16))
    files.look_for(theirs.place(0).region_uuid)
    found: list[FoundPool] = []

    def is_found() -> bool:
        files.look_for(theirs.place(0).region_uuid)
        found.extend(files.take_found())
        return bool(found)

    wait_until("the region", is_found)
    assert set(found) == {FoundPool(neighbours.theirs.rig.pool.engine_index, theirs.uuid)}


def plant(directories: Iterable[Path], uid: int) -> None:
    """Put a keyspace of that user, with an engine 7, in the place of each directory's."""
    for directory in directories:
        space = directory.parents[1]
        space.rename(space.with_name("away"))
        shutil.copytree(space.with_name("away"), space)
        (space / directory.parent.name).rename(space / "engine-7")
        for path in (space, *space.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.chown(path, uid, uid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("uid", [0, 54321])
def test_a_keyspace_that_is_put_in_the_place_of_ours_is_not_read(
    neighbours: Neighbours, uid: int
) -> None:
    ours, theirs = neighbours.ours, neighbours.theirs.rig.pool
    plant(theirs.directories, uid)
    neighbours.attach()
    ours.load((name(0), None, 0), owner=OWNER)
    assert ours.done() == [OK, OK], "the engine in the directory that we have"
    assert ours.pages[0].tobytes() == content(name(0))
    ours.attach(OWNER + 1, 7, neighbours.superblock.uuid)
    assert ours.done() == [io_error(errno.ENOENT)]
