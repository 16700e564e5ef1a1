# SPDX-License-Identifier: Apache-2.0
"""The self-test passes on the imported vLLM and catches stand-ins that would give wrong tokens."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.adapter import run_child
from tests.unit.imported_vllm import ImportedVllm
from vllm_nvmeof_offload.connector import NVMeoFOffloadingConnector
from vllm_nvmeof_offload.vllm_adapter import self_test

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, imported_vllm: ImportedVllm) -> dict[str, Any]:
    # A variable of the user's that would leave the test nothing to load.
    env = {**os.environ, "VLLM_NVMEOF_STORE_THRESHOLD": "3"}
    scratch = tmp_path_factory.mktemp("self-test")
    return run_child("self_test_child", scratch, env, "stand-ins", run=imported_vllm.run)


def test_an_unknown_vllm_that_works_passes_with_one_loud_line(found: dict[str, Any]) -> None:
    for case in ("whole", "again", "settings"):
        assert found[case]["error"] == ""
        (line,) = found[case]["log"]
        assert line.startswith("THIS VLLM (0.") and "IS UNKNOWN" in line
        assert "allow_unknown_vllm=false refuses this vLLM" in line
        assert found[case]["cpu_s"] < 2


@pytest.mark.parametrize(
    ("stand_in", "said"),
    [
        ("exchanged", "32 of 64 tokens of a request have wrong KV, the first at"),
        ("stored_exchanged", "of 64 tokens of a request have wrong KV, the first at"),
        ("failures_ignored", "64 of 64 tokens of a request have wrong KV"),
        ("no_reset", "a request after a reset: tokens by source were {'cpu': 64,"),
        ("new_call", "(TypeError: "),
    ],
)
def test_a_stand_in_that_works_otherwise_is_refused(
    found: dict[str, Any], stand_in: str, said: str
) -> None:
    error = found[stand_in]["error"]
    assert error.startswith("IntegrationError: vLLM 0.") and "failed the self-test" in error
    assert said in error and "use a release of vLLM 0.32 or 0.33, or" in error
    assert "\n" not in error and found[stand_in]["log"] == []


def test_it_leaves_nothing_in_the_users_pool(found: dict[str, Any]) -> None:
    assert list(Path(found["pool"]).iterdir()) == []


@pytest.mark.parametrize(("version", "tests"), [("0.33.0", 0), ("0.34.0", 1)])
def test_only_an_unknown_release_is_tested(
    monkeypatch: pytest.MonkeyPatch, version: str, tests: int
) -> None:
    class Connector(NVMeoFOffloadingConnector):
        def __init__(self) -> None: ...

    tested: list[Any] = []
    monkeypatch.setattr(self_test, "run", tested.append)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    Connector()._test_unknown("configuration")
    assert tested == ["configuration"] * tests
