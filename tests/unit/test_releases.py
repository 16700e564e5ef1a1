# SPDX-License-Identifier: Apache-2.0
"""Fetching a release: by the index's hash, once, and with a reason where it cannot be."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from tests.fabric.rig.packages import locked
from tests.upstream.releases import (
    ReleaseDamagedError,
    ReleaseUnavailableError,
    ask_index,
    fetch,
)

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
