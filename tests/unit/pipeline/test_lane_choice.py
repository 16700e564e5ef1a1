# SPDX-License-Identifier: Apache-2.0
"""Which lane reads a chunk: the one that has it first, the own one on a tie."""

from __future__ import annotations

import pytest

from vllm_nvmeof_offload.native import choose_lane

WAIT, OWN, FIRST, SECOND = -1, 0, 1, 2


@pytest.mark.parametrize(
    ("own", "peers", "chosen"),
    [
        ((1.0, True), [], OWN),
        ((1.0, False), [], WAIT),
        ((1.0, True), [(2.0, True)], OWN),
        ((2.0, True), [(1.0, True)], FIRST),
        ((3.0, True), [(2.0, True), (1.0, True)], SECOND),
        # A tie is the own lane's; beyond one twentieth it is none.
        ((1.04, True), [(1.0, True)], OWN),
        ((1.06, True), [(1.0, True)], FIRST),
        # The best lane is waited for, not left for a slower one that is free.
        ((1.0, False), [(2.0, True)], WAIT),
        ((2.0, True), [(1.0, False)], WAIT),
        # On a tie the own lane may be full while the peer, which ends sooner, has room.
        ((1.04, False), [(1.0, True)], FIRST),
        ((1.0, False), [(1.04, True)], WAIT),
        # Between two peers, too, a slower one that has room is no reason not to wait.
        ((3.0, True), [(1.0, False), (2.0, True)], WAIT),
        # Nobody knows when a lane without a rate ends.
        ((float("inf"), True), [(1.0, True)], FIRST),
        ((1.0, True), [(float("inf"), True)], OWN),
    ],
)
def test_the_chunk_goes_where_it_ends_first(
    own: tuple[float, bool], peers: list[tuple[float, bool]], chosen: int
) -> None:
    assert choose_lane(*own, peers) == chosen
