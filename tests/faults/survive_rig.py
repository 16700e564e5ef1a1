# SPDX-License-Identifier: Apache-2.0
"""The worker's half over a real pool, without vLLM: engine, pipeline, its thread, the watcher."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.chunks import Reported, batch_of, place_in, rows_of
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.mounts import mount_of, read_mounts
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import (
    ChunkBatch,
    Command,
    FetchCommand,
    OpReport,
    Report,
    ResetCommand,
    SlotIdentity,
    Verdict,
    VerdictReport,
    WriteCommand,
    unpacked,
)
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.targets.reattach import Attachments, TargetWatcher
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

from .kit import WAIT_S, Bench, name

CACHE_SLOTS = 16
#: Also of operations that must succeed, beside other processes on a busy machine.
DEADLINE_S = 2.0


class Survivor:
    """One rank. `read` and `write` move a chunk between a pool slot and a cache slot."""

    def __init__(self, engine: str, pool: Pool, slots: int, **watcher: object) -> None:
        """slots: how many of the pool's slots are written with `name(slot)` first."""
        self.pool = pool
        self.bench = Bench(engine, pool, CACHE_SLOTS)
        self.bench.store((slot, name(slot)) for slot in range(slots))
        self.health = tuple(TargetHealth() for _ in range(pool.target_count))
        self.reports: list[Reported | Report] = []
        self._closed = False
        self._ops = itertools.count(1)
        self._place = itertools.cycle(range(CACHE_SLOTS))
        waker = Waker()
        config = TransferLimits(
            group_bytes=(pool.payload_bytes,),
            target_count=pool.target_count,
            read_deadline_s=DEADLINE_S,
            write_deadline_s=DEADLINE_S,
            health=self.health,
        )
        staging = StagingMap(self.bench.base_address, pool.slot_bytes, CACHE_SLOTS, 0)
        copy = HostCopyEngine(on_done=waker.wake)
        self._copy = copy
        engine_of = self.bench.engine
        self.runner = PipelineRunner(
            TransferPipeline(staging, copy, engine_of, config), waker, engine_of.fileno()
        )
        self.watcher = TargetWatcher(
            Attachments(pool, engine_of, self.health),
            [str(directory) for directory in pool.directories],
            lambda call: self.runner.hand_over(lambda _: call()),
            **watcher,  # type: ignore[arg-type]
        )

    def obey(self, command: Command) -> int:
        self.runner.hand_over(lambda pipeline: pipeline.command(command))
        return command.op  # type: ignore[union-attr]

    def start_read(self, number: int, identity: SlotIdentity) -> tuple[int, int]:
        """Start a read; return its op and its cache slot."""
        place = next(self._place)
        self.bench.payload(place)[:] = bytes(self.pool.payload_bytes)
        batch = self._row(identity, place, number)
        return self.obey(FetchCommand(next(self._ops), batch)), place

    def _row(self, identity: SlotIdentity, cache_slot: int, number: int) -> ChunkBatch:
        return batch_of((identity, cache_slot, place_in(number, self.pool.target_count)))

    def outcome(self, op: int) -> Outcome:
        report = self.wait(lambda r: isinstance(r, Reported) and r.op == op and bool(r.outcome))
        assert isinstance(report, Reported)
        assert report.outcome is not None
        return report.outcome

    def read(self, number: int, identity: SlotIdentity) -> Outcome:
        """Read a chunk and check that OK means the right bytes."""
        op, place = self.start_read(number, identity)
        outcome = self.outcome(op)
        assert not outcome.ok or self.bench.right(place, identity)
        return outcome

    def write(self, source: int, target: int, identity: SlotIdentity) -> Outcome:
        """Read a chunk from pool slot `source` and write it to pool slot `target`."""
        op, place = self.start_read(source, identity)
        assert self.outcome(op).ok
        number = next(self._ops)
        return self.outcome(self.obey(WriteCommand(number, self._row(identity, place, target))))

    def reset(self) -> Outcome:
        return self.outcome(
            self.obey(ResetCommand(next(self._ops), self.pool.stamp.tag, named=True))
        )

    def wait(self, wanted: Callable[[Reported | Report], bool]) -> Reported | Report:
        """Return the first such report. Ops have one row."""
        end_s = time.monotonic() + WAIT_S
        while True:
            for report in unpacked(self.runner.take()[1]):
                self.reports += rows_of(report) if isinstance(report, OpReport) else [report]
            for report in self.reports:
                if wanted(report):
                    self.reports.remove(report)
                    return report
            assert time.monotonic() < end_s, f"the op was not reported; {self.reports}"
            time.sleep(0.002)

    def wait_released(self, op: int) -> None:
        self.wait(lambda r: r == Reported(op, 0, None))

    def wait_verdict(self, target: int, verdict: Verdict) -> None:
        """Wait until the verdict would be reported to the manager."""
        self.wait(
            lambda r: isinstance(r, VerdictReport) and (r.target, r.verdict) == (target, verdict)
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s
            time.sleep(0.01)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.watcher.stop()
        self.runner.stop()
        assert self.bench.close()
        self._copy.close()


def mount_id_of(place: Path) -> int:
    mount = mount_of(str(place), read_mounts())
    assert mount is not None
    return mount.mount_id


def open_files_on(mount: int) -> list[str]:
    """This process's open files, from /proc only: a look at a file might hang."""
    found = []
    for entry in Path("/proc/self/fdinfo").iterdir():
        try:
            text = entry.read_text()
            link = str((Path("/proc/self/fd") / entry.name).readlink())
        except OSError:
            continue
        mount_id = next(line.split()[1] for line in text.splitlines() if line.startswith("mnt_id"))
        if mount_id == str(mount):
            found.append(link)
    return found


def probers() -> list[int]:
    """The living child processes that probe a target."""
    children: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the process has just ended
            children += (task / "children").read_text().split()
    found = []
    for pid in children:
        with contextlib.suppress(OSError):
            if b"targets.prober" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def own_threads() -> list[str]:
    """Names of this process's threads, without the kernel's workers for io_uring."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return [name for name in names if not name.startswith("iou-")]


def closing() -> bool:
    """Whether files of a replaced target are being closed."""
    return "nvmeof-close" in [thread.name for thread in threading.enumerate()]
