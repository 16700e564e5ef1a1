# SPDX-License-Identifier: Apache-2.0
"""The contract of `replace_target`: what is submitted from then on goes to the new files."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from vllm_nvmeof_offload.errors import OK, io_error
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import SlotIdentity

from .rig import Rig, content, name

MakeRig = Callable[..., Rig]


def exchange(rig: Rig, target: int, slab: Slab) -> Callable[[], None]:
    close = rig.pool.exchange(target, slab, None)
    rig.engine.replace_target(target)
    return close


def copy_of(rig: Rig, target: int, path: Path) -> Slab:
    """The target's files as they are now, in another place."""
    path.mkdir()
    for file in ("slab", "table"):
        (path / file).write_bytes((rig.pool.directories[target] / file).read_bytes())
    slab = Slab(path)
    if rig.pool.is_direct(target):
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


def test_without_files_a_target_fails_at_once_and_its_descriptors_are_let_go(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(targets=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    there = copy_of(rig, 0, tmp_path / "copy")
    exchange(rig, 0, Slab(rig.pool.directories[0], (-1, -1)))()
    rig.fill(3, name(3))
    gone = [rig.read(0, 2, name(1)), rig.write(2, 3, name(3))]
    assert {c.outcome for c in rig.run(*gone)} == {io_error(errno.EBADF)}
    assert rig.run(rig.read(1, 2, name(2)))[0].outcome == OK
    exchange(rig, 0, there)()
    assert rig.run(rig.read(0, 2, name(1)))[0].outcome == OK
    assert rig.payload(2) == content(name(1))
