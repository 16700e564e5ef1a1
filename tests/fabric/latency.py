# SPDX-License-Identifier: Apache-2.0
"""`bench latency` in the guest: a local disk, and an equal one on the fabric of the same kernel.

`python -m tests.fabric.latency TRANSPORT RESULT.json SIZE` boots a guest whose clock counts
instructions, so that neither other work on this machine nor the emulator's speed is measured. The
disks are in memory and answer by a timer. Target and initiator share the one processor. SIZE is
4KiB or 512KiB.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_nvmeof_bench import latency
from vllm_nvmeof_bench.results import dump

from tests.fabric.nvmet import Fabric, Timeouts, run, take_into_memory
from tests.fabric.rig.guest import Guest, GuestFailedError
from vllm_nvmeof_offload.units import KIB, MIB, parse_bytes

ROOT = Path(__file__).parents[2]
BOOT_S_MAX = 3600.0
MEMORY_MIB = 5120
#: What a drive's flash takes, in nanoseconds.
ANSWER_NS = 80_000
#: Two slots of 512 KiB for each of 32 in flight.
JOB_BYTES = 34 * MIB
JOBS, DEPTHS, ROUNDS = 8, (1, 32), 5
#: Emulated seconds per measurement, by payload. With 512 KiB, operations take milliseconds, and in
#: a shorter time fio's jobs do not run together.
RUN_S = {"4KiB": 0.3, "512KiB": 3.0}
DISK_MIB = 760
GUEST = (
    "emulated; its clock advances by 2 ns per instruction and jumps over waits; "
    f"disks in memory, which answer after {ANSWER_NS // 1000} µs"
)


def main() -> int:
    """Boot the guest, and copy its results; the exit status is the guest's."""
    transport, result, size = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    job = ROOT / "build" / "fabric" / f"latency-{transport}"
    script = (
        f"cd {shlex.quote(str(ROOT))} && export OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 "
        f"&& PAYLOAD={shlex.quote(size)} exec {shlex.quote(sys.executable)} "
        f"-m tests.fabric.latency {transport}\n"
    )
    try:
        guest = Guest.prepare(memory_mib=MEMORY_MIB)
        ended = guest.run(job, script, BOOT_S_MAX, virtual=True)
    except GuestFailedError as error:
        print(error, file=sys.stderr)
        return 99
    print(ended.tail)
    shutil.copy(job / "result.json", result)
    return ended.status


@dataclass(frozen=True)
class Settings(latency.Settings):
    """slots_max: of a pool, each of which is written one by one."""

    slots_max: int = 256

    @property
    def payloads(self) -> tuple[int, ...]:
        return (parse_bytes(os.environ["PAYLOAD"]),)

    def slots(self, payload_bytes: int) -> int:
        return min(self.slots_max, super().slots(payload_bytes))


def measure(transport: str) -> None:
    """In the guest: measure the disk and the namespace, and write the results."""
    take_into_memory("fio", "mkfs.xfs")
    places = {"local": _disk(0), f"nvme-{transport}": _namespace(transport, _disk(1))}
    for name, device in places.items():
        place = Path("/mnt") / name
        place.mkdir()
        run("mkfs.xfs", "-q", "-f", "-K", str(device))
        run("mount", "-o", "noatime", str(device), str(place))
    settings = Settings(
        target=tuple(f"{name}=/mnt/{name}" for name in places),
        cases=("read", "write"),
        jobs=(JOBS,),
        depths=DEPTHS,
        slot_bytes=512 * KIB,
        rounds=ROUNDS,
        run_s=RUN_S[os.environ["PAYLOAD"]],
        job_bytes=JOB_BYTES,
    )
    latency.run(
        settings,
        lambda samples, found: dump(
            Path("/run/job/result.json"), "latency", samples, {**found, "guest": GUEST}
        ),
        lambda done, total, what: print(f"{done}/{total} {what}", flush=True),
    )


def _disk(number: int) -> Path:
    """A disk of the kernel's null_blk, which keeps what is written."""
    name = f"nullb{number}"
    place = Path("/sys/kernel/config/nullb") / name
    place.mkdir()
    options = {
        "size": DISK_MIB,
        "blocksize": 4096,
        "memory_backed": 1,
        "irqmode": 2,
        "completion_nsec": ANSWER_NS,
        "hw_queue_depth": 1024,
        "power": 1,
    }
    for option, value in options.items():
        (place / option).write_text(str(value))
    return Path("/dev") / name


def _namespace(transport: str, disk: Path) -> Path:
    """A disk behind one path of a fabric."""
    fabric = Fabric(transport)
    fabric.replace_disk(1, disk)
    fabric.connect(Timeouts(keep_alive_tmo=None), (1,))
    device = fabric.device(1)
    assert device is not None
    return device


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(main())
    measure(sys.argv[1])
