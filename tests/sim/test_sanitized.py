# SPDX-License-Identifier: Apache-2.0
"""`make soak SANITIZE=1` builds the native module that it plays with."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .sanitized import ROOT


@pytest.mark.slow  # it compiles the native module with sanitizers
def test_the_simulator_runs_over_a_build_with_sanitizers() -> None:
    command = [sys.executable, "-m", "tests.sim", "--first", "1", "--steps", "200", "--sanitize"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout
