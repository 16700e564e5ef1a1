# SPDX-License-Identifier: Apache-2.0
"""Hits as the product's own manager finds them: one per engine, with a CPU tier and a pool.

Copies and I/O of the managers succeed at once; the time of reads is the cluster's. With sharing,
an engine also reads what is in another engine's pool, as its follower would know it, and does not
store that again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm_nvmeof_bench.results import BenchError

from research.cluster.agents import Agent
from vllm_nvmeof_offload.groups import GROUP_ID_BYTES
from vllm_nvmeof_offload.manager.core import FROM_CPU, FROM_POOL, CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.protocol import OpReport, RankHello

_CHUNK_BYTES = 1 << 20  # the manager decides by chunks; time is the cluster's
_CHUNKS_MIN = 8
#: Chunks of one drawn agent; more than any context has.
_AGENT_CHUNKS = 1 << 24


@dataclass(frozen=True)
class Sizes:
    """Of one engine, in tokens. chunk_tokens: at least a block of the trace."""

    cpu_tokens: int
    pool_tokens: int
    chunk_tokens: int
    sharing: bool


class Tiers:
    """The managers of all engines: those of the prefill nodes, then those of the decode nodes."""

    def __init__(
        self, agents: Sequence[Agent], sizes: Sizes, engines: tuple[int, int], block_tokens: int
    ) -> None:
        self._agents, self._sizes = agents, sizes
        self._prefill = engines[0]
        self._per_chunk = max(1, sizes.chunk_tokens // block_tokens)
        self._cores = [_core(sizes) for _ in range(sum(engines))]

    def find(self, agent: int, turn: int, prefill: int) -> tuple[int, int]:
        one, chunk = self._agents[agent], self._sizes.chunk_tokens
        # The last token is always computed.
        keys = self._keys(agent, turn, one.hit[turn] + one.new[turn] - 1)
        if not keys:
            return 0, 0
        core = self._cores[prefill]
        own = np.frombuffer(core.present(keys), np.uint8).astype(bool)
        there = own | self._elsewhere(keys, prefill)
        found = len(keys) if there.all() else int(there.argmin())
        in_cpu = np.frombuffer(core.present(keys, FROM_CPU), np.uint8)[:found]
        mine = [key for key, is_own in zip(keys[:found], own, strict=False) if is_own]
        if mine:
            core.report([OpReport(core.prepare_load(mine).op)])
        return found * chunk, (found - int(in_cpu.sum())) * chunk

    def prefilled(self, agent: int, turn: int, prefill: int) -> None:
        one = self._agents[agent]
        self._store(prefill, self._keys(agent, turn, one.hit[turn] + one.new[turn]))

    def decoded(self, agent: int, turn: int, decode: int) -> None:
        """The decode engine stores what the answer has filled; where there is none, the engine of
        the prompt does."""
        one = self._agents[agent]
        if turn + 1 == len(one.hit):
            return  # nobody comes back
        prompt = one.hit[turn] + one.new[turn]
        whole = self._keys(agent, turn + 1, prompt + one.answer[turn])
        tail = whole[prompt // self._sizes.chunk_tokens :]
        has_decode = len(self._cores) > self._prefill
        self._store(self._prefill + decode if has_decode else decode, tail)

    def _store(self, engine: int, keys: list[bytes]) -> None:
        core = self._cores[engine]
        borrowed = self._elsewhere(keys, engine)
        wanted = [key for key, there in zip(keys, borrowed, strict=True) if not there]
        if (command := core.prepare_store(wanted).command) is not None:
            core.report([OpReport(command.op)])
        core.turn()
        while commands := core.take_commands():
            core.report([OpReport(one.op) for one in commands])  # type: ignore[union-attr]
        core.ended(wanted)

    def _elsewhere(
        self, keys: list[bytes], engine: int
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return, by key, whether another engine's pool has it for this one to read."""
        there = np.zeros(len(keys), bool)
        if self._sizes.sharing and keys:
            for number, core in enumerate(self._cores):
                if number != engine:
                    there |= np.frombuffer(core.present(keys, FROM_POOL), np.uint8).astype(bool)
        return there

    def _keys(self, agent: int, turn: int, tokens: int) -> list[bytes]:
        """The keys of the whole chunks in a prompt's first `tokens`."""
        one, count = self._agents[agent], tokens // self._sizes.chunk_tokens
        if one.blocks:
            ends = one.blocks[turn][self._per_chunk - 1 :: self._per_chunk]
            return [_key(number) for number in ends[:count].tolist()]
        first = agent * _AGENT_CHUNKS
        return [_key(number) for number in range(first, first + count)]


def _core(sizes: Sizes) -> ManagerCore:
    cache, pool = (
        max(_CHUNKS_MIN, tokens // sizes.chunk_tokens) if tokens else 0
        for tokens in (sizes.cpu_tokens, sizes.pool_tokens)
    )
    if not cache:
        raise BenchError("the CPU tier of an engine holds at least a few chunks")
    hello = RankHello(
        rank=0,
        engine_index=0,
        keyspace="simulated",
        cache_slots=cache,
        pool_slots=pool,
        target_count=1,
        slot_bytes=_CHUNK_BYTES,
    )
    return ManagerCore(CoreConfig(key_bytes=len(_key(0))), agree([hello]), first_generation=0)


def _key(number: int) -> bytes:
    """A key of group 0."""
    return number.to_bytes(8, "little", signed=True) + bytes(GROUP_ID_BYTES)
