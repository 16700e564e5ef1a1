# SPDX-License-Identifier: Apache-2.0
"""New weights by vLLM's API, and what the watch on them is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.e2e.shapes.rig import Plan, Zygote, same
from tests.e2e.shapes.test_answers import ASKED, CPU


def test_kv_of_old_weights_is_not_used(zygote: Zygote, tmp_path: Path) -> None:
    """With its negative control: where nobody watches it is used, and the comparison sees it."""
    new = zygote.reference(Plan("other", [ASKED]), "other")
    plan = Plan("llama", [ASKED, ASKED], target=tmp_path / "watched", reload="other")
    watched = zygote.run(plan, "reloaded")
    assert not same(watched.answers[0], new)
    assert same(watched.answers[1], new)
    assert watched.grown(1, CPU) == 0
    unwatched = zygote.run(
        replace(plan, target=tmp_path / "unwatched", unwatched=True), "reloaded-unwatched"
    )
    assert same(unwatched.answers[0], watched.answers[0])
    assert unwatched.grown(1, CPU) > 0
    assert not same(unwatched.answers[1], new)
