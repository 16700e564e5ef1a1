# SPDX-License-Identifier: Apache-2.0
"""One simulated server: GPU memory as vLLM's prefix cache, and behind it the product's manager.

What decides is the product: look-up, eviction, write policy, landing, sightings are
`ManagerCore`'s own. What is simulated is the rest: requests come one after the other and hold
their blocks for no time, every copy, read and write succeeds at once, and GPU memory is
plain LRU, a prefix's head younger than its tail, as vLLM frees blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.manager.adoption import agree
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.eviction import choose_policy, credit_share
from vllm_nvmeof_offload.manager.types import WritePolicy
from vllm_nvmeof_offload.protocol import CancelCommand, OpReport, RankHello, WriteCommand

__all__ = ["Shape", "World"]

_CHUNK_BYTES = 1 << 20  # only ratios matter: sizes are in chunks here


@dataclass(frozen=True)
class Shape:
    """Sizes in chunks. pool 0: no pool. policy: as `eviction_policy` is configured."""

    gpu: int
    cache: int
    pool: int
    policy: str = "lru"
    write_policy: str = WritePolicy.THROUGH.value
    store_threshold: int = 1


class World:
    """counts: chunks by where they were found (`gpu`, `cpu`, `pool`, `miss`), and `stored`,
    `written`, of all since it was made."""

    def __init__(self, shape: Shape) -> None:
        self.counts: Counter[str] = Counter()
        self._gpu: OrderedDict[int, None] = OrderedDict()
        self._gpu_chunks = shape.gpu
        config = CoreConfig(
            write_policy=WritePolicy(shape.write_policy),
            store_threshold=shape.store_threshold,
            # Also where chunks are written on eviction, where the product counts no returns: so
            # it is seen what that is worth.
            credit_share=credit_share(shape.policy),
        )
        hello = RankHello(
            rank=0,
            engine_index=0,
            keyspace="simulated",
            cache_slots=shape.cache,
            pool_slots=shape.pool,
            target_count=1,
            slot_bytes=_CHUNK_BYTES,
        )
        policy = choose_policy(shape.policy)
        self._core = ManagerCore(config, agree([hello]), policy=policy, first_generation=0)

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """One request from its look-up to its end. Chunks are named by numbers that stand for
        all tokens up to their end; all are whole."""
        core = self._core
        in_gpu = 0
        while in_gpu < len(prompt) and prompt[in_gpu] in self._gpu:
            in_gpu += 1
        keys = [_key(number) for number in prompt]
        found: list[bytes] = []
        for key in keys[in_gpu:]:
            if core.lookup(key) is None:
                break
            found.append(key)
        self.counts["gpu"] += in_gpu
        self.counts["miss"] += len(prompt) - in_gpu - len(found)
        if found:
            command = core.prepare_load(found)
            for chunk in command.chunks:
                self.counts["cpu" if chunk.pool_slot is None else "pool"] += 1
            core.report([OpReport(command.op)])
        keys += map(_key, answer)
        self._store(keys)
        core.ended(keys)
        self._keep(prompt, answer)

    def chunks(self) -> set[int]:
        """What is in the tiers now."""
        return {_number(entry.identity.key) for entry in self._core.entries()}

    def _store(self, keys: list[bytes]) -> None:
        plan = self._core.prepare_store(keys)
        self.counts["stored"] += len(plan.stored)
        if plan.command is not None:
            self._core.report([OpReport(plan.command.op)])
        self._core.turn()
        while commands := self._core.take_commands():
            done = []
            for command in commands:
                assert not isinstance(command, CancelCommand), "nothing is overdue here"
                self.counts["written"] += isinstance(command, WriteCommand)
                done.append(OpReport(command.op))
            self._core.report(done)

    def _keep(self, *chunks: Iterable[int]) -> None:
        gpu = self._gpu
        for number in reversed([one for part in chunks for one in part]):
            gpu[number] = None
            gpu.move_to_end(number)
        while len(gpu) > self._gpu_chunks:
            gpu.popitem(last=False)


def _key(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)


def _number(key: bytes) -> int:
    return int.from_bytes(key, "little", signed=True)
