# SPDX-License-Identifier: Apache-2.0
"""KV cache groups of each model family, planned without vLLM and compared with vLLM's planner.

The planner's plan of each family also goes through the server's rules: it must refuse, choose
blocks per chunk and see groups as `doctor --model` says.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sizing.families import FAMILIES, NOT_SIZED, Family
from tests.upstream import suite
from tests.upstream.releases import ReleaseUnavailableError, release
from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import KvSizes
from vllm_nvmeof_offload.commands.size.model import parse_model
from vllm_nvmeof_offload.commands.size.plan import Plan, stages_of
from vllm_nvmeof_offload.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[3]
RELEASES = ("0.32.0", "0.33.0")
LAYOUTS = ("BLHNC", "LBHNC")
STAGES = (1, 2)
CONTEXT = 32 << 10
REPLAY_OFF = "DeepSeek V4.1 without bounded replay"
Case = dict[str, Any]


def case(family: Family, layout: str, tp: int, pp: int) -> Case:
    return {
        "layers": family.layers,
        "layout": layout,
        "tp": tp,
        "block_tokens": family.block_tokens,
        "context": CONTEXT,
        "stage_ends": [stage.stop for stage in stages_of(len(family.layers), pp)],
    }


def arms(family: Family) -> list[tuple[str, int, int]]:
    return [(layout, tp, pp) for layout in LAYOUTS for tp in family.parallel for pp in STAGES]


def stored_windows(family: Family) -> Family:
    """The family under --no-swa-bounded-replay."""
    layers = [
        [{**spec, "bounded_replay": False} if "bounded_replay" in spec else spec for spec in layer]
        for layer in family.layers
    ]
    return replace(family, layers=layers)


@functools.cache
def vllms(version: str) -> dict[str, list[Any]]:
    """Family → vLLM's plans of its arms, from one process."""
    try:
        tree = release(version)
    except ReleaseUnavailableError as error:
        pytest.skip(f"vLLM {version}'s planner cannot be had: {error}")
    families = {**FAMILIES, **NOT_SIZED, REPLAY_OFF: stored_windows(FAMILIES["DEEPSEEK_V4_1"])}
    asked = [(name, arm) for name, family in families.items() for arm in arms(family)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream.planner_child"],
        input=json.dumps([case(families[name], *arm) for name, arm in asked]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=suite.environment(tree, ROOT),
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("PLANS "))
    plans: dict[str, list[Any]] = {name: [] for name in families}
    for (name, _), plan in zip(asked, json.loads(line.removeprefix("PLANS ")), strict=True):
        plans[name].append(plan)
    return plans


def described(sizes: KvSizes) -> dict[str, Any]:
    """Our plan in the child's form."""
    plan: Plan = sizes.plan
    names = {
        (layer, sizes.model.caches[position]): number
        for number, (layer, position) in enumerate(sizes.model.order)
    }
    everything = range(sizes.model.layers)
    groups = [
        {
            "caches": sorted(names[page.layer, page.cache] for page in group.pages),
            "block_tokens": group.block_tokens,
            "page_bytes": group.page_bytes(everything),
            "true_bytes": group.true_bytes(everything),
            "stored": group.stored,
            "reach_tokens": group.cache.reach_tokens,
        }
        for group in plan.groups
    ]
    strides = [plan.stride_bytes(stage) for stage in range(len(plan.stages))]
    blocks = sizes.session_rank_bytes(CONTEXT) // sizes.block_bytes()
    server = {
        "refused": not sizes.works,
        "blocks_per_chunk": sizes.blocks_per_chunk,
        "groups": [
            [one.group_id, one.kind.name, one.tokens_per_chunk, one.reach_chunks]
            for one in (rank.group for rank in sizes.groups())
        ],
        # The server does not know the padding of a group's further page sizes.
        "boundary_tokens": pytest.approx(sizes.boundary_tokens, rel=0.05),
    }
    return {"groups": groups, "stride_bytes": strides, "blocks": blocks, "server": server}


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_groups_are_those_of_vllms_planner(version: str, name: str) -> None:
    family = FAMILIES[name]
    model = parse_model(family.config, family.model)
    assert model.block_tokens == family.block_tokens
    assert model.layers == len(family.layers)
    for (layout, tp, pp), expected in zip(arms(family), vllms(version)[name], strict=True):
        deployment = Deployment(tensor_parallel=tp, pipeline_parallel=pp, layout=layout)
        if "refused" in expected:
            with pytest.raises(ConfigError, match=r"--layout='LBHNC': vLLM cannot .* give BLHNC"):
                KvSizes(model, deployment)
            continue
        assert described(KvSizes(model, deployment)) == expected, (layout, tp, pp)


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("name", NOT_SIZED)
def test_the_server_takes_a_plan_that_we_cannot_make(version: str, name: str) -> None:
    family = NOT_SIZED[name]
    with pytest.raises(ConfigError, match=family.not_sized):
        parse_model(family.config, family.model)
    plans = dict(zip(arms(family), vllms(version)[name], strict=True))
    for (layout, *sizes), plan in plans.items():
        if layout == "BLHNC":
            assert not plan["server"]["refused"], sizes
            stored = [at for at, group in enumerate(plan["groups"]) if group["stored"]]
            assert [group[0] for group in plan["server"]["groups"]] == stored


@pytest.mark.parametrize("version", RELEASES)
def test_windows_are_stored_where_vllm_does_not_compute_them_again(version: str) -> None:
    """Without bounded replay, only rings, which vLLM's prefix cache lacks, are not stored."""
    specs = itertools.chain.from_iterable(FAMILIES["DEEPSEEK_V4_1"].layers)
    rings = {at for at, spec in enumerate(specs) if spec["class"] == "CircularBufferSpec"}
    assert rings
    for plan in vllms(version)[REPLAY_OFF]:
        assert not plan["server"]["refused"]
        kinds = {kind for _, kind, _, _ in plan["server"]["groups"]}
        assert kinds == {"FULL", "WINDOW"}
        left_out = [group["caches"] for group in plan["groups"] if not group["stored"]]
        assert {*itertools.chain.from_iterable(left_out)} == rings


def test_bytes_stored_are_the_groups_own() -> None:
    """Within 3 % of what all layers have, under both layouts, and never a packed block's stride."""
    for family in FAMILIES.values():
        model = parse_model(family.config, family.model)
        for layout, tp, pp in arms(family):
            deployment = Deployment(tensor_parallel=tp, pipeline_parallel=pp, layout=layout)
            try:
                sizes = KvSizes(model, deployment)
            except ConfigError:
                continue
            for stage, layers in enumerate(sizes.plan.stages):
                each: float = 0.0
                for layer, position in model.order:
                    cache = model.caches[position]
                    if layer in layers and cache.kind.keeps_every_token:
                        each += cache.entry_bytes(tp, 2) / cache.tokens_per_entry
                stored = sum(
                    one.payload_bytes / one.group.tokens_per_chunk
                    for one in sizes.groups(stage)
                    if one.group.reach_chunks is None
                )
                assert stored == pytest.approx(each, rel=0.03), (family.model, layout, tp, pp)
