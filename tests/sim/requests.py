# SPDX-License-Identifier: Apache-2.0
"""Requests, conversations and the parts of vLLM's GPU block pool that the simulator needs."""

from __future__ import annotations

import enum
import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_nvmeof_offload.groups import Group

from .base import Knobs
from .shapes import key_of

_MASK = (1 << 64) - 1


def extend(prefix: int, token: int) -> int:
    """The hash of a token prefix extended by one token."""
    value = (prefix * 0x9E3779B97F4A7C15 + token + 1) & _MASK
    return value ^ (value >> 29)


def next_token(prefix: int) -> int:
    """What the model samples."""
    return prefix % 5


def prefix_hashes(tokens: list[int]) -> list[int]:
    hashes, prefix = [], 0
    for token in tokens:
        prefix = extend(prefix, token)
        hashes.append(prefix)
    return hashes


class Status(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False)
class Request:
    """One LLM request. Greedy: the next token is a function of the prefix."""

    rid: int
    conversation: int
    tokens: list[int]
    prompt: int
    length: int  # tokens at its end
    born_s: float
    status: Status = Status.WAITING
    computed: int = 0
    #: Its blocks by group; None: those behind a window or a state were given back.
    tables: list[list[int | None]] = field(default_factory=list)
    #: (group, index) → a block that was given back and has not been given to others.
    left: dict[tuple[int, int], int] = field(default_factory=dict)
    stored_chunks: list[int] = field(default_factory=list)  # by group
    jobs: set[int] = field(default_factory=set)
    loaded: bool = False  # every rank reported the load as finished
    failed: bool = False  # the load finished, but some blocks are missing
    aborted: bool = False
    zombie: bool = False  # aborted during a load that has not finished
    signaled: bool = False
    load_attempts: int = 0
    had: int = 0  # tokens that were computed at the last preemption
    refused: set[bytes] = field(default_factory=set)  # chunks that found no room so far
    offered: set[bytes] = field(default_factory=set)  # while there are some: all that were offered
    priority: int = 0  # the lowest number runs first under the policy `priority`

    def __post_init__(self) -> None:
        self.hashes = prefix_hashes(self.tokens)

    def __str__(self) -> str:
        return f"r{self.rid}"

    def sample(self) -> None:
        token = next_token(self.hashes[-1])
        self.tokens.append(token)
        self.hashes.append(extend(self.hashes[-1], token))

    def wanted(self, knobs: Knobs) -> int:
        """Tokens to schedule: those not computed yet, and drafts once it generates."""
        left = len(self.tokens) - self.computed
        room = self.length - len(self.tokens) - 1
        return left + (min(knobs.drafts, room) if left == 1 else 0)

    def verify(self, count: int) -> int:
        """Compute the tokens; return the new count of computed tokens without rejected drafts."""
        after = self.computed + count
        while len(self.tokens) < after and self.hashes[-1] % 3:  # the model samples this draft
            self.sample()
        return min(after, len(self.tokens))

    def preempted(self) -> None:
        self.had = self.computed
        self.status = Status.WAITING

    @property
    def blocks(self) -> list[int]:
        """Those that it holds."""
        return [block for table in self.tables for block in table if block is not None]

    @property
    def holds_blocks(self) -> bool:
        return any(block is not None for table in self.tables for block in table)

    def keys(self, group: Group, chunks: int | None = None) -> list[bytes]:
        """The offload keys of its first chunks; None: of all."""
        size = group.tokens_per_chunk
        end = len(self.tokens) if chunks is None else chunks * size
        return [key_of(self.hashes[last], group) for last in range(size - 1, end, size)]

    def forget(self, allocated: set[int]) -> None:
        """Others have these blocks now."""
        for at in [at for at, block in self.left.items() if block in allocated]:
            del self.left[at]

    def load_failed(self, tokens: int) -> None:
        """The tokens from this one on must be computed."""
        self.failed = True
        self.computed = tokens


def store_again(requests: Iterable[Request], knobs: Knobs) -> None:
    """The connector's part after any request's load has failed: see its `store_again`."""
    for request in requests:
        request.stored_chunks = [
            min(stored, request.computed // group.tokens_per_chunk)
            for stored, group in zip(request.stored_chunks, knobs.groups, strict=True)
        ]


def note_refused(
    request: Request, refused: list[bytes], at_key: dict[bytes, tuple[int, int]]
) -> None:
    """The connector's part after an offer: vLLM offers again what was refused, and the rest."""
    request.refused = request.refused.difference(at_key).union(refused)
    request.offered = request.offered.union(at_key) if request.refused else set()
    for group, chunk in map(at_key.__getitem__, refused):
        request.stored_chunks[group] = min(request.stored_chunks[group], chunk)


def take_victim(running: list[Request], *, by_priority: bool) -> Request:
    """Take the request that vLLM preempts out of `running`."""
    if not by_priority:
        return running.pop()
    victim = max(running, key=lambda r: (r.priority, r.born_s))
    running.remove(victim)
    return victim


def request_to_free(waiting: list[Request], keeper: Request) -> Request | None:
    """The waiting request that must free its blocks when nothing runs and several hold some."""
    for other in reversed(waiting):
        if other is not keeper and other.status is Status.WAITING and other.holds_blocks:
            return other
    return None


class Clients:
    """The server's clients; they remember conversations across restarts of the server."""

    def __init__(self, knobs: Knobs, rng: random.Random) -> None:
        self._knobs = knobs
        self._rng = rng
        self._systems = [[rng.randrange(9) for _ in range(40)] for _ in range(2)]
        self.conversations: list[list[int]] = []
        self._next = 1

    def ask(self, now_s: float) -> Request:
        rng, most = self._rng, self._knobs.request_tokens_max
        room = most - 4
        few = len(self.conversations) < 3
        if self.conversations and rng.random() < (0.5 if few else 0.9):
            number = rng.randrange(len(self.conversations))
        else:
            number = len(self.conversations)
            system = rng.choice(self._systems)
            self.conversations.append(system[: rng.randint(0, min(room // 2, len(system)))])
        tokens = self.conversations[number][:room]
        new = rng.choice((0, rng.randint(1, 3), rng.randint(1, max(1, room))))
        tokens = tokens + [rng.randrange(9) for _ in range(min(new, room - len(tokens)))]
        tokens = tokens or [1]
        length = min(most, len(tokens) + rng.choice((1, 2, 5, 10)))
        rid, self._next = self._next, self._next + 1
        request = Request(rid, number, tokens, len(tokens), length, now_s)
        request.priority = rng.randrange(3) if self._knobs.by_priority else 0
        return request

    def turn_elsewhere(self, rng: random.Random) -> list[int]:
        """Another server has answered a turn of a conversation; return its tokens."""
        room = self._knobs.request_tokens_max - 4
        number = rng.randrange(len(self.conversations) + 1)
        if number == len(self.conversations):
            system = rng.choice(self._systems)
            self.conversations.append(system[: rng.randint(0, min(room // 2, len(system)))])
        tokens = self.conversations[number][:room]
        more = rng.choice((0, rng.randint(1, max(1, room))))
        tokens = (tokens + [rng.randrange(9) for _ in range(min(more, room - len(tokens)))]) or [1]
        prefix = prefix_hashes(tokens)[-1]
        for _ in range(rng.choice((0, 1, 3))):
            tokens.append(next_token(prefix))
            prefix = extend(prefix, tokens[-1])
        self.conversations[number] = tokens
        return tokens

    def answered(self, request: Request) -> None:
        self.conversations[request.conversation] = list(request.tokens)


#: Of a block: group position, hash of the prefix that ends with it.
Content = tuple[int, int]


class BlockPool:
    """Blocks 1 to n. A free block keeps its content and its hash until it is allocated."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = OrderedDict.fromkeys(range(count))
        self._references = [0] * count
        self._hash_of: dict[int, Content] = {}
        self._cached: dict[Content, int] = {}

    @property
    def free_count(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def find(self, prefix: Content) -> int | None:
        return self._cached.get(prefix)

    def share(self, block: int) -> None:
        self._references[block] += 1
        self._free.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None

    def cache(self, block: int, prefix: Content) -> None:
        if prefix not in self._cached and block not in self._hash_of:
            self._cached[prefix] = block
            self._hash_of[block] = prefix

    def reset(self) -> None:
        self._cached.clear()
        self._hash_of.clear()

    def _forget(self, block: int) -> None:
        prefix = self._hash_of.pop(block, None)
        if prefix is not None:
            del self._cached[prefix]
