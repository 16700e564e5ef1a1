# SPDX-License-Identifier: Apache-2.0
"""Store on the second lookup and write on eviction, with I/O on threads."""

from __future__ import annotations

from pathlib import Path

from tests.e2e import faults_rig as rig


def test_chunks_are_stored_on_the_second_lookup_and_written_on_eviction(tmp_path: Path) -> None:
    reference = rig.reference()
    spec = rig.spec(
        tmp_path / "pool", store_threshold=2, write_policy="on_eviction", io_engine="threads"
    )
    few = slice(2)  # less than the CPU tier holds
    with rig.start(spec, "policies") as server:
        assert "engine threads" in server.log()
        assert rig.same(rig.ask(server, reference.prompts[few]), reference.answers[few])
        first = rig.wait_for(server, "figures", rig.has_figures)
        assert first.value("vllm:nvmeof_unstored_chunks_total", reason="below_threshold") > 0
        rig.forget_gpu(server)
        assert rig.same(rig.ask(server, reference.prompts[few]), reference.answers[few])
        now = rig.wait_for(
            server, "stores", lambda m: m.value("vllm:nvmeof_stored_chunks_total") > 0
        )
        assert now.value("vllm:nvmeof_fallbacks") == 0
        assert now.value("vllm:nvmeof_written_chunks_total") == 0, "they stay in the CPU tier"
        for _ in range(3):
            assert rig.same(rig.ask(server, reference.prompts), reference.answers)
        now = rig.wait_for(
            server, "demotions", lambda m: m.value("vllm:nvmeof_written_chunks_total") > 0
        )
        assert now.value("vllm:nvmeof_target_written_bytes_total", target="0") > 0
        assert rig.same(rig.ask(server, reference.prompts), reference.answers)
        assert rig.grown(server, now, "vllm:nvmeof_loaded_tokens_total", source="pool") > 0
        assert rig.metrics(server).value("vllm:nvmeof_failed_chunks_total") == 0
