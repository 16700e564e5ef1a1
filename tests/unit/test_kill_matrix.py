# SPDX-License-Identifier: Apache-2.0
"""The mutants of the kill matrix: what is changed, and that a process runs under it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kill_matrix import changes

SOURCE = """
def judge(load, limit: int = 3) -> State:
    \"\"\"Text with 1 < 2.\"\"\"
    if load is None and limit > 2:
        logger.info("%d", 1 + 2)
        raise ValueError(f"{limit + 1}")
    load.tries += 1
    load.forget()
    return State.POOLED
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(changes, "PACKAGE", tmp_path)
    (tmp_path / "judge.py").write_text(SOURCE)
    return tmp_path


def test_operators_lines_and_outcomes_are_changed_and_texts_are_not(package: Path) -> None:
    found = list(changes.changes_of(package / "judge.py"))
    assert {(one.kind, one.before, one.after) for one in found} == {
        ("constant", "3", "4"),
        ("condition", "load is None and limit > 2", "not (load is None and limit > 2)"),
        ("and or", "and", "or"),
        ("comparison", "is", "is not"),
        ("comparison", ">", ">="),
        ("constant", "2", "3"),
        ("dropped line", "load.tries += 1", "pass"),
        ("constant", "1", "2"),
        ("dropped line", "load.forget()", "pass"),
        ("outcome", "State.POOLED", "next(x for x in State if x is not State.POOLED)"),
    }
    for one in found:
        assert changes.named(one.name) == one
        compile(one.apply(SOURCE.encode()), "judge.py", "exec")


def test_the_same_seed_gives_the_same_changes_of_every_folder() -> None:
    first = changes.chosen(3)
    assert first == changes.chosen(3)
    assert [one.path.partition("/")[0] for one in first[::3]] == list(changes.FOLDERS)


def test_a_process_runs_under_a_change_and_so_do_its_children() -> None:
    file = changes.PACKAGE / "manager" / "load_or_recompute.py"
    change = next(one for one in changes.changes_of(file) if one.kind == "constant")
    module = ".".join(file.relative_to(changes.ROOT).with_suffix("").parts)
    program = f"import {module} as m; print(type(m.__loader__).__name__ == 'Changed')"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    for name in (change.name, ""):
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(changes.__file__).with_name("site")),
            "NVMEOF_CHANGE": name,
        }
        done = subprocess.run(
            [sys.executable, "-c", child], env=environment, capture_output=True, text=True
        )
        assert done.stdout == f"{bool(name)}\n", done.stderr


def test_a_suite_ends_at_its_first_failure_and_the_next_one_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    bodies = {
        "unit/test_one.py": ("note('a')", "note('b'); raise OSError", "note('c')"),
        "contract/test_two.py": ("note('d')",),
    }
    for name, tests in bodies.items():
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True)
        lines = [f"def note(what): open({str(ran)!r}, 'a').write(what)"]
        lines += [f"def test_{number}(): {body}" for number, body in enumerate(tests)]
        file.write_text("\n".join(lines))
    played = tmp_path / "played.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(changes.ROOT),
        "NVMEOF_PLAYED": str(played),
        "NVMEOF_LIMIT_S": "60",
    }
    options = ["--rootdir", str(tmp_path), "--import-mode=importlib", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.kill_matrix.plugin", *options, "tests"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert ran.read_text() == "abd"
    suites = json.loads(played.read_text())
    assert suites["unit"]["killed_by"] == "tests/unit/test_one.py::test_1"
    assert suites["contract"]["tests"] == 1
    assert "killed_by" not in suites["contract"]
