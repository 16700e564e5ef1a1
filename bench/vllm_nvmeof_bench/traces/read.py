# SPDX-License-Identifier: Apache-2.0
"""Which reader reads which files."""

from __future__ import annotations

from pathlib import Path

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.traces.kv_cache_tester import read_folder
from vllm_nvmeof_bench.traces.model import Trace
from vllm_nvmeof_bench.traces.mooncake import read_lines

__all__ = ["read_trace"]


def read_trace(path: Path) -> Trace:
    """A folder of *.json or one such file: kv-cache-tester's; *.jsonl: Mooncake's.

    Raises:
        BenchError: neither, or not well formed; names the file and the line or place.
    """
    if not path.exists():
        raise BenchError(f"{path}: there is no such file or folder")
    if path.is_dir() or path.suffix == ".json":
        return read_folder(path)
    if path.suffix == ".jsonl":
        return read_lines(path)
    raise BenchError(
        f"{path}: give a folder of kv-cache-tester's *.json files, or a *.jsonl file of Mooncake's"
    )
