# SPDX-License-Identifier: Apache-2.0
"""The chunk size: the number of blocks per chunk that suits the configuration and all groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.groups import GroupKind

#: The default maximum number of tokens per chunk; low, because a request reuses only whole chunks.
_CHUNK_TOKENS_MAX = 256


def chunk_blocks(
    config: OffloadConfig, block_bytes: int, block_tokens: int, stages: int = 1
) -> int:
    """Return the blocks per chunk: the configured number, or enough for `chunk_bytes_min` within
    the token limit. `block_bytes` is a block's size on one rank, `block_tokens` its token count.
    Pipeline stages differ in bytes per block, so with several `stages` only the token limit
    applies."""
    if config.blocks_per_chunk is not None:
        return config.blocks_per_chunk
    if config.block_size is not None:
        return max(1, config.block_size // block_tokens)
    limit = _CHUNK_TOKENS_MAX // block_tokens
    wanted = -(-config.chunk_bytes_min // max(1, block_bytes)) if stages == 1 else limit
    return max(1, min(wanted, limit))


def blocks_of_chunk(
    config: OffloadConfig, groups: Sequence[GroupBlocks], block_bytes: int, stages: int
) -> tuple[int, str]:
    """Return the number of blocks per chunk, and a warning if it does not suit all groups, else "".

    Only a configured number can be unsuitable. Raises ConfigError if that number cannot work.
    `block_bytes` and `stages` are as in `chunk_blocks`.
    """
    blocks = chunk_blocks(config, block_bytes, groups[0].block_tokens, stages)
    fitting = blocks_that_fit(groups, blocks)
    keys = ("blocks_per_chunk", "block_size")
    given = next((key for key in keys if getattr(config, key) is not None), "")
    if not given:
        return fitting, ""
    value, tokens = getattr(config, given), groups[0].block_tokens
    if given == "block_size" and value % tokens:
        remedy = f"not a multiple of {tokens}, this model's tokens per block; leave it out"
        raise ConfigError(given, value, remedy)
    if blocks == fitting:
        return blocks, ""
    if reason := why_one_block(groups):
        raise ConfigError(given, value, f"{reason}; leave it out")
    return blocks, (
        f"{given}={value} makes chunks that exceed a window or do not divide an attention chunk, "
        f"and many such chunks are not stored: leave {given} out, or give at most {fitting} blocks "
        "per chunk"
    )


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """A group's blocks. `span_tokens` is the length of a window or an attention chunk."""

    kind: GroupKind
    block_tokens: int
    span_tokens: int | None = None

    def fits(self, blocks_per_chunk: int) -> bool:
        """Return whether vLLM still has all of a chunk's blocks when it computes the last one.

        vLLM frees the first blocks earlier if a chunk exceeds the window or spans two attention
        chunks.
        """
        tokens = self.block_tokens * blocks_per_chunk
        if self.span_tokens is None or blocks_per_chunk == 1:
            return True
        if self.kind is GroupKind.LOCAL:
            return self.span_tokens % tokens == 0
        return tokens <= self.span_tokens


def why_one_block(groups: Sequence[GroupBlocks]) -> str:
    if any(group.kind is GroupKind.STATE for group in groups):
        return "this model has states, each of which is one block"
    if len({group.block_tokens for group in groups}) > 1:
        return "the blocks of this model's KV cache groups have different numbers of tokens"
    return ""


def blocks_that_fit(groups: Sequence[GroupBlocks], wanted: int) -> int:
    """Return the largest number of blocks per chunk up to `wanted` that suits all groups."""
    if why_one_block(groups):
        return 1
    fitting = (n for n in range(wanted, 1, -1) if all(group.fits(n) for group in groups))
    return next(fitting, 1)
