# SPDX-License-Identifier: Apache-2.0
"""A wrapper that injects faults into any I/O engine, for tests and drills on a running server.

A control file, if given, contains knobs as JSON, such as `{"seed": 7, "read_eio": 2,
"write_delay_ms": 50}`. It is read again when it changes, so that the faults of a running server can
change. `<control file>.fired` counts, in JSON, how often each knob has fired (`….fired.R` for rank
R above 0). `"rank": R` limits the knobs to rank R.

Values: `true` strikes every time, a whole number that many times, and a fraction with that
probability. `read_delay_ms` and `write_delay_ms` are milliseconds; `bytes_per_s` is a rate.

Errors are reported without calling the inner engine. A delayed or hanging operation is held here
and counts as started; it is forwarded when the fault ends, unless it was cancelled.
`flip_byte_on_read` damages the slab, which the inner engine's check must detect. The negative
controls change a payload *after* that check: only a test of tokens can detect the wrong KV.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import select
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import CANCELLED, OK, ConfigError, Outcome, io_error
from vllm_nvmeof_offload.io.base import (
    Completion,
    ForeignSlab,
    IoEngine,
    IoOp,
    Lanes,
    Room,
    Waker,
    end_of,
)
from vllm_nvmeof_offload.native import PythonLanes
from vllm_nvmeof_offload.native._tiers import LaneOp
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import (
    OURS,
    OpKind,
    SlotIdentity,
    Urgency,
    owner_of,
    slot_of,
    target_of,
)
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES, slot_stride_bytes

#: Each knob → its effect.
KNOBS = {
    "read_eio": "a read completes with EIO",
    "write_eio": "a write completes with EIO; nothing is written",
    "enospc_writes": "a write completes with ENOSPC; nothing is written",
    "read_delay_ms": "every read takes this many milliseconds longer",
    "write_delay_ms": "every write takes this many milliseconds longer",
    "bytes_per_s": "reads share a link of this many bytes per second, in the order of submission",
    "hang_reads": "a read hangs until the knob is cleared",
    "hang_writes": "a write hangs until the knob is cleared",
    "flip_byte_on_read": "a payload byte in the slab is flipped before a read: the CRC detects it",
    "swap_slots": "negative control: a read returns the previous read's payload as OK",
    "flip_with_valid_crc": "negative control: a read returns one wrong payload byte as OK",
    "flip_before_copy": "like flip_with_valid_crc, but only for reads whose CRC the copy verifies",
}
_READ_ERRORS = (("read_eio", errno.EIO),)
_ERRORS: dict[OpKind, tuple[tuple[str, int], ...]] = {
    OpKind.LOAD: _READ_ERRORS,
    OpKind.FETCH: _READ_ERRORS,
    OpKind.WRITE: (("write_eio", errno.EIO), ("enospc_writes", errno.ENOSPC)),
    OpKind.RESET: (),
}
_TICK_S = 0.005
_FINE_TICK_S = 0.0005  # while reads share a link, which transfers a chunk in a few milliseconds
#: The kinds of operations, indexed by their numbers in the native machine.
_KINDS = tuple(OpKind)


def lanes_of(engine: IoEngine) -> Lanes:
    """Return lanes that call a Python engine."""
    return PythonLanes(
        room=engine.room,
        submit=lambda ops: engine.submit([_op_of(one) for one in ops]),
        cancel=lambda token: bool(engine.cancel([token])),
        poll=lambda: [end_of(one) for one in engine.poll()],
    )


def _op_of(one: LaneOp) -> IoOp:
    return IoOp(
        one.token,
        _KINDS[one.kind],
        Urgency(one.urgency),
        one.place,
        one.address,
        SlotIdentity(one.key, one.generation),
        one.payload_bytes,
        Stamp(*one.stamp),
        None if one.payload_crc < 0 else one.payload_crc,
        one.single_copy,
        one.client,
        one.header_only,
    )


@dataclass(slots=True)
class _Knob:
    value: bool | int | float
    left: int  # strikes left, if the value is a whole number


class FaultPlan:
    """The knobs with their random numbers and counts, used only on the engine's calling thread."""

    def __init__(
        self,
        knobs: Mapping[str, object] | None = None,
        *,
        seed: int = 0,
        control_path: Path | None = None,
        rank: int = 0,
    ) -> None:
        """Start from `knobs`, or from the control file if it exists; raise ConfigError if a knob is
        unknown or a value is neither a number nor a boolean. rank: this process's rank."""
        self._control_path = control_path
        self._rank = rank
        self._control_version: tuple[int, int] | None = None
        self.fired: Counter[str] = Counter()
        self._link_s = 0.0  # when the reads' link has transferred all bytes so far
        self._start(dict(knobs or {}), seed)
        self.refresh()

    def set(self, **knobs: object) -> None:
        """Change the given knobs without reseeding. Raises as the constructor does."""
        self._knobs.update(_checked(knobs))

    def _start(self, knobs: dict[str, object], seed: int) -> None:
        if knobs.pop("rank", self._rank) != self._rank:
            knobs = {}
        self._knobs = _checked(knobs)
        self.random = random.Random(seed)
        logger.info("fault injection: seed %d, %s", seed, knobs)

    def refresh(self) -> None:
        """Read the control file again if it has changed."""
        if self._control_path is None:
            return
        try:
            status = self._control_path.stat()
            version = (status.st_mtime_ns, status.st_ino)
            if version == self._control_version:
                return
            knobs = json.loads(self._control_path.read_text())
            self._start(knobs, int(knobs.pop("seed", 0)))
            self._control_version = version
        except FileNotFoundError:
            if self._control_version is not None:
                self._control_version = None
                self._start({}, 0)
        except (
            *(OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError),
            ConfigError,
        ) as error:
            # The file is probably incomplete: the next call reads it again.
            logger.warning("fault injection: cannot use %s yet: %s", self._control_path, error)

    def milliseconds(self, knob: str) -> float:
        """Return the value of a delay knob; count the knob as fired if it is not 0."""
        if not self.is_set(knob):
            return 0.0
        self._count(knob)
        return float(self._knobs[knob].value)

    def link_ends_s(self, size_bytes: int, now_s: float) -> float:
        """Return when a read's last byte will have passed the reads' link; 0 without a link."""
        if not self.is_set("bytes_per_s"):
            return 0.0
        self._count("bytes_per_s")
        rate = float(self._knobs["bytes_per_s"].value)
        self._link_s = max(now_s, self._link_s) + size_bytes / rate
        return self._link_s

    def is_set(self, knob: str) -> bool:
        """Return whether the knob is set and not 0."""
        return knob in self._knobs and bool(self._knobs[knob].value)

    def strikes(self, knob: str) -> bool:
        """Decide whether `knob` strikes now; if so, count it as fired."""
        if not self.is_set(knob):
            return False
        one = self._knobs[knob]
        if isinstance(one.value, float):
            struck = self.random.random() < one.value
        else:
            struck = one.value is True or one.left > 0
            one.left -= 1
        if struck:
            self._count(knob)
        return struck

    def _count(self, knob: str) -> None:
        self.fired[knob] += 1
        if self._control_path is not None:
            suffix = f".fired.{self._rank}" if self._rank else ".fired"
            path = self._control_path.with_name(self._control_path.name + suffix)
            temporary = path.with_name(path.name + ".new")
            temporary.write_text(json.dumps(self.fired))
            temporary.rename(path)


def _checked(knobs: Mapping[str, object]) -> dict[str, _Knob]:
    checked: dict[str, _Knob] = {}
    for name, value in knobs.items():
        if name == "seed":
            continue
        if name not in KNOBS:
            raise ConfigError("fault_injection", name, f"no such knob; there are {sorted(KNOBS)}")
        if not isinstance(value, bool | int | float) or value < 0:
            raise ConfigError(name, value, "true, a count, a probability or milliseconds")
        checked[name] = _Knob(value, int(value))
    return checked


@dataclass(slots=True, eq=False)
class _Held:
    """An operation that a fault holds."""

    op: IoOp
    hang: str  # the knob, or "" for a delay until `until_s`
    until_s: float
    wanted: bool = True
    exchanged: bool = False  # its target's files were replaced after submission


def inject(
    engine: IoEngine, control: str, rank: int, pool: Pool, memory: memoryview, base_address: int
) -> IoEngine:
    """Wrap the engine of a server's rank so that it injects the faults in a control file."""
    plan = FaultPlan(control_path=Path(control), rank=rank)
    return FaultyIoEngine(engine, plan, pool, memory, base_address)


class FaultyIoEngine:
    """An `io.base.IoEngine` that injects faults into another engine."""

    def __init__(
        self,
        inner: IoEngine,
        plan: FaultPlan,
        pool: Pool,
        memory: memoryview,
        base_address: int,
    ) -> None:
        """Wrap `inner`. pool, memory: those that `inner` uses."""
        self.name = f"{inner.name} + faults"
        self.plan = plan
        self._inner = inner
        self._pool = pool
        self._memory = memory
        self._base_address = base_address
        self._held: list[_Held] = []
        self._forwarded: dict[int, IoOp] = {}
        self._completions: list[Completion] = []
        self._last_payload: bytes | None = None
        self._waker = Waker()
        # Readable when either engine has completions.
        self._epoll = select.epoll()
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._epoll.register(self._waker.fd, select.EPOLLIN)
        self._closed = threading.Event()
        threading.Thread(target=self._tick, name="io-faults", daemon=True).start()

    @property
    def stamp(self) -> Stamp:
        return self._inner.stamp

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        return self._inner.begin_reset(tag, named)

    def save_sessions(self, content: bytes) -> None:
        self._inner.save_sessions(content)

    def attach(self) -> Lanes:
        return lanes_of(self)

    def room(self) -> Room:
        return self._inner.room()

    def submit(self, ops: Sequence[IoOp]) -> None:
        self.plan.refresh()
        for op in ops:
            self._submit_one(op)

    def _submit_one(self, op: IoOp) -> None:
        for knob, error in _ERRORS[op.kind]:
            if self.plan.strikes(knob):
                self._complete(op, io_error(error))
                return
        held = self._hold(op)
        if held is None:
            self._forward(op)
        else:
            self._held.append(held)

    def _hold(self, op: IoOp) -> _Held | None:
        if op.kind is OpKind.RESET:
            return None
        what = "read" if op.is_read else "write"
        if self.plan.strikes(f"hang_{what}s"):
            return _Held(op, f"hang_{what}s", 0.0)
        now_s, until_s = time.monotonic(), 0.0
        if delay_ms := self.plan.milliseconds(f"{what}_delay_ms"):
            until_s = now_s + delay_ms / 1000
        if op.is_read:
            size_bytes = slot_stride_bytes(op.payload_bytes)
            until_s = max(until_s, self.plan.link_ends_s(size_bytes, now_s))
        return _Held(op, "", until_s) if until_s else None

    def _forward(self, op: IoOp) -> None:
        self._forwarded[op.token] = op
        ours = owner_of(op.place) == OURS  # never write to another engine's slab
        if op.is_read and ours and op.payload_bytes and self.plan.strikes("flip_byte_on_read"):
            self._flip_on_disk(op)
        self._inner.submit([op])

    def cancel(self, tokens: Sequence[int]) -> list[int]:
        """Cancel operations; held ones count as started."""
        for held in self._held:
            held.wanted &= held.op.token not in tokens
        withdrawn = self._inner.cancel([token for token in tokens if token in self._forwarded])
        for token in withdrawn:
            del self._forwarded[token]
        return withdrawn

    def replace_target(self, target: int) -> None:
        # Held operations can no longer be forwarded, because they would use the new files.
        for held in self._held:
            held.exchanged |= target_of(held.op.place) == target
        self._inner.replace_target(target)

    def attach_region(self, owner: int, target: int, region: ForeignSlab) -> None:
        self._inner.attach_region(owner, target, region)

    def detach_region(self, owner: int, target: int) -> None:
        self._inner.detach_region(owner, target)

    def poll(self) -> list[Completion]:
        self.plan.refresh()
        self._waker.clear()
        self._release_held()
        for completion in self._inner.poll():
            op = self._forwarded.pop(completion.token)
            if op.is_read and op.payload_bytes and completion.outcome == OK:
                self._deceive(op)
            self._completions.append(completion)
        completions, self._completions = self._completions, []
        return completions

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop the inner engine, and cancel all held operations."""
        self._closed.set()
        for held in self._held:
            self._complete(held.op, CANCELLED)
        self._held.clear()
        return self._inner.close(timeout_s)

    def _release_held(self) -> None:
        now_s = time.monotonic()
        held_before, self._held = self._held, []
        for held in held_before:
            over = not self.plan.is_set(held.hang) if held.hang else held.until_s <= now_s
            room = self._inner.room()
            if over and not held.wanted:
                self._complete(held.op, CANCELLED)
            elif over and held.exchanged:
                self._complete(held.op, io_error(errno.ESTALE))
            elif over and (room.reads if held.op.is_read else room.writes):
                self._forward(held.op)
            else:
                self._held.append(held)

    def _complete(self, op: IoOp, outcome: Outcome) -> None:
        self._completions.append(Completion(op.token, outcome, time.monotonic()))
        self._waker.wake()

    def _tick(self) -> None:
        """Wake the caller regularly, because held operations wait for a time or a knob."""
        while not self._closed.wait(_FINE_TICK_S if self.plan.is_set("bytes_per_s") else _TICK_S):
            if self._held:
                self._waker.wake()

    def _deceive(self, op: IoOp) -> None:
        """Apply the negative controls to a verified payload."""
        start = op.address - self._base_address + HEADER_BYTES
        payload = self._memory[start : start + op.payload_bytes]
        if self.plan.strikes("flip_with_valid_crc") or (
            op.header_only and self.plan.strikes("flip_before_copy")
        ):
            payload[self.plan.random.randrange(len(payload))] ^= 1 << self.plan.random.randrange(8)
        if self.plan.is_set("swap_slots"):
            true_payload = bytes(payload)
            last = self._last_payload
            if last is not None and last != true_payload and self.plan.strikes("swap_slots"):
                payload[:] = last
            self._last_payload = true_payload

    def _flip_on_disk(self, op: IoOp) -> None:
        """Flip one payload byte in the slab. O_DIRECT requires rewriting an aligned page."""
        fd = self._pool.files(target_of(op.place))[0]
        offset = slot_of(op.place) * self._pool.slot_bytes
        at = self.plan.random.randrange(op.payload_bytes)
        page_offset = offset + HEADER_BYTES + at // PAGE_BYTES * PAGE_BYTES
        with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
            os.preadv(fd, [view], page_offset)
            view[at % PAGE_BYTES] ^= self.plan.random.randrange(1, 256)
            os.pwritev(fd, [view], page_offset)
