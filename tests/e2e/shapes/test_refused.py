# SPDX-License-Identifier: Apache-2.0
"""Models and options that cannot be offloaded correctly are refused before the server is ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.server import ServerError

from tests.e2e import servers
from tests.e2e.shapes.rig import Plan, Zygote

REMEDY = "add --enable-prefix-caching"


def test_states_without_prefix_caching_are_refused_by_llm(zygote: Zygote, tmp_path: Path) -> None:
    """vLLM then keeps one state per request, and its offloading would stop with an assertion."""
    plan = Plan("lfm2", options={"enable_prefix_caching": False}, target=tmp_path)
    outcome = zygote.run(plan, "refused-lfm2")
    assert outcome.error.startswith("ConfigError: enable_prefix_caching=False")
    assert REMEDY in outcome.error
    assert f"cannot serve: {outcome.error.removeprefix('ConfigError: ')}" in outcome.log


def test_states_of_several_blocks_are_refused(zygote: Zygote, tmp_path: Path) -> None:
    """A state is one block, and a chunk has as many blocks in every group."""
    plan = Plan("lfm2", target=tmp_path, extra={"blocks_per_chunk": 2})
    outcome = zygote.run(plan, "refused-lfm2-chunks")
    assert outcome.error.startswith("ConfigError: blocks_per_chunk=2")
    assert "leave it out" in outcome.error


def test_states_without_prefix_caching_are_refused_by_vllm_serve(
    zygote: Zygote, tmp_path: Path
) -> None:
    """A server exits, and one line names the cause and the remedy."""
    name = "refused-lfm2-server"
    model = zygote.model("lfm2")
    spec = servers.spec(tmp_path)
    spec = replace(spec, model=model, extra_args=("--no-enable-prefix-caching",))
    with pytest.raises(ServerError, match="exited with"):
        servers.start(spec, name)
    lines = (servers.BUILD / "logs" / f"{name}.log").read_text().splitlines()
    (line,) = [line for line in lines if "cannot serve:" in line]
    assert "enable_prefix_caching=False" in line
    assert REMEDY in line


def test_states_alone_are_served_and_not_offloaded(zygote: Zygote, tmp_path: Path) -> None:
    """Without prefix caching, which is vLLM's default for this model, a block is the context."""
    options, extra = {"enable_prefix_caching": False}, {"blocks_per_chunk": 1}
    plan = Plan("mamba", options=options, target=tmp_path, extra=extra)
    outcome = zygote.run(plan, "unoffloaded-mamba")
    assert not outcome.error
    assert "nothing will be offloaded" in outcome.log
    assert REMEDY in outcome.log
