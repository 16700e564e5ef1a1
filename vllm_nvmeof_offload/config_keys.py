# SPDX-License-Identifier: Apache-2.0
"""Every configuration key with its unit, default, limits and meaning, in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.names import SPEC_MODULE, SPEC_NAME
from vllm_nvmeof_offload.units import GIB, KIB, MIB, PAGE_BYTES, parse_bytes

__all__ = [
    "VLLM_KEYS",
    "OffloadConfig",
    "default_staging_bytes",
    "default_target",
]

STAGING_BYTES_DEFAULT_MAX = 8 * GIB
#: No machine has an EiB; a larger number is a slip, and would overflow 64-bit arithmetic.
SIZE_BYTES_MAX = 1 << 60
_MS_MAX = 3_600_000

#: Keys of vLLM's own that may stand beside ours.
VLLM_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "blocks_per_chunk",
        "block_size",
        "offload_prompt_only",
        "self_describing_kv_events",
        "sync_load_budget_bytes",
        "canonical_layout",
    }
)


def default_staging_bytes() -> int:
    """Pinned memory when none was asked for: a quarter of physical memory, at most 8 GiB."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(STAGING_BYTES_DEFAULT_MAX, physical // 4)


def default_target(env: Mapping[str, str]) -> str:
    """The pool directory when none was given, from `XDG_CACHE_HOME` or `HOME` in `env`."""
    cache = env.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification ignores relative values
        cache = os.path.join(env.get("HOME") or os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "vllm-nvmeof", "pool")


def _size(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a size")
    try:
        return parse_bytes(value)
    except OverflowError:
        raise ValueError("not a finite size") from None


def _paths(value: object) -> object:
    return [value] if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_size), Field(le=SIZE_BYTES_MAX)]
_SIZE = 'a size such as 1073741824 or "1GiB"'


def _key(default: Any, unit: str, allowed: str, meaning: str, **limits: Any) -> Any:
    """One key. `allowed` completes the sentence "give …" in refusals."""
    extra: dict[str, Any] = {"unit": unit, "allowed": allowed}
    if callable(default):
        return Field(
            default_factory=default, description=meaning, json_schema_extra=extra, **limits
        )
    return Field(default=default, description=meaning, json_schema_extra=extra, **limits)


class OffloadConfig(BaseModel):
    """All settings of one engine. Frozen; the same object in the scheduler and every worker."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)

    staging_bytes: Size = _key(
        default_staging_bytes, "bytes", f"{_SIZE} above 0",
        "Pinned CPU memory over all ranks and replicas: the CPU tier and the slots that loads "
        "stream through. Default: a quarter of physical memory, at most 8 GiB.",
        gt=0,
    )  # fmt: skip
    targets: Annotated[list[str], BeforeValidator(_paths)] = _key(
        lambda: [default_target(os.environ)], "directories", "one path or a list of paths",
        "Directories that hold the pool, each best on a file system of its own on an NVMe "
        "namespace. Default: $XDG_CACHE_HOME/vllm-nvmeof/pool.",
        min_length=1,
    )  # fmt: skip
    pool_bytes: Size | None = _key(
        None, "bytes", f"{_SIZE}, 0 for none, or null for the default",
        "Size of the pool over all ranks, replicas and targets; 0: no pool, the CPU tier only. "
        "Default: the smaller of 100 GiB and half of what is free on the targets.",
        ge=0,
    )  # fmt: skip
    chunk_bytes_min: Size = _key(
        512 * KIB, "bytes", f"{_SIZE} from 4KiB to 1GiB",
        "Blocks are grouped into chunks of at least this size a rank, unless blocks_per_chunk or "
        "block_size says how many.",
        ge=PAGE_BYTES, le=GIB,
    )  # fmt: skip
    stream_slots: int = _key(
        64, "slots", "an integer from 2 to 65536",
        "Pinned slots of each rank that loads from the pool stream through; bounded by a quarter "
        "of the rank's staging.",
        ge=2, le=65536,
    )  # fmt: skip
    land_cache_share: float = _key(
        0.5, "share", "a number from 0 to 1",
        "Share of the cache slots that one load may fill with what it reads from the pool.",
        ge=0, le=1,
    )  # fmt: skip
    reload_cache_share: float = _key(
        0.25, "share", "a number from 0 to 1",
        "Share of the cache slots that preempted requests may hold: their chunks are kept there, "
        "or fetched from the pool, until they run again.",
        ge=0, le=1,
    )  # fmt: skip
    prefetch_cache_share: float = _key(
        0.25, "share", "a number from 0 to 1",
        "Share of the cache slots that may be filled from the pool for requests that wait in "
        "vLLM's queue. 0: no prefetch.",
        ge=0, le=1,
    )  # fmt: skip
    admission: Literal["auto", "always"] = _key(
        "auto", "", '"auto" or "always"',
        "auto: what is found is loaded where that is sooner than computing it again, by the rates "
        "learned so far; always: it is loaded.",
    )  # fmt: skip
    prefill_tokens_per_s: float | None = _key(
        None, "tokens/s", "a number above 0, or null to learn it",
        "How fast the model computes prompts, for admission. Default: learned from its steps.",
        gt=0,
    )  # fmt: skip
    read_bytes_per_s: Size | None = _key(
        None, "bytes/s", f"{_SIZE} above 0, or null to learn it",
        "How fast each rank reads the pool, all targets together, for admission. Default: "
        "learned from its reads.",
        gt=0,
    )  # fmt: skip
    copy_backend: Literal["auto", "dma", "kernel"] = _key(
        "auto", "", '"auto", "dma" or "kernel"',
        "What moves bytes between a GPU and pinned memory. auto: dma, or kernel where it was "
        "measured to be 1.5 times as fast; dma: the copy engines alone; kernel: a kernel on a few "
        "multiprocessors alone, for comparisons. Without a GPU it means nothing.",
    )  # fmt: skip
    io_engine: Literal["auto", "uring", "threads"] = _key(
        "auto", "", '"auto", "uring" or "threads"',
        "How staging and pool exchange bytes. auto: io_uring, or threads where it is denied; "
        "uring: refuse to start where it is denied.",
    )  # fmt: skip
    io_depth: int = _key(
        64, "operations", "an integer from 1 to 4096",
        "Reads, and as many writes, that io_uring keeps in flight on each target.",
        ge=1, le=4096,
    )  # fmt: skip
    io_split_bytes: Size = _key(
        MIB, "bytes", f"{_SIZE} from 4KiB to 1GiB",
        "io_uring cuts a chunk into operations of about this size, so that none delays the others "
        "for long.",
        ge=PAGE_BYTES, le=GIB,
    )  # fmt: skip
    io_threads: int = _key(
        8, "threads", "an integer from 2 to 256",
        "I/O threads of each rank with the threads engine; one is kept for reads.",
        ge=2, le=256,
    )  # fmt: skip
    o_direct: Literal["auto", "on", "off"] = _key(
        "auto", "", '"auto", "on" or "off"',
        "Whether pool I/O bypasses the page cache. auto: where the file system can; on: refuse "
        "to start where it cannot.",
    )  # fmt: skip
    write_policy: Literal["through", "on_eviction", "off"] = _key(
        "through", "", '"through", "on_eviction" or "off"',
        "through: what is stored in the CPU tier is written to the pool behind it; on_eviction: "
        "only when the CPU tier is about to need its room, which writes less and loses more at a "
        "restart; off: the pool is only read.",
    )  # fmt: skip
    eviction_policy: str = _key(
        "credited_lru", "", '"credited_lru", "lru", or "module:Class" of a policy of your own',
        "Which chunk goes first where room is needed. lru: the least recently used; credited_lru: "
        "the same, but in the CPU tier what later requests came back for counts as used later "
        "(as lru where write_policy is not through, which finds more there); "
        "examples/04_custom_policy.py has one of another kind, for both tiers.",
        min_length=1,
    )  # fmt: skip
    store_threshold: int = _key(
        1, "sightings", "an integer from 1 to 1000000",
        "A chunk is offloaded on its n-th sighting: the n-th request that has it, as vLLM's key "
        "of this name counts. 1: at once. More spares the device what is never asked for again.",
        ge=1, le=1_000_000,
    )  # fmt: skip
    read_deadline_ms: int = _key(
        5_000, "ms", "an integer from 1 to 3600000",
        "A pool read that takes longer counts as failed; its request recomputes.",
        ge=1, le=_MS_MAX,
    )  # fmt: skip
    write_deadline_ms: int = _key(
        30_000, "ms", "an integer from 1 to 3600000",
        "A pool write that takes longer counts as failed; the chunk stays in the CPU tier only.",
        ge=1, le=_MS_MAX,
    )  # fmt: skip
    read_bytes_in_flight_max: Size = _key(
        64 * MIB, "bytes", f"{_SIZE} of at least 4KiB",
        "Bound on bytes being read, for each rank, and with io_uring for each of its targets.",
        ge=PAGE_BYTES,
    )  # fmt: skip
    write_bytes_in_flight_max: Size = _key(
        32 * MIB, "bytes", f"{_SIZE} of at least 4KiB",
        "Bound on bytes being written, for each rank, and with io_uring for each of its targets.",
        ge=PAGE_BYTES,
    )  # fmt: skip
    write_bytes_beside_reads_max: Size = _key(
        512 * KIB, "bytes", f"{_SIZE} of at least 4KiB",
        "The same bound while reads wait or run: what keeps reads quick. One operation may always "
        "run.",
        ge=PAGE_BYTES,
    )  # fmt: skip
    adopt: bool = _key(
        True, "", "true or false", "Whether chunks that an earlier run left in the pool are used."
    )
    weights_never_change: bool = _key(
        False, "", "true or false",
        "Say true if the weights are never updated in a running engine: chunks stored after a "
        "cache reset may then be adopted by a later run.",
    )  # fmt: skip
    replicas: int = _key(
        1, "engines", "vLLM's --data-parallel-size, or leave it out",
        "Data-parallel replicas that share staging_bytes and pool_bytes. Our plugin sets it.",
        ge=1, le=64,
    )  # fmt: skip
    weights_seen: dict[str, str] = _key(
        dict, "", "a mapping of models to stamps, or leave it out",
        "Stamps of the files of each model from before vLLM read them. Our plugin sets it.",
    )  # fmt: skip
    fault_injection: str | None = _key(
        None, "file", "the path of a control file, or null",
        "FOR TESTS: a file that makes pool I/O fail or deliver wrong KV. Refused unless the "
        "environment variable VLLM_NVMEOF_ALLOW_FAULT_INJECTION is 1; logged.", min_length=1,
    )  # fmt: skip
    offload_prompt_only: bool = _key(
        False, "", "true or false",
        "vLLM's key: store prompts only. Ours is false, so that what a preempted request has "
        "generated comes back too.",
    )  # fmt: skip
    blocks_per_chunk: int | None = _key(
        None, "blocks", "an integer of at least 1, or leave it out",
        "vLLM's key: blocks in one chunk; overrides chunk_bytes_min.", ge=1,
    )  # fmt: skip
    block_size: int | None = _key(
        None, "tokens", "a multiple of vLLM's --block-size, or leave it out",
        "vLLM's key: tokens in one chunk; overrides chunk_bytes_min.", ge=1,
    )  # fmt: skip
    self_describing_kv_events: bool = _key(
        False, "", "true or false", "vLLM's key: put token ids into KV events."
    )
    sync_load_budget_bytes: int = _key(
        0, "bytes", "0, or leave it out: a synchronous load that fails cannot be reported in time",
        "vLLM's key; must be 0.", ge=0, le=0,
    )  # fmt: skip
    canonical_layout: Literal[False] = _key(
        False, "", "false, or leave it out: pools keep each rank's own layout",
        "vLLM's key; must be false.",
    )  # fmt: skip
    spec_name: Literal["NVMeoFOffloadingSpec"] = _key(
        SPEC_NAME, "", f'"{SPEC_NAME}", or leave it out', "vLLM's key: the name of our spec."
    )
    spec_module_path: str | None = _key(
        SPEC_MODULE, "", f'"{SPEC_MODULE}", or leave it out', "vLLM's key: where our spec lives."
    )

    @field_validator("targets")
    @classmethod
    def _absolute(cls, targets: list[str]) -> list[str]:
        if not all(t.strip() for t in targets):
            raise ValueError("an empty path")
        paths = [os.path.abspath(os.path.expanduser(t)) for t in targets]
        if len({os.path.realpath(p) for p in paths}) != len(paths):
            raise ValueError("the same directory twice")
        return paths

    @model_validator(mode="after")
    def _one_chunk_size(self) -> OffloadConfig:
        if self.blocks_per_chunk is not None and self.block_size is not None:
            raise ConfigError(
                "block_size", self.block_size,
                f"blocks_per_chunk={self.blocks_per_chunk} says it already; give only one of them",
            )  # fmt: skip
        return self
