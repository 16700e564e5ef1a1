# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the part of NIXL's agent that `NixlTransport` calls, for machines without RDMA.

Another process's memory stands in for what a network card reaches: a READ copies it when the one
who began it asks for its state, and nothing of the other process runs meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

Places = Sequence[tuple[int, int, int]]

_libc = ctypes.CDLL(None, use_errno=True)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Core:
    """What ends when nothing refers to the agent any more."""


class _Handle(NamedTuple):
    pid: int
    there: int
    here: int
    size_bytes: int


class Agent:
    def __init__(self, name: str, config: dict[str, Any]) -> None:
        assert not config["backends"], "a backend that is made here listens by TCP"
        self.name, self.agent, self.backends = name, _Core(), dict[str, dict[str, str]]()
        self._registered: list[tuple[int, int]] = []
        self._pids: dict[str, int] = {"NIXL_INIT_AGENT": os.getpid()}
        self._known: dict[str, list[tuple[int, int]]] = {"NIXL_INIT_AGENT": self._registered}

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        return {"ucx_devices": ""}

    def create_backend(self, backend: str, parameters: dict[str, str]) -> None:
        assert parameters["engine_config"] == "TLS=^tcp"
        self.backends[backend] = parameters

    def register_memory(self, whole: Sequence[tuple[int, int, int, str]], mem_type: str) -> object:
        assert self.backends, "no backend"
        self._registered += [(address, size_bytes) for address, size_bytes, _, _ in whole]
        return whole

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self.name, os.getpid(), self._registered]).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, pid, registered = json.loads(metadata)
        self._pids[name], self._known[name] = pid, [tuple(one) for one in registered]
        return bytes(name, "ascii")

    def get_xfer_descs(self, places: Places, mem_type: str) -> Places:
        return places

    def prep_xfer_dlist(self, name: str, places: Places) -> tuple[str, Places]:
        for address, size_bytes, _ in places:
            inside = (a <= address and address + size_bytes <= a + n for a, n in self._known[name])
            assert any(inside), "not registered"
        return name, places

    def make_prepped_xfer(
        self,
        kind: str,
        ours: tuple[str, Places],
        our_rows: list[int],
        theirs: tuple[str, Places],
        their_rows: list[int],
    ) -> _Handle:
        assert kind == "READ"
        here, size_bytes, _ = ours[1][our_rows[0]]
        there, _, _ = theirs[1][their_rows[0]]
        return _Handle(self._pids[theirs[0]], there, here, size_bytes)

    def transfer(self, handle: _Handle) -> str:
        return "PROC"

    def check_xfer_state(self, handle: _Handle) -> str:
        ours, theirs = (_IoVec(at, handle.size_bytes) for at in (handle.here, handle.there))
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        arguments = ctypes.byref(ours), one, ctypes.byref(theirs), one, none
        read = _libc.process_vm_readv(ctypes.c_int(handle.pid), *arguments)
        if read != handle.size_bytes:
            raise OSError(ctypes.get_errno(), "the other process is gone")
        return "DONE"

    def release_xfer_handle(self, handle: _Handle) -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


def install() -> None:
    """Let `import nixl` find this from now on, in this process."""
    module = ModuleType("nixl")
    vars(module).update(nixl_agent=Agent, nixl_agent_config=dict)
    sys.modules["nixl"] = module
