# SPDX-License-Identifier: Apache-2.0
"""KV cache bytes per token, block and session; sessions that fit, and the bandwidth they need.

Figures per rank are for the fullest pipeline stage. The largest KV cache group determines the block
size in GPU memory and the slot size of all groups; padding is not copied, read or written.

A reload is the worst case: all KV is only in the pool, and all `concurrency` sessions return at
once, spread evenly over drives, links and GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_nvmeof_offload.commands.size.deployment import Deployment, parse_link
from vllm_nvmeof_offload.commands.size.model import LayerCache, LayerKind, ModelShape
from vllm_nvmeof_offload.commands.size.plan import PlannedGroup, plan_groups
from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.boundary import automatic
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES
from vllm_nvmeof_offload.pool.log import log_pages_of, with_log
from vllm_nvmeof_offload.staging import split_slots
from vllm_nvmeof_offload.units import PAGE_BYTES, slot_stride_bytes

#: The reason why a server with offloading refuses some models, and the remedy.
REFUSED, REMEDY = "a model without KV that vLLM can offload", "serve this model without offloading"


@dataclass(frozen=True, slots=True)
class SessionSlots:
    """The slots that a session takes in one group on one rank. `payload_bytes` is the size of the
    group's chunks, `stride_bytes` that of a slot."""

    count: int
    payload_bytes: int
    stride_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """The room for KV in the pool or, for each of `engines`, on one GPU or in a rank's cache slots.
    A negative `free_bytes` means that the weights do not fit. A session takes `session_bytes`."""

    free_bytes: int
    session_bytes: int
    engines: int = 1

    @property
    def sessions(self) -> int:
        each = max(0, self.free_bytes) // self.session_bytes if self.session_bytes else 0
        return each * self.engines


@dataclass(frozen=True, slots=True)
class Hop:
    """One kind of hardware that every byte passes, such as the drives. `needed` is how many of
    these would meet the TTFT."""

    name: str
    bytes_per_s: float
    needed: int


@dataclass(frozen=True, slots=True)
class Reload:
    session_bytes: int
    needed_bytes_per_s: float
    hops: tuple[Hop, ...]
    seconds: float
    sessions_in_time: int

    @property
    def bottleneck(self) -> Hop:
        return min(self.hops, key=lambda hop: hop.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings for each single-engine server, and the total writes to all drives. The CPU tier
    holds the sessions that return at once, and the pool holds the sessions of all users."""

    staging_bytes: int
    pool_bytes: int
    targets: int
    drives_needed: int
    written_bytes_per_day: float
    drive_writes_per_day: float


class KvSizes:
    """The formulas for a model in a deployment; in bytes, unless the name says otherwise."""

    def __init__(self, model: ModelShape, deployment: Deployment) -> None:
        """Raise ConfigError if vLLM would refuse this split or layout of the model."""
        self.model, self.deployment = model, deployment
        ranks = deployment.tensor_parallel
        for cache in model.caches:
            heads = cache.kv_heads
            if cache.value_width and heads % ranks and ranks % heads:
                remedy = f"vLLM cannot split {heads} KV heads; give a divisor or a multiple"
                raise ConfigError("--tp", ranks, remedy)
        if deployment.pipeline_parallel > model.layers:
            remedy = f"the model has {model.layers} layers"
            raise ConfigError("--pp", deployment.pipeline_parallel, remedy)
        _check_context_parallel(model, deployment)
        self.plan = plan_groups(model, deployment)
        self._stages = range(deployment.pipeline_parallel)
        self.fullest = max(self._stages, key=self.plan.stride_bytes)
        given = OffloadConfig(blocks_per_chunk=deployment.blocks_per_chunk)
        try:
            self.blocks_per_chunk, _ = self.plan.blocks_of_chunk(given)
        except ConfigError as error:
            raise ConfigError("--blocks-per-chunk", error.value, error.remedy) from None

    @property
    def works(self) -> bool:
        """Return whether a server with offloading accepts the model."""
        return bool(self.plan.stored)

    def notes(self) -> Iterator[str]:
        yield from self.model.notes
        if any(one.kind is LayerKind.STATE and one.state is None for one in self.model.caches):
            yield "the size of this family's recurrent state is unknown and counted as 0"
        if (copies := self.copies()) > 1:
            yield (
                f"{copies:.3g} copies: each rank stores its own KV, so "
                f"{self.deployment.ranks_words} needs {copies:.3g} times the pool space and "
                "bandwidth"
            )

    @property
    def block_tokens(self) -> int:
        """Return the tokens per block in layers that keep every token, else in the first group."""
        kept = [one for one in self.plan.groups if one.cache.kind.keeps_every_token]
        return (kept or self.plan.groups)[0].block_tokens

    @property
    def chunk_tokens(self) -> int:
        return self.blocks_per_chunk * self.block_tokens

    @property
    def unit_tokens(self) -> int:
        """Return the unit, in tokens, of which every hit's length is a multiple."""
        return math.lcm(*(g.block_tokens for g in self.plan.stored)) * self.blocks_per_chunk

    @property
    def boundary_tokens(self) -> int:
        """Return the default number of tokens between lasting boundaries; 0 if none are needed."""
        unit = math.lcm(self.unit_tokens, *(group.block_tokens for group in self.plan.groups))
        return automatic(self.groups(), unit)

    def _layers(self, stage: int | None) -> range:
        return self.plan.stages[self.fullest if stage is None else stage]

    def groups(self, stage: int | None = None) -> list[RankGroup]:
        found = []
        for position, group in enumerate(self.plan.groups):
            if group.stored:
                tokens = group.block_tokens * self.blocks_per_chunk
                reach = max(1, -(-(group.cache.reach_tokens or 0) // tokens))
                kept = None if group.kind is GroupKind.FULL else reach
                one = Group(position, group.kind, tokens, self.blocks_per_chunk, kept)
                found.append(RankGroup(one, group.true_bytes(self._layers(stage))))
        return found

    def token_bytes(self) -> int:
        """Return the bytes that a token adds permanently; copies on several ranks count once."""
        return round(self._growing(1, range(self.model.layers)))

    def rank_token_bytes(self) -> int:
        growing = self._growing(self.deployment.tensor_parallel, self._layers(self.fullest))
        return round(growing / self.deployment.decode_context_parallel)

    def _growing(self, tensor_parallel: int, layers: range) -> float:
        kv_bytes = self.deployment.kv_element_bytes
        kept = (self.model.caches[at] for layer, at in self.model.order if layer in layers)
        kept = (one for one in kept if one.kind.keeps_every_token)
        return sum(c.entry_bytes(tensor_parallel, kv_bytes) / c.tokens_per_entry for c in kept)

    def copies(self) -> float:
        """Return the KV bytes on all ranks divided by the bytes of one copy."""
        ranks, kv_bytes = self.deployment.tensor_parallel, self.deployment.kv_element_bytes
        once = each = 0
        for cache in self.model.caches:
            tokens = self.plan.groups[0].block_tokens * cache.tokens_per_entry
            once += cache.layers * cache.block_bytes(tokens, 1, kv_bytes)
            if cache.kind.keeps_every_token:
                tokens //= self.deployment.decode_context_parallel
            each += cache.layers * cache.block_bytes(tokens, ranks, kv_bytes)
        return each * self.deployment.stage_ranks / once if once else 1.0

    def page_bytes(self, cache: LayerCache) -> int:
        pages = (page for group in self.plan.groups for page in group.pages)
        return next(page.true_bytes for page in pages if page.cache == cache)

    def fragment_bytes(self, cache: LayerCache) -> int:
        """Return the bytes of a page's contiguous piece if keys and values are separate."""
        return self.page_bytes(cache) // (2 if cache.value_width else 1)

    def block_bytes(self) -> int:
        return self.plan.stride_bytes(self.fullest)

    def rank_weights_bytes(self) -> int | None:
        """Return one rank's share of the weights in bytes, if spread evenly; None if unknown."""
        total, deployment = self.model.weights.total_bytes, self.deployment
        # Prefill-context-parallel ranks have equal weights.
        shares = deployment.tensor_parallel * deployment.pipeline_parallel
        return None if total is None else -(-total // shares)

    def state_bytes(self) -> int:
        return sum(g.payload_bytes for g in self.groups() if g.group.kind is GroupKind.STATE)

    def boundary_bytes(self) -> int:
        """Return the bytes of a boundary on one rank, in addition to the KV of its prefix."""
        return sum(g.payload_bytes * (g.group.reach_chunks or 0) for g in self.groups())

    def session_rank_bytes(self, context_tokens: int) -> int:
        blocks = sum(_held_blocks(group, context_tokens) for group in self.plan.groups)
        return blocks * self.block_bytes()

    def session_slots(self, context_tokens: int, stage: int | None = None) -> list[SessionSlots]:
        """Return one rank's slots, by group, for a session and the session's last boundary."""
        groups, end = self.groups(stage), context_tokens - context_tokens % self.unit_tokens
        stride = slot_stride_bytes(max(one.payload_bytes for one in groups))
        slots = []
        for one in groups:
            count = min(end // one.group.tokens_per_chunk, one.group.reach_chunks or end)
            slots.append(SessionSlots(count, one.payload_bytes, stride))
        return slots

    def _all_slots(self, context_tokens: int) -> Iterator[SessionSlots]:
        for stage in [*self._stages] * self.deployment.stage_ranks:
            yield from self.session_slots(context_tokens, stage)

    def loaded_bytes(self, context_tokens: int) -> int:
        own = self._all_slots(context_tokens)
        return sum(one.count * slot_stride_bytes(one.payload_bytes) for one in own)

    def pooled_bytes(self, context_tokens: int) -> int:
        slots = self._all_slots(context_tokens)
        return sum(s.count * (s.stride_bytes + ENTRY_BYTES) for s in slots)

    def gpu_room(self) -> Room | None:
        deployment, weights = self.deployment, self.rank_weights_bytes()
        if weights is None:
            return None
        taken = int(deployment.gpu_memory_bytes * deployment.gpu_memory_utilization)
        free = taken - deployment.gpu_reserve_bytes - weights
        return Room(free, self.session_rank_bytes(deployment.context_tokens), deployment.engines)

    def cpu_room(self) -> Room:
        deployment = self.deployment
        slots = self.session_slots(deployment.context_tokens)
        session = sum(one.count * one.stride_bytes for one in slots)
        if not session:
            return Room(0, 0)
        stride, staging = slots[0].stride_bytes, deployment.staging_bytes // deployment.ranks
        cache_slots, _ = split_slots(staging, stride, deployment.stream_slots)
        return Room(cache_slots * stride, session, deployment.engines)

    def pool_room(self, drives: int) -> Room:
        """Return the room in the pool. A session may span drives, so no remainder is lost."""
        # Each rank has a log on each drive.
        ranks = self.deployment.ranks
        each = int(self.deployment.drive_bytes * self.deployment.drive_fill)
        each -= ranks * log_pages_of(each // ranks) * PAGE_BYTES
        return Room(each * drives, self.pooled_bytes(self.deployment.context_tokens))

    def plan_reload(self, drives: int) -> Reload:
        deployment, session = self.deployment, self.loaded_bytes(self.deployment.context_tokens)
        needed = deployment.concurrency * session / deployment.ttft_seconds
        link, gpu_link = parse_link(deployment.link), parse_link(deployment.gpu_link)
        share = deployment.link_efficiency
        hops = tuple(
            Hop(name, count * each, math.ceil(needed / each))
            for name, count, each in (
                ("drives", drives, deployment.drive_read_bytes_per_s),
                ("links", link.count, link.bytes_per_s * share),
                ("GPU links", deployment.gpus, gpu_link.total_bytes_per_s * share),
            )
        )
        rate = min(hop.bytes_per_s for hop in hops)
        in_time = math.floor(rate * deployment.ttft_seconds / session) if session else 0
        seconds = deployment.concurrency * session / rate
        return Reload(session, needed, hops, seconds, in_time)

    def advise(self, back: Reload) -> Advice | None:
        """Return settings for this load, or None if the context is shorter than a chunk."""
        deployment, engines = self.deployment, self.deployment.engines
        slots = self.session_slots(deployment.context_tokens)
        each, stride = sum(one.count for one in slots), slots[0].stride_bytes
        if not each:
            return None
        cached = -(-deployment.concurrency // engines) * each
        # Stream slots are at most a quarter of all slots, and at least one.
        staged = max(cached + 1, min(cached + deployment.stream_slots, cached * 4 // 3))
        session = self.pooled_bytes(deployment.context_tokens)
        by_space = math.ceil(
            deployment.users * session / (deployment.drive_bytes * deployment.drive_fill)
        )
        needed = max(by_space, back.hops[0].needed)
        used = min(needed, deployment.drives)
        targets = -(-used // engines)
        on_target = -(-(-(-deployment.users // engines) * each) // targets)
        written = deployment.users * session * deployment.daily_tokens / deployment.context_tokens
        return Advice(
            staging_bytes=deployment.ranks * staged * stride,
            pool_bytes=deployment.ranks * targets * with_log(on_target * (stride + ENTRY_BYTES)),
            targets=targets,
            drives_needed=needed,
            written_bytes_per_day=written,
            drive_writes_per_day=written / (used * deployment.drive_bytes),
        )


def _check_context_parallel(model: ModelShape, deployment: Deployment) -> None:
    """Raise ConfigError for context-parallel sizes that vLLM refuses.

    Decode context parallelism divides the tokens of full and latent attention, but not states.
    vLLM also requires the number of query heads per KV head, which is unknown here, to be a
    multiple of --dcp.
    """
    tp, pcp = deployment.tensor_parallel, deployment.prefill_context_parallel
    dcp = deployment.decode_context_parallel
    divided = [cache for cache in model.caches if cache.kind.keeps_every_token]
    others = {cache.kind for cache in model.caches} - {cache.kind for cache in divided}
    latent = any(cache.kind is LayerKind.LATENT for cache in divided)
    heads = max((cache.kv_heads for cache in divided), default=tp)
    for flag, size, refused in (("--pcp", pcp, others), ("--dcp", dcp, others - {LayerKind.STATE})):
        if size > 1 and refused:
            names = " and ".join(sorted(kind.value for kind in refused))
            remedy = f"vLLM does not support this option for layers with {names}; leave it out"
            raise ConfigError(flag, size, remedy)
    remedy = ""
    if pcp == 1 and tp % dcp:
        remedy = f"give a divisor of --tp {tp}"
    elif pcp > 1 and dcp not in (1, pcp, tp * pcp):
        sizes = " or ".join(map(str, sorted({1, pcp, tp * pcp})))
        remedy = f"with --tp {tp} --pcp {pcp}, give {sizes}"
    elif dcp > 1 and not latent and (dcp > tp // heads or tp <= heads):
        remedy = "only ranks that hold the same KV head can share its tokens; each of "
        remedy += f"{heads} heads is on {max(1, tp // heads)} of the {tp} ranks of --tp"
    if remedy:
        raise ConfigError("--dcp", dcp, remedy)


def _held_blocks(group: PlannedGroup, context_tokens: int) -> int:
    """Return the number of blocks that vLLM keeps for a context between two steps."""
    blocks, reach = -(-context_tokens // group.block_tokens), group.cache.reach_tokens or 0
    if group.cache.kind is LayerKind.WINDOW:
        # A window that begins within a block touches one more block than its length fills.
        return min(blocks, -(-(reach - 1) // group.block_tokens) + 1)
    if group.cache.kind is LayerKind.LOCAL:
        return min(blocks, -(-reach // group.block_tokens))
    if group.cache.kind is LayerKind.STATE:
        return 2  # the current state, and the last state that can be a hit
    return 1 if group.cache.kind is LayerKind.RING else blocks
