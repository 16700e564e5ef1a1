# SPDX-License-Identifier: Apache-2.0
"""The routing of a turn: DualPath's scheduling (Wu et al., arXiv 2602.21548), as pure functions.

The simulator and `dual_path_router.py` use these functions. A router only names helpers; the
servers choose a link per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

#: The longest read queue that counts as short.
SHORT_QUEUE_S = 0.05
_SPREAD = 1.05


def choose_prefill(
    tokens: Sequence[float], queues_s: Sequence[float], tokens_max: float
) -> int | None:
    """Return the engine for a prompt; None if all engines have more than `tokens_max` tokens.

    By engine, `tokens` are its outstanding tokens and `queues_s` the seconds until its link has
    read its queue. Engines with a short queue are preferred, and among them the first with the
    fewest tokens.
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
    """Return the engine for an answer; None if no engine has room.

    `tokens` and `requests` are the load by engine, `need` the tokens of this request, and
    `tokens_max` the tokens that an engine's memory holds (0: no bound). Among engines with room,
    those that stay near the mean are preferred, by the fewest requests; the others are ranked by
    the fewest tokens.
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
    """Return `count` engines: the decode engine, then the engines with the shortest read queues."""
    if count == 1:
        return [decode]
    others = sorted((queue_s, engine) for engine, queue_s in enumerate(queues_s))
    return [decode, *(engine for _, engine in others if engine != decode)][:count]
