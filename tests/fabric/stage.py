# SPDX-License-Identifier: Apache-2.0
"""What a scenario is played on: the fabric, a mounted target or two, a load, and a time line."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .child import LoadProcess
from .loadspec import LoadSpec
from .nvmet import Fabric, Timeouts, run

LOOK_S = 0.1
#: Of the guest's clock, which jumps while files are read from a busy outer machine.
READY_S_MAX = 600.0
UNMOUNT_S_MAX = 60.0
#: On a processor that is emulated, how much later than its deadline an outcome may be seen.
LATE_S_MAX = 1.0
#: Verdicts are logged once a second; one that has lasted so long must be in the log.
LOGGED_S_MIN = 3.0


@dataclass
class Stage:
    """Time lines are in seconds since the scenario's begin, on the guest's clock."""

    fabric: Fabric
    engine: str
    began_s: float = field(default_factory=time.monotonic)
    timeline: list[tuple[float, str]] = field(default_factory=list)
    child: LoadProcess | None = None
    #: How often sysfs is looked at.
    look_s: float = LOOK_S
    mounted: list[Path] = field(default_factory=list)
    _seen: dict[str, str] = field(default_factory=dict)

    # -- telling ----------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def say(self, text: str, at_s: float | None = None) -> None:
        """at_s: on the clock that all processes share; None: now."""
        stamp = self.now_s if at_s is None else at_s - self.began_s
        self.timeline.append((round(stamp, 2), text))
        print(f"[{stamp:8.2f}] {text}", flush=True)

    def check(self, ok: bool, claim: str) -> None:
        """A claim that must hold; it is in the time line either way."""
        self.say(f"{'holds' if ok else 'DOES NOT HOLD'}: {claim}")
        assert ok, claim

    def equal(self, what: str, found: object, wanted: object) -> None:
        """A claim that two things are the same."""
        self.check(found == wanted, f"{what}: {found}" + (f", not {wanted}" * (found != wanted)))

    @property
    def pace_s(self) -> float:
        """Between two operations of the load, seconds."""
        assert self.child is not None
        return self.child.spec.interval_s

    # -- setting up -------------------------------------------------------------------

    def connect(self, timeouts: Timeouts, targets: tuple[int, ...] = (1,)) -> tuple[Path, ...]:
        """Connect both paths, make file systems on these namespaces, mount them."""
        self.fabric.connect(timeouts)
        places = []
        for number in targets:
            device = self.fabric.device(number)
            assert device is not None
            run("mkfs.xfs", "-q", "-f", "-K", str(device))
            places.append(self.mount(number))
        self._look()
        return tuple(places)

    def mount(self, number: int) -> Path:
        """Mount a namespace, whatever its name is now."""
        device, place = self.fabric.device(number), Path(f"/mnt/target{number}")
        assert device is not None
        place.mkdir(parents=True, exist_ok=True)
        run("mount", "-o", "noatime", str(device), str(place))
        self.mounted.append(place)
        return place

    def _unmounted(self, number: int = 1) -> bool:
        done = subprocess.run(
            ["umount", f"/mnt/target{number}"], capture_output=True, timeout=UNMOUNT_S_MAX
        )
        return not done.returncode

    def load(self, *targets: Path, **options: Any) -> LoadProcess:
        """Start the process under test, and wait until operations succeed."""
        spec = LoadSpec(targets, engine=self.engine, **options)
        self.child = child = LoadProcess(spec)
        kinds = {"store", "write", "load"} if spec.loads else {"store", "write"}
        self.until(
            lambda: {op.kind for op in child.ops if op.outcome == "ok"} == kinds,
            READY_S_MAX,
            "stores, writes and loads succeed",
        )
        self.say(f"load runs: engine {child.engine}")
        return child

    # -- time passes ------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Let the load run; note what changes in the fabric and what it says."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._listen(min(left_s, self.look_s))

    def until(self, done: Callable[[], bool], within_s: float, what: str) -> float:
        """Let time pass until `done`; the seconds that it took."""
        began_s = time.monotonic()
        while not done():
            passed_s = time.monotonic() - began_s
            if passed_s > within_s:
                self.check(False, f"within {within_s:g} s: {what}")
            self._listen(self.look_s)
        return time.monotonic() - began_s

    def _listen(self, seconds: float) -> None:
        self._look()
        if self.child is None:
            time.sleep(seconds)
            return
        for what, at_s, *rest in self.child.drain(seconds):
            if what == "verdict":
                self.say(f"verdict on target {rest[0]}: {': '.join(filter(None, rest[1:]))}", at_s)
            elif what == "lost":
                self.check(False, "the process under test lives")
            elif what == "log":
                self.say(f"log: {rest[0]}", at_s)
        self.check_bytes()

    def _look(self) -> None:
        states = self.fabric.states()
        for name in self._seen.keys() | states.keys():
            before, now = self._seen.get(name, "not there"), states.get(name, "not there")
            if before != now and self._seen:
                self.say(f"{name}: {before} → {now}")
        self._seen = states

    # -- judging ----------------------------------------------------------------------

    def check_bytes(self) -> None:
        assert self.child is not None
        wrong = [op for op in self.child.ops if op.outcome == "WRONG BYTES"]
        if wrong:
            self.check(False, f"right bytes or a miss, never wrong bytes ({wrong[:3]})")

    def only_ok(self, since_s: float, claim: str) -> None:
        """Nothing that has begun since then failed."""
        assert self.child is not None
        failed = {op.outcome for op in self.child.between(since_s)} - {"ok"}
        self.check(not failed, f"{claim}{f' ({failed})' if failed else ''}")

    def only_late(self, since_s: float) -> None:
        """What has begun since then and failed met its deadline, or found the slot unwritten."""
        assert self.child is not None
        late = {"ok", "miss: deadline", "miss: stale", "miss: checksum_mismatch"}
        other = {op.outcome for op in self.child.between(since_s)} - late
        self.check(not other, f"no I/O error, only deadlines{f' ({other})' if other else ''}")

    def worst_s(self, kind: str) -> float:
        """The longest that an operation of this kind has taken to its outcome, seconds."""
        assert self.child is not None
        return max((op.seconds for op in self.child.ops if op.kind == kind), default=0.0)

    def counts(self, since_s: float = 0.0) -> dict[str, int]:
        """Outcomes by kind, since a moment."""
        assert self.child is not None
        found = Counter(f"{op.kind} {op.outcome}" for op in self.child.between(since_s))
        return dict(sorted(found.items()))

    def verdict(self, target: int = 0) -> str:
        """The last one that the process gave."""
        assert self.child is not None
        return next((v for _, t, v in reversed(self.child.verdicts) if t == target), "ok")

    def until_verdict(self, *wanted: str, within_s: float, target: int = 0) -> float:
        """Wait for one of these verdicts; seconds that it took."""
        return self.until(
            lambda: self.verdict(target) in wanted,
            within_s,
            f"the verdict is {' or '.join(wanted)}",
        )

    def until_states(self, *wanted: str, within_s: float) -> None:
        """Wait until the controllers are in these states, in the order of their paths."""
        states = self.fabric.controllers
        self.until(
            lambda: tuple(states().values()) == wanted, within_s, f"controllers are {wanted}"
        )

    def remount(self, number: int = 1) -> None:
        """Unmount what is dead, and mount the namespace anew, by its identity."""
        self.until(self._unmounted, 10, "the dead file system can be unmounted")
        self.say("the dead file system is unmounted; mounting the namespace again")
        self.mounted.remove(Path(f"/mnt/target{number}"))
        self.mount(number)

    def recovers(self, within_s: float, targets: int = 1) -> None:
        """Stores, writes and loads on each target succeed that began after now."""
        child, now_s = self.child, time.monotonic()
        assert child is not None
        wanted = {(kind, target) for kind in ("write", "load") for target in range(targets)}

        def works() -> bool:
            fine = [op for op in child.between(now_s) if op.outcome == "ok"]
            return wanted <= {(op.kind, op.target) for op in fine}

        took_s = self.until(works, within_s, "writes and loads succeed again")
        self.say(f"writes and loads succeed again {took_s:.1f} s after that")

    def finish_load(self) -> None:
        """End the load, and check what holds in every scenario."""
        child = self.child
        assert child is not None
        child.stop()
        self.until(lambda: child.counters is not None, READY_S_MAX, "the load ends when asked")
        for kind, deadline_s in (
            ("load", child.spec.read_deadline_s),
            ("write", child.spec.write_deadline_s),
        ):
            # Its time runs from the hand-over, before which it may wait once as long.
            bound_s = 2 * deadline_s + LATE_S_MAX
            worst_s = self.worst_s(kind)
            self.check(
                worst_s <= bound_s,
                f"every {kind} has its outcome within {bound_s:g} s (worst {worst_s:.2f} s)",
            )
        worst_s = self.worst_s("store")
        self.check(worst_s <= LATE_S_MAX, f"no store waits for a disk (worst {worst_s:.2f} s)")
        self._check_log(child)

    def _check_log(self, child: LoadProcess) -> None:
        """The log names every verdict worse than degraded that has lasted."""
        lasting, since = set(), dict[int, tuple[float, str]]()
        for at_s, target, verdict in [
            *child.verdicts,
            *((time.monotonic(), t, "") for t in (0, 1)),
        ]:
            before_s, before = since.get(target, (at_s, "ok"))
            if at_s - before_s >= LOGGED_S_MIN:
                lasting.add(before)
            since[target] = at_s, verdict
        said = [text for _, text in self.timeline if text.startswith("log: ")]
        for verdict in sorted(lasting & {"suspect", "gone"}):
            self.check(any(f" is {verdict}: " in line for line in said), f"the log says {verdict}")

    # -- tidying up -------------------------------------------------------------------

    def strike(self) -> None:
        """Bring everything back to nothing connected, whatever has happened."""
        self.fabric.mend(1, 2)
        for number in (1, 2):
            with suppress(AssertionError, OSError):
                self.fabric.hang_disk(number, on=False)
        if self.child is not None and self.child.process.is_alive():
            self.child.kill()  # only now: a thread that waits for a hung disk does not die
        for place in self.mounted:
            subprocess.run(["umount", "-l", str(place)], capture_output=True, timeout=UNMOUNT_S_MAX)
        self.fabric.disconnect()
        end_s = time.monotonic() + 30.0
        while self.fabric.controllers() and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        for path in (1, 2):
            self.fabric.set_ana(path, "optimized")
            with suppress(AssertionError):
                self.fabric.add_port(path)
        for number in (1, 2):
            with suppress(OSError):
                self.fabric.enable_namespace(number)
