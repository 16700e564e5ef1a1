# SPDX-License-Identifier: Apache-2.0
"""The pool and the pipeline on a real NVMe/TCP or NVMe/RDMA fabric whose paths, ports and media
fail, and on a file system that two hosts share by NFS.

Each case is a function of `scenarios/`, played in the guest. The function makes the checks; its
time line is in build/fabric-report.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import REPORT, Results
from .rig import guest as emulation
from .rig.guest import Guest, GuestFailedError
from .scenarios import BOOTS, SCENARIOS

#: The first test of a session waits for the guests; see `BOOT_S_MAX`.
pytestmark = [pytest.mark.fabric, pytest.mark.timeout(2000)]

ALL = [each for boot in BOOTS for each in boot]


@pytest.mark.parametrize("scenario", ALL)
def test_scenario(scenario: str, played: Results) -> None:
    one = played[scenario]
    timeline = "\n".join(f"{at_s:8.2f}  {text}" for at_s, text in one["timeline"])
    assert one["ok"], f"{one['failure']}\n{timeline}"


def test_the_report_has_every_scenario(played: Results) -> None:
    text = REPORT.read_text()
    assert [name for name in played if f"## {name}\n" not in text] == []


def test_every_scenario_is_played() -> None:
    assert {each.split(":")[0] for each in ALL} == set(SCENARIOS)


def test_a_guest_that_does_not_end_is_stopped_with_an_error(guest: Guest, tmp_path: Path) -> None:
    with pytest.raises(GuestFailedError, match="did not end within 20 s") as caught:
        guest.run(tmp_path, "echo so far; sleep 1000", 20)
    assert "so far" in str(caught.value)


def test_a_guest_returns_status_and_files(guest: Guest, tmp_path: Path) -> None:
    result = guest.run(tmp_path, "uname -r >kernel; exit 7", 60)
    assert result.status == 7
    assert (tmp_path / "kernel").read_text().strip() in guest.kernel.parent.joinpath(
        "packages"
    ).read_text()


EMULATOR = """#!/bin/sh
# Stands in for an emulator whose guest hangs in its first starts: these cannot be had on demand.
echo started >>{starts}
[ $(wc -l <{starts}) -gt {hung} ] || exec sleep 1000
echo "[rig] kernel up after 1 s"
echo 7 >{job}/status
"""


@pytest.mark.parametrize(("hung", "fails"), [(2, False), (3, True)])
def test_a_guest_whose_kernel_hangs_is_started_again(
    hung: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulation, "KERNEL_UP_S_MAX", 2.0)
    job, starts = tmp_path / "job", tmp_path / "starts"
    emulator = tmp_path / "usr" / "bin" / "qemu-system-x86_64"
    emulator.parent.mkdir(parents=True)
    emulator.write_text(EMULATOR.format(starts=starts, hung=hung, job=job))
    emulator.chmod(0o755)
    guest = Guest(tmp_path, tmp_path / "kernel", tmp_path / "initramfs")
    if fails:
        with pytest.raises(GuestFailedError, match="did not come up in 3 starts"):
            guest.run(job, "", 20)
    else:
        assert guest.run(job, "", 20).status == 7
    assert starts.read_text().count("started") == 3
