# SPDX-License-Identifier: Apache-2.0
"""CRC-32C of chunks in GPU memory, by the product's code, as often as wanted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.base import Payloads
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.gpu_checksums import PART_BYTES_MAX, GpuChecksums, Launch

_Rows = npt.NDArray[np.uint64]


class CrcKernel:
    """CRCs of the same chunks, on a stream of its own.

    chunks: each uint64[m, 2], the (address, bytes) of its pieces in their order; multiples of 512
    bytes, aligned to 16.
    """

    def __init__(
        self, cuda: Cuda, kernel: int, chunks: Sequence[_Rows], launch: Launch | None = None
    ) -> None:
        self._cuda = cuda
        rows = np.concatenate(chunks)
        ends = np.cumsum(rows[:, 1])
        # Payloads one behind the other: addresses in staging count only as offsets here.
        pieces = np.stack([rows[:, 0], ends - rows[:, 1], rows[:, 1]], axis=1)
        counts = np.array([len(chunk) for chunk in chunks], np.uint32)
        sizes = np.array([chunk[:, 1].sum() for chunk in chunks], np.uint64)
        self._payloads = Payloads.of(counts, np.cumsum(sizes) - sizes, sizes)
        parts_max = int((rows[:, 1] // np.uint64(PART_BYTES_MAX) + np.uint64(1)).sum())
        self._kernel = GpuChecksums(cuda, kernel, launch, parts_max)
        prepared = self._kernel.prepare(pieces, self._payloads)
        assert prepared is not None
        self._checksums = prepared
        self._stream = cuda.create_stream(launch is not None and launch.urgent)

    def run(self) -> None:
        """Return when all parts are done; then `join`."""
        self._kernel.launch(self._checksums, self._stream)
        self._cuda.synchronize_stream(self._stream)

    def join(self) -> list[int]:
        """Return each chunk's CRC-32C."""
        self._kernel.write(self._checksums)
        crcs: list[int] = self._payloads.crcs.tolist()
        return crcs

    def close(self) -> None:
        self._cuda.destroy_stream(self._stream)
        self._kernel.close()
