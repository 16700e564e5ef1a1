# SPDX-License-Identifier: Apache-2.0
"""vLLM with this package in its tree and without the plugin: configuration, tokens, its own tests.

The Python code of 0.32 and 0.33 runs over the compiled files of the installed CPU build.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import servers as rig
from tests.e2e.test_upstream import NEWEST, check
from tests.unit.tools.gpu_tools import tool
from tests.upstream import suite
from tests.upstream.releases import Release, ReleaseUnavailableError, grafted, installed_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

ROOT = Path(__file__).resolve().parents[2]
IN_TREE = "vllm.v1.kv_offload.nvmeof"
NO_PLUGIN = {"VLLM_PLUGINS": ""}


@pytest.fixture(scope="module", params=[installed_version(), NEWEST])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    version: str = request.param
    try:
        return grafted(version, tmp_path_factory.mktemp("grafted") / version)
    except ReleaseUnavailableError as error:
        pytest.skip(f"vLLM {version} cannot be had: {error}")


def python(tree: Release, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the grafted vLLM's Python."""
    environment = {**suite.environment(tree), **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )


def read(tree: Release, target: Path, **variables: str) -> dict[str, Any]:
    model = rig.spec().model
    child = str(ROOT / "tests" / "upstream" / "grafted_child.py")
    done = python(tree, "-P", child, str(model), str(target), **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_tree_has_the_backend_by_itself(tree: Release, tmp_path: Path) -> None:
    found = read(tree, tmp_path / "pool", **NO_PLUGIN)
    assert found["version"].partition("+")[0] == tree.version
    assert found["plugin"] == []
    assert set(found["choices"]) == {"native", "lmcache", "nvmeof"}
    assert found["connector"] == f"{IN_TREE}.connector"
    assert found["spec"] == f"{IN_TREE}.spec"
    assert found["watched"] == "EngineCore.collective_rpc"
    assert not found["post_init_wrapped"], "nothing of vLLM is replaced at run time"
    for case in ("flag", "ours", "stock", "fail"):
        assert found[case]["kv_connector"] == "NVMeoFOffloadingConnector", found[case]
        assert found[case]["kv_connector_module_path"] == f"{IN_TREE}.connector"
        assert found[case]["kv_role"] == "kv_both"
        given = "fail" if case == "fail" else "recompute"
        assert found[case]["kv_load_failure_policy"] == given
    assert found["flag"]["staging_bytes"] == 1 << 30
    assert found["native"]["kv_connector"] == "OffloadingConnector"
    assert found["native"]["kv_load_failure_policy"] != "recompute", "vLLM's own default"
    assert found["unknown_key"]["error"].startswith("ConfigError: targts")


def test_an_installed_plugin_leaves_such_a_vllm_alone(tree: Release, tmp_path: Path) -> None:
    found = read(tree, tmp_path / "pool")
    assert set(found["plugin"]) <= {
        *("vllm_nvmeof_offload", "vllm_nvmeof_offload.errors", "vllm_nvmeof_offload.plugin")
    }
    assert not found["post_init_wrapped"]
    assert found["flag"]["kv_connector_module_path"] == f"{IN_TREE}.connector"


def test_help_lists_the_backend(tree: Release) -> None:
    command = "from vllm.entrypoints.cli.main import main; main()"
    done = python(tree, "-c", command, "serve", "--help=kv-offloading-backend", **NO_PLUGIN)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = " ".join(done.stdout.split())
    assert "{lmcache,native,nvmeof}" in shown
    assert "'nvmeof' (pinned CPU memory and a file pool" in shown


def engine(tree: Release, pool: Path, **variables: str) -> dict[str, Any]:
    """Run an engine in a program's process."""
    environment = {k: v for k, v in rig.spec().environment().items() if k not in os.environ}
    child = ("-m", "tests.upstream.engine_child", str(pool))
    done = python(tree, *child, **environment, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    seen: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return seen


def test_tokens_from_every_tier_are_the_same(tree: Release, tmp_path: Path) -> None:
    """The flag is the tree's; the pool of an engine with the plugin is adopted."""
    expected = [answer.tokens for answer in rig.reference().answers]
    plugins = tree.version == installed_version()
    if plugins:
        engine(replace(tree, python=None), tmp_path / "pool")
    seen = engine(tree, tmp_path / "pool", **NO_PLUGIN)
    assert seen["version"].partition("+")[0] == tree.version
    assert (seen["adopted"] > 0) is plugins
    assert seen["cold"] == seen["back"] == expected
    assert seen["again"] == expected[-1:]
    assert seen["hinted"] == expected[0]
    none = {"retain": 0, "drop": 0, "malformed": 0}
    assert seen["hints"] == {"prefetch": 1, "demote": 1, "unknown": 1, **none}
    assert seen["loaded"]["cpu"] > 0
    assert seen["loaded"]["pool"] > 0


def test_our_end_to_end_tests_pass(tree: Release) -> None:
    """The stock spelling, conversations and preemptions, over HTTP."""
    if tree.version != installed_version():
        pytest.skip("test_versions and this module's other tests run this release")
    done = python(tree, "-m", "pytest", "-q", "tests/e2e/test_tokens.py", **NO_PLUGIN)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_vllms_own_tests_pass_with_our_connector(tree: Release, tmp_path: Path) -> None:
    if tree.version != NEWEST:
        pytest.skip("test_upstream runs them with the same connector from outside the tree")
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    for path in suite.PLUGIN.glob("*.py"):
        (plugin / path.name).write_text(tool("graft").rewritten(path.read_text()))
    check(suite.run(tree, tmp_path, plugin=plugin), tree.version)
