# SPDX-License-Identifier: Apache-2.0
"""Pulls between two processes by RDMA: `python -m tests.fabric.pulls LENDING PULLING`.

The arguments are an RDMA device for each process. Each is also in its own IPC namespace: within one
UCX would copy through shared memory. Prints one line of JSON: the fields of `Pulled`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from tests.process import listening
from vllm_nvmeof_offload.peers.base import SlotMemory
from vllm_nvmeof_offload.peers.transport import NixlTransport, TransportError, load_nixl

SLOTS, SLOT_BYTES = 8, 28 * 1024
ROUNDS = 10
PULLED_BYTES = ROUNDS * SLOTS * SLOT_BYTES
POLL_S = 0.001
#: An ordinary pull takes milliseconds.
PULL_S_MAX = 60.0
DEAD_S = 2.0
_CLONE_NEWIPC = 0x08000000
_FORK = multiprocessing.get_context("fork")


@dataclass
class Pulled:
    """wrong: slots with other bytes. listens: TCP ports of both processes. after_kill: how a pull
    from the killed process ends. closed: whether each agent has ended its pulls."""

    wrong: int
    listens: list[int]
    after_kill: str
    closed: bool


class _Slots:
    """Memory with `SLOTS` slots."""

    def __init__(self) -> None:
        self.view = mmap.mmap(-1, SLOTS * SLOT_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.memory = SlotMemory(address, SLOT_BYTES, SLOTS)

    def fill(self, number: int) -> None:
        """Write `number` plus the slot's index into each byte."""
        self.view[:] = b"".join(bytes([number + slot]) * SLOT_BYTES for slot in range(SLOTS))

    def wrong(self, number: int) -> int:
        """Count the slots with any other byte."""
        starts = [slot * SLOT_BYTES for slot in range(SLOTS)]
        return sum(
            self.view[start : start + SLOT_BYTES] != bytes([number + slot]) * SLOT_BYTES
            for slot, start in enumerate(starts)
        )


def _lend(device: str, pipe: Connection) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.unshare(_CLONE_NEWIPC), os.strerror(ctypes.get_errno())
    os.environ["UCX_NET_DEVICES"] = f"{device}:1"
    slots = _Slots()
    transport = NixlTransport(slots.memory)
    pipe.send((transport.metadata, slots.memory, listening()))
    while True:
        while not pipe.poll(POLL_S):
            transport.progress()
        slots.fill(pipe.recv())
        pipe.send(None)


def main() -> None:
    """Pull all slots again and again, then once from a killed process."""
    lending, pulling = sys.argv[1:]
    load_nixl()
    pipe, far = _FORK.Pipe()
    process = _FORK.Process(target=_lend, args=(lending, far), daemon=True)
    process.start()
    os.environ["UCX_NET_DEVICES"] = f"{pulling}:1"
    slots, wrong = _Slots(), 0
    transport = NixlTransport(slots.memory)
    metadata, theirs, ports = pipe.recv()
    transport.connect(metadata, theirs)
    for number in range(ROUNDS):
        pipe.send(number)
        pipe.recv()
        for slot in range(SLOTS):
            ended = _pull(transport, slots, slot, PULL_S_MAX)
            assert ended == "done", ended
        wrong += slots.wrong(number)
    process.kill()
    process.join()
    after_kill = _pull(transport, slots, 0, DEAD_S)
    found = Pulled(wrong, ports + listening(), after_kill, transport.close())
    print(json.dumps(asdict(found)), flush=True)
    os._exit(0)  # without the libraries' destructors (docs/troubleshooting.md)


def _pull(transport: NixlTransport, slots: _Slots, slot: int, within_s: float) -> str:
    """Pull one slot: "done", "hangs" or "fails"."""
    end_s = time.monotonic() + within_s
    try:
        pull = transport.pull(slot, slots.memory.address_of(slot), SLOT_BYTES)
        while not transport.has_ended(pull):
            if time.monotonic() > end_s:
                return "hangs"
            time.sleep(POLL_S)
    except TransportError:
        return "fails"
    return "done"


if __name__ == "__main__":
    main()
