# SPDX-License-Identifier: Apache-2.0
"""Where a turn goes: the scheduling of DualPath (Wu et al., arXiv 2602.21548), as pure functions.

The simulator plays them and `examples/dual_path_router.py` routes by them. Which link reads is
the servers' own choice, chunk by chunk; a router only names helpers.
"""

from __future__ import annotations

from collections.abc import Sequence

#: A read queue up to so long counts as short.
SHORT_QUEUE_S = 0.05
_SPREAD = 1.05


def choose_prefill(
    tokens: Sequence[float], queues_s: Sequence[float], tokens_max: float
) -> int | None:
    """The engine for a prompt; None: all have as much as they may have.

    tokens: outstanding by engine. queues_s: seconds until its link has read what waits. Engines
    above `tokens_max` get nothing; those with a short queue come before the others; within a
    class the one with the fewest tokens is chosen, the first of equals.
    """
    best, found = None, (True, 0.0)
    for engine, count in enumerate(tokens):
        if count <= tokens_max:
            rank = (queues_s[engine] > SHORT_QUEUE_S, count)
            if best is None or rank < found:
                best, found = engine, rank
    return best


def choose_decode(
    tokens: Sequence[float], requests: Sequence[int], need: float, tokens_max: float
) -> int | None:
    """The engine for an answer; None: none has room.

    tokens, requests: held by engine. need: tokens of this request. tokens_max: that fit an
    engine's memory, 0: no bound. Of engines with room those that stay near the mean come first,
    by the fewest requests; the others by the fewest tokens.
    """
    near = _SPREAD * (sum(tokens) + need) / len(tokens)
    best, found = None, (True, 0.0, 0.0)
    for engine, count in enumerate(tokens):
        if tokens_max and count + need > tokens_max:
            continue
        far = count + need > near
        rank = (far, count if far else requests[engine], count)
        if best is None or rank < found:
            best, found = engine, rank
    return best


def choose_helpers(decode: int, queues_s: Sequence[float], count: int) -> list[int]:
    """The decode engine of the request, then those with the shortest read queues."""
    if count == 1:
        return [decode]
    others = sorted((queue_s, engine) for engine, queue_s in enumerate(queues_s))
    return [decode, *(engine for _, engine in others if engine != decode)][:count]
