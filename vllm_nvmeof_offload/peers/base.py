# SPDX-License-Identifier: Apache-2.0
"""The definitions that both sides of a peer connection share.

A *loading server* requests a chunk from a *helper*. The helper reads the chunk into one of its
*serve slots*, and sends the chunk or lets the loading server pull it. The loading server verifies
the chunk in its own slot, so a peer can affect how soon a chunk arrives, but never whether the
chunk is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import SlotIdentity

#: The intervals at which both sides send a beat: while a read is open, and at other times.
BEAT_OPEN_S = 0.05
BEAT_IDLE_S = 1.0
#: If a peer has sent nothing for this long, its open reads are retried elsewhere, and nothing
#: more is requested from it until it sends something.
STALLED_S = 0.5
SILENT_S = 3.5  # a peer that has sent nothing for this long is lost


class SlotMemory(NamedTuple):
    """Contiguous slots of equal size, the first one at `address`."""

    address: int
    slot_bytes: int
    slots: int

    def slot_of(self, address: int) -> int:
        slot, rest = divmod(address - self.address, self.slot_bytes)
        assert not rest
        assert 0 <= slot < self.slots
        return slot

    def address_of(self, slot: int) -> int:
        assert 0 <= slot < self.slots
        return self.address + slot * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Common:
    """The facts that two peers must have in common, in addition to the share tag. `secret` is the
    share secret, or empty. `replica` is the index of one of a server's `replicas`; the two peers
    may differ in both."""

    keyspace: str
    rank: int
    world_size: int
    slot_bytes: int
    secret: bytes = field(default=b"", repr=False)
    replica: int = 0
    replicas: int = 1

    @property
    def port_offset(self) -> int:
        """The offset of this rank's port from the server's `peer_listen`."""
        return self.replica * self.world_size + self.rank


@dataclass(frozen=True, slots=True)
class PeerRead:
    """A chunk that the loading server wants from the slot at `place`. `address` is the address of a
    staging slot on the loading server, and of a serve slot on the helper. `token` is the caller's
    number. Only the share tag `tag` is accepted. The attempt ends at `deadline_s`, by
    `time.monotonic`."""

    token: int
    address: int
    payload_bytes: int
    identity: SlotIdentity
    place: SlotPlace
    tag: bytes
    deadline_s: float


class PeerEnd(NamedTuple):
    """The outcome of a read. `released` states that nothing touches its buffer any more. If it is
    False, another end with the same token follows, which only reports the release."""

    token: int
    outcome: Outcome
    released: bool


class PeerState(NamedTuple):
    """The state of a peer's lane. `credits` is the number of reads that may be open. `bytes_per_s`
    is 0 if unknown. `queued_bytes` are the bytes that the peer's storage must read before our next
    request. `lost` counts how often its session was lost or stalled."""

    usable: bool
    credits: int
    bytes_per_s: float
    queued_bytes: int
    lost: int = 0


NO_PEER = PeerState(False, 0, 0.0, 0)


class Served(NamedTuple):
    """The end of a helper's read, after which the storage no longer touches its serve slot.
    `outcome` is None if the helper has not opened the place's region."""

    token: int
    outcome: Outcome | None


class Levels(NamedTuple):
    """The load on the helper's storage: the bytes left to read, and its rate, or 0 if unknown."""

    queued_bytes: int
    bytes_per_s: float


class ServePort(Protocol):
    """The interface to the helper's storage. Only the server's thread calls it; no call blocks."""

    def serve(self, reads: Sequence[PeerRead]) -> None:
        """Read these chunks after the helper's own loads. `poll` reports each end once."""

    def cancel(self, tokens: Sequence[int]) -> None:
        """Cancel these reads. `poll` still reports the end of each."""

    def poll(self) -> list[Served]:
        """Take the reads that ended since the last call."""

    def levels(self) -> Levels:
        """Return the current load on the storage."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` may have something to return."""
