# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.io.base import IoLimits

class StartGate:
    def __init__(self) -> None: ...
    def shut(self, pool_slots: Sequence[int]) -> None: ...
    def starts(self) -> list[int]: ...

class Engine:
    def __init__(
        self,
        targets: Sequence[tuple[int, int, int]],
        base: int,
        length: int,
        *,
        regions: Sequence[bytes],
        logs: Sequence[tuple[int, int, int]],
        rank: int,
        permits: Sequence[int],
        groups: Sequence[tuple[int, int]],
        slot_bytes: int,
        registered: bool,
        threads: int,
        limits: IoLimits,
        cpus: Sequence[int],
        gate: StartGate | None,
    ) -> None: ...
    def submit(
        self,
        token: int,
        urgency: int,
        pool_slot: int,
        address: int,
        payload_bytes: int,
        key: bytes,
        generation: int,
        epoch: int,
        tag: bytes,
        payload_crc: int,
        single_copy: bool,
        owner: int,
        header_only: bool,
        /,
    ) -> None: ...
    def room(self) -> tuple[int, int]: ...
    @property
    def address(self) -> int: ...
    def kick(self) -> None: ...
    def cancel(self, token: int) -> bool: ...
    def replace_target(self, index: int, slab_fd: int, table_fd: int, log_fd: int, /) -> None: ...
    def log_reset(self, target: int, epoch: int, /) -> None: ...
    def log_hint(
        self,
        target: int,
        region_uuid: bytes,
        slot: int,
        member: int,
        generation: int,
        count: int,
        /,
    ) -> None: ...
    def attach(self, owner: int, target: int, slab_fd: int, uuid: bytes, rank: int, /) -> None: ...
    def detach(self, owner: int, target: int, /) -> None: ...
    def poll(self) -> list[tuple[int, int, int, int, int]]: ...
    def fileno(self) -> int: ...
    def close(self, timeout_s: float) -> bool: ...

def probe_ring(fd: int, address: int, bytes_: int, registered: bool, /) -> None: ...
def copy(
    to: npt.NDArray[np.uint64],
    from_: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
    /,
) -> None: ...
def copy_payloads(
    to: npt.NDArray[np.uint64],
    from_: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
    counts: npt.NDArray[np.uint32],
    payloads: npt.NDArray[np.uint64],
    payload_sizes: npt.NDArray[np.uint64],
    crcs: npt.NDArray[np.int64],
    loads: bool,
    /,
) -> None: ...
def join_crcs(
    words: npt.NDArray[np.uint32],
    sizes: npt.NDArray[np.uint64],
    counts: npt.NDArray[np.uint32],
    crcs: npt.NDArray[np.uint32],
    /,
) -> None: ...
def entry_crcs(
    entries: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64], crcs: npt.NDArray[np.uint32]
) -> None: ...
def seal(
    slot: npt.NDArray[np.uint8] | memoryview,
    key: bytes,
    generation: int,
    payload_bytes: int,
    payload_crc: int,
    epoch: int,
    tag: bytes,
    region_uuid: bytes,
    rank: int,
    number: int,
    kind: int,
    single_copy: bool,
    /,
) -> None: ...
def verify(
    slot: npt.NDArray[np.uint8] | memoryview,
    key: bytes,
    generation: int,
    payload_bytes: int,
    region_uuid: bytes,
    rank: int,
    number: int,
    tag: bytes,
    /,
) -> int: ...
def parse_header(
    page: memoryview, /
) -> tuple[tuple[bytes, int], tuple[bytes, int, int], int, int, tuple[int, bytes], bool] | None: ...
def encode_entry(
    slot: int, key: bytes, generation: int, epoch: int, single_copy: bool, /
) -> bytes: ...

class LogWriter:
    def __init__(self, pages: int, first: int, lease_generation: int, fd: int, /) -> None: ...
    def put(
        self, slot: int, key: bytes, generation: int, epoch: int, single_copy: bool, /
    ) -> None: ...
    def reset(self, epoch: int, /) -> None: ...
    def hint(
        self, region_uuid: bytes, slot: int, member: int, generation: int, count: int, /
    ) -> None: ...
    def replace(self, fd: int, /) -> None: ...
    def flush(self) -> None: ...
