# SPDX-License-Identifier: Apache-2.0
"""The contract of RESET: it voids what was submitted before it, and no more."""

from __future__ import annotations

from collections.abc import Callable

from vllm_nvmeof_offload.errors import (
    OK,
)
from vllm_nvmeof_offload.io.base import IoKind

from .rig import Rig, content, name

MakeRig = Callable[..., Rig]


def test_a_reset_voids_what_was_submitted_before_it_and_no_more(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4)
    rig.store(0, name(1))
    rig.gate.shut([1])
    before = [rig.write(1, 1, name(2)), rig.write(2, 2, name(3))]
    reset = rig.op(IoKind.RESET)
    after = rig.write(3, 3, name(4))
    rig.submit(*before, reset, after)
    rig.gate.open_all()
    found = rig.wait(lambda completions: len(completions) == 4)
    assert {c.outcome for c in found} == {OK}
    assert rig.reopen().adopt().keys == (name(4).key,)


def test_what_follows_a_reset_that_says_so_is_not_adopted(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(0, name(1))
    assert [c.outcome for c in rig.run(rig.op(IoKind.RESET, adoptable=False))] == [OK]
    rig.store(1, name(2))
    rig.zero(5)
    assert [c.outcome for c in rig.run(rig.read(1, 5, name(2)))] == [OK]
    assert rig.payload(5) == content(name(2))
    assert rig.reopen().adopt().keys == ()


def test_two_resets_and_writes_between(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4)
    ops = []
    for number in range(6):
        ops += [rig.write(number, number, name(number)), rig.op(IoKind.RESET)]
    ops.append(rig.write(20, 20, name(20)))
    assert {c.outcome for c in rig.run(*ops)} == {OK}
    assert rig.reopen().adopt().keys == (name(20).key,)
