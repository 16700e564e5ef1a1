# SPDX-License-Identifier: Apache-2.0
"""`tools/graft.sh` on trees that have only the lines that it looks for, and on vLLM's releases,
where its edits are those that docs/in-tree.md shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tools.gpu_tools import ROOT, tool
from tests.upstream.releases import ReleaseUnavailableError, source_tree

graft = tool("graft")
OURS = "vllm/v1/kv_offload/nvmeof"


def run(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "tools" / "graft.sh", *options, tree]
    env = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def contents(tree: Path) -> dict[str, bytes]:
    files = (path for path in tree.rglob("*") if path.is_file())
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files with the lines that the edits look for, and nothing else."""
    place = tmp_path / "vllm-source"
    (place / "vllm").mkdir(parents=True)
    (place / "vllm" / "__init__.py").touch()
    for edit in graft.EDITS:
        path = place / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else "first line\n"
        path.write_text(f"{before}{edit.anchor}a line between\n")
    return place


def test_the_package_is_laid_under_its_new_name(tree: Path) -> None:
    done = run(tree)
    assert done.returncode == 0, done.stderr
    laid = contents(tree / OURS)
    sources = {
        path.relative_to(ROOT / "vllm_nvmeof_offload").as_posix()
        for path in (ROOT / "vllm_nvmeof_offload").rglob("*.py")
    }
    assert {name for name in laid if name.endswith(".py")} == sources - {"plugin.py"}
    for name, content in laid.items():
        if name.endswith(".py"):
            assert b"vllm_nvmeof_offload" not in content, name
    assert {"copy/copy_blocks.cu", "copy/crc_blocks.cu", "commands/size/presets.json"} <= set(laid)
    assert any(name.startswith("native/_tiers.") for name in laid)
    assert not any(name.endswith((".cpp", ".h", ".pyi", ".pyc")) for name in laid)
    assert not any("mutants" in name for name in laid), "built for this repository's tests only"


def test_every_edit_is_made_once_and_a_second_run_changes_nothing(tree: Path) -> None:
    before = contents(tree)
    assert run(tree).returncode == 0
    once = contents(tree)
    for edit in graft.EDITS:
        assert once[edit.file].decode().count(edit.lines) == 1, edit
        assert b"a line between\n" in once[edit.file], "what is around it stays"
        assert once[edit.file] != before[edit.file]
    (tree / OURS / "left_from_an_older_one.py").touch()
    assert run(tree).returncode == 0
    assert contents(tree) == once
    assert run(tree, "--diff").stdout == "", "there is nothing to edit any more"


@pytest.mark.parametrize("edit", graft.EDITS, ids=lambda edit: f"{edit.file}:{edit.lines[:24]}")
def test_a_line_that_is_gone_is_named_and_nothing_is_changed(tree: Path, edit: object) -> None:
    path = tree / edit.file  # type: ignore[attr-defined]
    anchor: str = edit.anchor  # type: ignore[attr-defined]
    path.write_text(path.read_text().replace(anchor, "something else\n"))
    before = contents(tree)
    done = run(tree)
    assert done.returncode == 1
    assert f"{path.relative_to(tree)}: the text that an edit looks for is gone" in done.stderr
    assert anchor.strip().splitlines()[0].strip() in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(tree) == before


def test_a_line_that_is_there_twice_is_named(tree: Path) -> None:
    path = tree / "vllm/config/vllm.py"
    path.write_text(path.read_text() * 2)
    before = contents(tree)
    done = run(tree)
    assert "vllm/config/vllm.py: the text that an edit looks for occurs more than once" in (
        done.stderr
    )
    assert contents(tree) == before


def test_a_file_or_a_vllm_that_is_missing_is_named(tree: Path) -> None:
    (tree / "vllm/v1/kv_offload/factory.py").unlink()
    assert "vllm/v1/kv_offload/factory.py: No such file" in run(tree).stderr
    assert f"{tree / 'vllm'}: there is no vLLM" in run(tree / "vllm").stderr


def test_an_installed_vllm_has_no_setup_py_to_edit(tree: Path) -> None:
    (tree / "setup.py").unlink()
    shutil.rmtree(tree / "requirements")
    done = run(tree)
    assert done.returncode == 0, done.stderr
    assert not (tree / "requirements").exists()


def test_a_python_without_the_compiled_modules_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graft.importlib.util, "find_spec", lambda _name: None)
    before = contents(tree)
    with pytest.raises(graft.GraftError, match="has no compiled _tiers, _native: install"):
        graft.graft(tree)
    assert contents(tree) == before


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


@pytest.mark.slow
def test_the_document_shows_the_edits(trees: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "in_tree_doc.py"), str(trees["0.33.0"])]
    done = subprocess.run([*command, "--check"], cwd=tmp_path, check=False)
    assert done.returncode == 0, "run tools/in_tree_doc.py on the source of vLLM 0.33.0"


@pytest.mark.slow
def test_all_releases_get_the_same_edits(trees: dict[str, Path]) -> None:
    graft = tool("graft")
    older, newer = (changes(graft.diff(trees[version])) for version in RELEASES)
    assert older == newer
    assert sum(line.startswith("--- ") for line in newer) == len({e.file for e in graft.EDITS})
    added = [line for line in newer if line.startswith("+") and not line.startswith("+++")]
    assert len(added) < 40, "a few lines"
