# SPDX-License-Identifier: Apache-2.0
"""Another release of vLLM than the installed one, whole: its Python, the compiled files here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import faults_rig as rig
from tests.upstream import suite
from tests.upstream.releases import ReleaseUnavailableError
from tests.upstream.trees import Release, release

ROOT = Path(__file__).resolve().parents[2]
OTHER = "0.33.0"
#: Our own tests in which vLLM is imported: flags and refusals, manager's face.
OUR_TESTS = ("test_plugin.py", "test_refusals.py", "manager/test_face.py")
#: `vllm serve` of 0.33 needs a package (orjson) that the installed 0.32 does not bring.
NOT_THE_COMMAND = "not vllm_serve and not an_unknown_vllm"


def other() -> Release:
    try:
        return release(OTHER)
    except ReleaseUnavailableError as error:
        pytest.skip(f"vLLM {OTHER} is not here: {error}")


def test_the_other_release_gives_the_same_tokens_from_every_tier_and_after_a_restart(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream.engine_child", str(tmp_path / "pool")],
        cwd=ROOT,
        env={**rig.spec().environment(), **suite.environment(other())},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    seen = json.loads(line.removeprefix("RESULT "))
    assert seen["version"] == OTHER
    # What the installed release answers without offloading.
    expected = [answer.tokens for answer in rig.reference().answers]
    assert seen["cold"] == seen["back"] == seen["restarted"] == expected
    assert seen["again"] == seen["void"] == expected[-1:]
    assert seen["first_loaded"]["cpu"] > 0
    assert seen["first_loaded"]["pool"] > 0
    assert seen["second_loaded"]["pool"] > 0
    assert seen["void_loaded"] == seen["second_loaded"]  # after a reset there is nothing to load


@pytest.mark.soak
def test_our_tests_of_what_meets_vllm_pass_on_the_other_release() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", NOT_THE_COMMAND]
        + [f"tests/unit/{name}" for name in OUR_TESTS],
        cwd=ROOT,
        env=suite.environment(other()),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
