# SPDX-License-Identifier: Apache-2.0
"""All figures for a model in a deployment, with their formulas, assumptions and notes.

Published figures are shown next to computed figures. For a cluster of prefill and decode nodes that
load through the links of both, DualPath (Wu et al., arXiv 2602.21548) gives the range of ratios
within which the links to storage saturate before the links between nodes and the nodes' memory. The
number of agents follows from the rate of the bottleneck, as in any closed queueing system.
"""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from vllm_nvmeof_offload.commands import plain_console, table
from vllm_nvmeof_offload.commands.size.deployment import VLLM_OPTIONS, Deployment, parse_link
from vllm_nvmeof_offload.commands.size.kv import REFUSED, REMEDY, Advice, KvSizes, Reload, Room
from vllm_nvmeof_offload.commands.size.model import LayerCache, LayerKind, ModelShape
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.units import GIB, human_bytes, human_seconds

_FILE_COLUMNS = 160


#: A published, measured ratio: one drive serves a node of 4 GPUs with 16 simultaneous
#: conversations. The source's table lists multiples of it.
_GPUS_PER_DRIVE, _SESSIONS_PER_DRIVE, _DRIVES = 4, 16, (1, 6, 12, 24)
_SOURCE = (
    "Western Digital, technical brief on disaggregated key-value cache offloading with OpenFlex "
    "Data24 4000: a 70B model on vLLM with LMCache"
)


@dataclass(frozen=True, slots=True)
class Figure:
    section: str
    name: str
    value: float
    unit: str
    text: str
    formula: str


@dataclass(frozen=True, slots=True)
class LayersRow:
    """One kind of layer. Bytes are for one block, or the state, in one layer on one rank.
    `fragment_bytes` is the size of a contiguous piece if keys and values are separate."""

    kind: str
    layers: int
    page_bytes: int
    fragment_bytes: int
    state_bytes: int | None
    reach_tokens: int | None


@dataclass(frozen=True, slots=True)
class ScaleRow:
    drives: int
    sessions_held: int
    sessions_in_time: int
    bottleneck: str
    published_gpus: int
    published_sessions: int


@dataclass(frozen=True, slots=True)
class SizeReport:
    model: str
    deployment: Deployment
    layers: list[LayersRow]
    figures: list[Figure]
    bottleneck: str
    meets_ttft: bool
    #: None if the rate of computing is unknown.
    loads_faster: bool | None
    #: Shell lines that start a single-engine server; empty if nothing would be stored.
    commands: list[str]
    scaling: list[ScaleRow]
    published_source: str
    assumptions: list[str]
    notes: list[str]


def build(model: ModelShape, deployment: Deployment) -> SizeReport:
    """Size `model` on `deployment`. Raises ConfigError if the GPUs do not form whole engines."""
    ranks = deployment.ranks
    if deployment.gpus % ranks:
        up = -(-deployment.gpus // ranks) * ranks
        remedy = f"an engine uses {ranks} GPUs (--tp times --pp times --pcp)"
        raise ConfigError("--gpus", deployment.gpus, f"{remedy}; give a multiple, such as {up}")
    sizes = KvSizes(model, deployment)
    room, back = sizes.gpu_room(), sizes.plan_reload(deployment.drives)
    compute_s, advice = _compute_seconds(deployment), sizes.advise(back)
    return SizeReport(
        model=model.name,
        deployment=deployment,
        layers=[_layers_row(sizes, cache) for cache in model.caches],
        figures=[
            *_model_figures(sizes),
            *_room_figures(sizes, room),
            *_reload_figures(deployment, back),
            *_compute_figures(deployment, back, compute_s),
            *_advice_figures(sizes, advice),
            *_cluster_figures(deployment, back.session_bytes),
        ],
        bottleneck=back.bottleneck.name,
        meets_ttft=back.seconds <= deployment.ttft_seconds,
        loads_faster=back.seconds < compute_s if compute_s and back.seconds else None,
        commands=_commands(sizes, advice) if advice else [],
        scaling=[_scale_row(sizes, d) for d in sorted({*_DRIVES, deployment.drives})],
        published_source=_SOURCE,
        assumptions=list(_assumptions(sizes)),
        notes=[
            *sizes.notes(),
            *_notes_on_model(sizes),
            *_notes_on_deployment(sizes, room, back),
            *_notes_on_advice(deployment, back, compute_s, advice),
        ],
    )


def _figure(section: str, name: str, value: float, formula: str, unit: str = "bytes") -> Figure:
    texts = {
        "bytes": human_bytes(value),
        "bytes/s": f"{value / 1e9:.2f} GB/s",
        "s": human_seconds(value),
    }
    number = f"{value:,.{0 if float(value).is_integer() else 2}f} {unit}"
    return Figure(section, name, value, unit, texts.get(unit, number), formula)


def _model_figures(sizes: KvSizes) -> Iterator[Figure]:
    row, deployment = functools.partial(_figure, "KV cache"), sizes.deployment
    formula = "layers × KV heads × (key + value width) × element bytes; MLA: layers × (rank + rope)"
    if any(not cache.kind.keeps_every_token for cache in sizes.model.caches):
        formula += "; only for layers that keep every token"
    yield row("KV of one token", sizes.token_bytes(), formula)
    tp, pp = deployment.tensor_parallel, deployment.pipeline_parallel
    formula = f"heads over --tp {tp}, layers over --pp {pp}"
    if deployment.decode_context_parallel > 1:
        formula += f", tokens over --dcp {deployment.decode_context_parallel}"
    yield row("of it on one rank", sizes.rank_token_bytes(), formula)
    formula = "bytes on all ranks ÷ KV of one token; above 1: MLA, or more ranks than KV heads"
    yield row("copies over all ranks", sizes.copies(), formula, "×")
    formula = f"{sizes.block_tokens} tokens × KV of one token on one rank"
    if len(sizes.plan.groups) > 1:
        formula = f"the widest of {len(sizes.plan.groups)} KV cache groups (doctor --model)"
    yield row("block, all layers of a rank", sizes.block_bytes(), formula)
    if state := sizes.state_bytes():
        formula = "convolution and recurrent state of all layers, per sequence of any length"
        yield row("recurrent state of a rank", state, formula)
    if boundary := sizes.boundary_bytes():
        formula = "windows and states that a prefix needs at its end, on one rank"
        yield row("kept per boundary", boundary, formula)
    blocks = f"{sizes.blocks_per_chunk} blocks"
    formula = f"{blocks}: at least chunk_bytes_min per rank, at most 256 tokens"
    yield row("chunk", sizes.chunk_tokens, formula, "tokens")
    context = deployment.context_tokens
    slots = sizes.session_slots(context)
    count = sum(one.count for one in slots)
    formula = "4 KiB header page + the largest chunk padded to 4 KiB; "
    yield row("slot", slots[0].stride_bytes, f"{formula}{count} of them per session")
    once = KvSizes(sizes.model, deployment.on_one_rank()).session_rank_bytes(context)
    formula = f"KV of {context} tokens in all layers; in windows, only the last tokens"
    yield row("session, made once", once, formula)


def _room_figures(sizes: KvSizes, room: Room | None) -> Iterator[Figure]:
    deployment, weights = sizes.deployment, sizes.rank_weights_bytes()
    drives, engines = deployment.drives, f"{deployment.engines} engines"
    if room is not None and weights is not None:
        row = functools.partial(_figure, "GPU memory")
        shares = deployment.tensor_parallel * deployment.pipeline_parallel
        formula = f"weights ÷ {shares} ranks; {sizes.model.weights.source}"
        yield row("weights on one GPU", weights, formula)
        formula = "memory × utilization − reserve − weights"
        yield row("left for KV on one GPU", room.free_bytes, formula)
        yield row("session on one GPU", room.session_bytes, "whole blocks of the context + state")
        formula = f"⌊left ÷ session⌋ × {engines}"
        yield row("sessions in GPU memory", room.sessions, formula, "sessions")
    row, room = functools.partial(_figure, "CPU tier"), sizes.cpu_room()
    formula = "staging ÷ ranks, whole slots, less the stream slots (64, at most a quarter)"
    yield row("cache slots of one rank", room.free_bytes, formula)
    formula = f"⌊cache slots ÷ slots of a session⌋ × {engines}"
    yield row("sessions in the CPU tier", room.sessions, formula, "sessions")
    row, room = functools.partial(_figure, "pool"), sizes.pool_room(drives)
    formula = "whole chunks × (slot + 64 bytes of table) over all ranks"
    yield row("session in the pool", room.session_bytes, formula)
    on_one = sizes.pool_room(1).sessions
    yield row("sessions per drive", on_one, "⌊drive × share used ÷ session⌋", "sessions")
    yield row("pool of the enclosure", room.free_bytes, f"{drives} drives × drive × share used")
    yield row("sessions per enclosure", room.sessions, "⌊pool ÷ session⌋", "sessions")


def _reload_figures(deployment: Deployment, back: Reload) -> Iterator[Figure]:
    row, efficiency = functools.partial(_figure, "reload"), f"{deployment.link_efficiency:g}"
    formula = "whole chunks × (header page + own bytes) over all ranks"
    yield row("read for a session", back.session_bytes, formula)
    formula = f"{deployment.concurrency} sessions at once × read ÷ {deployment.ttft_seconds:g} s"
    yield row("needed for the TTFT", back.needed_bytes_per_s, formula, "bytes/s")
    formulas = {
        "drives": f"{deployment.drives} × read rate of a drive",
        "links": f"{deployment.link} × {efficiency}",
        "GPU links": f"{deployment.gpus} GPUs × {deployment.gpu_link} × {efficiency}",
    }
    for hop in back.hops:
        yield row(f"{hop.name} give", hop.bytes_per_s, formulas[hop.name], "bytes/s")
        yield row(f"{hop.name} needed", hop.needed, "⌈needed ÷ rate of one⌉", hop.name)
    formula = f"sessions × read ÷ rate of the {back.bottleneck.name} (the lowest)"
    yield row("time to load them all", back.seconds, formula, "s")
    in_time = back.sessions_in_time
    yield row("sessions at once in the TTFT", in_time, "⌊lowest rate × TTFT ÷ read⌋", "sessions")


def _compute_seconds(deployment: Deployment) -> float:
    if deployment.prefill_tokens_per_s is None:
        return 0.0
    tokens = deployment.concurrency * deployment.context_tokens
    return tokens / (deployment.engines * deployment.prefill_tokens_per_s)


def _compute_figures(deployment: Deployment, back: Reload, compute_s: float) -> Iterator[Figure]:
    """Yield the rate at which computing is as fast as loading; compare the two at a given rate."""
    if not back.seconds:
        return
    row = functools.partial(_figure, "computing")
    tokens, engines = deployment.concurrency * deployment.context_tokens, deployment.engines
    formula = "sessions × context ÷ time to load them all ÷ engines; below it, loading is faster"
    yield row("as fast as loading at", tokens / back.seconds / engines, formula, "tokens/s")
    if compute_s:
        rate = f"{engines} engines × {deployment.prefill_tokens_per_s:g} tokens/s"
        yield row("time to compute them all", compute_s, f"sessions × context ÷ ({rate})", "s")
        formula = "time to compute ÷ time to load; below 1, computing is faster"
        yield row("gain of loading", compute_s / back.seconds, formula, "×")


def _advice_figures(sizes: KvSizes, advice: Advice | None) -> Iterator[Figure]:
    if advice is None:
        return
    deployment, row = sizes.deployment, functools.partial(_figure, "settings")
    formula = f"one engine's share of {deployment.concurrency} sessions + stream slots"
    yield row("staging of one engine", advice.staging_bytes, formula)
    formula = f"one engine's share of {deployment.users} users' sessions + logs"
    yield row("pool of one engine", advice.pool_bytes, formula)
    formula = "the larger of the drives for the users' sessions and the drives for the TTFT"
    yield row("drives for this load", advice.drives_needed, formula, "drives")
    formula = (
        f"{deployment.users} users × session in the pool × {deployment.daily_tokens} ÷ context"
    )
    yield row("written per day", advice.written_bytes_per_day, formula)
    formula = "written per day ÷ capacity of the drives for this load (DWPD)"
    yield row("drive writes per day", advice.drive_writes_per_day, formula, "")


def _commands(sizes: KvSizes, advice: Advice) -> list[str]:
    deployment = sizes.deployment
    targets = ":".join(f"/mnt/kv/{number}" for number in range(advice.targets))
    words = ["vllm serve", shlex.quote(sizes.model.name)]
    for option, name in VLLM_OPTIONS.items():
        value = getattr(deployment, name)
        words += [f"--{option}", str(value)] if value not in (None, 1) else []
    words += ["--kv-cache-dtype fp8"] if deployment.kv_element_bytes == 1 else []
    words += ["--kv-offloading-backend nvmeof"]
    words += ["--kv-offloading-size", str(-(-advice.staging_bytes // GIB))]
    return [
        f"export VLLM_NVMEOF_TARGETS={targets}",
        f"export VLLM_NVMEOF_POOL_BYTES={-(-advice.pool_bytes // GIB)}GiB",
        " ".join(words),
    ]


def _notes_on_advice(
    deployment: Deployment, back: Reload, compute_s: float, advice: Advice | None
) -> Iterator[str]:
    if not compute_s:
        yield (
            "loading and computing are not compared: give --prefill-tokens-per-s, as measured on "
            "your GPU"
        )
    elif back.seconds >= compute_s:
        yield (
            f"computing takes {human_seconds(compute_s)}, loading {human_seconds(back.seconds)}: "
            "the pool would not be used (admission)"
        )
    if advice and advice.drives_needed > deployment.drives:
        yield (
            f"this load needs {advice.drives_needed} drives, but --drives is {deployment.drives}: "
            "the pool exceeds the drives, or loads miss the TTFT"
        )


def ratio_range(deployment: Deployment) -> tuple[float, float]:
    """Return the lowest and highest ratio of prefill to decode nodes; if low > high, none fits."""
    gpus, links = deployment.node_gpus, deployment.node_storage_links
    rate = parse_link(deployment.node_link).total_bytes_per_s
    memory = deployment.node_memory_bytes_per_s / (links * rate)
    least = links / (gpus - links) if gpus > links else float("inf")
    return least, min((gpus - 2 * links) / links, (gpus - links) / (2 * links), (memory - 3) / 2)


def turns_per_s(
    links: int, link_bytes_per_s: float, read_bytes: float, prefill: int, compute_s: float
) -> float:
    """Return the turns per second that the links and prefill nodes can sustain. Each turn reads
    `read_bytes` and computes for `compute_s`; if that is 0, computing is not a limit."""
    read = links * link_bytes_per_s / read_bytes
    return min(read, prefill / compute_s) if compute_s else read


def _cluster_figures(deployment: Deployment, read_bytes: float) -> Iterator[Figure]:
    """Yield the figures for the cluster, if one is given. Each turn reads its context:
    `read_bytes`, or 0 if the context is shorter than a chunk."""
    row = functools.partial(_figure, "cluster")
    prefill, decode = deployment.prefill_nodes, deployment.decode_nodes
    if prefill is None or decode is None:
        return
    least, most = ratio_range(deployment)
    formula = "s ÷ (g − s); g GPUs and s storage links of B in a node"
    yield row("least prefill per decode node", least, formula, "×")
    formula = "min{(g − 2s) ÷ s, (g − s) ÷ (2s), (M ÷ (B × s) − 3) ÷ 2}; M: memory"
    yield row("most prefill per decode node", most, formula, "×")
    yield row("prefill per decode node", prefill / decode, f"{prefill} ÷ {decode}", "×")
    if not read_bytes:
        return
    link, share = deployment.node_link, deployment.link_efficiency
    gap_s, compute_s = deployment.turn_gap_seconds, deployment.turn_compute_seconds or 0.0
    for words, nodes in (("", prefill + decode), (", own links only", prefill)):
        links, rate = nodes * deployment.node_storage_links, parse_link(link).total_bytes_per_s
        turns = turns_per_s(links, rate * share, read_bytes, prefill, compute_s)
        formula = f"{links} × {link} × {share:g} ÷ read"
        if compute_s:
            formula = f"min({formula}, {prefill} nodes ÷ {compute_s:g} s)"
        yield row(f"turns per second{words}", turns, formula, "/s")
        # With more agents, all would wait longer: the cluster sustains no more turns.
        agents = int(turns * (deployment.ttft_seconds + gap_s))
        formula = f"turns × (TTFT + {gap_s:g} s from first token to next turn)"
        yield row(f"agents at the TTFT{words}", agents, formula, "agents")


def _layers_row(sizes: KvSizes, cache: LayerCache) -> LayersRow:
    page, fragment = sizes.page_bytes(cache), sizes.fragment_bytes(cache)
    ranks, state = sizes.deployment.tensor_parallel, None
    if cache.kind is LayerKind.STATE:
        state = cache.state.rank_bytes(ranks) if cache.state else None
        page = fragment = 0
    return LayersRow(cache.kind.value, cache.layers, page, fragment, state, cache.reach_tokens)


def _scale_row(sizes: KvSizes, drives: int) -> ScaleRow:
    back, held = sizes.plan_reload(drives), sizes.pool_room(drives).sessions
    published = drives * _GPUS_PER_DRIVE, drives * _SESSIONS_PER_DRIVE
    return ScaleRow(drives, held, back.sessions_in_time, back.bottleneck.name, *published)


def _assumptions(sizes: KvSizes) -> Iterator[str]:
    deployment, weights = sizes.deployment, sizes.model.weights
    if weights.total_bytes:
        yield f"weights: {weights.source} (--weights-bytes)"
    reserve = human_bytes(deployment.gpu_reserve_bytes)
    yield (
        f"{deployment.gpu_memory_utilization:g} of GPU memory for vLLM, of which {reserve} for "
        "activations and CUDA graphs (--gpu-utilization, --gpu-reserve)"
    )
    yield f"the pool uses {deployment.drive_fill:g} of a drive (--drive-fill)"
    yield f"{deployment.link_efficiency:g} of a link's rate is payload (--link-efficiency)"
    yield (
        "worst case: all sessions return at once, and their KV is only in the pool; the TTFT "
        "covers only the load, and computing tokens that were not stored takes additional time"
    )
    yield (
        f"{deployment.users} users, one session each in the pool (--users); each adds "
        f"{deployment.daily_tokens} tokens per day, written once (--daily-tokens)"
    )
    yield "sessions share no prefix; chunks are spread evenly over drives, links and GPUs"


def _notes_on_model(sizes: KvSizes) -> Iterator[str]:
    kinds = {cache.kind for cache in sizes.model.caches}
    if not sizes.works:
        yield f"this version refuses {REFUSED}: the figures are only a plan ({REMEDY})"
    if LayerKind.WINDOW in kinds or LayerKind.LOCAL in kinds:
        yield "for windows and attention chunks, the pool counts only the chunks of one boundary"
    if LayerKind.STATE in kinds:
        yield "layers with recurrent state have no KV per token, but one state per session"


def _notes_on_deployment(sizes: KvSizes, room: Room | None, back: Reload) -> Iterator[str]:
    deployment, limit = sizes.deployment, sizes.model.context_tokens_max
    context = deployment.context_tokens
    prefill, decode = deployment.prefill_nodes, deployment.decode_nodes
    if limit is not None and context > limit:
        yield f"--context {context} exceeds the model's limit of {limit} tokens"
    if context < sizes.chunk_tokens:
        chunk = f"a chunk of {sizes.chunk_tokens} tokens"
        yield f"--context {context} is less than {chunk}: nothing is stored"
    if room is None:
        yield f"GPU memory is left out: {sizes.model.weights.source}"
    elif room.free_bytes <= 0:
        yield "the weights do not fit into GPU memory: raise --tp or --gpu-memory"
    elif room.sessions == 0:
        yield "no session of this context fits into GPU memory: vLLM would refuse to start"
    if prefill and decode:
        least, most = ratio_range(deployment)
        if not least <= prefill / decode <= most:
            yield (
                f"with {prefill} prefill and {decode} decode nodes, links between nodes or the "
                "nodes' memory saturate before the links to the pool"
            )
    if back.seconds > deployment.ttft_seconds:
        hop = back.bottleneck
        yield (
            f"the {hop.name} are too slow: they give {hop.bytes_per_s / 1e9:.2f} of the needed "
            f"{back.needed_bytes_per_s / 1e9:.2f} GB/s; give {hop.needed} {hop.name}, or at most "
            f"{back.sessions_in_time} sessions at once"
        )


def show(report: SizeReport) -> None:
    console = plain_console(_FILE_COLUMNS)
    console.print(report.model, style="bold")
    layers = ("layers", "kind", "block in one layer of a rank", "K or V only", "kept")
    console.print(table(layers, map(_layers_cells, report.layers), "layers"))
    figures = table(("", "figure", "value", "formula"), (), "figures")
    for section, rows in itertools.groupby(report.figures, lambda one: one.section):
        figures.add_section()
        for at, one in enumerate(rows):
            figures.add_row("" if at else section, one.name, one.text, one.formula)
    console.print(figures)
    verdict = "in time" if report.meets_ttft else "NOT in time"
    compared = {
        None: "not compared with computing",
        True: "loading is faster than computing",
        False: "COMPUTING is faster",
    }[report.loads_faster]
    console.print(f"bottleneck: {report.bottleneck}; {verdict}; {compared}")
    if report.commands:
        console.print("to start each server of one engine (replace the targets with yours):")
    for line in report.commands:
        console.print(f"    {line}", soft_wrap=True)
    headings = ("drives", "sessions held", "at once in the TTFT", "bottleneck")
    published = ("published: GPUs", "published: sessions")
    cells = (
        [value if isinstance(value, str) else f"{value:,}" for value in astuple(row)]
        for row in report.scaling
    )
    title = "by the number of drives (other values as given)"
    console.print(table((*headings, *published), cells, title))
    lines = [
        *(f"assumed: {line}" for line in report.assumptions),
        *(f"note: {line}" for line in report.notes),
        f"published ratio: {report.published_source}",
    ]
    for line in lines:
        console.print(line)


def _layers_cells(row: LayersRow) -> tuple[str, ...]:
    page, piece, kept = human_bytes(row.page_bytes), human_bytes(row.fragment_bytes), "every token"
    if row.reach_tokens is not None:
        kept = f"the last {row.reach_tokens} tokens"
    if not row.page_bytes:
        page = "unknown" if row.state_bytes is None else human_bytes(row.state_bytes)
        piece, kept = "", "one state per sequence, no KV per token"
    return str(row.layers), row.kind, page, piece, kept
