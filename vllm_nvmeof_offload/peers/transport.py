# SPDX-License-Identifier: Apache-2.0
"""Transfers from a peer's serve slots into our memory with NIXL's READ, which the receiver starts.

NIXL's own progress thread would keep a core busy while nothing moves, so it is not used: our pulls
progress when their state is read, and peers' pulls from us in `progress`. All calls come from the
thread that created the agent.

NIXL is used if network cards can move the bytes by RDMA; otherwise chunks arrive in messages
(`session.Sent`). Without an RDMA port, NIXL is not imported. We never let UCX use TCP, because its
TCP transport listens on each interface, at arbitrary ports, and writes data from any sender to any
address that the sender names (seen with NIXL 1.5.1).

A pull in progress cannot be cancelled. NIXL releases the pull's handle and the peer without an
error, but still writes into the buffer when a suspended peer continues or a cut link is restored
(seen with 1.5.1 over TCP and soft-RoCE). Only the end of the agent, which takes milliseconds, ends
the pull. So each session has a separate agent, and the end of a session ends all its pulls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import uuid
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_nvmeof_offload.child import child_command
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric import ACTIVE, read_rdma_ports
from vllm_nvmeof_offload.peers.base import SlotMemory
from vllm_nvmeof_offload.units import PAGE_BYTES

#: Variables that are set before NIXL's first import. UCX keeps registered memory until this many
#: regions wait to be freed; without a limit, it leaks them (vLLM sets the same value). By default,
#: NIXL logs each agent.
_ENVIRONMENT = {"UCX_RCACHE_MAX_UNRELEASED": "1024", "NIXL_LOG_LEVEL": "WARN"}
_PROBE_S = 60.0
_DRAM = "DRAM"
_UCX_CONFIG = "TLS=^tcp"  # not in the environment, which also applies to vLLM's agents


def has_rdma(sysfs: str = "/sys") -> bool:
    """Return whether this machine has an active RDMA port; a device alone is not enough."""
    return any(port.state == ACTIVE for port in read_rdma_ports(sysfs))


class TransportError(EngineError):
    """A failed transfer or connection, which ends the session."""


def load_nixl() -> ModuleType:
    """Import NIXL. Raises ImportError if it is not installed or not usable."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import nixl

    module: ModuleType = nixl
    return module


def why_no_pulls() -> str:
    """Return the reason why no bytes can be pulled here, in one line; empty if they can be. Only
    the creation of an agent shows whether NIXL's UCX has a driver for the RDMA device. A separate
    process creates it, because an incompatible library may abort."""
    if not has_rdma():
        return "no RDMA port is active here"
    command = child_command("peers.transport")
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot probe NIXL: {error}"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"its probe exits with {done.returncode}"]
    return f"cannot use NIXL: {lines[-1][:200]}"


class Pull:
    """A pull in progress (`NixlTransport.pull`)."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle  # None once it has ended


class NixlTransport:
    """A NIXL agent. It lets peers with its metadata pull from `memory`, or pulls into `memory`."""

    def __init__(self, memory: SlotMemory) -> None:
        """Create the agent. Raises TransportError if NIXL refuses."""
        self._memory = memory
        self._lists: list[tuple[int, Any, Any]] = []  # pulled length, our list, their list
        self._pulls: set[Pull] = set()
        self._peer: tuple[str, SlotMemory] | None = None
        self._agent = _checked(_new_agent)
        self._core = weakref.ref(self._agent.agent)
        whole = [(memory.address, memory.slot_bytes * memory.slots, 0, "")]
        self._registered = _checked(self._agent.register_memory, whole, mem_type=_DRAM)
        #: The data that a peer needs to pull from us.
        self.metadata: bytes = _checked(self._agent.get_agent_metadata)

    def connect(self, metadata: bytes, memory: SlotMemory) -> None:
        """Prepare pulls from the peer with this metadata. `memory` is the peer's serve slots."""
        name = _checked(self._agent.add_remote_agent, metadata)
        self._peer = name if isinstance(name, str) else name.decode(), memory

    def pull(self, slot: int, address: int, size_bytes: int) -> Pull:
        """Start to pull `size_bytes` of a peer's slot to our `address`. Raises TransportError."""
        ours, theirs = self._lists_of(size_bytes)
        places = ours, [self._memory.slot_of(address)], theirs, [slot]
        pull = Pull(_checked(self._agent.make_prepped_xfer, "READ", *places))
        self._pulls.add(pull)
        self._look(pull, _checked(self._agent.transfer, pull.handle))
        return pull

    def has_ended(self, pull: Pull) -> bool:
        """Let a pull progress. Return whether all bytes have arrived. Raises TransportError."""
        if pull.handle is not None:
            self._look(pull, _checked(self._agent.check_xfer_state, pull.handle))
        return pull.handle is None

    def progress(self) -> None:
        """Let a peer's pulls from us progress."""
        with contextlib.suppress(Exception):  # errors concern peers that have left
            self._agent.get_new_notifs()

    def close(self) -> bool:
        """End all pulls. Return whether nothing writes into our memory any more. If False, call
        again later: something still refers to the agent, such as the frames of an exception."""
        for pull in self._pulls:
            pull.handle = None
        self._pulls.clear()
        self._lists.clear()
        self._registered = self._agent = None
        return self._core() is None

    def _look(self, pull: Pull, state: str) -> None:
        if state == "DONE":
            _checked(self._agent.release_xfer_handle, pull.handle)
            pull.handle = None
            self._pulls.discard(pull)
        elif state != "PROC":
            raise TransportError(state)

    def _lists_of(self, size_bytes: int) -> tuple[Any, Any]:
        """Return the descriptor lists, ours and theirs, of the first `size_bytes` of each slot."""
        for known, ours, theirs in self._lists:
            if known == size_bytes:
                return ours, theirs
        assert self._peer is not None
        name, memory = self._peer
        ours = self._list_of("NIXL_INIT_AGENT", self._memory, size_bytes)
        theirs = self._list_of(name, memory, size_bytes)
        self._lists.append((size_bytes, ours, theirs))
        return ours, theirs

    def _list_of(self, name: str, memory: SlotMemory, size_bytes: int) -> Any:
        places = [(memory.address_of(slot), size_bytes, 0) for slot in range(memory.slots)]
        descriptors = _checked(self._agent.get_xfer_descs, places, mem_type=_DRAM)
        return _checked(self._agent.prep_xfer_dlist, name, descriptors)


def _new_agent() -> Any:
    nixl = load_nixl()
    config = nixl.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=[])
    agent = nixl.nixl_agent(uuid.uuid4().hex, config)  # unique among all peers
    parameters = agent.get_plugin_params("UCX")
    agent.create_backend("UCX", {**parameters, "engine_config": _UCX_CONFIG})
    return agent


def _checked(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """Call NIXL. Replace any error with a TransportError that does not refer to the error."""
    try:
        return call(*arguments, **more)
    except Exception as error:  # noqa: BLE001 - NIXL has a separate class for each error
        text = f"{type(error).__name__}: {error}"[:200]
    raise TransportError(text)


def _probe() -> None:
    """Create an agent, and exit without the libraries' destructors, which may crash."""
    load_nixl()
    memory = ctypes.create_string_buffer(PAGE_BYTES)
    try:
        NixlTransport(SlotMemory(ctypes.addressof(memory), PAGE_BYTES, 1))
    except TransportError as error:
        sys.exit(f"it cannot create an agent ({error}); its UCX may lack the RDMA device's driver")
    os._exit(0)


if __name__ == "__main__":
    _probe()
