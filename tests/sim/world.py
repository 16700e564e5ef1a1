# SPDX-License-Identifier: Apache-2.0
"""One simulated world: servers start, work, crash and start again on the same pool."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from vllm_nvmeof_offload.groups import GROUP_ID_BYTES
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.eviction import choose_policy, credit_share
from vllm_nvmeof_offload.manager.handshake import CREDITED, WritePolicy, agree
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, member_of

from .base import Clock, Knobs, Tag, Trace, Violation
from .copying import with_checks
from .follower import SimFollower
from .owners import Owners, with_owners
from .peers import with_peers, with_serving
from .rank import Output, SimRank
from .requests import Clients, Request
from .rules import Rules, SavedRetention
from .scheduler import SimScheduler
from .shapes import RankSet, shaped, with_sets
from .store import NAMED_WEIGHTS, VERSIONS, RankStore

REQUEST_S_MAX = 300.0
#: Of half a second: superblocks of several resets, each of which waits for the one before it, may
#: be left at the end.
_LAST_TURNS_MAX = 20


class World:
    """Plays one seed: `run` reaches the end or raises `Violation`."""

    def __init__(
        self,
        seed: int,
        profile: str | None = None,
        ranks: int | None = None,
        policy: str = CREDITED,
        shape: str | None = None,
        sets: int | None = None,
        owners: int | None = None,
        peers: int = 0,
        serve: bool = False,
        checks: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self._policy_name = policy
        self._policy = choose_policy(policy)
        self.knobs = Knobs.draw(self.rng, profile)
        if ranks is not None:
            self.knobs = replace(self.knobs, ranks=ranks, loses=0.7)
        self.knobs = shaped(self.knobs, seed, shape)
        self.knobs = with_sets(self.knobs, seed, 0 if ranks is not None else sets)
        self.knobs = with_owners(self.knobs, seed, 0 if ranks is not None else owners)
        self.knobs = with_peers(self.knobs, seed, peers)
        self.knobs = with_serving(self.knobs, seed, serve)
        self.knobs = with_checks(self.knobs, seed, checks)
        if self.knobs.profile == "leases":
            self.knobs = replace(
                self.knobs,
                permit_gaps=self.rng.choice((0.002, 0.02)),
                permit_lost=self.rng.choice((0.0, 0.0, 0.05)),
            )
        self._flushes = random.Random(f"flushes of {seed}")
        self.clock = Clock()
        self.trace = Trace(self.clock)
        self.clients = Clients(self.knobs, self.rng)
        self.counts: Counter[str] = Counter()
        #: Generation → the right payload, over all processes' lives.
        self.expected: dict[int, list[Tag]] = {}
        self._saved: SavedRetention = {}
        self._stores = [RankStore(self.knobs.targets, seed + n) for n in range(self.knobs.ranks)]
        of_ranks = self.knobs.pages[: self.knobs.ranks]
        self.counts["unlike_stages"] += len(set(of_ranks)) > 1
        self._owners: Owners | None = None
        if self.knobs.owners:
            self._owners = Owners(self.knobs, seed, self.clients, self.expected)
        self._follower: SimFollower | None = None
        self._boots = 0
        self._calm = False
        self._start()

    # -- processes --------------------------------------------------------------------

    def _start(self) -> None:
        self._boots += 1
        knobs = self.knobs
        config = CoreConfig(
            world_size=knobs.ranks,
            key_bytes=8 + GROUP_ID_BYTES,
            groups=knobs.groups,
            weights_never_change=knobs.weights_never_change,
            land_cache_share=knobs.land_share,
            reload_cache_share=knobs.reload_share,
            prefetch_cache_share=knobs.prefetch_share,
            admission=knobs.admission,
            store_threshold=knobs.store_threshold,
            eviction_policy=self._policy_name,
            credit_share=credit_share(self._policy_name, WritePolicy(knobs.write_policy)),
            write_policy=WritePolicy(knobs.write_policy),
            report_deadline_s=knobs.report_deadline_s,
            kv_events=True,
            equal_min=knobs.equal_min,
            sample_every=knobs.sample_every,
            retain_share=0.5 if knobs.retains else 0.0,
        )
        self._sets = [RankSet(knobs) for _ in range(knobs.ranks // knobs.set_size)]
        self.ranks = [
            SimRank(
                rank,
                knobs,
                self.clock,
                self.rng,
                self.trace,
                self._stores[rank],
                self.expected,
                self._meanwhile,
                self._sets[rank // knobs.set_size] if knobs.set_size > 1 else None,
                self._owners,
            )
            for rank in range(knobs.ranks)
        ]
        agreement = agree([rank.hello() for rank in self.ranks])
        self._follow()
        follower = self._follower
        self.core = ManagerCore(
            config,
            agreement,
            self.clock,
            self._policy,
            wall_clock=lambda: 1e9 + self.clock(),
            first_generation=self._boots << 32,
            foreign=follower and follower.foreign,
        )
        self.rules = Rules(self.core, knobs, self.clock, self.expected, follower, self._saved)
        self.rules.ranks = self.ranks
        self.scheduler = SimScheduler(
            self.core, knobs, self.trace, self.rules, self.expected, self.clock
        )
        self._outputs: deque[Sequence[Output]] = deque()
        self.rules.adopted()
        self.counts["restored_sessions"] += self.rules.restored(self._stores[0].sessions)
        places = (entry.place for entry in self.core.entries())
        self.counts["adopted_single_copies"] += sum(member_of(p) != EVERY_MEMBER for p in places)
        self.rules.check()

    def _follow(self) -> None:
        """Start the follower of this process."""
        if self._owners is None:
            return
        self._follower = SimFollower(self._owners, self.knobs, self._owners.rng)
        self.clock.on_advance = self._follower.foreign.set_time
        self._follower.foreign.set_time(self.clock())

    def _crash(self) -> None:
        self.counts["crashes"] += 1
        power_cut = self.rng.random() < 0.5
        self.trace("crash", "power cut" if power_cut else "kill")
        for rank in self.ranks:
            rank.io.crash(power_cut=power_cut)
        if self.knobs.loses and self.rng.random() < self.knobs.loses:
            rank = self.rng.choice(self.ranks)
            what = self.rng.choice(("superblock", "entries", "slab"))
            self.trace("rank", rank.rank, "has lost its", what)
            self.counts[f"lost_{what}"] += 1
            rank.io.store.lose(what, self.rng)
        self._count()
        self._start()

    # -- events -----------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(self.knobs.ticks):
            self._event()
            self.rules.check_memory()
        self._end()

    def _event(self) -> None:
        self.counts["steps"] += 1
        self._elsewhere()
        self._flush_a_load()
        rng, knobs = self.rng, self.knobs
        draw = rng.random()
        if draw < 0.4:
            self._step()
        elif draw < 0.7:
            rng.choice(self.ranks).pump()
        elif draw < 0.85:
            self.clock.advance(rng.choice((0.001, 0.01, 0.1)) * rng.random())
        elif draw < 0.95:
            if len(self.scheduler.waiting) + len(self.scheduler.running) < 6:
                self._ask()
        elif draw < 0.97:
            self.clock.advance(rng.choice((0.3, 3.0)))
        rare = rng.random()
        if rare < knobs.abort:
            self._abort()
        elif rare < knobs.abort + knobs.reset:
            self.counts["resets"] += 1
            self._reset()
            if self._owners is not None and self._owners.rng.random() < 0.3:
                self._reset_again()
            self.rules.check()
        elif rare < knobs.abort + knobs.reset + knobs.crash:
            self._crash()

    def _reset(self) -> None:
        """The caches are reset, vLLM notices new weights, or the operator names the weights."""
        rng, scheduler = self.rng, self.scheduler
        if not self.knobs.names or rng.random() >= self.knobs.names:
            scheduler.reset(new_weights=not scheduler.is_named and rng.random() < 0.5)
        elif rng.random() < 0.4:
            scheduler.change_weights(rng.choice((None, *range(VERSIONS))))
            self.counts["noticed_weights"] += 1
        else:
            version = rng.randrange(VERSIONS)
            if scheduler.epoch >= NAMED_WEIGHTS and rng.random() < 0.5:
                version = scheduler.epoch - NAMED_WEIGHTS  # what they are already
            scheduler.name_weights(version)
            self.counts["named_weights"] += 1

    def _reset_again(self) -> None:
        """Before a step has taken the first reset, when others may have offered more."""
        self.counts["double_resets"] += 1
        for _ in range(10):
            self._elsewhere()
        self.scheduler.reset(new_weights=False)

    def _elsewhere(self) -> None:
        """What other engines and the follower do in one tick."""
        if self._owners is not None and self._follower is not None:
            self._owners.step()
            self._follower.step()

    def _ask(self) -> None:
        request = self.clients.ask(self.clock())
        self.trace("ask", request, "prompt", request.prompt, "until", request.length)
        self.scheduler.add(request)

    def _flush_a_load(self) -> None:
        rng, share = self._flushes, self.knobs.flushed_loads
        if rng.random() < share:
            self.scheduler.flush_a_load(rng)

    def _abort(self) -> None:
        live = self.scheduler.waiting + self.scheduler.running
        if live:
            self.scheduler.abort(self.rng.choice(live))

    def _step(self, *, force: bool = False) -> None:
        if not force and not self.scheduler.busy():
            return
        metadata = self.scheduler.schedule()
        self.rules.check()
        order = list(self.ranks)
        self.rng.shuffle(order)
        outputs = {rank.rank: rank.execute(metadata) for rank in order}
        self._outputs.append([outputs[rank] for rank in range(len(self.ranks))])
        self.counts[f"steps_in_flight:{len(self._outputs)}"] += 1
        while len(self._outputs) > self.knobs.lag:
            self.scheduler.update(self._outputs.popleft())
            self.rules.check()
        self._collect()

    def _collect(self) -> None:
        for request in self.scheduler.done:
            if not request.aborted:
                self.counts["answered"] += 1
                self.clients.answered(request)
        self.scheduler.done.clear()
        for request in self.scheduler.waiting + self.scheduler.running:
            self._check_age(request)

    def _check_age(self, request: Request) -> None:
        if self.clock() - request.born_s > REQUEST_S_MAX:
            raise Violation("end", f"{request} does not finish: {request.status}")

    def _meanwhile(self) -> None:
        """Let another rank continue while one waits."""
        self.rng.choice(self.ranks).pump()

    # -- the end ----------------------------------------------------------------------

    def _end(self) -> None:
        """Stop new requests and faults; check that everything ends and nothing is left."""
        self.counts.update(self._owners.counts if self._owners else ())
        for rank in self.ranks:
            rank.io.calm = True
            if rank.peers is not None:
                rank.peers.calm = True
        self._settle()
        self.rules.quiet()
        self.clock.advance(10.0)  # a hang that is ever released ends now
        for turn in range(_LAST_TURNS_MAX):
            for rank in self.ranks:
                rank.pump()
            self.clock.advance(0.5)
            self._step(force=True)
            if turn >= 3 and all(rank.pipeline.idle() for rank in self.ranks):
                break
        self._settle()
        for _ in range(2 + self.knobs.lag):
            self._step(force=True)
        self._count()
        stuck = [rank.io.stuck + (rank.peers.stuck if rank.peers else 0) for rank in self.ranks]
        if not any(stuck):
            self.rules.idle()

    def _settle(self) -> None:
        limit_s = self.clock() + REQUEST_S_MAX
        while self.scheduler.busy() or self._outputs_matter():
            if self.clock() > limit_s:
                raise Violation("end", f"the engine never stops stepping: {self.core.gauges()}")
            self.counts["steps"] += 1
            self._step(force=True)
            for rank in self.ranks:
                rank.pump()
            self.clock.advance(0.02 + 0.05 * self.rng.random())

    def _outputs_matter(self) -> bool:
        return any(o.finished or o.reports for outputs in self._outputs for o in outputs)

    def _count(self) -> None:
        for series, count in self.core.counters.items():
            name, *labels = (series,) if isinstance(series, str) else series
            if name == "failed_chunks":
                operation, outcome, _ = labels
                self.counts[f"{operation}_failed"] += int(count)
                labels = [outcome]
            self.counts[":".join((name, *labels))] += int(count)
        self.counts.update(self.scheduler.counts)
        for rank in self.ranks:
            self.counts.update(rank.io.counts)
            self.counts.update(rank.copy.counts)
            self.counts.update(rank.peers.counts if rank.peers else ())
            self.counts.update(rank.landing.counts if rank.peers else ())
            self.counts.update(rank.serving.counts if rank.serving else ())
            self.counts.update(rank.opener.counts if rank.opener else ())
        self.counts.update(self._follower.counts if self._follower else ())
        self.counts["unequal_groups"] += len(self.core.unequal_groups)


def play(
    seed: int,
    profile: str | None = None,
    ranks: int | None = None,
    policy: str = CREDITED,
    shape: str | None = None,
    sets: int | None = None,
    owners: int | None = None,
    peers: int = 0,
    serve: bool = False,
    checks: bool = False,
) -> Counter[str]:
    """Run one seed. The message of a violation or a failed assertion gives the replay command.

    ranks: their number; one rank loses part of its pool at most crashes. None: the seed chooses.
    policy: a value of `eviction_policy`. shape: of `shapes.SHAPES`, or "full"; None: the seed
    chooses. sets: of ranks with equal KV, with two ranks each; 0: none; None: the seed chooses, if
    it chooses the number of ranks. owners: other engines on our targets; None: the same. peers:
    that read for each rank. serve: others ask each rank for chunks. checks: copies of loads check
    payloads.
    """
    world: World | None = None
    try:
        world = World(seed, profile, ranks, policy, shape, sets, owners, peers, serve, checks)
        world.run()
    except AssertionError as error:
        trace = world.trace if world else "  (at the start)"
        replay = f"--seed {seed}" + (f" --profile {profile}" if profile else "")
        replay += f" --ranks {ranks}" if ranks else ""
        replay += f" --policy {policy}" if policy != CREDITED else ""
        replay += f" --shape {shape!r}" if shape else ""
        replay += f" --sets {sets}" if sets is not None else ""
        replay += f" --owners {owners}" if owners is not None else ""
        replay += f" --peers {peers}" if peers else ""
        replay += " --serve" if serve else ""
        replay += " --checks" if checks else ""
        raise AssertionError(
            f"{error or type(error).__name__}\nseed {seed}: {world.knobs if world else ''}\n"
            f"last events:\n{trace}\nreplay: python -m tests.sim {replay}"
        ) from error
    return world.counts
