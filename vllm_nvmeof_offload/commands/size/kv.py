# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV cache: of a token, a block, a session in GPU memory, and of what is offloaded.

A *stage* is one part of a pipeline; layers are spread over stages as evenly as they go, the
first stages taking what is left over. Rank figures are of the fullest stage, number 0.

What fits where: sessions in GPU memory, in the CPU tier, in the pool.

The hardware and the load that a model is sized for.

What brings sessions back from the pool in time, and what is in the way.

The worst case: everything is in the pool, nothing in GPU memory or in the CPU tier, and all of
`concurrency` sessions come back at the same moment, spread evenly over drives, links and GPUs.

What people write on a command line: links, rates, durations, numbers of tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field

from vllm_nvmeof_offload.commands.size.model import LayerGroup, LayerKind, ModelShape
from vllm_nvmeof_offload.config import OffloadConfig, chunk_blocks
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES
from vllm_nvmeof_offload.units import GIB, parse_bytes, slot_stride_bytes

__all__ = [
    "CpuRoom",
    "Deployment",
    "GpuRoom",
    "Hop",
    "KvSizes",
    "Layout",
    "Link",
    "PoolRoom",
    "Reload",
    "SessionSlots",
    "cpu_room",
    "gpu_room",
    "parse_duration",
    "parse_link",
    "parse_rate",
    "parse_tokens",
    "plan_reload",
    "pool_room",
    "sessions_in_time",
]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is served.

    kv_bytes: of one element of the KV cache. block_tokens: tokens in one block.
    blocks_per_chunk: None for as many as `chunk_bytes_min` asks for, as the server chooses.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_bytes: int = 2
    block_tokens: int = 16
    blocks_per_chunk: int | None = None

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def alone(self) -> Layout:
        """The same on one rank."""
        return replace(self, tensor_parallel=1, pipeline_parallel=1)


@dataclass(frozen=True, slots=True)
class SessionSlots:
    """`count` slots of `payload_bytes` each, on one rank, hold a session's part in some layers."""

    count: int
    payload_bytes: int

    @property
    def stride_bytes(self) -> int:
        """Bytes of one slot in staging and in a slab: header page and padded payload."""
        return slot_stride_bytes(self.payload_bytes)


class KvSizes:
    """The formulas for one model in one layout. All results in bytes unless named otherwise."""

    def __init__(self, model: ModelShape, layout: Layout) -> None:
        """Raises: ConfigError for a split that vLLM refuses."""
        self.model, self.layout = model, layout
        for group in model.groups:
            _check_split(group, layout)
        if layout.pipeline_parallel > model.layers:
            remedy = f"the model has {model.layers} layers"
            raise ConfigError("--pp", layout.pipeline_parallel, remedy)
        self.blocks_per_chunk = layout.blocks_per_chunk or self._default_blocks_per_chunk()

    @property
    def chunk_tokens(self) -> int:
        return self.blocks_per_chunk * self.layout.block_tokens

    def token_bytes(self) -> int:
        """One token in all layers, each thing once: what the model itself makes."""
        kv_bytes = self.layout.kv_bytes
        return sum(group.layers * group.token_bytes(1, kv_bytes) for group in self.model.groups)

    def rank_token_bytes(self, stage: int = 0) -> int:
        """One token in the layers of one rank."""
        return sum(
            self._layers(group, stage) * self._token_bytes(group) for group in self.model.groups
        )

    def copies(self) -> float:
        """Bytes over all ranks for each byte that the model makes; above 1: ranks hold alike."""
        once = self.token_bytes()
        ranks = sum(self.rank_token_bytes(stage) for stage in self._stages())
        return ranks * self.layout.tensor_parallel / once if once else 1.0

    def page_bytes(self, group: LayerGroup) -> int:
        """One block in one layer on one rank."""
        return self.layout.block_tokens * self._token_bytes(group)

    def fragment_bytes(self, group: LayerGroup) -> int:
        """The piece of a page that lies together where keys and values are apart."""
        pieces = 2 if group.value_width else 1
        return self.page_bytes(group) // pieces

    def block_bytes(self, stage: int = 0) -> int:
        """One block in all layers of one rank: one physical block, all layers together."""
        return self.layout.block_tokens * self.rank_token_bytes(stage)

    def state_bytes(self, stage: int = 0) -> int:
        """Recurrent state of one sequence on one rank."""
        states = ((g, g.state) for g in self.model.groups if g.state is not None)
        tensor_parallel = self.layout.tensor_parallel
        return sum(self._layers(g, stage) * s.rank_bytes(tensor_parallel) for g, s in states)

    def session_rank_bytes(self, context_tokens: int, stage: int = 0) -> int:
        """A session in GPU memory, on one rank: whole blocks, windows as far as they reach."""
        attention = sum(
            self._layers(group, stage)
            * self.page_bytes(group)
            * _kept(group, context_tokens, self.layout.block_tokens)
            for group in self.model.groups
        )
        return attention + self.state_bytes(stage)

    def session_slots(self, context_tokens: int, stage: int = 0) -> list[SessionSlots]:
        """What one rank stores of a session: whole chunks only, windows as far as they reach."""
        chunks = context_tokens // self.chunk_tokens
        full, slots = 0, []
        for group in self.model.groups:
            payload = self._layers(group, stage) * self.page_bytes(group) * self.blocks_per_chunk
            if group.kind is LayerKind.WINDOW:
                kept = _kept(group, chunks * self.chunk_tokens, self.chunk_tokens)
                slots.append(SessionSlots(kept, payload))
            else:
                full += payload
        if full:
            slots.append(SessionSlots(chunks, full))
        if chunks and self.state_bytes(stage):
            slots.append(SessionSlots(1, self.state_bytes(stage)))
        return slots

    def staged_rank_bytes(self, context_tokens: int, stage: int = 0) -> int:
        """A session's slots on one rank, in pinned memory; also what a load reads there."""
        return sum(s.count * s.stride_bytes for s in self.session_slots(context_tokens, stage))

    def loaded_bytes(self, context_tokens: int) -> int:
        """Bytes that all ranks read to bring a session back from the pool."""
        each = sum(self.staged_rank_bytes(context_tokens, stage) for stage in self._stages())
        return each * self.layout.tensor_parallel

    def pooled_bytes(self, context_tokens: int) -> int:
        """Bytes of a session in the pool, over all ranks, with the table's entries."""
        slots = sum(
            s.count for stage in self._stages() for s in self.session_slots(context_tokens, stage)
        )
        entries = slots * self.layout.tensor_parallel * ENTRY_BYTES
        return self.loaded_bytes(context_tokens) + entries

    def _stages(self) -> Iterator[int]:
        return iter(range(self.layout.pipeline_parallel))

    def _layers(self, group: LayerGroup, stage: int) -> int:
        whole, left = divmod(group.layers, self.layout.pipeline_parallel)
        return whole + (stage < left)

    def _token_bytes(self, group: LayerGroup) -> int:
        return group.token_bytes(self.layout.tensor_parallel, self.layout.kv_bytes)

    def _default_blocks_per_chunk(self) -> int:
        # One way to choose: the server's own, with its default chunk_bytes_min.
        return chunk_blocks(OffloadConfig(), self.block_bytes(), self.layout.block_tokens)


def _kept(group: LayerGroup, context_tokens: int, unit_tokens: int) -> int:
    """Units (blocks or chunks) of `unit_tokens` that a layer keeps of a context."""
    units = -(-context_tokens // unit_tokens)
    if group.kind is LayerKind.WINDOW and group.window_tokens is not None:
        # A window need not begin where a unit does: one more than it covers.
        units = min(units, -(-(group.window_tokens - 1) // unit_tokens) + 1)
    return units


def _check_split(group: LayerGroup, layout: Layout) -> None:
    ranks, heads = layout.tensor_parallel, group.kv_heads
    if group.split_by_heads and heads % ranks and ranks % heads:
        raise ConfigError(
            "--tp", ranks, f"vLLM cannot share {heads} KV heads over it; give a divisor or multiple"
        )


#: The server's own default, so that the CPU tier comes out as it will be.
_STREAM_SLOTS: int = OffloadConfig.model_fields["stream_slots"].default


class Deployment(BaseModel):
    """Frozen. Bytes, seconds, tokens; links as they are written on the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int = Field(1, ge=1, description="GPUs of the whole deployment.")
    gpu_memory_bytes: int = Field(80 * GIB, gt=0, description="Memory of one GPU.")
    gpu_memory_utilization: float = Field(
        0.92, gt=0, le=1, description="Share of GPU memory that vLLM takes; its default."
    )
    gpu_reserve_bytes: int = Field(
        4 * GIB, ge=0, description="Of that, for activations and CUDA graphs. An assumption."
    )
    tensor_parallel: int = Field(1, ge=1, description="Tensor parallel size of one engine.")
    pipeline_parallel: int = Field(1, ge=1, description="Pipeline parallel size of one engine.")
    kv_element_bytes: int = Field(2, ge=1, description="Bytes of one element of the KV cache.")
    block_tokens: int = Field(16, ge=1, description="Tokens in one block.")
    blocks_per_chunk: int | None = Field(None, ge=1, description="None: as the server chooses.")
    staging_bytes: int = Field(
        8 * GIB, ge=0, description="Pinned CPU memory of one engine, over its ranks."
    )
    stream_slots: int = Field(_STREAM_SLOTS, ge=1, description="Of each rank; the default.")
    context_tokens: int = Field(32 << 10, ge=1, description="Context of one session.")
    concurrency: int = Field(16, ge=1, description="Sessions that come back at once.")
    drives: int = Field(24, ge=1, description="Drives in one enclosure.")
    drive_bytes: int = Field(15_360_000_000_000, gt=0, description="Of one drive. An assumption.")
    drive_fill: float = Field(
        0.9, gt=0, le=1, description="Share of a drive that the pool takes. An assumption."
    )
    drive_read_bytes_per_s: float = Field(
        6.5e9, gt=0, description="Sequential read rate of one drive. An assumption."
    )
    link: str = Field("2x100GbE", description="All links between enclosure and GPU hosts.")
    gpu_link: str = Field("pcie5x16", description="Link of one GPU to its host.")
    link_efficiency: float = Field(
        0.9, gt=0, le=1, description="Payload's share of a link's rate. An assumption."
    )
    ttft_seconds: float = Field(2.0, gt=0, description="Objective: time to first token.")

    @property
    def engines(self) -> int:
        return self.gpus // self.layout.ranks

    @property
    def layout(self) -> Layout:
        return Layout(
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            kv_bytes=self.kv_element_bytes,
            block_tokens=self.block_tokens,
            blocks_per_chunk=self.blocks_per_chunk,
        )

    @property
    def parsed_link(self) -> Link:
        return parse_link(self.link)

    @property
    def parsed_gpu_link(self) -> Link:
        return parse_link(self.gpu_link)

    def check(self) -> None:
        """Raises: ConfigError where GPUs and ranks do not go together."""
        ranks = self.layout.ranks
        if self.gpus % ranks:
            up = -(-self.gpus // ranks) * ranks
            remedy = f"an engine takes {ranks} (--tp times --pp); give a multiple, such as {up}"
            raise ConfigError("--gpus", self.gpus, remedy)


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """GPU memory. free_bytes: for KV on one GPU (below 0: the weights do not fit)."""

    weights_bytes: int
    free_bytes: int
    session_bytes: int
    sessions: int


@dataclass(frozen=True, slots=True)
class CpuRoom:
    """Pinned memory of all engines: cache slots of one rank, and sessions over all engines."""

    cache_bytes: int
    sessions: int


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """The pool on `drives` drives."""

    pool_bytes: int
    session_bytes: int
    sessions_per_drive: int
    sessions: int


def gpu_room(sizes: KvSizes, deployment: Deployment) -> GpuRoom | None:
    """None where nobody knows what the weights weigh. Weights are taken as evenly spread."""
    total = sizes.model.weights.total_bytes
    if total is None:
        return None
    weights = -(-total // sizes.layout.ranks)
    taken = int(deployment.gpu_memory_bytes * deployment.gpu_memory_utilization)
    free = taken - deployment.gpu_reserve_bytes - weights
    session = sizes.session_rank_bytes(deployment.context_tokens)
    each = max(0, free) // session if session else 0
    return GpuRoom(weights, free, session, each * deployment.engines)


def cpu_room(sizes: KvSizes, deployment: Deployment) -> CpuRoom:
    """Cache slots are what is left of the staging after the stream slots.

    Stream slots take at most a quarter, as in the server.
    """
    slots = sizes.session_slots(deployment.context_tokens)
    stride = max((s.stride_bytes for s in slots), default=0)
    session = sizes.staged_rank_bytes(deployment.context_tokens)
    if not stride or not session:
        return CpuRoom(0, 0)
    total = deployment.staging_bytes // sizes.layout.ranks // stride
    streams = max(1, min(deployment.stream_slots, total // 4))
    cache = max(0, total - streams) * stride
    return CpuRoom(cache, cache // session * deployment.engines)


def pool_room(sizes: KvSizes, deployment: Deployment, drives: int) -> PoolRoom:
    """A session's chunks may lie on several drives, so that no drive's rest is lost."""
    each = int(deployment.drive_bytes * deployment.drive_fill)
    session = sizes.pooled_bytes(deployment.context_tokens)
    if not session:
        return PoolRoom(each * drives, 0, 0, 0)
    return PoolRoom(each * drives, session, each // session, each * drives // session)


@dataclass(frozen=True, slots=True)
class Hop:
    """One thing that all bytes pass. needed: how many of it the objective asks for."""

    name: str
    bytes_per_s: float
    needed: int


@dataclass(frozen=True, slots=True)
class Reload:
    """All of the returning sessions, loaded at once."""

    session_bytes: int
    needed_bytes_per_s: float
    hops: tuple[Hop, ...]
    seconds: float
    sessions_in_time: int

    @property
    def bottleneck(self) -> Hop:
        return min(self.hops, key=lambda hop: hop.bytes_per_s)


def plan_reload(sizes: KvSizes, deployment: Deployment, drives: int) -> Reload:
    """Load `concurrency` sessions from `drives` drives within the TTFT objective."""
    session = sizes.loaded_bytes(deployment.context_tokens)
    needed = deployment.concurrency * session / deployment.ttft_seconds
    hops = _hops(deployment, drives, needed)
    rate = min(hop.bytes_per_s for hop in hops)
    return Reload(
        session_bytes=session,
        needed_bytes_per_s=needed,
        hops=hops,
        seconds=deployment.concurrency * session / rate,
        sessions_in_time=sessions_in_time(session, rate, deployment.ttft_seconds),
    )


def sessions_in_time(session_bytes: int, bytes_per_s: float, seconds: float) -> int:
    """Sessions that load within `seconds`; 0 where a session has nothing to load."""
    return math.floor(bytes_per_s * seconds / session_bytes) if session_bytes else 0


def _hops(deployment: Deployment, drives: int, needed: float) -> tuple[Hop, ...]:
    link, gpu_link = deployment.parsed_link, deployment.parsed_gpu_link
    efficiency = deployment.link_efficiency
    one_link = link.bytes_per_s * efficiency
    one_gpu = gpu_link.total_bytes_per_s * efficiency
    one_drive = deployment.drive_read_bytes_per_s
    return (
        Hop("drives", drives * one_drive, math.ceil(needed / one_drive)),
        Hop("links", link.count * one_link, math.ceil(needed / one_link)),
        Hop("GPU links", deployment.gpus * one_gpu, math.ceil(needed / one_gpu)),
    )


#: Transfers per second and lane, and the share of them that carries data (line encoding).
_PCIE = {3: (8e9, 128 / 130), 4: (16e9, 128 / 130), 5: (32e9, 128 / 130), 6: (64e9, 242 / 256)}
_LINK = re.compile(r"^\s*(?:(\d+)\s*x\s*)?(.+?)\s*$", re.IGNORECASE)
_PCIE_NAME = re.compile(r"^pcie\s*(?:gen)?\s*(\d)\s*x\s*(\d+)$", re.IGNORECASE)
_NETWORK = re.compile(r"^(\d+(?:\.\d+)?)\s*(?:gbe|gbps|gbit/s|gb/s|gbib|gib)$", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min)\s*$", re.IGNORECASE)
_TOKENS = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([km]?)\s*$", re.IGNORECASE)
_LANES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Link:
    """`count` links of `bytes_per_s` each in one direction, by the line rate."""

    text: str
    count: int
    bytes_per_s: float

    @property
    def total_bytes_per_s(self) -> float:
        return self.count * self.bytes_per_s


def parse_link(text: str) -> Link:
    """Parse `100GbE`, `2x400GbE`, `pcie5x16`, `4xpcie4x8` or a rate such as `2x12.5GB/s`.

    Raises:
        ValueError: none of these.
    """
    match = _LINK.match(text)
    assert match is not None or not text.strip(), text
    count, name = (int(match.group(1) or 1), match.group(2)) if match else (0, "")
    rate = _one_link(name)
    if rate is None or count < 1:
        raise ValueError(
            f"{text!r} is not a link; write 100GbE, 2x400GbE, pcie5x16 or a rate such as 12.5GB/s"
        )
    return Link(text.strip(), count, rate)


def parse_rate(text: str) -> float:
    """Parse `6.5GB/s` or `900 MiB/s` into bytes per second.

    Raises:
        ValueError: no rate, or none above 0.
    """
    amount, slash, per = text.strip().rpartition("/")
    if slash and per.lower() == "s":
        rate = parse_bytes(amount)
        if rate > 0:
            return float(rate)
    raise ValueError(f"{text!r} is not a rate above 0; write 6.5GB/s or 900MiB/s")


def parse_duration(text: str) -> float:
    """Parse `2s` or `500ms` into seconds.

    Raises:
        ValueError: no duration, or none above 0.
    """
    match = _DURATION.match(text)
    seconds = float(match.group(1)) * _SECONDS[match.group(2).lower()] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a duration above 0; write 2s or 500ms")
    return seconds


def parse_tokens(text: str) -> int:
    """Parse `32768`, `128k` (times 1024) or `1M` (times 1024²).

    Raises:
        ValueError: no number of tokens, or none above 0.
    """
    match = _TOKENS.match(text)
    scale = {"": 1, "k": 1 << 10, "m": 1 << 20}
    tokens = int(float(match.group(1)) * scale[match.group(2).lower()]) if match else 0
    if tokens <= 0:
        raise ValueError(f"{text!r} is not a number of tokens above 0; write 32768 or 128k")
    return tokens


def _one_link(name: str) -> float | None:
    """Bytes per second of one link, in one direction; None: not a link."""
    pcie = _PCIE_NAME.match(name)
    if pcie:
        generation, lanes = int(pcie.group(1)), int(pcie.group(2))
        if generation not in _PCIE or lanes not in _LANES:
            return None
        transfers, share = _PCIE[generation]
        return lanes * transfers * share / 8
    network = _NETWORK.match(name)
    # 12.5GB/s is bytes, 100Gb/s is bits: the only place where the case of a letter tells.
    if network and "B/s" not in name:
        return float(network.group(1)) * 1e9 / 8 or None
    try:
        return parse_rate(name)
    except ValueError:
        return None
