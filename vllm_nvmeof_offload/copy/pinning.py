# SPDX-License-Identifier: Apache-2.0
"""Registers staging with CUDA piece by piece, while slots in registered pieces are already in use.

Pieces end at slot boundaries, so no slot spans two registrations. While a call pins memory, the
driver blocks all other threads of the process, including the model's: with 94 GB in 1 GB pieces,
stalls of 2.0 s were measured (vllm#51414). Pieces are therefore small, with pauses in which other
threads can take the driver's lock. The constructor registers the first piece, so that a start fails
on a machine where registration is impossible; a thread registers the others after `start`. Each
rank that shares memory registers all of it, because it also copies from the others' slots.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import MIB, format_bytes

REGISTERED_BYTES_MAX = 256 * MIB
_LOG_EVERY_S = 5.0
#: This is long enough for a waiting thread to wake up and take the lock. The value has not been
#: tuned on a GPU.
_PAUSE_S = 0.001
#: The delay before a retry if the driver refuses a registration during a graph capture.
_CAPTURE_S = 0.1


class Readiness(enum.IntEnum):
    """Whether the GPU can access staging. For several pieces, the largest value applies."""

    READY = 0
    WAITING = 1  # the registration is not complete
    FAILED = 2  # the registration failed


class StagingPinning:
    """The registration of staging with CUDA. Its thread calls `on_change` after each piece."""

    def __init__(
        self,
        cuda: Cuda,
        staging: StagingMap,
        on_change: Callable[[], None],
        piece_bytes_max: int = REGISTERED_BYTES_MAX,
    ) -> None:
        self._cuda = cuda
        self._on_change = on_change
        members = staging.members
        bases = members.addresses if members else (staging.base_address,)
        self._base = np.uint64(bases[0])
        slots = staging.cache_slots + staging.stream_slots
        slots_per_piece = max(1, piece_bytes_max // staging.slot_bytes)
        self._piece_bytes = slots_per_piece * staging.slot_bytes
        self._part_bytes = slots * staging.slot_bytes  # per member, one after the other
        self._pieces_per_part = -(-slots // slots_per_piece)
        self._own = members.member * self._pieces_per_part if members else 0
        count = len(bases) * self._pieces_per_part
        within = np.arange(self._pieces_per_part, dtype=np.uint64) * np.uint64(self._piece_bytes)
        #: The sorted addresses at which registrations begin.
        self.starts = (np.array(bases, np.uint64)[:, None] + within).reshape(-1)
        self._states = np.full(count, Readiness.WAITING, np.uint8)
        self._all_ready = False
        self._stopping = threading.Event()
        cuda.register(*self.first)
        self._states[self._own] = Readiness.READY
        self._thread = threading.Thread(target=self._run, name="nvmeof-pinning", daemon=True)

    def start(self) -> None:
        """Start registering the other pieces. Call after measurements, to avoid disturbing them."""
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    @property
    def first(self) -> tuple[int, int]:
        """Return the address and size (bytes) of this rank's first piece, which is always ready."""
        return int(self.starts[self._own]), self._bytes_of(self._own)

    def readiness(self, addresses: npt.NDArray[np.uint64]) -> Readiness:
        if self._all_ready:
            return Readiness.READY
        parts, within = np.divmod(addresses - self._base, np.uint64(self._part_bytes))
        pieces = parts * np.uint64(self._pieces_per_part) + within // np.uint64(self._piece_bytes)
        states = self._states[pieces.astype(np.intp)]
        return Readiness(int(states.max(initial=Readiness.READY)))

    def close(self) -> None:
        """Unregister all pieces, after the current registration. No copy may be running."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for number in np.flatnonzero(self._states == Readiness.READY).tolist():
            try:
                self._cuda.unregister(int(self.starts[number]))
            except CudaError as error:
                logger.warning("cannot unregister pinned memory: %s", error)
                return

    def _bytes_of(self, number: int) -> int:
        within = number % self._pieces_per_part * self._piece_bytes
        return min(self._piece_bytes, self._part_bytes - within)

    def _run(self) -> None:
        logged_s = time.monotonic()
        done = self._bytes_of(self._own)
        size = len(self._states) // self._pieces_per_part * self._part_bytes
        for number in np.roll(np.arange(len(self._states)), -self._own)[1:].tolist():
            if self._stopping.is_set():
                return
            self._states[number] = self._register(number)
            done += self._bytes_of(number)
            self._on_change()
            self._stopping.wait(_PAUSE_S)
            if time.monotonic() - logged_s > _LOG_EVERY_S:
                logged_s = time.monotonic()
                share = format_bytes(done), format_bytes(size)
                logger.info("registered with CUDA: %s of %s", *share)
        self._all_ready = bool((self._states == Readiness.READY).all())

    def _register(self, number: int) -> Readiness:
        while True:
            try:
                self._cuda.enter_own_thread()
                self._cuda.register(int(self.starts[number]), self._bytes_of(number))
                return Readiness.READY
            except CudaError as error:
                if error.while_capturing and not self._stopping.wait(_CAPTURE_S):
                    continue
                logger.error(
                    "cannot register %s of pinned memory, so copies of its slots fail: %s",
                    *(format_bytes(self._bytes_of(number)), error),
                )
                return Readiness.FAILED
