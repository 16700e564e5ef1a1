# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.imported_vllm import ImportedVllm


@pytest.fixture(scope="session")
def imported_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImportedVllm]:
    pytest.importorskip("vllm")
    process = ImportedVllm(tmp_path_factory.mktemp("imported-vllm"))
    yield process
    process.close()
