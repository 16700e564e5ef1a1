# SPDX-License-Identifier: Apache-2.0
"""Another release of vLLM: its Python code with the installed release's compiled files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import servers as rig
from tests.e2e.servers import LOADED
from tests.upstream import suite
from tests.upstream.releases import Release, ReleaseUnavailableError, release

ROOT = Path(__file__).resolve().parents[2]
OTHER = "0.33.0"
#: Not among `vllm_release.KNOWN`.
UNKNOWN = "0.31.0"
#: Our tests that import vLLM: flags, refusals, KV cache groups, the manager's interface and the
#: look-up's rule.
OUR_TESTS = (
    *("adapter/test_plugin.py", "adapter/test_cache_groups.py"),
    "adapter/test_supported.py::test_unsupported_features_are_refused_by_name",
    *("manager/test_vllm_manager.py", "manager/test_boundary.py"),
    *("manager/test_advice.py", "manager/test_router_scores.py", "adapter/test_replay.py"),
)


def other(version: str = OTHER) -> Release:
    try:
        return release(version)
    except ReleaseUnavailableError as error:
        pytest.skip(f"vLLM {version} cannot be had: {error}")


def test_the_other_release_gives_the_same_tokens_from_every_tier_and_after_a_restart(
    tmp_path: Path,
) -> None:
    """Run an engine within a program's process, then `vllm serve` on the pool that it left."""
    # The answers of the installed release without offloading.
    expected = [answer.tokens for answer in rig.reference().answers]
    seen, log = _engine(tmp_path / "pool", OTHER)
    _same_tokens_from_every_tier(seen, expected)
    assert (seen["version"], seen["known_as"]) == (OTHER, "0.33") and "UNKNOWN" not in log
    assert seen["hinted"] == expected[0]
    none = {"retain": 0, "drop": 0, "malformed": 0}
    assert seen["hints"] == {"prefetch": 1, "demote": 1, "unknown": 1, **none}
    base = rig.spec(tmp_path / "pool")
    spec = replace(base, env={**base.env, **suite.environment(other())})
    with rig.start(spec, "other-release", unforked=True) as server:
        assert f"version {OTHER}" in server.log()
        before = rig.metrics(server)
        assert rig.same(rig.ask(server, rig.reference().prompts), rig.reference().answers)
        assert rig.grown(server, before, LOADED, source="pool") > 0
        before = rig.metrics(server)
        rig.forget_all(server)
        again = rig.ask(server, rig.reference().prompts[-1:])
        assert rig.same(again, rig.reference().answers[-1:])
        assert rig.grown(server, before, LOADED) == 0, "after a reset there is nothing to load"


def test_an_unknown_release_is_served_after_its_self_test(tmp_path: Path) -> None:
    expected = [answer.tokens for answer in rig.reference().answers]
    seen, log = _engine(tmp_path / "pool", UNKNOWN)
    _same_tokens_from_every_tier(seen, expected)
    assert (seen["version"], seen["known_as"]) == (UNKNOWN, "unknown")
    assert log.count(f"THIS VLLM ({UNKNOWN}) IS UNKNOWN") == 1


def _same_tokens_from_every_tier(seen: dict[str, Any], expected: list[list[int]]) -> None:
    assert seen["cold"] == seen["back"] == expected
    assert seen["again"] == expected[-1:]
    assert seen["loaded"]["cpu"] > 0
    assert seen["loaded"]["pool"] > 0


def _engine(pool: Path, version: str) -> tuple[dict[str, Any], str]:
    """What `engine_child` printed with this release, and its log."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream.engine_child", str(pool)],
        cwd=ROOT,
        env={**rig.spec().environment(), **suite.environment(other(version))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    seen: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return seen, done.stdout + done.stderr


@pytest.mark.soak
def test_our_tests_that_import_vllm_pass_on_the_other_release() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"] + [f"tests/unit/{name}" for name in OUR_TESTS],
        cwd=ROOT,
        env=suite.environment(other()),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
