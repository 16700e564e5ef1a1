# SPDX-License-Identifier: Apache-2.0
"""Hits found by the product's own managers, one per engine, with a CPU tier and a pool.

The managers' copies and I/O succeed at once; the cluster determines the time of reads. With
sharing, an engine also reads chunks from other engines' pools, and does not store them again.
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

_CHUNK_BYTES = 1 << 20  # arbitrary: the manager counts chunks, and the cluster determines times
_CHUNKS_MIN = 8
#: The chunk numbers per drawn agent, more than any context needs.
_AGENT_CHUNKS = 1 << 24


@dataclass(frozen=True)
class Sizes:
    """The sizes of one engine in tokens. A chunk has at least a block of the trace."""

    cpu_tokens: int
    pool_tokens: int
    chunk_tokens: int
    sharing: bool


class Tiers:
    """The managers of all engines: first of the prefill nodes, then of the decode nodes."""

    def __init__(
        self, agents: Sequence[Agent], sizes: Sizes, engines: tuple[int, int], block_tokens: int
    ) -> None:
        self._agents, self._sizes = agents, sizes
        self._prefill = engines[0]
        self._per_chunk = max(1, sizes.chunk_tokens // block_tokens)
        self._cores = [_core(sizes) for _ in range(sum(engines))]

    def find(self, agent: int, turn: int, prefill: int) -> tuple[int, int]:
        one, chunk = self._agents[agent], self._sizes.chunk_tokens
        # The last token of a prompt is always computed.
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
        """Store the chunks that the answer has filled, on the decode engine or, if there is none,
        on the prompt's engine."""
        one = self._agents[agent]
        if turn + 1 == len(one.hit):
            return  # this was the last turn
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
        """Return, by key, whether `engine` can read the chunk from another engine's pool."""
        there = np.zeros(len(keys), bool)
        if self._sizes.sharing and keys:
            for number, core in enumerate(self._cores):
                if number != engine:
                    there |= np.frombuffer(core.present(keys, FROM_POOL), np.uint8).astype(bool)
        return there

    def _keys(self, agent: int, turn: int, tokens: int) -> list[bytes]:
        """Return the keys of the full chunks in a prompt's first `tokens` tokens."""
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
        raise BenchError("the CPU tier of an engine must hold at least a few chunks")
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
    """Return the chunk's key in group 0."""
    return number.to_bytes(8, "little", signed=True) + bytes(GROUP_ID_BYTES)
