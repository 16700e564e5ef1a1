# SPDX-License-Identifier: Apache-2.0
"""How many models of vLLM's recipes we accept, by the caches that vLLM 0.33 gives their layers.

A recipe's model counts as accepted if the server's rule knows the specification classes of its
family. The table in docs/compatibility.md has one row per family, with the number of its models.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.sizing.families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
RECIPES = json.loads(Path(__file__).with_name("recipes.json").read_text())
#: A recipe's `tasks` are text or multimodal; the others generate sounds, pictures or vectors.
MODELS = 146
#: Of these families' models nothing but text recognition is asked, of pictures or of speech.
RECOGNISERS = ("OCR", "ASR", "Transcribe", "whisper", "Voxtral")


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = RECIPES["families"]
    return found


def table() -> dict[str, list[str]]:
    """Cells by family of the table in the documentation."""
    text = (ROOT / "docs" / "compatibility.md").read_text()
    section = text.split("## Model families")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if "|" in line]
    return {cells[0]: cells for cells in lines[2:]}


def accepted(row: dict[str, Any]) -> bool:
    """Does the server's rule know every class of the family's specifications?"""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    from vllm_nvmeof_offload.vllm_adapter.groups import kinds_of

    kinds = set()
    for name in row["specifications"]:
        cls = getattr(interface, name)
        kinds |= kinds_of(SimpleNamespace(kv_cache_spec=object.__new__(cls)))
    return None not in kinds


def test_at_least_95_percent_are_accepted() -> None:
    every = [model for row in rows() for model in row["models"]]
    assert len(every) == len(set(every)) == MODELS
    kept = [model for row in rows() if accepted(row) for model in row["models"]]
    assert len(kept) == 144
    assert len(kept) >= 0.95 * len(every)
    # Those that answer in text, and are no mere recognisers.
    chat = [model for model in every if not any(word in model for word in RECOGNISERS)]
    assert len(chat) == 133
    assert set(chat) <= set(kept)


def test_a_planned_family_is_in_the_table_of_plans() -> None:
    named = {row["planned_as"] for row in rows()} - {None}
    assert named <= set(FAMILIES)


def test_the_documentation_has_a_row_per_family() -> None:
    cells = table()
    for row in rows():
        family = row["family"]
        assert cells[family][-1] == str(len(row["models"])), family
        verdict = cells[family][1]
        assert verdict.startswith(("yes", "experimental", "no")), family
        assert verdict.startswith("no") != accepted(row), family
