# SPDX-License-Identifier: Apache-2.0
"""The process may end while the pipeline's thread works, as after an uncaught exception.

A real pipeline in a child; its engines answer at once.
"""

from __future__ import annotations

from tests.unit.imported_vllm import ImportedVllm

_STATUS = 7
_CHUNKS = 65_536  # they keep the thread busy for 20 ms
_CHILD = f"""
import time
from vllm_nvmeof_bench.hotpath import chunks

def leave(seconds):
    raise SystemExit({_STATUS})

one = chunks.Worker({_CHUNKS})
time.sleep = leave  # `measure` has handed over everything and waits
keys = chunks.random_keys([1], {_CHUNKS})
one.measure(chunks.Recorder("ours", {_CHUNKS}, 0), chunks.batches_of(keys, {_CHUNKS}))
"""


def test_a_process_can_end_while_transfers_run(imported_vllm: ImportedVllm) -> None:
    child = imported_vllm.run(["-c", _CHILD])
    assert child.returncode == _STATUS, child.stderr
    assert "terminate called" not in child.stderr
