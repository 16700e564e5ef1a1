# SPDX-License-Identifier: Apache-2.0
"""A scenario's stage: the fabric, one or two mounted targets, a load, and a time line."""

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
from .network_fs import NetworkFs
from .nvmet import Fabric, Timeouts, run
from .report import LoadSpec

LOOK_S = 0.1
#: Between two looks at sysfs, which take a third of an emulated processor if made each `LOOK_S`.
SYSFS_S_MIN = 0.5
#: Seconds of the guest's clock, which jumps while files are read from a busy outer machine.
READY_S_MAX = 600.0
UNMOUNT_S_MAX = 60.0
#: How long after its deadline an outcome may be seen on an emulated processor.
LATE_S_MAX = 1.0
#: Verdicts are logged once per second; a verdict that lasted this long must be in the log.
LOGGED_S_MIN = 3.0


@dataclass
class Stage:
    """One scenario's stage. Its time line is in seconds since the start, on the guest's clock."""

    fabric: Fabric
    engine: str
    began_s: float = field(default_factory=time.monotonic)
    timeline: list[tuple[float, str]] = field(default_factory=list)
    child: LoadProcess | None = None
    #: Seconds between two looks for messages.
    look_s: float = LOOK_S
    mounted: list[Path] = field(default_factory=list)
    network_fs: NetworkFs | None = None
    _seen: dict[str, str] = field(default_factory=dict)
    _looked_s: float = -SYSFS_S_MIN

    # -- recording --------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def record(self, text: str, at_s: float | None = None) -> None:
        """Add a line to the time line. at_s: on the clock of all processes; None: now."""
        stamp = self.now_s if at_s is None else at_s - self.began_s
        self.timeline.append((round(stamp, 2), text))
        print(f"[{stamp:8.2f}] {text}", flush=True)

    def check(self, ok: bool, claim: str) -> None:
        """Check a claim and add the result to the time line."""
        self.record(f"{'holds' if ok else 'DOES NOT HOLD'}: {claim}")
        assert ok, claim

    def equal(self, what: str, found: object, wanted: object) -> None:
        """Check that two values are equal."""
        self.check(found == wanted, f"{what}: {found}" + (f", not {wanted}" * (found != wanted)))

    @property
    def pace_s(self) -> float:
        """Seconds between two operations of the load."""
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
        """Mount a namespace under its current device name."""
        device, place = self.fabric.device(number), Path(f"/mnt/target{number}")
        assert device is not None
        place.mkdir(parents=True, exist_ok=True)
        run("mount", "-o", "noatime", str(device), str(place))
        self.mounted.append(place)
        return place

    def share(self) -> NetworkFs:
        """Export a file system on namespace 1 to two NFS clients."""
        (directory,) = self.connect(Timeouts())
        self.network_fs = NetworkFs(directory)
        self.network_fs.let_in()
        return self.network_fs

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
        self.record(f"load runs: engine {child.engine}")
        return child

    # -- time passes ------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Let the load run; record its messages and changes of the fabric."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._receive(min(left_s, self.look_s))

    def until(self, done: Callable[[], bool], within_s: float, what: str) -> float:
        """Let time pass until `done`; return the seconds."""
        began_s = time.monotonic()
        while not done():
            passed_s = time.monotonic() - began_s
            if passed_s > within_s:
                self.check(False, f"within {within_s:g} s: {what}")
            self._receive(self.look_s)
        return time.monotonic() - began_s

    def _receive(self, seconds: float) -> None:
        self._look()
        if self.child is None:
            time.sleep(seconds)
            return
        for what, at_s, *rest in self.child.drain(seconds):
            if what == "verdict":
                self.record(
                    f"verdict on target {rest[0]}: {': '.join(filter(None, rest[1:]))}", at_s
                )
            elif what == "lost":
                self.check(False, "the process under test lives")
            elif what == "log":
                self.record(f"log: {rest[0]}", at_s)
        self.check_bytes()

    def _look(self) -> None:
        if self.now_s - self._looked_s < SYSFS_S_MIN:
            return
        self._looked_s, states = self.now_s, self.fabric.states()
        for name in self._seen.keys() | states.keys():
            before, now = self._seen.get(name, "not there"), states.get(name, "not there")
            if before != now and self._seen:
                self.record(f"{name}: {before} → {now}")
        self._seen = states

    # -- judging ----------------------------------------------------------------------

    def check_bytes(self) -> None:
        assert self.child is not None
        wrong = [op for op in self.child.ops if op.outcome == "WRONG BYTES"]
        if wrong:
            self.check(False, f"right bytes or a miss, never wrong bytes ({wrong[:3]})")

    def only_ok(self, since_s: float, claim: str) -> None:
        """Check that no operation that began since then failed."""
        assert self.child is not None
        failed = {op.outcome for op in self.child.between(since_s)} - {"ok"}
        self.check(not failed, f"{claim}{f' ({failed})' if failed else ''}")

    def only_late(self, since_s: float) -> None:
        """Check that operations since then failed only by deadline or on an unwritten slot."""
        assert self.child is not None
        late = {"ok", "miss: deadline", "miss: stale", "miss: checksum_mismatch"}
        other = {op.outcome for op in self.child.between(since_s)} - late
        self.check(not other, f"no I/O error, only deadlines{f' ({other})' if other else ''}")

    def worst_s(self, kind: str) -> float:
        """The longest time of an operation of this kind until its outcome, in seconds."""
        assert self.child is not None
        return max((op.seconds for op in self.child.ops if op.kind == kind), default=0.0)

    def counts(self, since_s: float = 0.0) -> dict[str, int]:
        """The number of outcomes by kind since a time."""
        assert self.child is not None
        found = Counter(f"{op.kind} {op.outcome}" for op in self.child.between(since_s))
        return dict(sorted(found.items()))

    def verdict(self, target: int = 0) -> str:
        """The last verdict that the process reported."""
        assert self.child is not None
        return next((v for _, t, v in reversed(self.child.verdicts) if t == target), "ok")

    def until_verdict(self, *wanted: str, within_s: float, target: int = 0) -> float:
        """Wait for one of these verdicts; return the seconds."""
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
        """Unmount the dead file system, and mount the namespace again by its identity."""
        self.until(self._unmounted, 10, "the dead file system can be unmounted")
        self.record("the dead file system is unmounted; mounting the namespace again")
        self.mounted.remove(Path(f"/mnt/target{number}"))
        self.mount(number)

    def recovers(self, within_s: float, targets: int = 1) -> None:
        """Wait until stores, writes and loads that begin from now on succeed on each target."""
        child, now_s = self.child, time.monotonic()
        assert child is not None
        wanted = {(kind, target) for kind in ("write", "load") for target in range(targets)}

        def works() -> bool:
            fine = [op for op in child.between(now_s) if op.outcome == "ok"]
            return wanted <= {(op.kind, op.target) for op in fine}

        took_s = self.until(works, within_s, "writes and loads succeed again")
        self.record(f"writes and loads succeed again {took_s:.1f} s after that")

    def finish_load(self) -> None:
        """End the load, and check the claims that hold in every scenario."""
        child = self.child
        assert child is not None
        child.stop()
        self.until(lambda: child.counters is not None, READY_S_MAX, "the load ends when asked")
        for kind, deadline_s in (
            ("load", child.spec.read_deadline_s),
            ("write", child.spec.write_deadline_s),
        ):
            # A deadline starts at the hand-over, before which an op may wait for the same time.
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
        """Check that the log names every verdict worse than degraded that lasted."""
        lasting, since = set(), dict[int, tuple[float, str]]()
        for at_s, target, verdict in [
            *child.verdicts,
            *((time.monotonic(), t, "") for t in (0, 1)),
        ]:
            before_s, before = since.get(target, (at_s, "ok"))
            if at_s - before_s >= LOGGED_S_MIN:
                lasting.add(before)
            since[target] = at_s, verdict
        logged = [text for _, text in self.timeline if text.startswith("log: ")]
        for verdict in sorted(lasting & {"suspect", "gone"}):
            self.check(any(f" is {verdict}: " in line for line in logged), f"the log has {verdict}")

    # -- tidying up -------------------------------------------------------------------

    def strike(self) -> None:
        """Disconnect and unmount everything, in whatever state the scenario left it."""
        self.fabric.mend(1, 2)
        for number in (1, 2):
            with suppress(AssertionError, OSError):
                self.fabric.hang_disk(number, on=False)
                self.fabric.slow_disk(number, 0)
        if self.child is not None and self.child.process.is_alive():
            self.child.kill()  # only now: a thread that waits for a hung disk cannot be killed
        if self.network_fs is not None:
            with suppress(AssertionError, OSError):
                self.network_fs.close()
        for place in self.mounted:
            subprocess.run(["umount", "-l", str(place)], capture_output=True, timeout=UNMOUNT_S_MAX)
        self.fabric.disconnect()
        end_s = time.monotonic() + 30.0
        while self.fabric.controllers() and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        self.fabric.join_paths()
        for path in (1, 2):
            with suppress(AssertionError):
                self.fabric.add_port(path)
        for number in (1, 2):
            with suppress(OSError):
                self.fabric.enable_namespace(number)
