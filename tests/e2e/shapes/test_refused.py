# SPDX-License-Identifier: Apache-2.0
"""Models whose KV is not one group of full attention are refused before the server is ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.server import ServerError

from tests.e2e import faults_rig
from tests.e2e.shapes.rig import Plan, Zygote

SERVE_WITHOUT = "serve this model without offloading"


@pytest.mark.parametrize(
    ("kind", "groups", "remedy"),
    [
        ("mistral", "1 KV cache group (2 x SlidingWindowSpec)", "add --disable-sliding-window"),
        ("jamba", "2 KV cache groups (1 x FullAttentionSpec, 1 x MambaSpec)", SERVE_WITHOUT),
        ("mamba", "1 KV cache group (2 x MambaSpec)", SERVE_WITHOUT),
    ],
)
def test_refused_by_llm(
    zygote: Zygote, tmp_path: Path, kind: str, groups: str, remedy: str
) -> None:
    outcome = zygote.run(Plan(kind, target=tmp_path), f"refused-{kind}")
    assert outcome.error.startswith("ConfigError: model=")
    assert f"{kind}-" in outcome.error
    for words in (groups, "this version offloads one group of full attention", remedy):
        assert words in outcome.error
    assert f"cannot serve: {outcome.error.removeprefix('ConfigError: ')}" in outcome.log


def test_refused_by_vllm_serve(zygote: Zygote, tmp_path: Path) -> None:
    """A server of a Gemma-like model exits, and one line names the cause and the remedy."""
    name = "refused-gemma"
    model = zygote.model("gemma")
    spec = replace(faults_rig.spec(tmp_path), model=model, gpu_blocks=400)
    with pytest.raises(ServerError, match="ended with"):
        faults_rig.start(spec, name)
    lines = (faults_rig.BUILD / "logs" / f"{name}.log").read_text().splitlines()
    (lines,) = [line for line in lines if "cannot serve:" in line]
    assert f"model='{model}'" in lines
    assert "4 KV cache groups (1 x FullAttentionSpec, 3 x SlidingWindowSpec)" in lines
    assert "add --disable-hybrid-kv-cache-manager" in lines
