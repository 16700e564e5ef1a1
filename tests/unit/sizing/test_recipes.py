# SPDX-License-Identifier: Apache-2.0
"""The models of vLLM 0.33's recipes that the server accepts, by the KV caches of their layers.

Each recipe belongs to one family. A family is planned as a model of `families.py` that has the same
kinds of layers, which `test_planner.py` compares with vLLM's planner and the server's rules, or it
has a reason (`why`). The table in docs/compatibility.md has one row per family, with the number of
its recipes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fabric.rig.packages import locked
from tests.unit.sizing.families import FAMILIES, NOT_SIZED
from tests.upstream.releases import ReleaseUnavailableError, cache_place, fetch, opened
from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import KvSizes
from vllm_nvmeof_offload.commands.size.model import parse_model

ROOT = Path(__file__).resolve().parents[3]
ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("recipes.json").read_text())[
    "families"
]
RELEASE = "0.33.0"
RECIPES, ACCEPTED = 188, 186
#: These families' models only recognise text in pictures or speech, or give vectors.
RECOGNISERS = ("OCR", "ASR", "Transcribe", "whisper", "Voxtral", "jina")


def section() -> str:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    return text.split("## Model families")[1].split("\n## ")[0]


def table() -> dict[str, list[str]]:
    """Cells by family of the table in the documentation."""
    lines = [line.strip("| ").split(" | ") for line in section().splitlines() if "|" in line]
    return {cells[0]: cells for cells in lines[2:]}


def accepted(row: dict[str, Any]) -> bool:
    """Does the server accept the family's caches?"""
    if name := row["planned_as"]:
        # `test_planner.py` compares this refusal with the server's, and knows of no other.
        family = FAMILIES.get(name)
        return family is None or (
            KvSizes(parse_model(family.config, family.model), Deployment()).refusal is None
        )
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    from vllm_nvmeof_offload.vllm_adapter.groups import kinds_of

    specs = (object.__new__(getattr(interface, name)) for name in row["specifications"])
    return all(None not in kinds_of(SimpleNamespace(kv_cache_spec=spec)) for spec in specs)


def test_every_recipe_of_the_release_has_one_family() -> None:
    try:
        with locked(cache_place()):
            sdist = fetch(RELEASE)
    except ReleaseUnavailableError as error:
        pytest.skip(f"vLLM {RELEASE} cannot be had: {error}")
    with opened(sdist.path) as archive:
        names = archive.getnames()
    recipes = [
        found[1]
        for name in names
        if (found := re.search(r"^[^/]+/recipes/models/(.+)\.yaml$", name))
    ]
    assert sorted(model for row in ROWS for model in row["models"]) == sorted(recipes)
    assert len(set(recipes)) == RECIPES


def test_every_family_is_planned_or_has_a_reason() -> None:
    for row in ROWS:
        assert bool(row["planned_as"]) != bool(row.get("why")), row["family"]
    assert {row["planned_as"] for row in ROWS} - {None} <= {*FAMILIES, *NOT_SIZED}


def test_at_least_95_percent_are_accepted() -> None:
    kept = [model for row in ROWS if accepted(row) for model in row["models"]]
    assert len(kept) == ACCEPTED >= 0.95 * RECIPES
    every = [model for row in ROWS for model in row["models"]]
    chat = [model for model in every if not any(word in model for word in RECOGNISERS)]
    assert set(chat) <= set(kept)
    assert f"{ACCEPTED} of {RECIPES} are accepted" in " ".join(section().split())


def test_the_documentation_has_a_row_per_family() -> None:
    cells = table()
    for row in ROWS:
        family = row["family"]
        assert cells[family][-1] == str(len(row["models"])), family
        verdict = cells[family][1]
        assert verdict.startswith(("yes", "experimental", "no")), family
        assert verdict.startswith("no") != accepted(row), family
    assert sum(int(row[-1]) for row in cells.values()) == RECIPES
