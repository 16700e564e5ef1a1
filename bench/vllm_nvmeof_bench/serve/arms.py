# SPDX-License-Identifier: Apache-2.0
"""Who is compared: servers of ours by name, or any server by its URL.

    none         GPU memory only
    cpu          our CPU tier, which holds everything; no pool
    pool         our CPU tier, which holds a third, and our pool on a local directory
    target       the same on a stand-in for an NVMe-oF target: the directory's disk, throttled
    full         our CPU tier, which holds everything, and our pool
    peer         vLLM's own tiering with its fs tier: a CPU tier that holds a third
    peer_target  the same on the throttled stand-in
    peer_full    vLLM's own tiering, whose CPU tier holds everything

`full` and `peer_full`, `pool` and `peer`, `target` and `peer_target` get the same bytes of CPU
memory, the same chunks, and store the same tokens. One of ours may say how its GPU copies, as
full:dma or full:kernel. An arm of the form NAME=URL is a server that runs already, with whatever
configuration it has.
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
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import ModelShape
from vllm_nvmeof_bench.servers.server import OffloadSpec, ServerSpec
from vllm_nvmeof_offload.copy.select import Backend
from vllm_nvmeof_offload.units import GIB, MIB, slot_stride_bytes

__all__ = ["ARMS", "PEER_NOTE", "Arm", "Sizes", "arms_of", "engine_id", "offload_of", "server_spec"]

BLOCK_TOKENS = 32
_STREAM_SLOTS = 16
_THIRD = 3
_READ_DEADLINE_MS = 60_000
_PEER_MODULE = "vllm_nvmeof_bench.serve.peer"
_PEER_SPEC = "HostTieringOffloadingSpec"
_PEER_SPEC_ON_GPU = "TieringOffloadingSpec"
_SMALL = ModelShape(layers=4, hidden=256, intermediate=1024, heads=2, kv_heads=2)
_LARGE = ModelShape(
    layers=8, hidden=2048, intermediate=7168, heads=16, kv_heads=4, positions_max=65_536
)
_BYTES = {"float32": 4, "bfloat16": 2}

#: Printed wherever the peer's figures are.
PEER_NOTE = (
    "peer: vLLM's own TieringOffloadingSpec with its fs tier. It refuses vLLM's CPU engine; a "
    "subclass made for this benchmark lends it a worker that copies between host buffers with the "
    "thread and memmove that ours uses. Its manager, its tiers and its files are vLLM's."
)


@dataclass(frozen=True)
class Arm:
    """One server. says: for people. tier: what the CPU tier holds, "all", "third" or "none".

    url: of one that runs already; everything else is then not known. copy_backend: of ours on a
    GPU, "dma" or "kernel"; empty: what is chosen by measurement.
    """

    name: str
    says: str
    tier: str = "none"
    pool: bool = False
    throttled: bool = False
    peer: bool = False
    url: str | None = None
    copy_backend: str = ""


ARMS = {
    arm.name: arm
    for arm in (
        Arm("none", "GPU memory only"),
        Arm("cpu", "our CPU tier, holds all", "all"),
        Arm("pool", "our CPU tier, holds a third, and pool", "third", pool=True),
        Arm("target", "the same, disk throttled", "third", pool=True, throttled=True),
        Arm("full", "our CPU tier, holds all, and pool", "all", pool=True),
        Arm("peer", "vLLM's tiering + fs, holds a third", "third", pool=True, peer=True),
        Arm(
            "peer_target",
            "vLLM's tiering + fs, holds a third, disk throttled",
            "third",
            pool=True,
            throttled=True,
            peer=True,
        ),
        Arm("peer_full", "vLLM's tiering + fs, holds all", "all", pool=True, peer=True),
    )
}


def arms_of(names: Sequence[str], base_urls: Sequence[str]) -> list[Arm]:
    """The arms to compare: those at `base_urls` (NAME=URL, or a URL) if any, else by name.

    Raises:
        BenchError: an unknown name, two of the same name, or not a URL.
    """
    found = [_remote(text, number) for number, text in enumerate(base_urls)]
    if not found:
        found = [_named(name) for name in names]
    if not found:
        raise BenchError("nothing to measure: give at least one arm")
    if len({arm.name for arm in found}) < len(found):
        raise BenchError("two arms have the same name: give each NAME=URL a name of its own")
    return found


def _named(text: str) -> Arm:
    name, colon, backend = text.partition(":")
    if name not in ARMS:
        raise BenchError(f"no arm {name!r}; there are {', '.join(ARMS)}, or --base-url")
    arm = ARMS[name]
    if not colon:
        return arm
    known = [one.value for one in (Backend.DMA, Backend.KERNEL)]  # as `copy_backend` has them
    if backend not in known or arm.peer or arm.tier == "none":
        raise BenchError(f"no arm {text!r}: one of ours may be followed by :{' or :'.join(known)}")
    return replace(arm, name=text, says=f"{arm.says}; copies by {backend}", copy_backend=backend)


def _remote(text: str, number: int) -> Arm:
    name, equals, url = text.partition("=")
    if not equals or "/" in name:
        name, url = f"server{number + 1}", text
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"--base-url {text!r}: give NAME=http://HOST:PORT")
    return Arm(name, "a server given by its URL", url=url.rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True)
class Sizes:
    """What servers of ours are sized by. Tokens, sequences: counts.

    working_tokens: whose KV an arm "that holds all" holds in its CPU tier. third_tokens: the same
    of one that holds a third; None: a third of it. request_tokens_max: of one prompt with its
    answer. gpu_tokens: of the GPU cache (ordinary memory on a CPU engine). target_mb_per_s: what
    the throttled stand-in reads and writes, MB/s. models: where the random model is kept; it is
    small for two cores, larger and bfloat16 for a GPU. server_args: more arguments of the servers,
    quoted as for a shell.
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
        if self.target_mb_per_s < 1:
            raise BenchError("the throttled stand-in needs at least 1 MB/s")

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers."""
        return self.shape.kv_bytes_per_token * _BYTES[self.dtype] // _BYTES["float32"]

    @property
    def chunk_bytes(self) -> int:
        """Of one block: the smallest chunk that any arm could have."""
        return BLOCK_TOKENS * self.kv_bytes_per_token

    @property
    def pool_bytes(self) -> int:
        """Twice what is ever stored."""
        return 2 * self._slots(self.working_tokens) * slot_stride_bytes(self.chunk_bytes) + 64 * MIB

    def tokens_of(self, tier: str) -> int:
        """Whose KV a CPU tier of this kind holds: "all" or "third"."""
        if tier == "all":
            return self.working_tokens
        return self.working_tokens // _THIRD if self.third_tokens is None else self.third_tokens

    def staging_bytes(self, tier: str) -> int:
        """Pinned memory of an arm, streams' slots included: the peer gets as much."""
        slots = self._slots(self.tokens_of(tier)) + _STREAM_SLOTS
        return slots * slot_stride_bytes(self.chunk_bytes)

    def _slots(self, tokens: int) -> int:
        return max(_STREAM_SLOTS, math.ceil(tokens / BLOCK_TOKENS))


def engine_id(name: str) -> str:
    """Of the peer's server of this arm: what its shared memory is named by."""
    return f"bench-{os.getpid()}-{name}"


def offload_of(arm: Arm, sizes: Sizes, place: Path) -> OffloadSpec | None:
    """How a server of ours offloads; its pool or files lie in `place`."""
    if arm.tier == "none":
        return None
    staging = sizes.staging_bytes(arm.tier)
    if arm.peer:
        spec = {"spec_name": _PEER_SPEC_ON_GPU}
        if has_cpu_engine():
            spec = {"spec_name": _PEER_SPEC, "spec_module_path": _PEER_MODULE}
        extra = {
            **spec,
            "cpu_bytes_to_use": staging,
            "block_size": BLOCK_TOKENS,
            "offload_prompt_only": False,
            "secondary_tiers": [{"type": "fs", "root_dir": str(place)}],
        }
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": engine_id(arm.name),
        }
        return OffloadSpec(None, extra, transfer)
    ours: dict[str, Any] = {
        "targets": [str(place)],
        "pool_bytes": sizes.pool_bytes if arm.pool else 0,
        "chunk_bytes_min": sizes.chunk_bytes,
        "stream_slots": _STREAM_SLOTS,
        "read_deadline_ms": _READ_DEADLINE_MS,
    }
    if arm.copy_backend:
        ours["copy_backend"] = arm.copy_backend
    return OffloadSpec(staging / GIB, ours)


def server_spec(arm: Arm, sizes: Sizes, model: Path, place: Path) -> ServerSpec:
    """The server of an arm that is started here."""
    length = -(-(sizes.request_tokens_max + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    package = Path(vllm_nvmeof_bench.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", ""))))
    return ServerSpec(
        model=model,
        max_model_len=length,
        gpu_blocks=sizes.gpu_tokens // BLOCK_TOKENS + 1,
        block_size=BLOCK_TOKENS,
        max_num_seqs=sizes.max_num_seqs,
        cores_reserved=0,
        offload=offload_of(arm, sizes, place),
        dtype=sizes.dtype,
        extra_args=tuple(shlex.split(sizes.server_args)),
        # The route that empties the GPU's prefix cache is one of the development mode.
        env={"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path},
    )
