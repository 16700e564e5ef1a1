# SPDX-License-Identifier: Apache-2.0
"""The words of peers.

P is the side that loads, D the side that serves. P asks D for a chunk; D reads it into one of its
*serve slots* and lends that to P; P pulls it into a slot of its own, and proves it there. Whatever
a peer says decides how soon a chunk comes, never whether it is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import SlotIdentity


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

    queued_bytes: what the peer's storage has to read before what we ask for now.
    """

    usable: bool
    credits: int
    bytes_per_s: float
    queued_bytes: int


NO_PEER = PeerState(False, 0, 0.0, 0)
