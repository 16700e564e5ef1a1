# SPDX-License-Identifier: Apache-2.0
"""The words of peers, and the seams to both sides' machines.

P is the side that loads, D the side that serves. P asks D for a chunk; D reads it into one of its
*serve slots* and lends that to P; P pulls it into a slot of its own, and proves it there. Whatever
a peer says decides how soon a chunk comes, never whether it is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import SlotIdentity

#: Both say "I live" so often while a read is open, and else.
BEAT_OPEN_S = 0.05
BEAT_IDLE_S = 1.0
#: Reads that are open are made elsewhere when the peer has said nothing for so long, and nothing
#: more is asked of it until it is heard again.
STALLED_S = 0.5
#: Who has said nothing for so long is lost.
SILENT_S = 3.5


class SlotMemory(NamedTuple):
    """Slots of equal size, one after the other. address: of the first one."""

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
    """What two peers must have in common, beside the share tag. secret: the share secret; empty:
    there is none. replica: which of a server's `replicas` this is; they need not have it in common.
    """

    keyspace: str
    rank: int
    world_size: int
    slot_bytes: int
    secret: bytes = field(default=b"", repr=False)
    replica: int = 0
    replicas: int = 1

    @property
    def port_offset(self) -> int:
        """Of the port at which this rank listens, from the server's `peer_listen`."""
        return self.replica * self.world_size + self.rank


@dataclass(frozen=True, slots=True)
class PeerRead:
    """A chunk that P wants: the slot at `place` into the staging slot at `address`.

    token: the caller's number. tag: only a chunk with this share tag is accepted. deadline_s: by
    `time.monotonic`; the peer's try ends then.
    """

    token: int
    address: int
    payload_bytes: int
    identity: SlotIdentity
    place: SlotPlace
    tag: bytes
    deadline_s: float


class PeerEnd(NamedTuple):
    """The outcome of a read.

    released: nothing touches its buffer any more. If not, another end of the same token follows,
    which says only that.
    """

    token: int
    outcome: Outcome
    released: bool


class PeerState(NamedTuple):
    """A peer's lane. credits: reads that it may have at a time. bytes_per_s: 0: not known.

    queued_bytes: what the peer's storage has to read before what we ask for now. lost: how often
    its session was lost, or it stalled.
    """

    usable: bool
    credits: int
    bytes_per_s: float
    queued_bytes: int
    lost: int = 0


NO_PEER = PeerState(False, 0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class ServeRead:
    """A chunk that D reads for P into the serve slot at `address`. token: the server's number."""

    token: int
    address: int
    payload_bytes: int
    identity: SlotIdentity
    place: SlotPlace
    tag: bytes
    deadline_s: float


class Served(NamedTuple):
    """The end of a `ServeRead`: the storage does not touch its serve slot any more.

    outcome: None: D has not opened the region of its place.
    """

    token: int
    outcome: Outcome | None


class Levels(NamedTuple):
    """D's storage: what it still has to read, and how fast it reads; 0: not known."""

    queued_bytes: int
    bytes_per_s: float


class ServePort(Protocol):
    """D's storage. Only the server's thread calls, and nothing here blocks."""

    def serve(self, reads: Sequence[ServeRead]) -> None:
        """Read behind D's own demand. Each ends once in `poll`, however late."""

    def cancel(self, tokens: Sequence[int]) -> None:
        """They are not wanted any more; they end as all others do."""

    def poll(self) -> list[Served]:
        """Return what has ended since the last call."""

    def levels(self) -> Levels:
        """Return how busy the storage is now."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` may have something to return."""
