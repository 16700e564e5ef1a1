# SPDX-License-Identifier: Apache-2.0
"""Runs `examples/03_offline_llm.py` as a user would. `test_wheel.py` starts `02_serve.sh`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e import faults_rig as rig

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "03_offline_llm.py"


def test_the_offline_example(tmp_path: Path) -> None:
    model = rig.spec().model
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, EXAMPLE, model, tmp_path / "pool"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^(\d+) prompt tokens were loaded; answers: the same$", done.stdout, re.M)
    assert found, done.stdout
    assert int(found[1]) > 1000
