# SPDX-License-Identifier: Apache-2.0
"""All figures of one model on one deployment, each with the formula it comes from.

What a sizing takes for granted, and what the reader should know about this one.

Figures that others have published, to stand beside ours. Nothing here was measured by us.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_DOWN, Decimal

from pydantic import BaseModel, ConfigDict

from vllm_nvmeof_offload.commands.size.kv import (
    Deployment,
    GpuRoom,
    KvSizes,
    Reload,
    cpu_room,
    gpu_room,
    plan_reload,
    pool_room,
)
from vllm_nvmeof_offload.commands.size.model import LayerGroup, LayerKind, ModelShape
from vllm_nvmeof_offload.units import KIB, MIB, human_bytes, human_seconds

__all__ = [
    "DATA24",
    "DATA24_DRIVES",
    "Figure",
    "LayersRow",
    "ScaleRatio",
    "ScaleRow",
    "SizeReport",
    "assumptions",
    "build",
    "notes",
    "print_kib",
    "print_mib",
]


def assumptions(sizes: KvSizes, deployment: Deployment) -> list[str]:
    """What was not given and cannot be computed: each with the option that replaces it."""
    reserve = human_bytes(deployment.gpu_reserve_bytes)
    gpu = (
        f"{deployment.gpu_memory_utilization:g} of GPU memory for vLLM, of that {reserve} for "
        "activations and CUDA graphs (--gpu-utilization, --gpu-reserve)"
    )
    worst = (
        "worst case: all sessions come back at once, with all of their KV in the pool alone; the "
        "whole TTFT is for loading, computing what was not stored comes on top"
    )
    weights = sizes.model.weights
    known = [f"weights: {weights.source} (--weights-bytes)"] if weights.total_bytes else []
    return [
        *known,
        gpu,
        f"the pool takes {deployment.drive_fill:g} of a drive (--drive-fill)",
        f"{deployment.link_efficiency:g} of a link's rate is payload (--link-efficiency)",
        worst,
        "sessions share no prefix; chunks lie evenly over drives, links and GPUs",
    ]


def notes(sizes: KvSizes, deployment: Deployment, room: GpuRoom | None, back: Reload) -> list[str]:
    """What is special about this model or this deployment; empty for a plain one."""
    return [*sizes.model.notes, *_of_model(sizes), *_of_deployment(sizes, deployment, room, back)]


def _of_model(sizes: KvSizes) -> Iterator[str]:
    kinds = {group.kind for group in sizes.model.groups}
    layout = sizes.layout
    refused = [
        name
        for name, found in (
            ("sliding windows", LayerKind.WINDOW in kinds),
            ("recurrent state", LayerKind.STATE in kinds),
            ("a second KV cache (the indexer's)", LayerKind.INDEXER in kinds),
            ("pipeline parallelism", layout.pipeline_parallel > 1),
        )
        if found
    ]
    if refused:
        yield f"this version of the offload refuses {' and '.join(refused)}: a plan, not a promise"
    if LayerKind.WINDOW in kinds:
        yield "of windowed layers the pool is counted with what a load reads: the last window"
    if LayerKind.STATE in kinds:
        yield "layers with recurrent state have no KV per token: one state a session is counted"
    if any(g.kind is LayerKind.STATE and g.state is None for g in sizes.model.groups):
        yield "the size of this family's recurrent state is not known here: counted as nothing"
    copies = sizes.copies()
    if copies > 1:
        yield (
            f"{copies:.3g} copies: each rank stores what it holds, so that "
            f"--tp {layout.tensor_parallel} costs {copies:.3g} times the pool and its bandwidth"
        )


def _of_deployment(
    sizes: KvSizes, deployment: Deployment, room: GpuRoom | None, back: Reload
) -> Iterator[str]:
    limit = sizes.model.context_tokens_max
    if limit is not None and deployment.context_tokens > limit:
        yield f"--context {deployment.context_tokens} is beyond the model's {limit} tokens"
    if deployment.context_tokens < sizes.chunk_tokens:
        yield (
            f"--context {deployment.context_tokens} is less than a chunk of {sizes.chunk_tokens} "
            "tokens: nothing is stored of it"
        )
    if room is None:
        yield f"GPU memory is left out: {sizes.model.weights.source}"
    elif room.free_bytes <= 0:
        yield "the weights do not fit into GPU memory: more --tp, or more --gpu-memory"
    elif room.sessions == 0:
        yield "not one session of this context fits into GPU memory: vLLM would refuse it"
    if back.seconds > deployment.ttft_seconds:
        hop = back.bottleneck
        yield (
            f"the {hop.name} are in the way: {hop.bytes_per_s / 1e9:.2f} of "
            f"{back.needed_bytes_per_s / 1e9:.2f} GB/s; {hop.needed} would do, or "
            f"{back.sessions_in_time} sessions at once"
        )


@dataclass(frozen=True, slots=True)
class ScaleRatio:
    """What one drive was seen to carry; a table scales it by the number of drives."""

    gpus_per_drive: int
    sessions_per_drive: int
    source: str

    def scaled(self, drives: int) -> tuple[int, int]:
        """(GPUs, sessions) on `drives` drives: in proportion, as the source's table does."""
        return drives * self.gpus_per_drive, drives * self.sessions_per_drive


#: A node of 4 GPUs on one drive, 16 conversations at once. The ratio does not follow from a
#: model's configuration: it was measured on one drive, and the table is its multiple.
DATA24 = ScaleRatio(
    4,
    16,
    "Western Digital, technical brief on disaggregated key-value cache offloading with OpenFlex "
    "Data24 4000: a 70B model on vLLM with LMCache",
)
DATA24_DRIVES = (1, 6, 12, 24)


def print_kib(count: int) -> str:
    """A block size as the vLLM blog's table prints it, with KB for KiB."""
    return f"{_rounded(Decimal(count) / KIB, 'KB')}"


def print_mib(count: int) -> str:
    """The same in MB for MiB: two places, halves down (0.875 is printed 0.87), no zeros."""
    return f"{_rounded(Decimal(count) / MIB, 'MB')}"


def _rounded(number: Decimal, unit: str) -> str:
    rounded = number.quantize(Decimal("0.01"), ROUND_HALF_DOWN)
    return f"{rounded.normalize():f} {unit}"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Figure(_Frozen):
    """`value` in `unit`; `text` for people; `formula`: what it was computed from."""

    section: str
    name: str
    value: float
    unit: str
    text: str
    formula: str


class LayersRow(_Frozen):
    """One kind of layers. Bytes of one block (or of the state) in one layer on one rank.

    fragment_bytes: the piece that lies together where layers, keys and values are apart.
    """

    kind: str
    layers: int
    page_bytes: int
    fragment_bytes: int
    state_bytes: int | None
    window_tokens: int | None


class ScaleRow(_Frozen):
    """One number of drives: ours by formula, and a published ratio beside it."""

    drives: int
    sessions_held: int
    sessions_in_time: int
    bottleneck: str
    published_gpus: int
    published_sessions: int


class SizeReport(_Frozen):
    """What `vllm-nvmeof size --json` prints."""

    model: str
    deployment: Deployment
    layers: list[LayersRow]
    figures: list[Figure]
    bottleneck: str
    meets_ttft: bool
    scaling: list[ScaleRow]
    published_source: str
    assumptions: list[str]
    notes: list[str]


def build(model: ModelShape, deployment: Deployment) -> SizeReport:
    """Size `model` on `deployment`.

    Raises:
        ConfigError: GPUs, ranks and KV heads that do not go together.
    """
    deployment.check()
    sizes = KvSizes(model, deployment.layout)
    room, back = gpu_room(sizes, deployment), plan_reload(sizes, deployment, deployment.drives)
    figures = [
        *_model_figures(sizes, deployment),
        *_gpu_figures(sizes, deployment, room),
        *_cpu_figures(sizes, deployment),
        *_pool_figures(sizes, deployment),
        *_reload_figures(sizes, deployment, back),
    ]
    return SizeReport(
        model=model.name,
        deployment=deployment,
        layers=[_layers_row(sizes, group) for group in model.groups],
        figures=figures,
        bottleneck=back.bottleneck.name,
        meets_ttft=back.seconds <= deployment.ttft_seconds,
        scaling=[_scale_row(sizes, deployment, d) for d in _drive_counts(deployment)],
        published_source=DATA24.source,
        assumptions=assumptions(sizes, deployment),
        notes=notes(sizes, deployment, room, back),
    )


def _bytes(section: str, name: str, value: float, formula: str) -> Figure:
    return Figure(
        section=section, name=name, value=value, unit="bytes", text=human_bytes(value),
        formula=formula,
    )  # fmt: skip


def _rate(section: str, name: str, value: float, formula: str) -> Figure:
    text = f"{value / 1e9:.2f} GB/s"
    return Figure(
        section=section, name=name, value=value, unit="bytes/s", text=text, formula=formula
    )


def _count(section: str, name: str, value: float, unit: str, formula: str) -> Figure:
    text = f"{value:,.0f} {unit}" if value == int(value) else f"{value:,.2f} {unit}"
    return Figure(section=section, name=name, value=value, unit=unit, text=text, formula=formula)


def _model_figures(sizes: KvSizes, deployment: Deployment) -> Iterator[Figure]:
    section, layout = "KV cache", sizes.layout
    yield _bytes(
        section, "KV of one token", sizes.token_bytes(),
        "layers × KV heads × (key + value width) × element bytes; MLA: layers × (rank + rope)",
    )  # fmt: skip
    yield _bytes(
        section, "of it on one rank", sizes.rank_token_bytes(),
        f"heads over --tp {layout.tensor_parallel}, layers over --pp {layout.pipeline_parallel}",
    )  # fmt: skip
    yield _count(
        section, "copies over all ranks", sizes.copies(), "×",
        "bytes on all ranks ÷ KV of one token; above 1: MLA, or more ranks than KV heads",
    )  # fmt: skip
    yield _bytes(
        section, "block, all layers of a rank", sizes.block_bytes(),
        f"{layout.block_tokens} tokens × KV of one token on one rank",
    )  # fmt: skip
    if sizes.state_bytes():
        yield _bytes(
            section, "recurrent state of a rank", sizes.state_bytes(),
            "convolution and recurrent state of each layer: per sequence, whatever its length",
        )  # fmt: skip
    yield _count(
        section, "chunk", sizes.chunk_tokens, "tokens",
        f"{sizes.blocks_per_chunk} blocks: at least chunk_bytes_min a rank, at most 256 tokens",
    )  # fmt: skip
    slots = sizes.session_slots(deployment.context_tokens)
    for slot in slots:
        yield _bytes(
            section, f"slot of {human_bytes(slot.payload_bytes)}", slot.stride_bytes,
            f"4 KiB header page + payload padded to 4 KiB; {slot.count} of them for a session",
        )  # fmt: skip
    yield _bytes(
        section, "session, made once", _session_once(sizes, deployment.context_tokens),
        f"KV of {deployment.context_tokens} tokens over all layers, windows as far as they reach",
    )  # fmt: skip


def _session_once(sizes: KvSizes, context_tokens: int) -> int:
    alone = KvSizes(sizes.model, sizes.layout.alone())
    return alone.session_rank_bytes(context_tokens)


def _gpu_figures(sizes: KvSizes, deployment: Deployment, room: GpuRoom | None) -> Iterator[Figure]:
    section = "GPU memory"
    if room is None:
        return
    yield _bytes(
        section, "weights on one GPU", room.weights_bytes,
        f"weights ÷ {sizes.layout.ranks} ranks; {sizes.model.weights.source}",
    )  # fmt: skip
    yield _bytes(
        section, "left for KV on one GPU", room.free_bytes,
        "memory × utilization − reserve − weights",
    )  # fmt: skip
    yield _bytes(
        section, "session on one GPU", room.session_bytes, "whole blocks of the context + state"
    )
    yield _count(
        section, "sessions in GPU memory", room.sessions, "sessions",
        f"⌊left ÷ session⌋ × {deployment.engines} engines",
    )  # fmt: skip


def _cpu_figures(sizes: KvSizes, deployment: Deployment) -> Iterator[Figure]:
    section, room = "CPU tier", cpu_room(sizes, deployment)
    yield _bytes(
        section, "cache slots of one rank", room.cache_bytes,
        "staging ÷ ranks, whole slots, less the stream slots (64, at most a quarter)",
    )  # fmt: skip
    yield _count(
        section, "sessions in the CPU tier", room.sessions, "sessions",
        f"⌊cache slots ÷ slots of a session⌋ × {deployment.engines} engines",
    )  # fmt: skip


def _pool_figures(sizes: KvSizes, deployment: Deployment) -> Iterator[Figure]:
    section, room = "pool", pool_room(sizes, deployment, deployment.drives)
    yield _bytes(
        section, "session in the pool", room.session_bytes,
        "whole chunks × (slot + 64 bytes of table) over all ranks",
    )  # fmt: skip
    yield _count(
        section, "sessions per drive", room.sessions_per_drive, "sessions",
        "⌊drive × share used ÷ session⌋",
    )  # fmt: skip
    yield _bytes(
        section, "pool of the enclosure", room.pool_bytes,
        f"{deployment.drives} drives × drive × share used",
    )  # fmt: skip
    yield _count(section, "sessions per enclosure", room.sessions, "sessions", "⌊pool ÷ session⌋")


def _reload_figures(sizes: KvSizes, deployment: Deployment, back: Reload) -> Iterator[Figure]:
    section = "reload"
    yield _bytes(
        section, "read for a session", back.session_bytes, "whole chunks × slot over all ranks"
    )
    yield _rate(
        section, "needed for the TTFT", back.needed_bytes_per_s,
        f"{deployment.concurrency} sessions at once × read ÷ {deployment.ttft_seconds:g} s",
    )  # fmt: skip
    formulas = {
        "drives": f"{deployment.drives} × read rate of a drive",
        "links": f"{deployment.link} × {deployment.link_efficiency:g}",
        "GPU links": (
            f"{deployment.gpus} GPUs × {deployment.gpu_link} × {deployment.link_efficiency:g}"
        ),
    }
    for hop in back.hops:
        yield _rate(section, f"{hop.name} give", hop.bytes_per_s, formulas[hop.name])
        yield _count(section, f"{hop.name} needed", hop.needed, hop.name, "⌈needed ÷ rate of one⌉")
    seconds = back.seconds
    yield Figure(
        section=section, name="time to load them all", value=seconds, unit="s",
        text=human_seconds(seconds),
        formula=f"sessions × read ÷ what the {back.bottleneck.name} give (the least)",
    )  # fmt: skip
    yield _count(
        section, "sessions at once in the TTFT", back.sessions_in_time, "sessions",
        "⌊least rate × TTFT ÷ read⌋",
    )  # fmt: skip


def _layers_row(sizes: KvSizes, group: LayerGroup) -> LayersRow:
    state = None
    if group.kind is LayerKind.STATE and group.state is not None:
        state = group.state.rank_bytes(sizes.layout.tensor_parallel)
    return LayersRow(
        kind=group.kind.value,
        layers=group.layers,
        page_bytes=sizes.page_bytes(group),
        fragment_bytes=sizes.fragment_bytes(group),
        state_bytes=state,
        window_tokens=group.window_tokens,
    )


def _drive_counts(deployment: Deployment) -> list[int]:
    return sorted({*DATA24_DRIVES, deployment.drives})


def _scale_row(sizes: KvSizes, deployment: Deployment, drives: int) -> ScaleRow:
    back = plan_reload(sizes, deployment, drives)
    gpus, sessions = DATA24.scaled(drives)
    return ScaleRow(
        drives=drives,
        sessions_held=pool_room(sizes, deployment, drives).sessions,
        sessions_in_time=back.sessions_in_time,
        bottleneck=back.bottleneck.name,
        published_gpus=gpus,
        published_sessions=sessions,
    )
