# SPDX-License-Identifier: Apache-2.0
"""A module of the package runs as a process, without the packages above it in a vLLM's tree."""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from vllm_nvmeof_offload import child

_SHOW = """\
import json, sys
from {package} import VALUE
print(json.dumps([__name__, VALUE, sys.argv[1:], sys.modules.get("fork").__dict__.get("BIG")]))
"""


def test_below_other_packages_none_of_them_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "fork" / "v1" / "ours"
    place.mkdir(parents=True)
    for folder in (tmp_path / "fork", tmp_path / "fork" / "v1"):
        (folder / "__init__.py").write_text("BIG = 'imported'\n")
    (place / "__init__.py").write_text("VALUE = 7\n")
    (place / "child.py").write_text(Path(child.__file__).read_text())
    (place / "show.py").write_text(_SHOW.format(package="fork.v1.ours"))
    monkeypatch.syspath_prepend(str(tmp_path))
    command = importlib.import_module("fork.v1.ours.child").child_command("show")
    done = subprocess.run([*command, "a", "-b"], cwd="/", capture_output=True, text=True)
    assert done.stdout.strip() == '["__main__", 7, ["a", "-b"], null]', done.stderr


def test_a_companion_that_is_stopped_before_its_start_is_never_started(tmp_path: Path) -> None:
    command = ["touch", str(tmp_path / "started")]
    with tempfile.TemporaryFile() as memory:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            one = child.Companion("test", command, memory.fileno(), restart_s=60, first_s=60)
            one.stop()
            one.stop()
        assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []
