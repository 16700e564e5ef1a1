# SPDX-License-Identifier: Apache-2.0
"""New weights by vLLM's API: the watch on weights prevents the use of old KV. With random seeds of
block hashes the pool is not adopted; the start line names the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.e2e.shapes.models import make_adapter
from tests.e2e.shapes.rig import Outcome, Plan, Request, Zygote, play_back, prompts, same
from tests.e2e.shapes.test_answers import ASKED, CPU, POOL, whole_chunks


def test_kv_of_old_weights_is_not_used(zygote: Zygote, tmp_path: Path) -> None:
    """Negative control: without the watch old KV is used, and the comparison detects it."""
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


def test_kv_of_an_adapters_old_files_is_not_used(zygote: Zygote, tmp_path: Path) -> None:
    """The adapter is overwritten on disk and reloaded under its name; with the same control."""
    new_files = make_adapter(tmp_path / "new", 2)
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "block_size": 64}

    def asked(number: int, path: Path) -> list[Request]:
        return [Request(one.prompt, lora=("tuned", number, str(path))) for one in ASKED]

    def swapped(name: str, *, unwatched: bool) -> Outcome:
        adapter = make_adapter(tmp_path / name, 1)
        rounds = [asked(1, adapter), asked(2, adapter)]
        plan = Plan("llama", rounds, options, tmp_path / f"{name}-pool", unwatched=unwatched)
        swap = (str(new_files), str(adapter))
        return zygote.run(replace(plan, adapter_swap=swap), f"adapter-{name}")

    reference = zygote.reference(Plan("llama", [asked(1, new_files)], options), "adapter-new")
    watched = swapped("watched", unwatched=False)
    assert not watched.error, watched.error
    assert not same(watched.answers[0], reference)
    assert same(watched.answers[1], reference)
    assert watched.grown(1, CPU) == 0
    unwatched = swapped("unwatched", unwatched=True)
    assert same(unwatched.answers[0], watched.answers[0])
    assert unwatched.grown(1, CPU) > 0
    assert not same(unwatched.answers[1], reference)


def test_a_server_that_is_never_idle_stores_again(zygote: Zygote, tmp_path: Path) -> None:
    """While an old request runs, new ones are stored, and KV of the old one is not served."""
    long = Request(prompts(9, 150)[0], tokens=400)
    again = Request([*long.prompt, 7, 8, 9])  # begins with both of the long prompt's chunks
    afterwards = [*ASKED, again]
    new = zygote.reference(Plan("other", [afterwards]), "other-steady")
    plan = Plan(
        "llama", [[long], ASKED, afterwards], target=tmp_path / "pool", reload="other", steady=True
    )
    steady = zygote.run(plan, "steady")
    _, during, after = steady.answers
    assert [a.tokens for a in during] == [a.tokens for a in new[: len(ASKED)]]
    assert steady.counters[0]["nvmeof_stores_suspended"] == 1
    assert steady.grown(1, "nvmeof_stored_chunks") >= whole_chunks(ASKED, 64) // 64
    assert same(after, new)
    assert steady.grown(2, CPU) + steady.grown(2, POOL) == whole_chunks(ASKED, 64)
    assert "1 requests with older KV are not stored" in steady.log
    assert "every request is stored again" in steady.log

    control = replace(plan, target=tmp_path / "control", unsuspended=True)
    _, _, mixed = zygote.run(control, "steady-unsuspended").answers
    assert not same(mixed[-1:], new[-1:])


WHOLE_TOKENS = 128 + 192
NOT_ADOPTED = (
    "NOTHING IS ADOPTED: xxhash block hashes are seeded at random unless PYTHONHASHSEED is set"
)


def test_a_random_seed_is_not_adopted_and_a_given_one_is(zygote: Zygote, tmp_path: Path) -> None:
    plan = Plan("llama", [ASKED], {"prefix_caching_hash_algo": "xxhash"}, tmp_path)
    first, second = play_back(zygote, plan, "random-seed")
    assert first.grown(1, CPU) == WHOLE_TOKENS, "chunks are found within one process"
    for outcome in (first, second):
        assert NOT_ADOPTED in outcome.log
    assert second.grown(0, CPU) == second.grown(0, POOL) == 0

    seeded = replace(plan, env={"PYTHONHASHSEED": "7"})
    stored = zygote.run(seeded, "seed-stored")
    found = zygote.run(seeded, "seed-found")
    for outcome in (stored, found):
        assert "NOTHING IS ADOPTED" not in outcome.log
        assert same(outcome.answers[0], first.answers[0])
    assert stored.grown(0, POOL) == 0
    assert found.grown(0, POOL) == WHOLE_TOKENS
