# SPDX-License-Identifier: Apache-2.0
"""The backend as an argument of `LLM`, in a program without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import faults_rig as rig


@pytest.mark.soak  # `test_examples.py` is a short version
def test_llm_takes_the_backend_as_an_argument(tmp_path: Path) -> None:
    reference = rig.reference()
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.llm_child", str(tmp_path / "pool")],
        cwd=Path(__file__).resolve().parents[2],
        env={**rig.spec().environment(), "VLLM_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    seen = json.loads(line.removeprefix("RESULT "))
    expected = [answer.tokens for answer in reference.answers]
    assert seen["cold"] == expected
    assert seen["back"] == expected
    assert seen["hits"] > 0
