# SPDX-License-Identifier: Apache-2.0
"""Registers staging with CUDA, piece by piece, while slots of finished pieces are used already.

Pieces of at most 256 MiB end at slots' ends: so no slot lies in two registrations. While a call
pins memory the driver lets no other thread of the process in, the model's among them, and a thread
that takes its lock again at once keeps it: others measured stalls of 2.0 s in 94 GB by pieces of
1 GB (vllm#51414). So pieces are short, with a pause between them. The first is registered at
once, so that a machine on which it cannot work refuses to start; the others by a thread, from
`start` on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.cuda import Readiness
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import MIB, format_bytes

__all__ = ["REGISTERED_BYTES_MAX", "StagingPinning"]

logger = logging.getLogger(LOGGER_NAME)

_WAITING, _READY, _FAILED = range(3)
_TELL_EVERY_S = 5.0
REGISTERED_BYTES_MAX = 256 * MIB
#: So that a thread that waits for the lock wakes up and gets it; never measured on a GPU.
_PAUSE_S = 0.001
#: Should a driver refuse it all the same while a CUDA graph is captured: until the next try.
_CAPTURE_S = 0.1


class StagingPinning:
    """See `copy.cuda.StagingPins`.

    on_change: called from the thread after each piece, since copies may wait for it.
    """

    def __init__(
        self,
        cuda: Cuda,
        staging: StagingMap,
        on_change: Callable[[], None],
        piece_bytes_max: int = REGISTERED_BYTES_MAX,
    ) -> None:
        self._cuda = cuda
        self._on_change = on_change
        self._base = staging.base_address
        slots = staging.cache_slots + staging.stream_slots
        slots_a_piece = max(1, piece_bytes_max // staging.slot_bytes)
        self._piece_bytes = slots_a_piece * staging.slot_bytes
        self._size = slots * staging.slot_bytes
        count = -(-slots // slots_a_piece)
        #: Sorted addresses at which registrations begin.
        self.starts = np.uint64(self._base) + np.arange(count, dtype=np.uint64) * np.uint64(
            self._piece_bytes
        )
        self._states = np.full(count, _WAITING, np.uint8)
        self._all_ready = False
        self._stopping = threading.Event()
        cuda.register(self._base, self._bytes_of(0))
        self._states[0] = _READY
        self._thread = threading.Thread(target=self._run, name="nvmeof-pinning", daemon=True)

    def start(self) -> None:
        """Register the other pieces. Until then nothing disturbs measurements."""
        self._thread.start()

    def wait(self) -> None:
        """Until every piece is registered, or has failed."""
        self._thread.join()

    @property
    def first(self) -> tuple[int, int]:
        """Address and bytes of the piece that is ready at once."""
        return self._base, self._bytes_of(0)

    def readiness(self, addresses: npt.NDArray[np.uint64]) -> Readiness:
        if self._all_ready:
            return Readiness.READY
        pieces = (addresses - np.uint64(self._base)) // np.uint64(self._piece_bytes)
        states = self._states[pieces.astype(np.intp)]
        if (states == _FAILED).any():
            return Readiness.FAILED
        return Readiness.READY if (states == _READY).all() else Readiness.WAITING

    def close(self) -> None:
        """Unregister, after the piece that is being registered. No copy is under way."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for number in np.flatnonzero(self._states == _READY).tolist():
            try:
                self._cuda.unregister(int(self.starts[number]))
            except CudaError as error:
                logger.warning("pinned memory was not given back: %s", error)
                return

    def _bytes_of(self, number: int) -> int:
        return min(self._piece_bytes, self._size - number * self._piece_bytes)

    def _run(self) -> None:
        told_s = time.monotonic()
        for number in range(1, len(self._states)):
            if self._stopping.is_set():
                return
            self._states[number] = self._register(number)
            self._on_change()
            self._stopping.wait(_PAUSE_S)
            if time.monotonic() - told_s > _TELL_EVERY_S:
                told_s = time.monotonic()
                done = min(self._size, (number + 1) * self._piece_bytes)
                share = format_bytes(done), format_bytes(self._size)
                logger.info("registered with CUDA: %s of %s", *share)
        self._all_ready = bool((self._states == _READY).all())

    def _register(self, number: int) -> int:
        try:
            self._cuda.enter_own_thread()
            while True:
                try:
                    self._cuda.register(int(self.starts[number]), self._bytes_of(number))
                    break
                except CudaError as error:
                    if not error.while_capturing or self._stopping.wait(_CAPTURE_S):
                        raise
        except CudaError as error:
            logger.error(
                "%s of pinned memory cannot be registered, and their slots fail: %s",
                *(format_bytes(self._bytes_of(number)), error),
            )
            return _FAILED
        return _READY
