# SPDX-License-Identifier: Apache-2.0
"""Reads that fail in this vLLM's engine, CPU or GPU; `test_faults.py` tests a server at length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.e2e.shapes.rig import Plan, Zygote, same
from tests.e2e.shapes.test_answers import ASKED, POOL, whole_chunks


def test_reads_that_fail(zygote: Zygote, tmp_path: Path) -> None:
    """After a restart every chunk is in the pool. Both reads of the first prompt fail, and one of
    their retries: missing chunks are computed, and later chunks are loaded.
    """
    plan = Plan("llama", [ASKED], target=tmp_path / "pool")
    reference = zygote.reference(plan, "failing")
    stored = zygote.run(plan, "failing-stored")
    assert same(stored.answers[0], reference)
    faults = tmp_path / "faults.json"
    faults.write_text('{"read_eio": 3, "seed": 1}')
    options = {"fault_injection": str(faults), "admission": "always"}
    failed = zygote.run(replace(plan, extra=options), "failing")
    assert same(failed.answers[0], reference)
    assert failed.grown(0, "nvmeof_failed_chunks") > 0
    assert failed.grown(0, POOL) == whole_chunks(ASKED, 64), "all chunks were requested"
    assert 0 < failed.grown(0, "nvmeof_failed_load_tokens") < whole_chunks(ASKED, 64)
    assert failed.grown(0, "nvmeof_stored_chunks") > 0, "the recomputed chunks were stored"
