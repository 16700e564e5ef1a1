# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV cache per token, block and session; sessions that fit; bandwidth that they need.

A *stage* is one part of a pipeline. Layers are spread over stages as evenly as possible, and
the first stages take the remainder. Figures of a rank are those of the fullest stage, number 0.

A reload is the worst case: all KV is only in the pool, and all of `concurrency` sessions come
back at the same moment, spread evenly over drives, links and GPUs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from vllm_nvmeof_offload.commands.size.model import LayerGroup, LayerKind, ModelShape
from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.copy.geometry import chunk_blocks
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES
from vllm_nvmeof_offload.units import GIB, parse_bytes, slot_stride_bytes

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

    count: int
    bytes_per_s: float

    @property
    def total_bytes_per_s(self) -> float:
        return self.count * self.bytes_per_s


def parse_link(text: str) -> Link:
    """Parse `100GbE`, `2x400GbE`, `pcie5x16` or a rate as in `2x12.5GB/s`; else ValueError."""
    match = _LINK.match(text)
    count, name = (int(match.group(1) or 1), match.group(2)) if match else (0, "")
    rate = _one_link(name)
    if rate is None or count < 1:
        raise ValueError(
            f"{text!r} is not a link; write 100GbE, 2x400GbE, pcie5x16 or a rate such as 12.5GB/s"
        )
    return Link(count, rate)


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
    # 12.5GB/s is bytes, 100Gb/s is bits: the only place where the case of a letter counts.
    if network and "B/s" not in name:
        return float(network.group(1)) * 1e9 / 8 or None
    try:
        return parse_rate(name)
    except ValueError:
        return None


def parse_rate(text: str) -> float:
    """Parse `6.5GB/s` or `900 MiB/s` into bytes per second above 0; else ValueError."""
    amount, slash, per = text.strip().rpartition("/")
    if slash and per.lower() == "s":
        rate = parse_bytes(amount)
        if rate > 0:
            return float(rate)
    raise ValueError(f"{text!r} is not a rate above 0; write 6.5GB/s or 900MiB/s")


def parse_duration(text: str) -> float:
    """Parse `2s` or `500ms` into seconds above 0; else ValueError."""
    match = _DURATION.match(text)
    seconds = float(match.group(1)) * _SECONDS[match.group(2).lower()] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a duration above 0; write 2s or 500ms")
    return seconds


def parse_tokens(text: str) -> int:
    """Parse `32768`, `128k` (times 1024) or `1M` (times 1024²), above 0; else ValueError."""
    match = _TOKENS.match(text)
    scale = {"": 1, "k": 1 << 10, "m": 1 << 20}
    tokens = int(float(match.group(1)) * scale[match.group(2).lower()]) if match else 0
    if tokens <= 0:
        raise ValueError(f"{text!r} is not a number of tokens above 0; write 32768 or 128k")
    return tokens


def _from_text(parser: Any) -> BeforeValidator:
    """A validator that parses text and leaves numbers as they are."""
    return BeforeValidator(lambda value: parser(value) if isinstance(value, str) else value)


def _check_link(text: str) -> str:
    parse_link(text)
    return text


_Bytes = Annotated[int, _from_text(parse_bytes)]
_Tokens = Annotated[int, _from_text(parse_tokens)]
_BytesPerS = Annotated[float, _from_text(parse_rate)]
_Seconds = Annotated[float, _from_text(parse_duration)]
_LinkText = Annotated[str, AfterValidator(_check_link)]


class Deployment(BaseModel):
    """The hardware and the load that a model is sized for.

    Values are numbers or texts as on the command line, whose options (cli.py) explain them.
    `gpus`, `drives` and `link` are of the whole deployment, `staging_bytes` and the parallel
    sizes are of one engine, `stream_slots` are of one rank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int = Field(1, ge=1)
    gpu_memory_bytes: _Bytes = Field(80 * GIB, gt=0)
    gpu_memory_utilization: float = Field(0.92, gt=0, le=1)  # vLLM's default
    gpu_reserve_bytes: _Bytes = Field(4 * GIB, ge=0)
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    kv_element_bytes: int = Field(2, ge=1)
    block_tokens: int = Field(16, ge=1)
    #: None: as many as the server would choose.
    blocks_per_chunk: int | None = Field(None, ge=1)
    staging_bytes: _Bytes = Field(8 * GIB, ge=0)
    #: The server's default, so that the CPU tier comes out as the server's.
    stream_slots: int = Field(OffloadConfig.model_fields["stream_slots"].default, ge=1)
    context_tokens: _Tokens = Field(32 << 10, ge=1)
    concurrency: int = Field(16, ge=1)
    drives: int = Field(24, ge=1)
    drive_bytes: _Bytes = Field(15_360_000_000_000, gt=0)
    drive_fill: float = Field(0.9, gt=0, le=1)
    drive_read_bytes_per_s: _BytesPerS = Field(6.5e9, gt=0)
    link: _LinkText = "2x100GbE"
    gpu_link: _LinkText = "pcie5x16"
    link_efficiency: float = Field(0.9, gt=0, le=1)
    ttft_seconds: _Seconds = Field(2.0, gt=0)

    @property
    def ranks(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def engines(self) -> int:
        return self.gpus // self.ranks

    def on_one_rank(self) -> Deployment:
        """The same with engines of one rank each."""
        return self.model_copy(update={"tensor_parallel": 1, "pipeline_parallel": 1})


@dataclass(frozen=True, slots=True)
class SessionSlots:
    """`count` slots of `payload_bytes` each hold one rank's part of a session in some layers."""

    count: int
    payload_bytes: int

    @property
    def stride_bytes(self) -> int:
        """Bytes of one slot in staging and in a slab: header page and padded payload."""
        return slot_stride_bytes(self.payload_bytes)


class KvSizes:
    """Formulas for one model in one deployment; results are bytes unless named otherwise."""

    def __init__(self, model: ModelShape, deployment: Deployment) -> None:
        """Raises ConfigError for a split of the model that vLLM refuses."""
        self.model, self.deployment = model, deployment
        self._stages = range(deployment.pipeline_parallel)
        for group in model.groups:
            _check_split(group, deployment.tensor_parallel)
        if deployment.pipeline_parallel > model.layers:
            remedy = f"the model has {model.layers} layers"
            raise ConfigError("--pp", deployment.pipeline_parallel, remedy)
        # The server's own way to choose, with its default chunk_bytes_min.
        self.blocks_per_chunk: int = deployment.blocks_per_chunk or chunk_blocks(
            OffloadConfig(), self.block_bytes(), deployment.block_tokens
        )

    @property
    def chunk_tokens(self) -> int:
        return self.blocks_per_chunk * self.deployment.block_tokens

    def token_bytes(self) -> int:
        """One token in all layers, each byte counted once however many ranks hold it."""
        kv_bytes = self.deployment.kv_element_bytes
        return sum(group.layers * group.token_bytes(1, kv_bytes) for group in self.model.groups)

    def rank_token_bytes(self, stage: int = 0) -> int:
        """One token in the layers of one rank."""
        return sum(
            self._layers(group, stage) * self._token_bytes(group) for group in self.model.groups
        )

    def copies(self) -> float:
        """Bytes on all ranks ÷ bytes that the model makes; above 1: ranks hold equal bytes."""
        once = self.token_bytes()
        ranks = sum(self.rank_token_bytes(stage) for stage in self._stages)
        return ranks * self.deployment.tensor_parallel / once if once else 1.0

    def page_bytes(self, group: LayerGroup) -> int:
        """One block in one layer on one rank."""
        return self.deployment.block_tokens * self._token_bytes(group)

    def fragment_bytes(self, group: LayerGroup) -> int:
        """The contiguous piece of a page where keys and values are apart."""
        return self.page_bytes(group) // (2 if group.value_width else 1)

    def block_bytes(self, stage: int = 0) -> int:
        """One block in all layers of one rank: one physical block, all layers together."""
        return self.deployment.block_tokens * self.rank_token_bytes(stage)

    def state_bytes(self, stage: int = 0) -> int:
        """Recurrent state of one sequence on one rank."""
        states = ((g, g.state) for g in self.model.groups if g.state is not None)
        tensor_parallel = self.deployment.tensor_parallel
        return sum(self._layers(g, stage) * s.rank_bytes(tensor_parallel) for g, s in states)

    def session_rank_bytes(self, context_tokens: int, stage: int = 0) -> int:
        """A session in GPU memory on one rank: whole blocks, windows as far as they reach."""
        attention = sum(
            self._layers(group, stage)
            * self.page_bytes(group)
            * _kept(group, context_tokens, self.deployment.block_tokens)
            for group in self.model.groups
        )
        return attention + self.state_bytes(stage)

    def session_slots(self, context_tokens: int, stage: int = 0) -> list[SessionSlots]:
        """Slots that one rank stores of a session: whole chunks, windows as far as they reach."""
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
        """A session's slots on one rank: bytes of pinned memory, and bytes that a load reads."""
        return sum(s.count * s.stride_bytes for s in self.session_slots(context_tokens, stage))

    def loaded_bytes(self, context_tokens: int) -> int:
        """Bytes that all ranks read to bring a session back from the pool."""
        each = sum(self.staged_rank_bytes(context_tokens, stage) for stage in self._stages)
        return each * self.deployment.tensor_parallel

    def pooled_bytes(self, context_tokens: int) -> int:
        """Bytes of a session in the pool, over all ranks, with the table's entries."""
        slots = sum(
            s.count for stage in self._stages for s in self.session_slots(context_tokens, stage)
        )
        entries = slots * self.deployment.tensor_parallel * ENTRY_BYTES
        return self.loaded_bytes(context_tokens) + entries

    def _layers(self, group: LayerGroup, stage: int) -> int:
        whole, left = divmod(group.layers, self.deployment.pipeline_parallel)
        return whole + (stage < left)

    def _token_bytes(self, group: LayerGroup) -> int:
        return group.token_bytes(self.deployment.tensor_parallel, self.deployment.kv_element_bytes)


def _kept(group: LayerGroup, context_tokens: int, unit_tokens: int) -> int:
    """Units (blocks or chunks) of `unit_tokens` that a layer keeps of a context."""
    units = -(-context_tokens // unit_tokens)
    if group.kind is LayerKind.WINDOW and group.window_tokens is not None:
        # A window need not begin where a unit does: one more than it covers.
        units = min(units, -(-(group.window_tokens - 1) // unit_tokens) + 1)
    return units


def _check_split(group: LayerGroup, ranks: int) -> None:
    heads = group.kv_heads
    if group.split_by_heads and heads % ranks and ranks % heads:
        raise ConfigError(
            "--tp", ranks, f"vLLM cannot share {heads} KV heads over it; give a divisor or multiple"
        )


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """GPU memory. free_bytes: for KV on one GPU (below 0: the weights do not fit)."""

    weights_bytes: int
    free_bytes: int
    session_bytes: int
    sessions: int


@dataclass(frozen=True, slots=True)
class CpuRoom:
    """Pinned memory. cache_bytes: cache slots of one rank. sessions: over all engines."""

    cache_bytes: int
    sessions: int


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """The pool on a number of drives."""

    pool_bytes: int
    session_bytes: int
    sessions_per_drive: int
    sessions: int


def gpu_room(sizes: KvSizes) -> GpuRoom | None:
    """Sessions in GPU memory, weights spread evenly; None if the weights' size is unknown."""
    deployment, total = sizes.deployment, sizes.model.weights.total_bytes
    if total is None:
        return None
    weights = -(-total // deployment.ranks)
    taken = int(deployment.gpu_memory_bytes * deployment.gpu_memory_utilization)
    free = taken - deployment.gpu_reserve_bytes - weights
    session = sizes.session_rank_bytes(deployment.context_tokens)
    each = max(0, free) // session if session else 0
    return GpuRoom(weights, free, session, each * deployment.engines)


def cpu_room(sizes: KvSizes) -> CpuRoom:
    """Sessions in the cache slots: the staging less the stream slots, at most a quarter of it."""
    deployment = sizes.deployment
    slots = sizes.session_slots(deployment.context_tokens)
    stride = max((s.stride_bytes for s in slots), default=0)
    session = sizes.staged_rank_bytes(deployment.context_tokens)
    if not stride or not session:
        return CpuRoom(0, 0)
    total = deployment.staging_bytes // deployment.ranks // stride
    streams = max(1, min(deployment.stream_slots, total // 4))
    cache = max(0, total - streams) * stride
    return CpuRoom(cache, cache // session * deployment.engines)


def pool_room(sizes: KvSizes, drives: int) -> PoolRoom:
    """Sessions on `drives` drives; one session may use several, so no drive's rest is lost."""
    each = int(sizes.deployment.drive_bytes * sizes.deployment.drive_fill)
    session = sizes.pooled_bytes(sizes.deployment.context_tokens)
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


def plan_reload(sizes: KvSizes, drives: int) -> Reload:
    """Load `concurrency` sessions from `drives` drives within the TTFT objective."""
    deployment, session = sizes.deployment, sizes.loaded_bytes(sizes.deployment.context_tokens)
    needed = deployment.concurrency * session / deployment.ttft_seconds
    link, gpu_link = parse_link(deployment.link), parse_link(deployment.gpu_link)
    hops = tuple(
        Hop(name, count * each, math.ceil(needed / each))
        for name, count, each in (
            ("drives", drives, deployment.drive_read_bytes_per_s),
            ("links", link.count, link.bytes_per_s * deployment.link_efficiency),
            ("GPU links", deployment.gpus, gpu_link.total_bytes_per_s * deployment.link_efficiency),
        )
    )
    rate = min(hop.bytes_per_s for hop in hops)
    in_time = math.floor(rate * deployment.ttft_seconds / session) if session else 0
    seconds = deployment.concurrency * session / rate
    return Reload(session, needed, hops, seconds, in_time)
