# SPDX-License-Identifier: Apache-2.0
"""The edits of a graft on vLLM's released sources are those that docs/in-tree.md shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.unit.gpu_tools import ROOT, tool
from tests.upstream.releases import ReleaseUnavailableError, source_tree

pytestmark = pytest.mark.slow

RELEASES = ("0.32.0", "0.33.0")


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for version in RELEASES:
        try:
            tree = source_tree(version, tmp_path_factory.mktemp("trees") / version)
        except ReleaseUnavailableError as error:
            pytest.skip(f"vLLM {version} cannot be had: {error}")
        assert tree.python is not None
        made[version] = tree.python
    return made


def changes(diff: str) -> list[str]:
    """The files and the changed lines of a diff, without what is around them."""
    return re.findall(r"^(?:---|\+\+\+|[-+]).*$", diff, re.M)


def test_the_document_shows_the_edits(trees: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "in_tree_doc.py"), str(trees["0.33.0"])]
    done = subprocess.run([*command, "--check"], cwd=tmp_path, check=False)
    assert done.returncode == 0, "run tools/in_tree_doc.py on the source of vLLM 0.33.0"


def test_all_releases_get_the_same_edits(trees: dict[str, Path]) -> None:
    graft = tool("graft")
    older, newer = (changes(graft.diff(trees[version])) for version in RELEASES)
    assert older == newer
    assert sum(line.startswith("--- ") for line in newer) == len({e.file for e in graft.EDITS})
    added = [line for line in newer if line.startswith("+") and not line.startswith("+++")]
    assert len(added) < 40, "a few lines"
