# SPDX-License-Identifier: Apache-2.0
"""Which front end a server has, as its engine can see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = """
import sys, types
vllm = types.ModuleType("vllm")
vllm.envs = types.SimpleNamespace(VLLM_USE_RUST_FRONTEND={by_variable})
sys.modules["vllm"] = vllm
from vllm_nvmeof_offload.vllm_adapter.vllm_release import drops_connector_stats
print(drops_connector_stats())
"""
#: A front end, which starts the launcher of the engine.
FRONT_END = """
import subprocess, sys
launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
subprocess.run([sys.argv[1], "-c", launcher, sys.argv[2]], check=True)
"""


@pytest.mark.parametrize(
    ("program", "by_variable", "dropped"),
    [
        ("python-frontend", False, False),
        ("python-frontend", True, True),
        ("vllm-rs", False, True),
    ],
)
def test_the_rust_front_end_is_known_by_its_variable_or_its_process(
    tmp_path: Path, program: str, by_variable: bool, dropped: bool
) -> None:
    front_end = tmp_path / program
    front_end.symlink_to(os.path.realpath(sys.executable))
    engine = ENGINE.format(by_variable=by_variable)
    done = subprocess.run(
        [str(front_end), "-c", FRONT_END, sys.executable, engine],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(dropped)]
