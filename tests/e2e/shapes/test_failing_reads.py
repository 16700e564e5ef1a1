# SPDX-License-Identifier: Apache-2.0
"""Reads that fail in this vLLM's engine, CPU or GPU; `test_faults.py` tests a server at length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.e2e.shapes.rig import Plan, Request, Zygote, only_cpu_engine, prompts, same
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
    failed = zygote.run(replace(plan, extra={"fault_injection": str(faults)}), "failing")
    assert same(failed.answers[0], reference)
    assert failed.grown(0, "nvmeof_failed_chunks") > 0
    assert failed.grown(0, POOL) == whole_chunks(ASKED, 64), "all chunks were requested"
    assert 0 < failed.grown(0, "nvmeof_recomputed_tokens:load_failed") < whole_chunks(ASKED, 64)
    assert failed.grown(0, "nvmeof_stored_chunks") > 0, "the recomputed chunks were stored"


@only_cpu_engine
def test_the_first_chunk_of_a_window_is_unreadable(zygote: Zygote, tmp_path: Path) -> None:
    """vLLM cannot compute on from a bad block whose own window was never loaded.

    The model has only windows of 128 tokens, so that of 333 tokens the chunks from 192 on are
    loaded. The control: if blocks were reported, vLLM would compute on from 192, and answer wrong.
    """
    asked = [Request(prompt, tokens=12) for prompt in prompts(6, 333)]
    plan = Plan("mistral", [asked], target=tmp_path / "pool")
    reference = zygote.reference(plan, "window")
    stored = zygote.run(plan, "window-stored")
    assert same(stored.answers[0], reference)
    failing = replace(plan, faults={0: {"flip_byte_on_read": 1}})
    failed = zygote.run(failing, "window-failing")
    assert failed.grown(0, "nvmeof_failed_chunks") == 1
    assert same(failed.answers[0], reference)
    assert zygote.run(plan, "window-again").grown(0, POOL) > 0, "the chunk was stored again"
    wrong = zygote.run(replace(failing, blocks_reported=True), "window-blocks")
    assert wrong.grown(0, "nvmeof_failed_chunks") == 1
    assert not same(wrong.answers[0], reference)
