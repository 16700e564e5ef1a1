# SPDX-License-Identifier: Apache-2.0
"""CRC-32C of chunks in GPU memory by the GPU: alone, and beside a bf16 matrix product."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from crc32c import crc32c

from vllm_nvmeof_bench.gpu.crc_kernel import CrcKernel, cut_chunks, join
from vllm_nvmeof_bench.gpu.loops import matrix_step, steps_per_s
from vllm_nvmeof_bench.gpu.samples import Sample
from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.gpu.world import World
from vllm_nvmeof_bench.pool.settings import BenchError

__all__ = ["measure_crc"]


class _Chunks:
    """Chunks of `per_chunk` pieces each in GPU memory, and one kernel for all of them."""

    def __init__(self, world: World, kernel: int, size: int, per_chunk: int, total: int) -> None:
        self.world, self.size, self.per_chunk = world, size, per_chunk
        self.count = max(1, total // (size * per_chunk))
        self.pieces = world.pieces(size, self.count * per_chunk)
        rows = np.ascontiguousarray(self.pieces[:, (0, 2)])
        self._parts, self._counts = cut_chunks(np.split(rows, self.count))
        self._kernel = CrcKernel(world.cuda, kernel, len(self._parts))
        self._stream = world.cuda.create_stream()

    def run(self) -> float:
        """Seconds from the first launch until the last chunk is done, without joining."""
        start_s = time.perf_counter()
        self._kernel.submit(self._parts, self._stream)
        self.world.cuda.synchronize_stream(self._stream)
        return time.perf_counter() - start_s

    def join(self) -> list[int]:
        words = self._kernel.words(len(self._parts))
        return join(words, self._parts[:, 1], self._counts)

    def check(self) -> None:
        """Raises: BenchError: another CRC than the library's of the same bytes."""
        content = self.world.fill(self.pieces)
        self.run()
        for found, chunk in zip(self.join(), np.split(content, self.count), strict=True):
            if found != crc32c(chunk):
                pieces = f"{self.per_chunk} × {self.size} bytes"
                raise BenchError(f"crc: a wrong CRC of a chunk of {pieces}")

    def close(self) -> None:
        self.world.cuda.destroy_stream(self._stream)
        self._kernel.close()


def measure_crc(
    world: World,
    settings: Settings,
    kernel: int,
    torch: Any | None,
    tell: Callable[[int, int, str], None] = lambda *at: None,
) -> list[Sample]:
    """GB/s by the chunk's pieces, the host's time to join; steps/s of the loop beside, with torch.

    Raises: BenchError: a wrong CRC.
    """
    samples: list[Sample] = []
    for step, (size, per_chunk) in enumerate(settings.crc_chunks):
        tell(step, len(settings.crc_chunks), f"CRC of {per_chunk} pieces of {size}")
        total = min(settings.bytes_max, settings.crc_bytes)
        chunks = _Chunks(world, kernel, size, per_chunk, total)
        with contextlib.closing(chunks):
            chunks.check()
            for number in range(settings.rounds):
                rate = round(size * per_chunk * chunks.count / chunks.run() / 1e9, 3)
                start_s = time.perf_counter()
                chunks.join()
                join_us = 1e6 * (time.perf_counter() - start_s) / chunks.count
                place = size, per_chunk, number
                samples.append(Sample("crc", "gpu", "load", *place, rate))
                samples.append(Sample("crc_join", "host", "load", *place, round(join_us, 2)))
            if torch is not None and step == 0:
                samples += _beside(chunks, settings, torch)
    return samples


def _beside(chunks: _Chunks, settings: Settings, torch: Any) -> list[Sample]:
    step = matrix_step(torch)
    samples = []
    for number in range(settings.rounds):
        for arm in ("alone", "crc"):
            with _running(chunks) if arm == "crc" else contextlib.nullcontext([]) as took_s:
                rate = steps_per_s(step, settings.loop_s, torch)
            samples.append(Sample("crc_matrix", arm, "both", 0, 0, number, round(rate, 3)))
            if took_s:
                moved = len(took_s) * chunks.size * chunks.per_chunk * chunks.count
                place = chunks.size, chunks.per_chunk, number
                rate = round(moved / sum(took_s) / 1e9, 3)
                samples.append(Sample("crc", "gpu_beside_matrix", "load", *place, rate))
    return samples


@contextlib.contextmanager
def _running(chunks: _Chunks) -> Iterator[list[float]]:
    """CRCs one after the other on a thread until left; seconds that each run took."""
    stopping, took_s = threading.Event(), list[float]()

    def run() -> None:
        chunks.world.cuda.make_current()
        while not stopping.is_set():
            took_s.append(chunks.run())

    thread = threading.Thread(target=run, name="crc")
    thread.start()
    try:
        yield took_s
    finally:
        stopping.set()
        thread.join()
