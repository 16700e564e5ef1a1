# SPDX-License-Identifier: Apache-2.0
"""The cluster on a virtual clock: turns are routed, read, computed, transferred and answered.

Links, prefill nodes and transfers to decode nodes handle one item at a time, unless loads share
links; decoding is a delay. The product's rules decide which link reads a piece (`choose_lane`) and
whether to read at all (`Admission`). A read is queued on its link when the link is chosen, not when
it has room. A wrong choice thus costs a whole load here, but only a few chunks in the product.

An event is (time, a number for the agent and the kind), so that simultaneous events have a fixed
order, and equal seeds give equal results.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

from examples.dual_path import choose_decode, choose_helpers, choose_prefill
from research.cluster.agents import Agent
from research.cluster.lanes import Lane, SharedLane
from research.cluster.machines import Machines
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.manager.load_or_recompute import Admission
from vllm_nvmeof_offload.native import choose_lane

#: Only the own link; the own and the helper's link alternately; the product's rule for whole loads;
#: the rule for pieces of loads; no reads, as a bound.
PATHS = ("own", "alternate", "request", "chunk", "none")
ROUTERS = ("least", "round_robin", "sticky")
_TURN, _LOADED, _PREFILLED, _DECODED, _LOST, _READ = range(6)
_KINDS = 8
#: The fewest chunks of a load that is split, and the most pieces into which it is split.
_SPLIT_CHUNKS_MIN, _PIECES_MAX = 4, 16
#: The time from the loss of a link to the deadline of its reads, which are then moved.
_NOTICED_S = 0.5


@dataclass(frozen=True)
class Rules:
    """The rules of a run. `path` is one of `PATHS`, and `router` one of `ROUTERS`; with sticky, an
    agent's prompts stay on its engine. `helpers` decode engines may read for a prompt. With
    `admission`, tokens that are computed faster than read are recomputed, as in the product;
    `queue` also counts prompts that wait for the engine, unlike the product. `lost` is (node, from,
    until) of a lost link."""

    path: str = "chunk"
    router: str = "least"
    helpers: int = 1
    admission: bool = False
    queue: bool = False
    lost: tuple[int, float, float] | None = None

    def __post_init__(self) -> None:
        assert self.path in PATHS, self.path
        assert self.router in ROUTERS, self.router


class Finds(Protocol):
    """A model of the tokens that prompts find in the tiers of engines."""

    def find(self, agent: int, turn: int, prefill: int) -> tuple[int, int]:
        """Return the number of tokens found, and how many of them must be read."""

    def prefilled(self, agent: int, turn: int, prefill: int) -> None:
        """Store the prompt, which the engine has computed."""

    def decoded(self, agent: int, turn: int, decode: int) -> None:
        """Store the answer, which the decode engine has computed."""


class Given:
    """The trace's hits, all of which must be read; with `local`, only the engine that computed them
    has them."""

    def __init__(self, agents: Sequence[Agent], local: bool) -> None:
        self._hits = [one.hit for one in agents]
        self._stored: dict[tuple[int, int], int] | None = {} if local else None

    def find(self, agent: int, turn: int, prefill: int) -> tuple[int, int]:
        hit = self._hits[agent][turn]
        if self._stored is not None:
            hit = min(hit, self._stored.get((agent, prefill), 0))
        return hit, hit

    def prefilled(self, agent: int, turn: int, prefill: int) -> None:
        if self._stored is not None and turn + 1 < len(self._hits[agent]):
            self._stored[agent, prefill] = self._hits[agent][turn + 1]

    def decoded(self, agent: int, turn: int, decode: int) -> None:
        pass


@dataclass
class Outcome:
    """A run's results. `begun_s` and `ttft_s` are each turn's start and TTFT, in order of first
    tokens. `ended_s` is, by agent, the end of the last answer, or 0 if the agent has not
    finished."""

    begun_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    read_bytes: float = 0.0
    found_tokens: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    recomputed_tokens: int = 0


class Cluster:
    """One run. `starts_s` are the agents' start times. Events after `horizon_s` are ignored."""

    def __init__(
        self,
        machines: Machines,
        rules: Rules,
        agents: Sequence[Agent],
        starts_s: Sequence[float],
        finds: Finds,
        horizon_s: float = inf,
    ) -> None:
        self.out = Outcome(ended_s=[0.0] * len(agents))
        self._machines, self._rules, self._agents = machines, rules, agents
        self._finds, self._horizon_s = finds, horizon_s
        nodes = machines.prefill + machines.decode
        assert not (machines.places and rules.lost), "shared links are not lost"
        self.lanes = [_lane(machines) for _ in range(nodes)]
        shared = machines.shared_bytes_per_s
        self._enclosure = Lane(shared, machines.report_s) if shared else None
        self._prefill_free_s = [0.0] * machines.prefill
        self._handed_free_s = [0.0] * machines.prefill
        decoders = machines.decode or machines.prefill
        self._prefill_tokens = [0.0] * machines.prefill
        self._decode_tokens, self._decode_requests = [0.0] * decoders, [0] * decoders
        self._waiting: deque[int] = deque()
        count = len(agents)
        self._turn, self._begun_s = [0] * count, [0.0] * count
        self._prefill, self._decode, self._home = [0] * count, [0] * count, [-1] * count
        self._found, self._new = [0] * count, [0] * count
        #: By agent, the end of its load and, if a link is lost, the part that each lane reads.
        self._due_s = [-1.0] * count
        self._loads: dict[int, list[tuple[int, float, float]]] = {}
        self._routed = itertools.count()
        self._alternates = [itertools.count() for _ in range(machines.prefill)]
        self._admissions = [_admission(machines, rules) for _ in range(machines.prefill)]
        self._events = [(at_s, _KINDS * one + _TURN) for one, at_s in enumerate(starts_s)]
        if rules.lost:
            self.lanes[rules.lost[0]].lost = rules.lost[1:]
            self._events.append((rules.lost[1] + _NOTICED_S, _LOST))
        heapify(self._events)

    def run(self) -> Outcome:
        handlers = (
            *(self._begin, self._loaded, self._prefilled, self._decoded),
            *(self._link_lost, self._chunk_read),
        )
        events, horizon_s, now_s = self._events, self._horizon_s, 0.0
        while events:
            now_s, code = heappop(events)
            if now_s > horizon_s:
                break
            handlers[code % _KINDS](now_s, code // _KINDS)
        self.out.end_s = min(now_s, horizon_s)
        return self.out

    # -- a turn -----------------------------------------------------------------------

    def _begin(self, now_s: float, agent: int) -> None:
        self._begun_s[agent] = now_s
        if self._waiting or not self._place(now_s, agent):
            self._waiting.append(agent)

    def _place(self, now_s: float, agent: int) -> bool:
        """Route a turn and start its read; return False if no engine has room."""
        one, turn, machines = self._agents[agent], self._turn[agent], self._machines
        need = one.hit[turn] + one.new[turn] + one.answer[turn]
        prefill = self._route(now_s, agent)
        if prefill is None:
            return False
        decode: int | None = prefill
        if machines.decode:
            decode = choose_decode(
                self._decode_tokens, self._decode_requests, need, machines.decode_tokens_max
            )
        elif machines.decode_tokens_max:
            held = self._decode_tokens[prefill]
            decode = prefill if held + need <= machines.decode_tokens_max or not held else None
        if decode is None and any(self._decode_requests):
            return False
        self._prefill[agent], self._decode[agent] = prefill, decode or 0
        self._home[agent] = prefill
        self._decode_tokens[decode or 0] += need
        self._decode_requests[decode or 0] += 1
        self._start(now_s, agent, prefill)
        return True

    def _route(self, now_s: float, agent: int) -> int | None:
        machines, rules, tokens = self._machines, self._rules, self._prefill_tokens
        if rules.router == "round_robin":
            return next(self._routed) % machines.prefill
        if rules.router == "sticky" and self._home[agent] >= 0:
            return self._home[agent]
        queues_s = [self.lanes[one].queue_s(now_s) for one in range(machines.prefill)]
        if rules.path == "none":
            queues_s = [0.0] * machines.prefill
        chosen = choose_prefill(tokens, queues_s, machines.batch_tokens_max)
        if chosen is not None and (room := machines.prefill_tokens_max):
            one, turn = self._agents[agent], self._turn[agent]
            held = tokens[chosen]
            if held and held + one.hit[turn] + one.new[turn] > room:
                return None
        return chosen

    def _start(self, now_s: float, agent: int, prefill: int) -> None:
        one, turn, out = self._agents[agent], self._turn[agent], self.out
        prompt = one.hit[turn] + one.new[turn]
        self._prefill_tokens[prefill] += prompt
        found, to_read = self._finds.find(agent, turn, prefill)
        out.prompt_tokens += prompt
        out.answer_tokens += one.answer[turn]
        count = to_read * self._machines.bytes_per_token
        if count and not self._worth(now_s, agent, count, to_read):
            found, count = found - to_read, 0.0
            out.recomputed_tokens += to_read
        self._found[agent], self._new[agent] = found, prompt - found
        out.found_tokens += found
        done_s = now_s
        if count and self._rules.path != "none":
            out.read_bytes += count
            lane = self.lanes[prefill]
            if isinstance(lane, SharedLane):
                self._expect(lane.begin(now_s, agent, count))
                return
            done_s = self._read(now_s, agent, count)
        self._due_s[agent] = done_s
        heappush(self._events, (done_s, _KINDS * agent + _LOADED))

    def _loaded(self, now_s: float, agent: int) -> None:
        if now_s != self._due_s[agent]:
            return  # the read was moved after its link was lost
        self._due_s[agent] = -1.0
        self._loads.pop(agent, None)
        prefill = self._prefill[agent]
        start_s = max(now_s, self._prefill_free_s[prefill])
        end_s = start_s + self._machines.compute_s(self._found[agent], self._new[agent])
        self._prefill_free_s[prefill] = end_s
        heappush(self._events, (end_s, _KINDS * agent + _PREFILLED))

    def _prefilled(self, now_s: float, agent: int) -> None:
        """Record the first token; transfer the prompt's KV to the decode node."""
        machines, out = self._machines, self.out
        prefill, decode, turn = self._prefill[agent], self._decode[agent], self._turn[agent]
        prompt = self._found[agent] + self._new[agent]
        self._prefill_tokens[prefill] -= prompt
        out.begun_s.append(self._begun_s[agent])
        out.ttft_s.append(now_s - self._begun_s[agent])
        self._finds.prefilled(agent, turn, prefill)
        if machines.decode:
            start_s = max(now_s, self._handed_free_s[prefill])
            now_s = start_s + prompt * machines.bytes_per_token / machines.compute_bytes_per_s
            self._handed_free_s[prefill] = now_s
        tpot_s = machines.step_s(self._decode_tokens[decode])
        out.tpot_s.append(tpot_s)
        end_s = now_s + self._agents[agent].answer[turn] * tpot_s
        heappush(self._events, (end_s, _KINDS * agent + _DECODED))

    def _decoded(self, now_s: float, agent: int) -> None:
        one, turn, decode = self._agents[agent], self._turn[agent], self._decode[agent]
        self._decode_tokens[decode] -= one.hit[turn] + one.new[turn] + one.answer[turn]
        self._decode_requests[decode] -= 1
        self._finds.decoded(agent, turn, decode)
        while self._waiting and self._place(now_s, self._waiting[0]):
            self._waiting.popleft()
        turn += 1
        if turn == len(one.new):
            self.out.ended_s[agent] = now_s
            return
        self._turn[agent] = turn
        if think_s := one.think_s[turn]:
            heappush(self._events, (now_s + think_s, _KINDS * agent + _TURN))
        else:
            self._begin(now_s, agent)

    # -- reads ------------------------------------------------------------------------

    def _read(self, now_s: float, agent: int, count: float) -> float:
        """Queue a load on its lanes; return the time of its completion."""
        prefill, path = self._prefill[agent], self._rules.path
        if path == "own" or not self._machines.decode:
            parts = {prefill: count}
        elif path == "alternate":
            helper = self._machines.prefill + self._decode[agent]
            parts = {(prefill, helper)[next(self._alternates[prefill]) % 2]: count}
        else:
            parts = self._chosen(now_s, agent, count)
        done_s, loads = now_s, []
        for lane, part in parts.items():
            end_s = self.lanes[lane].read(now_s, part, -1 if lane == prefill else prefill)
            done_s = max(done_s, end_s)
            loads.append((lane, part, end_s))
        if self._enclosure is not None:
            done_s = max(done_s, self._enclosure.read(now_s, count))
        if self._rules.lost:
            self._loads[agent] = loads
        return done_s

    def _expect(self, reads: Sequence[tuple[float, int]]) -> None:
        for come_s, agent in reads:
            heappush(self._events, (come_s, _KINDS * agent + _READ))

    def _chunk_read(self, now_s: float, agent: int) -> None:
        lane = self.lanes[self._prefill[agent]]
        assert isinstance(lane, SharedLane)
        reads, ended = lane.came(now_s, agent)
        self._expect(reads)
        if ended:
            self._due_s[agent] = now_s
            self._loaded(now_s, agent)

    def _chosen(self, now_s: float, agent: int, count: float) -> dict[int, float]:
        """Return the bytes that the product's rule gives to each lane."""
        lanes, machines, prefill = self.lanes, self._machines, self._prefill[agent]
        chunks = int(count / (machines.bytes_per_token * machines.chunk_tokens))
        pieces = min(chunks, _PIECES_MAX) if self._rules.path == "chunk" else 1
        if chunks < _SPLIT_CHUNKS_MIN:
            pieces = 1
        part = count / pieces
        helpers = self._helpers(now_s, agent)
        if not lanes[prefill].usable(now_s, _NOTICED_S):
            helpers = helpers or [prefill]
            own_s, own_room = inf, False
        else:
            own_s, own_room = lanes[prefill].queue_s(now_s) + part / lanes[prefill].rate, True
        numbers = [prefill, *helpers]
        rates = [lanes[one].rate for one in numbers]
        # A piece read by a helper is no faster than the link between the nodes.
        rates[1:] = [min(rate, machines.compute_bytes_per_s) for rate in rates[1:]]
        steps = [part / rate for rate in rates]
        ends = [
            (lanes[one].seen_s(now_s, prefill) + step, True)
            for one, step in zip(helpers, steps[1:], strict=True)
        ]
        given = [0] * len(numbers)
        for _ in range(pieces):
            # If no lane has room, the piece waits in the prefill node's own queue.
            lane = max(0, choose_lane(own_s, own_room, ends))
            given[lane] += 1
            if lane:
                ends[lane - 1] = (ends[lane - 1][0] + steps[lane], True)
            else:
                own_s += steps[0]
        return {one: n * part for one, n in zip(numbers, given, strict=True) if n}

    def _helpers(self, now_s: float, agent: int) -> list[int]:
        """Return the lanes of the decode engines that the router names and whose links work."""
        machines, prefill, rules = self._machines, self._prefill[agent], self._rules
        queues_s = []
        if rules.helpers > 1:
            decoders = self.lanes[machines.prefill :]
            queues_s = [lane.seen_s(now_s, prefill) for lane in decoders]
        chosen = choose_helpers(self._decode[agent], queues_s, rules.helpers)
        numbers = [machines.prefill + one for one in chosen]
        if rules.lost is None:
            return numbers
        return [one for one in numbers if self.lanes[one].usable(now_s, _NOTICED_S)]

    def _readable(self, now_s: float, agent: int) -> bool:
        own = self.lanes[self._prefill[agent]].usable(now_s, _NOTICED_S)
        helped = self._rules.path in ("request", "chunk") and bool(self._machines.decode)
        return own or (helped and bool(self._helpers(now_s, agent)))

    def _worth(self, now_s: float, agent: int, count: float, tokens: int) -> bool:
        """Return whether the product would read rather than compute: not if no link can read."""
        if self._rules.lost and not self._readable(now_s, agent):
            return False
        prefill = self._prefill[agent]
        admission = self._admissions[prefill]
        if admission is None:
            return True
        if self._rules.queue:
            wait_s = max(0.0, self._prefill_free_s[prefill] - now_s)
            tokens += int(wait_s * admission.prefill_rate)
        lanes = [self.lanes[prefill]]
        if self._rules.path in ("request", "chunk"):
            lanes += self.lanes[self._machines.prefill :][: self._rules.helpers]
        # Several lanes act like a single one.
        rate = sum(lane.rate for lane in lanes)
        if shared := self._machines.shared_bytes_per_s:
            rate = min(rate, shared / self._machines.prefill)  # the measured rate of a busy link
        queued = sum(lane.queue_s(now_s) * lane.rate for lane in lanes)
        admission.read_rates = [rate]
        return admission.decide([int(count)], [int(queued)], tokens).load

    def _link_lost(self, now_s: float, _: int) -> None:
        """Handle the deadline of a lost link's reads: move them to other links, or compute."""
        assert self._rules.lost is not None
        lost, since_s, until_s = self._rules.lost
        self.lanes[lost].free_s = until_s
        for agent, loads in list(self._loads.items()):
            left = sum(part for lane, part, end_s in loads if lane == lost and end_s > since_s)
            if not left:
                continue
            others = [end_s for lane, _, end_s in loads if lane != lost]
            if self._rules.path in ("request", "chunk") and self._prefill[agent] != lost:
                end_s = self.lanes[self._prefill[agent]].read(now_s, left)
            elif self._rules.path in ("request", "chunk") and (
                helpers := self._helpers(now_s, agent)
            ):
                end_s = self.lanes[helpers[0]].read(now_s, left, self._prefill[agent])
            else:
                end_s, count = now_s, int(left / self._machines.bytes_per_token)
                self.out.recomputed_tokens += count
                self._found[agent] -= count
                self._new[agent] += count
            self._due_s[agent] = max(end_s, *others, now_s)
            heappush(self._events, (self._due_s[agent], _KINDS * agent + _LOADED))


def _lane(machines: Machines) -> Lane:
    rate, report_s = machines.storage_bytes_per_s, machines.report_s
    if not machines.places:
        return Lane(rate, report_s)
    chunk_bytes = machines.chunk_tokens * machines.bytes_per_token
    return SharedLane(rate, report_s, machines.places, chunk_bytes)


def _admission(machines: Machines, rules: Rules) -> Admission | None:
    if not rules.admission:
        return None
    made = Admission(CoreConfig(), [machines.storage_bytes_per_s])
    made.prefill_rate = 1000 / machines.compute_s(0, 1000)
    return made
