# SPDX-License-Identifier: Apache-2.0
"""Boots the guest, runs one script in it as root, and returns the files that it wrote.

The guest sees this machine's `/` read-only at the same paths: the checkout and its virtual
environment run inside unchanged. Only files that the guest writes to the job directory remain.

Under virtual time the guest's clock jumps over every wait: minutes of timeouts take seconds. It
then has one processor, and a wait for the outer machine, such as for a file, costs guest time.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from .image import build_image, program
from .packages import RigUnavailableError, cache_place, locked, tools_root

CONSOLE_TAIL_LINES = 40

#: What the guest's first process prints, 2 s after the start on an idle machine.
KERNEL_UP = b"[rig] kernel up"
#: Without it the emulator is started again. Of 120 boots with two emulated processors, one
#: printed nothing in 60 s.
KERNEL_UP_S_MAX = 40.0
STARTS_MAX = 3
#: A veth pair passes pages from the initiator to the target in the same kernel. Linux 6.1 takes a
#: piece of two huge pages that lie side by side for an overrun of the first, and its target dies:
#: "kernel BUG at mm/usercopy.c", https://github.com/openebs/mayastor/issues/1693
UNCHECKED_COPIES = "hardened_usercopy=off"
#: Linux measures the TSC's rate at the start. On a busy machine it measured a quarter of it, and
#: the guest's clock ran four times as fast.
CLOCK = "clocksource=hpet"
POLL_S = 0.1


class GuestFailedError(Exception):
    """The guest did not boot or did not end by itself; the message has the end of its console."""


@dataclass(frozen=True)
class GuestResult:
    """status: the script's exit status. console: the guest's whole output."""

    status: int
    console: str

    @property
    def tail(self) -> str:
        """The last lines of the console."""
        return "\n".join(self.console.splitlines()[-CONSOLE_TAIL_LINES:])


@dataclass(frozen=True)
class Guest:
    """A guest that can be booted any number of times. It is emulated, so it needs no KVM."""

    tools: Path
    kernel: Path
    initramfs: Path
    memory_mib: int = 2048
    ram_disk_mib: int = 384
    processors: int = 2

    @classmethod
    def prepare(cls, **options: object) -> Guest:
        """Download and build the missing parts (a minute, once).

        Raises:
            RigUnavailableError: the guest cannot be had on this machine.
        """
        place = cache_place()
        try:
            with locked(place):
                tools = tools_root(place)
                image = build_image(place, tools)
        except OSError as error:
            raise RigUnavailableError(
                f"the guest cannot be made in {place}: {error}; set XDG_CACHE_HOME to another place"
            ) from error
        return cls(tools, image.kernel, image.initramfs, **options)  # type: ignore[arg-type]

    def run(
        self, job: Path, script: str, timeout_s: float, *, virtual: bool = False
    ) -> GuestResult:
        """Run `script` (bash) in the guest's directory /run/job, which is `job` on this machine.

        `timeout_s` begins when the guest's kernel is up. A kernel that does not come up is started
        again, before the script has run.

        Raises:
            GuestFailedError: the script did not end within `timeout_s`, or did not start.
        """
        job.mkdir(parents=True, exist_ok=True)
        (job / "status").unlink(missing_ok=True)
        (job / "job.sh").write_text(script)
        console = job / "console.log"
        for _ in range(STARTS_MAX):
            why = self._start(self._command(job, virtual), console, timeout_s)
            if why is not None:
                break
        else:
            why = f"the guest's kernel did not come up in {STARTS_MAX} starts"
        status = job / "status"
        found = status.read_text().strip() if status.exists() else ""
        result = GuestResult(int(found or -1), console.read_text(errors="replace"))
        if not found:
            raise GuestFailedError(f"{why}; the end of {console}:\n{result.tail}")
        return result

    def _start(self, command: list[str], console: Path, timeout_s: float) -> str | None:
        """Emulate the guest to its end; why it ended, or None if its kernel did not come up."""
        with console.open("wb") as output:
            # The kernel kills the emulator when this process ends for any reason.
            emulator = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LD_LIBRARY_PATH": f"{self.tools}/usr/lib/x86_64-linux-gnu"},
            )
            try:
                if not _is_up(emulator, console):
                    return None
                emulator.wait(timeout_s)
                return f"the guest ended without a result (emulator: {emulator.returncode})"
            except subprocess.TimeoutExpired:
                return f"the guest did not end within {timeout_s:g} s"
            finally:
                emulator.kill()
                emulator.wait()

    def _command(self, job: Path, virtual: bool) -> list[str]:
        if virtual:
            accelerator = ["-accel", "tcg", "-icount", "shift=1,sleep=off", "-smp", "1"]
        else:
            accelerator = ["-accel", "tcg,thread=multi", "-smp", str(self.processors)]
        append = (
            "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable no_timer_check "
            f"random.trust_cpu=on {UNCHECKED_COPIES} rig_ram_mib={self.ram_disk_mib}"
        )
        if not virtual:
            append += f" {CLOCK}"
        shares = []
        for tag, path, read_only in (
            ("outer", Path("/"), True),
            ("tools", self.tools, True),
            ("job", job.resolve(), False),
        ):
            mode = ",readonly=on" if read_only else ""
            shares += [
                "-fsdev",
                f"local,id={tag},path={path},security_model=none,multidevs=remap{mode}",
                "-device",
                f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
            ]
        return [
            program(self.tools, "qemu-system-x86_64"),
            *("-L", f"{self.tools}/usr/share/qemu", "-L", f"{self.tools}/usr/share/seabios"),
            *("-M", "pc", "-cpu", "Nehalem-v1", *accelerator, "-m", str(self.memory_mib)),
            *("-display", "none", "-nodefaults", "-no-reboot", "-serial", "stdio"),
            *("-device", "virtio-rng-pci"),
            *("-kernel", str(self.kernel), "-initrd", str(self.initramfs), "-append", append),
            *shares,
        ]


def _is_up(emulator: subprocess.Popen[bytes], console: Path) -> bool:
    """Wait until the guest's kernel is up, or the emulator has ended; False: neither came."""
    end_s = time.monotonic() + KERNEL_UP_S_MAX
    while KERNEL_UP not in console.read_bytes():
        try:
            emulator.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > end_s:
                return False
        else:
            return True
    return True
