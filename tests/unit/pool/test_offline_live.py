# SPDX-License-Identifier: Apache-2.0
"""Offline commands while a server runs that does not know of them; and the checks of removal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_nvmeof_offload.commands.pool.check import check, exit_code
from vllm_nvmeof_offload.commands.pool.offline import prefill, remove
from vllm_nvmeof_offload.commands.pool.show import summaries
from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.pool.survey import find, survey

from .kit import name
from .offline_kit import flip_header, flip_payload, server, snapshot, write_pool

ENTRY = 64


def test_beside_a_live_server_everything_is_read_only(tmp_path: Path) -> None:
    places = [tmp_path / "t0", tmp_path / "t1"]
    directories = write_pool(*places)
    flip_payload(directories[1], 0)
    settled: list[str] = []
    with server(*places) as child:
        before = snapshot(tmp_path)
        for deep in (False, True):
            with pytest.raises(PoolLockedError, match=rf"pid {child.pid} on host .*stop that"):
                check(find(places), repair=True, deep=deep)
        with pytest.raises(PoolLockedError, match=f"pid {child.pid} "):
            prefill(find(places))
        (one, other) = check(find(places), deep=True, settle=lambda: settled.append("waited"))
        assert (exit_code([one]), exit_code([other])) == (0, 4)
        assert settled == ["waited"]
        assert [part.owner.kind for part in survey(find(places))] == ["live", "live"]
        assert summaries(survey(find(places)))[0]["lease"]["page"]["pid"] == child.pid
        assert snapshot(tmp_path) == before
    # Killed, not stopped: its name is still there, and blocks no other server.
    assert [part.owner.kind for part in survey(find(places))] == ["dead", "dead"]
    assert exit_code(check(find(places), repair=True, deep=True)) == 1
    assert [part.owner.kind for part in survey(find(places))] == ["free", "free"]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("torn", [flip_header, flip_payload])
@pytest.mark.parametrize("ends", ["the write ends", "another key's entry comes", "never"])
def test_only_lasting_damage_beside_a_server_is_reported(
    tmp_path: Path, deep: bool, torn: Callable[[Path, int], None], ends: str
) -> None:
    """A slot that is being written looks torn, until its write and its entry are there."""
    (directory,) = write_pool(tmp_path / "t")
    newer = write_pool(tmp_path / "newer", stored={3: name(99)})[0]
    waited: list[str] = []

    def settle() -> None:
        waited.append("waited")
        if ends == "the write ends":
            torn(directory, 3)  # the same bit again
        elif ends == "another key's entry comes":
            entry = (newer / "table").read_bytes()[3 * ENTRY : 4 * ENTRY]
            with (directory / "table").open("r+b") as table:
                table.seek(3 * ENTRY)
                table.write(entry)

    torn(directory, 3)
    with server(tmp_path / "t"):
        reports = check(find([tmp_path / "t"]), deep=deep, settle=settle)
    seen = deep or torn is flip_header
    assert waited == (["waited"] if seen else [])
    assert exit_code(reports) == (4 if seen and ends == "never" else 0)


def test_removal_refuses_foreign_files_and_then_deletes_nothing(tmp_path: Path) -> None:
    write_pool(tmp_path / "a")
    (foreign,) = write_pool(tmp_path / "b")
    (foreign / "superblock").write_bytes(b"something else")
    before = snapshot(tmp_path)
    with pytest.raises(PoolError, match="by hand"):
        remove(find([tmp_path / "a", tmp_path / "b"]))
    with server(tmp_path / "a") as child, pytest.raises(PoolLockedError, match=f"{child.pid}"):
        remove(find([tmp_path / "a"]))
    assert snapshot(tmp_path).keys() == before.keys()
