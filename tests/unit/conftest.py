# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.fabrics.trees import Tree
from tests.unit.imported_vllm import ImportedVllm


@pytest.fixture(scope="session")
def imported_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImportedVllm]:
    pytest.importorskip("vllm")
    process = ImportedVllm(tmp_path_factory.mktemp("imported-vllm"))
    yield process
    process.close()


@pytest.fixture
def file() -> Iterator[int]:
    """The memory of a foreign table."""
    fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine")


# Put the benchmarks of a checkout, in `bench/`, on the import path.
if importlib.util.find_spec("vllm_nvmeof_bench") is None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
