# SPDX-License-Identifier: Apache-2.0
"""The contract of a read: intact bytes that belong in another place are STALE, never OK.

Key, generation and length are equal on all ranks of an engine, so only the place in a slot's
header tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_nvmeof_offload.errors import OK, STALE
from vllm_nvmeof_offload.pool.pool import Pool

from .rig import Rig, content, name

MakeRig = Callable[..., Rig]
IDENTITY = name(7, 3)
#: The slot that is read; with two targets it is on the first one.
SLOT = 2


def whole_slot(pool: Pool, number: int) -> bytes:
    index, target = divmod(number, pool.target_count)
    slab = (pool.directories[target] / "slab").read_bytes()
    return slab[index * pool.slot_bytes :][: pool.slot_bytes]


def put_whole_slot(pool: Pool, number: int, data: bytes) -> None:
    index, target = divmod(number, pool.target_count)
    with (pool.directories[target] / "slab").open("r+b") as slab:
        slab.seek(index * pool.slot_bytes)
        slab.write(data)


@pytest.mark.parametrize(
    ("where", "options", "number"),
    [
        ("slot", None, SLOT + 2),
        ("target", None, SLOT + 1),
        ("rank", {"rank": 1}, SLOT),
        ("server", {}, SLOT),
    ],
)
def test_a_slot_that_belongs_in_another_place_is_stale(
    make_rig: MakeRig, where: str, options: dict[str, int] | None, number: int
) -> None:
    rig = make_rig(targets=2)
    other = rig if options is None else make_rig(targets=2, **options)
    rig.store(SLOT, IDENTITY)
    other.store(number, IDENTITY)
    ours, theirs = whole_slot(rig.pool, SLOT), whole_slot(other.pool, number)
    assert (rig.pool.directories == other.pool.directories) is (where in ("slot", "target"))
    put_whole_slot(rig.pool, SLOT, theirs)
    rig.zero(1)
    assert rig.run(rig.read(SLOT, 1, IDENTITY))[0].outcome == STALE, where
    assert other.run(other.read(number, 1, IDENTITY))[0].outcome == OK
    put_whole_slot(rig.pool, SLOT, ours)
    assert rig.run(rig.read(SLOT, 1, IDENTITY))[0].outcome == OK
    assert rig.payload(1) == content(IDENTITY)
