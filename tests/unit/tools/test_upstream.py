# SPDX-License-Identifier: Apache-2.0
"""Fetching a release of vLLM, and the results of `make vllm-next`, with fake releases."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fabric.rig.packages import locked
from tests.upstream import next as trial
from tests.upstream.releases import (
    Release,
    ReleaseDamagedError,
    ReleaseUnavailableError,
    ask_index,
    fetch,
)
from tests.upstream.suite import Outcome

CONTENT = b"a source distribution"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    releases = tmp_path / "vllm-nvmeof" / "releases"
    with locked(releases):
        return releases


@pytest.fixture
def on_index(tmp_path: Path) -> Path:
    file = tmp_path / "on-index.tar.gz"
    file.write_bytes(CONTENT)
    return file


def test_a_release_is_fetched_once_and_again_when_it_is_damaged(
    place: Path, on_index: Path
) -> None:
    asked = []

    def ask(version: str) -> tuple[str, str]:
        asked.append(version)
        return on_index.as_uri(), hashlib.sha256(CONTENT).hexdigest()

    found = fetch("1.2.3", ask)
    assert found.path.read_bytes() == CONTENT
    assert found == fetch("1.2.3", ask)
    assert asked == ["1.2.3"]
    found.path.write_bytes(b"damaged")
    assert fetch("1.2.3", ask).path.read_bytes() == CONTENT
    assert asked == ["1.2.3", "1.2.3"]


def test_a_file_with_another_hash_than_the_indexs_is_deleted(place: Path, on_index: Path) -> None:
    with pytest.raises(ReleaseDamagedError, match=r"has SHA-256 .*, the index states 00"):
        fetch("1.2.3", lambda version: (on_index.as_uri(), "00"))
    assert {path.name for path in place.iterdir()} == {"lock"}


def test_without_the_file_there_is_a_reason(place: Path, tmp_path: Path) -> None:
    gone = (tmp_path / "gone").as_uri()
    with pytest.raises(ReleaseUnavailableError, match=r"vllm-1\.2\.3\.tar\.gz cannot be fetched"):
        fetch("1.2.3", lambda version: (gone, "00"))


@pytest.mark.skipif(
    shutil.which("uv", path=str(Path(sys.executable).parent)) is None, reason="no uv here"
)
def test_without_an_index_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))
    with pytest.raises(ReleaseUnavailableError, match="no package index here"):
        ask_index("0.32.0")


@pytest.mark.parametrize(
    ("refusal", "error", "failed", "status"),
    [
        (None, "", [], 0),
        ("X is gone", "", [], 1),
        (None, "exchanged", [], 1),
        (None, "", ["a test"], 1),
    ],
)
def test_a_release_is_good_if_it_is_served_tested_and_passes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusal: str | None,
    error: str,
    failed: list[str],
    status: int,
) -> None:
    def stand_in(name: str, function: Callable[..., Any]) -> None:
        monkeypatch.setattr(trial, name, function)

    stand_in("newest", lambda release="": f"{release or '0.99'}.5")
    stand_in("release", lambda version: Release(version, Path(), None))
    calls = {"0.99.5": "(a, b)", "0.33.5": "(a)"}
    stand_in("interface", lambda tree: {"lines": {"call": calls[tree.version]}, "refusal": refusal})
    stand_in("run_child", lambda *_: {"whole": {"error": error}})
    monkeypatch.setattr(
        trial.suite, "run", lambda *_: Outcome(["one", "two"], failed, [], {}, "its output")
    )
    monkeypatch.setattr("sys.argv", ["next"])
    assert trial.main() == status
    printed = capsys.readouterr().out.splitlines()
    assert printed[:4] == [
        "vLLM 0.99.5; the newest known one is 0.33.5",
        "interfaces that we use: 2 lines differ",
        "- call (a)",
        "+ call (a, b)",
    ]
    assert f"server: {refusal or 'would start'}" in printed
    assert f"self-test: {error or 'passed'}" in printed
    assert f"vLLM's own tests with our connector: 2 passed, {len(failed)} failed, 0 skipped" in (
        printed
    )


def test_without_an_index_the_status_is_another_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(release: str = "") -> str:
        raise ReleaseUnavailableError("no package index here")

    monkeypatch.setattr(trial, "newest", gone)
    monkeypatch.setattr("sys.argv", ["next"])
    assert trial.main() == 2
    assert "no release to try: no package index here" in capsys.readouterr().err
