# SPDX-License-Identifier: Apache-2.0
"""The pool and the pipeline on a real NVMe/TCP or NVMe/RDMA fabric whose paths, ports and media
fail, and on a file system that two hosts share by NFS.

Each case is a function of `scenarios/`, played in the guest. The function makes the checks; its
time line is in build/fabric-report.md.
"""

from __future__ import annotations

import pytest

from .conftest import Results
from .scenarios import BOOTS, SCENARIOS

#: The first test of a session waits for the guests; see `BOOT_S_MAX`.
pytestmark = [pytest.mark.fabric, pytest.mark.timeout(2000)]

ALL = [each for boot in BOOTS for each in boot]


@pytest.mark.parametrize("scenario", ALL)
def test_scenario(scenario: str, played: Results) -> None:
    one = played[scenario]
    timeline = "\n".join(f"{at_s:8.2f}  {text}" for at_s, text in one["timeline"])
    assert one["ok"], f"{one['failure']}\n{timeline}"


def test_every_scenario_is_played() -> None:
    assert {each.split(":")[0] for each in ALL} == set(SCENARIOS)
