# SPDX-License-Identifier: Apache-2.0
"""The contract of `replace_target`: later operations go to the new files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_nvmeof_offload.errors import OK, io_error
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import SlotIdentity

from .rig import Rig, content, name

MakeRig = Callable[..., Rig]


def exchange(rig: Rig, target: int, slab: Slab | None) -> Callable[[], None]:
    close = rig.pool.exchange(target, slab, None)
    rig.engine.replace_target(target)
    return close


def copy_of(rig: Rig, target: int, path: Path) -> Slab:
    """Copy the target's current files to another directory."""
    path.mkdir()
    for file in ("slab", "table"):
        (path / file).write_bytes((rig.pool.directories[target] / file).read_bytes())
    slab = Slab(path)
    if rig.pool.is_direct[target]:
        slab.use_direct()
    return slab


def holds(directory: Path, identity: SlotIdentity) -> tuple[bool, bool]:
    """Whether its slab has the payload, and its table the key."""
    slab, table = (directory / file for file in ("slab", "table"))
    return content(identity) in slab.read_bytes(), identity.key in table.read_bytes()


def test_new_operations_go_to_new_files_and_none_is_torn(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(targets=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    old, new = rig.pool.directories[0], tmp_path / "copy"
    slab = copy_of(rig, 0, new)
    rig.gate.shut([2])
    rig.fill(3, name(3))
    rig.submit(rig.write(2, 3, name(3)))
    rig.gate.wait_started(3)
    close = exchange(rig, 0, slab)
    rig.store(4, name(4), staging_slot=4)  # while the other one is under way
    rig.gate.open_all()
    assert [c.outcome for c in rig.wait(bool)] == [OK]
    close()
    for slot, identity in ((0, name(1)), (1, name(2)), (4, name(4))):
        rig.zero(5)
        assert rig.run(rig.read(slot, 5, identity))[0].outcome == OK
        assert rig.payload(5) == content(identity)
    assert (holds(old, name(4)), holds(new, name(4))) == ((False, False), (True, True))
    assert sorted([holds(old, name(3)), holds(new, name(3))]) == [(False, False), (True, True)]


def test_without_files_a_target_fails_at_once_and_its_descriptors_are_closed(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(targets=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    there = copy_of(rig, 0, tmp_path / "copy")
    exchange(rig, 0, None)()
    rig.fill(3, name(3))
    gone = [rig.read(0, 2, name(1)), rig.write(2, 3, name(3))]
    assert {c.outcome for c in rig.run(*gone)} == {io_error(errno.EBADF)}
    assert rig.run(rig.read(1, 2, name(2)))[0].outcome == OK
    exchange(rig, 0, there)()
    assert rig.run(rig.read(0, 2, name(1)))[0].outcome == OK
    assert rig.payload(2) == content(name(1))


def test_a_queued_operation_keeps_the_files_of_its_submission_over_two_exchanges(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """Its files stay open until it is released; files of later attachments may be closed
    earlier.
    """
    rig = make_rig(targets=1, threads=2)
    first = rig.pool.directories[0]
    second, third = copy_of(rig, 0, tmp_path / "second"), copy_of(rig, 0, tmp_path / "third")
    for slot in (1, 3):
        rig.store(slot, name(slot))
    started = len(rig.gate.started)
    rig.gate.shut([1, 2, 3])
    rig.submit(rig.read(1, 1, name(1)), rig.read(3, 3, name(3)))  # as many as there are threads
    rig.gate.wait_started(started + 2)
    rig.fill(2, name(2))
    rig.submit(rig.write(2, 2, name(2)))
    close_first = exchange(rig, 0, second)
    close_second = exchange(rig, 0, third)
    numbers = {second.fd, second.table_fd}
    close_second()
    with files_with(numbers, tmp_path) as strangers:
        rig.gate.open_all()
        done = rig.wait(lambda found: len(found) == 3)
        sizes = [os.path.getsize(path) for path in strangers]
    assert sizes == [0] * len(sizes), "a foreign file was written"
    assert [completion.outcome for completion in done] == [OK] * 3
    close_first()
    assert holds(first, name(2)) == (True, True)
    assert holds(tmp_path / "second", name(2)) == (False, False)
    assert holds(tmp_path / "third", name(2)) == (False, False)


@contextmanager
def files_with(numbers: set[int], place: Path) -> Iterator[list[Path]]:
    """New empty files that have got the descriptors `numbers`, among others."""
    opened: dict[int, Path] = {}
    try:
        while not numbers <= set(opened):
            path = place / f"stranger-{len(opened)}"
            opened[os.open(path, os.O_RDWR | os.O_CREAT)] = path
        yield list(opened.values())
    finally:
        for number in opened:
            os.close(number)
