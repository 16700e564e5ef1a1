# SPDX-License-Identifier: Apache-2.0
"""The contract of tokens: a caller may reuse a token as soon as its operation is released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllm_nvmeof_offload.errors import DEADLINE, OK
from vllm_nvmeof_offload.io.base import Completion

from .rig import Rig, name

MakeRig = Callable[..., Rig]


def test_an_operation_does_not_inherit_the_deadline_of_its_tokens_previous_use(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    for number in range(3):
        rig.store(number, name(number))
    rig.gate.shut([1, 2])
    before = len(rig.gate.started)
    # The first deadline of all, so that an engine that sorts them looks at the others later.
    first = rig.read(2, 4, name(2), deadline_s=rig.clock() + 20)
    hasty = rig.read(0, 2, name(0), deadline_s=rig.clock() + 30)
    rig.submit(first)
    assert rig.run(hasty)[0].outcome == OK
    patient = replace(rig.read(1, 3, name(1), deadline_s=rig.clock() + 1000), token=hasty.token)
    rig.submit(patient)
    rig.gate.wait_started(before + 3)
    rig.clock.advance(60)
    assert rig.engine.poll() == [Completion(first.token, DEADLINE, released=False)]
    rig.gate.open_all()
    found = rig.wait(lambda found: len(found) == 2)
    assert {(c.token, c.outcome) for c in found} == {(first.token, None), (patient.token, OK)}
