# SPDX-License-Identifier: Apache-2.0
"""The report on a model: its KV cache groups, their sizes, the stored chunks, and any refusal.

The report is computed from config.json as in `vllm-nvmeof size`, without a GPU, vLLM or weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.commands import FAILED, plain_console, print_json, table
from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import REFUSED, REMEDY, KvSizes
from vllm_nvmeof_offload.commands.size.model import read_model
from vllm_nvmeof_offload.commands.size.plan import PlannedGroup
from vllm_nvmeof_offload.groups import GroupKind, RankGroup
from vllm_nvmeof_offload.units import HEADER_BYTES, human_bytes, slot_stride_bytes

_FILE_COLUMNS = 160
#: A note is printed if chunks fill a smaller share of their slots on average.
_FILL_MIN = 0.75

_STORED = {
    GroupKind.FULL: "every whole chunk",
    GroupKind.LOCAL: "every whole chunk",
    GroupKind.WINDOW: "the chunks before a boundary",
    GroupKind.STATE: "the state at a boundary",
}


def examine_model(path: Path, kv_dtype: str, as_json: bool, **given: Any) -> int:
    """Print the report on the model in `path` and return the exit code. `given` has fields of
    `Deployment`. Raises ConfigError for an unusable value."""
    model = read_model(path)
    element_bytes = model.kv_element_bytes(kv_dtype)
    sizes = KvSizes(model, Deployment(kv_element_bytes=element_bytes, **given))
    report = describe(sizes)
    if as_json:
        print_json(report)
    else:
        _show(sizes, report)
    return 0 if report["works"] else FAILED


def describe(sizes: KvSizes) -> dict[str, Any]:
    """Return the output of `vllm-nvmeof doctor --model --json`, with a row for each group.

    Bytes are for one rank. A hit ends at a multiple of `unit_tokens`. `boundary_tokens` is the
    number that the key's value "auto" means for this model, or 0 if the key has no effect.
    """
    works, stored, deployment = sizes.works, sizes.groups(), sizes.deployment
    slot = slot_stride_bytes(max((one.payload_bytes for one in stored), default=0))
    ranks = {one.group.group_id: one for one in stored}
    return {
        "model": sizes.model.name,
        "layout": deployment.layout,
        "tensor_parallel": deployment.tensor_parallel,
        "pipeline_parallel": deployment.pipeline_parallel,
        "prefill_context_parallel": deployment.prefill_context_parallel,
        "decode_context_parallel": deployment.decode_context_parallel,
        "works": works,
        "refused": None if works else REFUSED,
        "remedy": None if works else REMEDY,
        "groups": [
            _row(sizes, position, group, ranks.get(position), slot)
            for position, group in enumerate(sizes.plan.groups)
        ],
        "blocks_per_chunk": sizes.blocks_per_chunk,
        "unit_tokens": sizes.unit_tokens,
        "boundary_tokens": sizes.boundary_tokens,
        "gpu_block_bytes": sizes.block_bytes(),
        "slot_bytes": slot,
        "token_bytes": sizes.rank_token_bytes(),
        "boundary_bytes": sizes.boundary_bytes(),
        "notes": [*sizes.notes(), *_notes(sizes, stored, slot)],
    }


def _row(
    sizes: KvSizes, position: int, group: PlannedGroup, rank: RankGroup | None, slot: int
) -> dict[str, Any]:
    """Return a KV cache group on one rank of the fullest stage. Bytes exclude padding.

    A group that keeps all tokens has `token_bytes` per token; a group that keeps only the last
    tokens has `boundary_chunks` and `boundary_bytes` per boundary. `slot_fill` is the share of a
    slot that a chunk fills. Values that do not apply are None.
    """
    stage = sizes.plan.stages[sizes.fullest]
    counted = Counter(page.cache.kind.value for page in group.pages if page.layer in stage)
    layers = ", ".join(f"{count} × {kind}" for kind, count in counted.items()) or "none here"
    row = {
        "group": position,
        "kind": "not stored",
        "layers": layers,
        "reach_tokens": group.cache.reach_tokens,
        "block_tokens": group.block_tokens,
        "block_bytes": group.true_bytes(stage),
        "stored": "nothing: vLLM recomputes it",
        **dict.fromkeys(("chunk_tokens", "chunk_bytes", "token_bytes")),
        **dict.fromkeys(("boundary_chunks", "boundary_bytes", "slot_fill")),
    }
    if rank is None:
        return row
    one, payload, reach = rank.group, rank.payload_bytes, rank.group.reach_chunks
    return row | {
        "kind": one.kind.name.lower(),
        "stored": _STORED[one.kind],
        "chunk_tokens": one.tokens_per_chunk,
        "chunk_bytes": payload,
        "token_bytes": payload / one.tokens_per_chunk if reach is None else None,
        "boundary_chunks": reach,
        "boundary_bytes": None if reach is None else reach * payload,
        "slot_fill": payload / (slot - HEADER_BYTES),
    }


def _notes(sizes: KvSizes, stored: list[RankGroup], slot: int) -> Iterator[str]:
    if any(one.group.reach_chunks is not None for one in stored):
        yield (
            f"a hit ends at a multiple of {sizes.unit_tokens} tokens at which windows and states "
            "were stored: at the end of a prompt or answer, or where prompts diverge"
        )
    fill: float = sum(one.payload_bytes for one in stored)
    fill /= max(1, len(stored) * (slot - HEADER_BYTES))
    if stored and fill < _FILL_MIN:
        yield (
            f"slots are {fill:.0%} full on average, because all groups use one slot size; padding "
            "is not copied, written or read"
        )


def _show(sizes: KvSizes, report: dict[str, Any]) -> None:
    console, deployment = plain_console(_FILE_COLUMNS), sizes.deployment
    console.print(sizes.model.name, style="bold")
    headings = (
        *("group", "layers", "kept", "block", "chunk", "per token", "per boundary", "slot fill"),
        "stored",
    )
    title = f"KV cache groups, {deployment.layout}, one rank of {deployment.ranks_words}"
    if deployment.pipeline_parallel > 1:
        title += f" --pp {deployment.pipeline_parallel} (the fullest stage)"
    console.print(table(headings, map(_cells, report["groups"]), title))
    for line in _lines(sizes, report):
        console.print(line)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    kept = {"full": "every token", "state": "one state"}.get(row["kind"], "")
    if row["reach_tokens"] is not None:
        unit = "of the attention chunk of" if row["kind"] == "local" else "the last"
        kept = f"{unit} {row['reach_tokens']} tokens"
    chunk = per_boundary = ""
    if row["chunk_bytes"] is not None:
        chunk = f"{row['chunk_tokens']} tokens, {human_bytes(row['chunk_bytes'])}"
        if row["boundary_chunks"] is not None:
            per_boundary = f"{row['boundary_chunks']} × {human_bytes(row['chunk_bytes'])}"
    return (
        f"{row['group']} {row['kind']}",
        row["layers"],
        kept,
        f"{row['block_tokens']} tokens, {human_bytes(row['block_bytes'])}",
        chunk,
        "" if row["token_bytes"] is None else human_bytes(row["token_bytes"]),
        per_boundary,
        "" if row["slot_fill"] is None else f"{row['slot_fill']:.0%}",
        row["stored"],
    )


def _lines(sizes: KvSizes, report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"each token adds {human_bytes(sizes.rank_token_bytes())}, each boundary "
        f"{human_bytes(sizes.boundary_bytes())}; {sizes.blocks_per_chunk} blocks per chunk; a slot "
        f"takes {human_bytes(report['slot_bytes'])}, a block in GPU memory "
        f"{human_bytes(sizes.block_bytes())}"
    )
    if sizes.boundary_tokens:
        yield f"boundary_tokens: auto keeps a boundary every {sizes.boundary_tokens} tokens"
    yield from (f"note: {note}" for note in report["notes"])
    yield "works" if sizes.works else f"refused: {REFUSED}; remedy: {REMEDY}"
