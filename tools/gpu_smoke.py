# SPDX-License-Identifier: Apache-2.0
"""Check a GPU in a minute: versions, maximum rates, registration, copies, and a fence.

`tools/gpu.py smoke` runs this program. It prints one JSON object per line, so that an interrupted
run keeps its results. If a step fails, its line contains `failed`, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
from vllm_nvmeof_bench.conditions import packages
from vllm_nvmeof_bench.copy import World, load_theirs

from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.copy.calibration import KvDevice
from vllm_nvmeof_offload.copy.driver import Cuda, compile_kernels
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import GIB, KIB, MIB

PACKAGES = (
    *("torch", "triton", "vllm", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "numpy"),
    *("transformers", "flashinfer-python"),
)
SIZES = (16 * KIB, 64 * KIB, 128 * KIB, 512 * KIB, 2 * MIB)
ROUNDS = 5
#: About 0.2 s on a GPU that runs at 2 GHz.
SLOW_CYCLES = 400_000_000
FENCE_S_MAX = 10.0


class Smoke:
    """Prints results, and records whether a step failed."""

    def __init__(self) -> None:
        self.failed = False

    def report(self, **figures: object) -> None:
        print(json.dumps(figures), flush=True)

    @contextlib.contextmanager
    def guarded(self, step: str) -> Iterator[None]:
        """Run a step; if it fails, print its name and continue with the next one."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any part may be missing here
            self.failed = True
            self.report(step=step, failed=f"{type(error).__name__}: {error}".splitlines()[0])


def report_ceilings(smoke: Smoke, torch: Any) -> None:
    """Copy one pinned GiB each way with torch: the upper bound for our copies' rate."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    for name, target, source in (("load", gpu, host), ("store", host, gpu)):
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
        smoke.report(ceiling=name, gb_per_s=round(GIB / begin.elapsed_time(end) / 1e6, 1))


def report_vllm_kernels(smoke: Smoke, torch: Any) -> None:
    """Run one kernel of vLLM's library, which has code for one architecture in a bundle."""
    import_module("vllm._C_stable_libtorch")
    row = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
    weight, out = torch.ones(256, dtype=torch.bfloat16, device="cuda"), torch.empty_like(row)
    torch.ops._C.rms_norm(out, row, weight, 1e-6)
    exact = row.float() * torch.rsqrt(row.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    error = float((out.float() - exact).abs().max())
    if not error < 0.05:
        raise ArithmeticError(f"rms_norm is off by {error}")
    smoke.report(vllm_kernel="rms_norm", error=round(error, 4))


def report_copies(smoke: Smoke, world: World, sizes: tuple[int, ...], size_max: int) -> None:
    """Report the GB/s of every arm by size, for each direction and for both together."""
    for arm in list(world.arms):
        for size in sizes:
            count = max(2, min(1000, size_max // size))
            with smoke.guarded(f"{arm}, {size} bytes"):
                if not world.check(arm, size, min(count, 64)):
                    raise ArithmeticError("the bytes that were copied back differ")
                half = count // 2
                works = {
                    "store": {Direction.STORE: world.pieces(size, count)},
                    "load": {Direction.LOAD: world.pieces(size, count)},
                    "both": {
                        Direction.STORE: world.pieces(size, half),
                        Direction.LOAD: world.pieces(size, half, first=half * size),
                    },
                }
                rates = {name: rate(world, arm, work) for name, work in works.items()}
                smoke.report(arm=arm, bytes=size, count=count, gb_per_s=rates)


def rate(world: World, arm: str, work: dict[Direction, Any]) -> float:
    """Return the median GB/s of several rounds, after a warm-up."""
    took_s = sorted([world.seconds_of(arm, work) for _ in range(ROUNDS + 1)][1:])
    moved = sum(int(rows[:, 2].sum()) for rows in work.values())
    return round(moved / took_s[ROUNDS // 2] / 1e9, 2)


def report_fence(
    smoke: Smoke, cuda: Cuda, stream: Callable[[], int], compute: Callable[[], None]
) -> None:
    """Measure how long a load with a passed fence waits behind a load with a pending fence.
    `compute` keeps `stream` busy for a while, and returns at once."""
    staging = Staging(2 * MIB, 6, 2, numa_node=cuda.facts.numa_node)
    memory = cuda.allocate(staging.size_bytes)
    starts = np.array([memory], np.uint64)
    engine, _ = KvDevice(cuda, stream).copy_engine("dma", staging.map, starts, Waker())
    rows = np.array([[memory, staging.map.base_address, 2 * MIB]], np.uint64)
    old = engine.record_fence()
    cuda.synchronize_stream(stream())
    compute()
    young = engine.record_fence()
    engine.submit(Direction.LOAD, rows, young)
    begin_s = time.perf_counter()
    rows[0, :2] += np.uint64(2 * MIB)
    ticket = engine.submit(Direction.LOAD, rows, old)
    while ticket not in dict(engine.poll()) and time.perf_counter() - begin_s < FENCE_S_MAX:
        time.sleep(0.0001)
    waited_ms = round(1e3 * (time.perf_counter() - begin_s), 2)
    smoke.report(load_behind_a_pending_fence_ms=waited_ms)
    cuda.synchronize_stream(stream())
    del old, young
    engine.close()
    cuda.free(memory)
    staging.close()


def report_world(smoke: Smoke, cuda: Cuda, kernel: int, size: int, sizes: tuple[int, ...]) -> None:
    facts = cuda.facts
    smoke.report(
        gpu=facts.name,
        arch=facts.arch,
        driver=facts.driver_version,
        numa_node=facts.numa_node,
        batch_call=cuda.has_batch,
        host_pointers_work_in_kernels=cuda.host_pointers_work_in_kernels,
    )
    theirs, about = load_theirs()
    others = {"vllm": theirs.copy} if theirs else {}
    with (
        contextlib.closing(World(cuda, kernel, size, others)) as world,
        contextlib.closing(theirs) if theirs else contextlib.nullcontext(),
    ):
        smoke.report(vllm_arm=about, bytes=size, seconds=world.seconds, on_node=world.numa_bound)
        report_copies(smoke, world, sizes, size // 2)


def main() -> int:
    smoke = Smoke()
    smoke.report(versions=packages(PACKAGES))
    import torch

    torch.zeros(1, device="cuda")
    with smoke.guarded("vLLM's kernels"):
        report_vllm_kernels(smoke, torch)
    with smoke.guarded("ceilings"):
        report_ceilings(smoke, torch)
    cuda = Cuda(0)
    with smoke.guarded("the fence"):
        report_fence(
            smoke,
            cuda,
            lambda: torch.cuda.current_stream().cuda_stream,
            lambda: torch.cuda._sleep(SLOW_CYCLES),
        )
    kernel = cuda.load_kernel(compile_kernels(cuda.facts.arch), "copy_blocks")
    with smoke.guarded("copies"):
        report_world(smoke, cuda, kernel, 2 * GIB, SIZES)
    smoke.report(done=True)
    return 1 if smoke.failed else 0


if __name__ == "__main__":
    sys.exit(main())
