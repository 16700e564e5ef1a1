# SPDX-License-Identifier: Apache-2.0
"""A region whose lease is lost is gone for the process; one whose lease is late is only read."""

from __future__ import annotations

from pathlib import Path

from tests.contract.rig import ENGINES
from vllm_nvmeof_offload.pool.lease import boot_ns
from vllm_nvmeof_offload.targets.health import PathStates, TargetHealth, Verdict
from vllm_nvmeof_offload.targets.reattach import Attachments


def test_a_target_whose_lease_is_lost_is_gone_and_is_not_searched_for(tmp_path: Path) -> None:
    rig = ENGINES["threads-buffered"](tmp_path, targets=2, leased=True)
    for permit in rig.pool.permits:
        permit.grant(1)  # it has run out: an outage, which is no loss
    health = [TargetHealth(), TargetHealth()]
    attachments = Attachments(rig.pool, rig.engine, health)
    states = [PathStates(), PathStates()]
    assert attachments.update(states) == [None, None]
    assert [one.verdict for one in health] == [Verdict.DEGRADED] * 2
    assert "lease could not be renewed" in health[0].reason
    renewed, lost = rig.pool.permits
    renewed.grant(boot_ns() + 10**12)
    lost.lose()
    for _ in range(2):
        assert attachments.update(states) == [None, None], "for good"
        assert [one.verdict for one in health] == [Verdict.OK, Verdict.GONE]
    assert "lease" in health[1].reason
    assert rig.pool.device(1) is None, "its files are closed"
    rig.gate.open_all()
    assert rig.engine.close(20.0)
    rig.pool.close()
