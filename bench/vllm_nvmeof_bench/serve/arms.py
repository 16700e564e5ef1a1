# SPDX-License-Identifier: Apache-2.0
"""The servers that a benchmark compares: arms to start, by name, or any server by its URL.

`ARMS` lists the names. `target` and `peer_target` use a stand-in for an NVMe-oF target: a throttled
directory on the local disk. The arms of each pair (`full` and `peer_full`, `pool` and `peer`,
`target` and `peer_target`) get the same CPU memory and chunks and store the same tokens. Our arms
may name a copy backend, as in full:dma or full:kernel. NAME=URL is a server already running.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import vllm_nvmeof_bench
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.servers import smollm2
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import ModelShape
from vllm_nvmeof_bench.servers.server import (
    BLOCK_TOKENS,
    STREAM_SLOTS,
    OffloadSpec,
    ServerSpec,
    on_blocks,
)
from vllm_nvmeof_bench.settings import option
from vllm_nvmeof_offload.copy.base import Backend
from vllm_nvmeof_offload.units import MIB, slot_stride_bytes

_READ_DEADLINE_MS = 60_000
_SMALL = ModelShape(layers=4, hidden=256, intermediate=1024, heads=2, kv_heads=2)
_LARGE = ModelShape(
    layers=8, hidden=2048, intermediate=7168, heads=16, kv_heads=4, positions_max=131_072
)
_BYTES = {"float32": 4, "bfloat16": 2}
_RANDOM, _REAL = "random", "smollm2"

#: A note printed with the peer's figures.
PEER_NOTE = (
    "peer: vLLM's own TieringOffloadingSpec with its fs tier. It refuses vLLM's CPU engine; a "
    "subclass made for this benchmark adds a worker that copies between host buffers with the "
    "thread and memmove that ours uses. The manager, the tiers and the files are vLLM's."
)


@dataclass(frozen=True)
class Arm:
    """One server. about: a description. tier: the CPU tier holds "all", a "third" or "none".

    url: URL of a running server, about which nothing else is known. copy_backend: for our arms on a
    GPU, "dma" or "kernel"; empty: chosen by calibration. place: name of the directory of its pool
    or files, if other than the arm's name: arms may share one.
    """

    name: str
    about: str
    tier: str = "none"
    pool: bool = False
    throttled: bool = False
    peer: bool = False
    url: str | None = None
    copy_backend: str = ""
    place: str = ""

    @property
    def directory(self) -> str:
        """Name of the arm's pool or file directory."""
        return self.place or self.name


ARMS = {
    arm.name: arm
    for arm in (
        Arm("none", "GPU memory only"),
        Arm("cpu", "our CPU tier, holds all", "all"),
        Arm("pool", "our CPU tier, holds a third, and pool", "third", pool=True),
        Arm("target", "the same, disk throttled", "third", pool=True, throttled=True),
        Arm("full", "our CPU tier, holds all, and pool", "all", pool=True),
        Arm("peer", "vLLM's tiering + fs, holds a third", "third", pool=True, peer=True),
        Arm("peer_target", "vLLM's tiering + fs, holds a third, disk throttled", "third", True,
            True, True),
        Arm("peer_full", "vLLM's tiering + fs, holds all", "all", pool=True, peer=True),
    )
}  # fmt: skip


def arms_option(*default: str) -> Any:
    """Return the option for the arms to start."""
    gpu = "on a GPU also such as full:dma or full:kernel"
    return option(default, f"Servers to start: {','.join(ARMS)}; {gpu}.")


@dataclass(frozen=True)
class ServerSettings:
    """The servers to measure: options that all benchmarks of whole servers share."""

    arms: tuple[str, ...] = arms_option("none", "full", "pool", "peer_full", "peer")
    base_urls: tuple[str, ...] = option(
        (),
        "Measure this server instead: NAME=http://HOST:PORT. Repeatable. Start the server with "
        "VLLM_SERVER_DEV_MODE=1, or its figures include hits in GPU memory.",
        recorded=False,
        flag="--base-url",
        repeated=True,
    )
    token_ids: str = option(
        "", "Range LOW:HIGH of the prompts' token IDs. Default with --base-url: 1000:30000."
    )
    target_mb_per_s: int = option(
        200, "Read and write limit of the throttled stand-in for a target in MB/s.", min=1
    )
    model: str = option(
        _RANDOM,
        f"Model of the servers to start: {_RANDOM}, or {_REAL} (45 KiB of KV per token).",
    )
    server_args: str = option(
        "", "Further arguments of vllm serve, quoted, for the servers to start."
    )
    directory: Path = option(
        Path("build/bench/disk"),
        "Directory for the pools of the servers to start.",
        flag="--dir",
    )

    def servers(self) -> list[Arm]:
        """Return the servers to measure; raise BenchError as `arms_of` does."""
        return arms_of(self.arms, self.base_urls)

    def sizes_of(self, working: int, request_max: int, gpu: int, **more: Any) -> Sizes:
        """Return sizes, in tokens, of the servers to start. more: fields of `Sizes`."""
        if self.model not in (_RANDOM, _REAL):
            raise BenchError(f"--model {self.model!r}: give {_RANDOM} or {_REAL}")
        if self.model == _REAL:
            more |= {"shape": smollm2.SHAPE, "dtype": "float32"}
        args = {"target_mb_per_s": self.target_mb_per_s, "server_args": self.server_args}
        return Sizes(working, request_max, gpu, **args, **more)


def arms_of(names: Sequence[str], base_urls: Sequence[str]) -> list[Arm]:
    """Return the arms to compare: the servers at `base_urls` (NAME=URL or URL), else `names`.

    Raises:
        BenchError: a name is unknown or used twice, or a URL is malformed.
    """
    found = [_remote(text, number) for number, text in enumerate(base_urls)]
    found = found or [_named(name) for name in names]
    if not found:
        raise BenchError("nothing to measure: give at least one arm")
    if len({arm.name for arm in found}) < len(found):
        raise BenchError("two arms have the same name: give each NAME=URL another name")
    return found


def _named(text: str) -> Arm:
    name, colon, backend = text.partition(":")
    if name not in ARMS:
        raise BenchError(f"no arm {name!r}; choose from {', '.join(ARMS)}, or --base-url")
    arm = ARMS[name]
    if not colon:
        return arm
    known = [one.value for one in (Backend.DMA, Backend.KERNEL)]  # values of `copy_backend`
    if backend not in known or arm.peer or arm.tier == "none":
        raise BenchError(f"no arm {text!r}: only ours may be followed by :{' or :'.join(known)}")
    return replace(arm, name=text, about=f"{arm.about}; copies by {backend}", copy_backend=backend)


def _remote(text: str, number: int) -> Arm:
    name, equals, url = text.partition("=")
    if not equals or "/" in name:
        name, url = f"server{number + 1}", text
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"--base-url {text!r}: give NAME=http://HOST:PORT")
    return Arm(name, "a server given by its URL", url=url.rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True)
class Sizes:
    """The sizes of the servers that a benchmark starts.

    working_tokens: number of tokens whose KV fits in the CPU tier of an arm that holds all.
    third_tokens: the same for an arm that holds a third; None: a third of working_tokens.
    request_tokens_max: longest prompt with its answer. gpu_tokens: tokens in the GPU cache
    (ordinary memory on a CPU engine). target_mb_per_s: rate of the throttled stand-in. models:
    directory for random models, larger ones for a GPU. server_args: quoted as for a shell.
    """

    working_tokens: int
    request_tokens_max: int
    gpu_tokens: int
    third_tokens: int | None = None
    max_num_seqs: int = 16
    target_mb_per_s: int = 200
    shape: ModelShape = field(default_factory=lambda: _SMALL if has_cpu_engine() else _LARGE)
    dtype: str = field(default_factory=lambda: "float32" if has_cpu_engine() else "bfloat16")
    models: Path = Path("build/models")
    server_args: str = ""

    def __post_init__(self) -> None:
        try:
            shlex.split(self.server_args)
        except ValueError as error:
            raise BenchError(f"--server-args {self.server_args!r}: {error}") from None
        if self.gpu_tokens < self.request_tokens_max:
            raise BenchError(
                f"a GPU cache of {self.gpu_tokens} tokens does not hold one request of "
                f"{self.request_tokens_max}"
            )

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of all layers per token."""
        return self.shape.kv_bytes_per_token * _BYTES[self.dtype] // _BYTES["float32"]

    @property
    def chunk_bytes(self) -> int:
        """The size of one block's KV, the smallest chunk that any arm can use."""
        return BLOCK_TOKENS * self.kv_bytes_per_token

    @property
    def pool_bytes(self) -> int:
        """The size of a pool: room for twice the bytes that are ever stored."""
        return 2 * self.slots(self.working_tokens) * slot_stride_bytes(self.chunk_bytes) + 64 * MIB

    def tokens_of(self, tier: str) -> int:
        """Return how many tokens' KV fits in a CPU tier of the kind `tier`: "all" or "third"."""
        if tier == "all":
            return self.working_tokens
        return self.working_tokens // 3 if self.third_tokens is None else self.third_tokens

    def staging_bytes(self, tier: str) -> int:
        """Return the bytes of an arm's pinned memory with stream slots; a peer gets the same."""
        slots = self.slots(self.tokens_of(tier)) + STREAM_SLOTS
        return slots * slot_stride_bytes(self.chunk_bytes)

    def slots(self, tokens: int) -> int:
        """Return the number of cache slots that a CPU tier needs for this many tokens."""
        return max(STREAM_SLOTS, math.ceil(tokens / BLOCK_TOKENS))


def engine_id(name: str) -> str:
    """Return the engine ID of a peer's server; vLLM names its shared memory after it."""
    return f"bench-{os.getpid()}-{name}"


def offload_of(arm: Arm, sizes: Sizes, place: Path) -> OffloadSpec | None:
    """Return the offloading of a server to start, if any. place: directory of its pool or files."""
    if arm.tier == "none":
        return None
    if arm.peer:
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": sizes.staging_bytes(arm.tier),
            "block_size": BLOCK_TOKENS,
            "offload_prompt_only": False,
            "secondary_tiers": [{"type": "fs", "root_dir": str(place)}],
        }
        if has_cpu_engine():
            extra["spec_name"] = "HostTieringOffloadingSpec"
            extra["spec_module_path"] = "vllm_nvmeof_bench.serve.peer"
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": engine_id(arm.name),
        }
        return OffloadSpec(None, extra, transfer)
    return OffloadSpec.sized(
        sizes.slots(sizes.tokens_of(arm.tier)),
        sizes.chunk_bytes,
        sizes.pool_bytes if arm.pool else 0,
        place,
        read_deadline_ms=_READ_DEADLINE_MS,
        **({"copy_backend": arm.copy_backend} if arm.copy_backend else {}),
    )


def server_spec(arm: Arm, sizes: Sizes, model: Path, place: Path) -> ServerSpec:
    """Return the server to start for an arm."""
    package = Path(vllm_nvmeof_bench.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", ""))))
    return ServerSpec(
        model=model,
        max_model_len=on_blocks(sizes.request_tokens_max + 1),
        gpu_blocks=sizes.gpu_tokens // BLOCK_TOKENS + 1,
        max_num_seqs=sizes.max_num_seqs,
        cores_reserved=0,
        offload=offload_of(arm, sizes, place),
        dtype=sizes.dtype,
        extra_args=tuple(shlex.split(sizes.server_args)),
        # The HTTP route that empties the GPU's prefix cache needs the development mode.
        env={"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path},
    )
