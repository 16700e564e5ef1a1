# SPDX-License-Identifier: Apache-2.0
"""Settings and checks of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

# A machine that is lent for its GPU alone may have neither; the GPU's tests do not need them.
with suppress(ImportError):
    from hypothesis import settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("any-machine", deadline=None)
    settings.load_profile("any-machine")

# Most machines have their temporary directories on the root file system.
os.environ.setdefault("VLLM_NVMEOF_ALLOW_ROOT_FILE_SYSTEM", "true")

#: What shares something that a process makes once and takes long; else each file is alone.
TOGETHER = {
    "tests/e2e/shapes": "zygote",
    "tests/e2e/test_faults.py": "server with faults",
    "tests/e2e/test_monitoring.py": "server with faults",
    "tests/unit/adapter/test_self_test.py": "imported vLLM",
    "tests/unit/pipeline/test_runner.py": "imported vLLM",
}
#: What mostly waits, and has nothing that its tests share: those of one parameter stay together.
APART = {"tests/faults/test_survive.py", "tests/faults/test_stop.py"}


_PART = "run only what tests/gate.py has, or only the rest; all tests if not given"


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a test sets stays its own: vLLM's configuration, for one, sets LD_PRELOAD."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=["gate", "rest"], help=_PART)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    from tests import gate

    parts: dict[str, list[pytest.Item]] = {"gate": [], "rest": []}
    for item in items:
        parts["gate" if gate.has(item) else "rest"].append(item)
    items[:] = parts.pop(part)
    config.hook.pytest_deselected(items=[*parts.popitem()[1]])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run side by side, a file's tests stay together, and in their order."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file in APART:
                return file + nodeid.partition("[")[2]
            directory = file.rpartition("/")[0]
            return TOGETHER.get(file) or TOGETHER.get(directory) or file

    return Together(config, log)
