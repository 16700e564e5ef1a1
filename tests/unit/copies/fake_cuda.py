# SPDX-License-Identifier: Apache-2.0
"""A STUB of the CUDA entry points: no GPU, no driver. Copies run on the host's memory, late.

Nothing runs until `step` or `drain`. Then one operation at a time runs, of any stream whose
first one may run, in an order that the seed gives; the copies of a batch run in any order,
between those of other streams. What CUDA leaves open is therefore really different from seed
to seed, so that an ordering which the engine forgets is seen as wrong bytes:

* `wait_event` waits for what the event had recorded when the wait was submitted;
* a source of ORDER_ANY may be read as early as in the call;
* a kernel reads its table of descriptors when it runs.

The engine's native code calls the stub as it calls the driver: by the addresses of functions.

It asserts what would be a mistake on a GPU: a descriptor across two `regions`, memory freed or
a stream destroyed with work under way, an event destroyed that a thread waits for. While
`capturing`, it refuses what CUDA does, of threads that have not declared themselves: `spoilt`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_nvmeof_offload.copy.base import DESCRIPTORS_MAX
from vllm_nvmeof_offload.copy.driver import (
    NO_END,
    ORDER_ANY,
    Cuda,
    CudaError,
    CudaFacts,
    End,
    _CopyAttributes,
)
from vllm_nvmeof_offload.native import core

MODEL_STREAM = 0
WAITING_CALLS = {"synchronize_stream", "synchronize_event"}
#: What threads may do while a CUDA graph is captured only if they have declared themselves.
SPOILING_CALLS = {"register", "allocate_host", "event_is_done", "stream_is_done", *WAITING_CALLS}


class FakeCuda(Cuda):
    """regions: (first address, bytes) of what is registered or allocated; None: not checked.

    ignore: calls that do nothing, as a mutant of the engine would. fail: calls that fail from
    the n-th on (n counts from 0).
    """

    def __init__(
        self,
        seed: int = 0,
        regions: Sequence[tuple[int, int]] | None = None,
        batch: bool = True,
        ignore: Sequence[str] = (),
    ) -> None:
        self.random = random.Random(seed)
        self.regions = regions
        self.ignore = set(ignore)
        self.fail: dict[str, int] = {}
        self.batches: list[int] = []
        self.orders: list[int] = []
        self.hints: list[bool] = []  # by batch: to overlap with compute
        self.kernels: dict[int, str] = {}
        #: Bytes of each part that a kernel went through, by launch.
        self.launched: list[list[int]] = []
        self.calls: Counter[str] = Counter()
        self.callers: dict[str, set[int]] = {}
        self.facts = CudaFacts("stub", "00" * 16, 13010, "sm_90", -1)
        self.host_pointers_work_in_kernels = True
        self.streams: dict[int, deque[Work]] = {MODEL_STREAM: deque()}
        self.events: dict[int, Mark | None] = {}
        self.waited_for: list[int] = []
        self.registered: dict[int, int] = {}
        self.allocated: dict[int, object] = {}
        self.capturing = False
        self.spoilt: list[str] = []
        self._relaxed: set[int] = set()
        self._models_thread: int | None = None
        self._has_batch = batch
        self._handles = itertools.count(1000)
        self._changed = threading.Condition()
        self._raised = threading.local()  # what calls from native code raised
        self._functions = self._make_functions()
        addresses = [ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._functions]
        self.functions = core.CudaFunctions(0, addresses if batch else [0, *addresses[1:]])

    # -- the test's side --------------------------------------------------------------

    def on_model(self, kernel: Callable[[], None]) -> None:
        """Launch a kernel of the model."""
        with self._changed:
            self.streams[MODEL_STREAM].append(Work(kernel=kernel))

    def step(self, stream: int | None = None) -> bool:
        """Run one operation, or one copy of a batch; False if nothing can run."""
        with self._changed:
            ready = [
                queue
                for name, queue in sorted(self.streams.items())
                if queue
                and stream in (None, name)
                and (queue[0].wait is None or queue[0].wait.done)
            ]
            if not ready:
                return False
            queue = self.random.choice(ready)
            work = queue[0]
            if work.moves:
                work.moves.pop(self.random.randrange(len(work.moves))).run()
            if work.kernel is not None:
                work.kernel()
            if work.record is not None:
                work.record.done = True
            if not work.moves:
                queue.popleft()
            self._changed.notify_all()
            return True

    def drain(self, stream: int | None = None) -> None:
        while self.step(stream):
            pass

    @property
    def is_idle(self) -> bool:
        return not any(self.streams.values())

    # -- Cuda's side ------------------------------------------------------------------

    @property
    def has_batch(self) -> bool:
        return self._has_batch

    def make_current(self) -> None: ...

    def enter_models_thread(self) -> None:
        self._models_thread = threading.get_ident()

    def enter_own_thread(self) -> None:
        if self._models_thread == threading.get_ident():
            return
        if self._called("enter_own_thread"):
            self._relaxed.add(threading.get_ident())

    def create_stream(self, urgent: bool = False) -> int:
        with self._changed:
            stream = next(self._handles)
            self.streams[stream] = deque()
            return stream

    def destroy_stream(self, stream: int) -> None:
        with self._changed:
            assert not self.streams.pop(stream), "a stream destroyed with work on it"

    def synchronize_stream(self, stream: int) -> None:
        self._called("synchronize_stream")
        while self.streams[stream]:
            # A thread of the test may have run the last one in between.
            assert self.step() or not self.streams[stream], "this stream waits for ever"

    def stream_is_done(self, stream: int) -> bool:
        self._called("stream_is_done")
        return not self.streams[stream]

    def wait_event(self, stream: int, event: int) -> None:
        if self._called("wait_event"):
            with self._changed:
                self.streams[stream].append(Work(wait=self.events[event]))

    def create_event(self) -> int:
        self._called("create_event")
        event = next(self._handles)
        self.events[event] = None
        return event

    def record_event(self, event: int, stream: int) -> None:
        if self._called("record_event"):
            with self._changed:
                mark = self.events[event] = Mark()
                self.streams[stream].append(Work(record=mark))

    def event_is_done(self, event: int) -> bool:
        self._called("event_is_done")
        mark = self.events[event]
        return mark is None or mark.done

    def synchronize_event(self, event: int) -> None:
        self._called("synchronize_event")
        with self._changed:
            mark = self.events[event]
            self.waited_for.append(event)
            assert self._changed.wait_for(lambda: mark is None or mark.done, 20)
            self.waited_for.remove(event)

    def destroy_event(self, event: int) -> None:
        with self._changed:
            del self.events[event]  # CUDA allows it before the event is done…
            assert event not in self.waited_for  # … but not under a thread that waits for it

    def copy_batch(
        self,
        tables: tuple[int, int, int],
        count: int,
        stream: int,
        source_order: int,
        overlap: bool = False,
    ) -> None:
        assert self._has_batch
        if not self._called("copy_batch"):
            return
        assert 0 < count <= DESCRIPTORS_MAX
        columns = [(ctypes.c_uint64 * count).from_address(table) for table in tables]
        self.batches.append(count)
        self.orders.append(source_order)
        self.hints.append(overlap)
        rows = zip(*columns, strict=True)
        moves = [self._move(*row, may_read_early=source_order == ORDER_ANY) for row in rows]
        with self._changed:
            self.streams[stream].append(Work(moves=moves))

    def copy(self, destination: int, source: int, count: int, stream: int) -> None:
        if self._called("copy"):
            with self._changed:
                move = self._move(destination, source, count, may_read_early=False)
                self.streams[stream].append(Work(moves=[move]))

    def load_kernel(self, code: bytes, name: str) -> int:
        handle = next(self._handles)
        self.kernels[handle] = name
        return handle

    def launch(
        self, kernel: int, blocks: int, threads: int, stream: int, arguments: Sequence[int]
    ) -> None:
        self._called("launch")
        table, count, *rest = arguments
        assert 0 < count <= DESCRIPTORS_MAX and blocks > 0 and threads % 32 == 0

        def crc() -> None:
            self.launched.append(make_crcs(table, count, rest[1]))

        def run() -> None:
            rows = np.ctypeslib.as_array((ctypes.c_uint64 * (3 * count)).from_address(table))
            rows = rows.reshape(count, 3)
            self.launched.append(rows[:, 2].tolist())
            for row in rows.tolist():
                self._move(*row, may_read_early=False).run()

        with self._changed:
            self.streams[stream].append(
                Work(kernel=crc if self.kernels.get(kernel) == "crc_blocks" else run)
            )

    def register(self, address: int, count: int) -> None:
        self._called("register")
        self.registered[address] = count

    def unregister(self, address: int) -> None:
        assert self.is_idle, "memory unregistered under way"
        del self.registered[address]

    def allocate_host(self, count: int) -> int:
        self._called("allocate_host")
        memory = ctypes.create_string_buffer(count)
        self.allocated[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free_host(self, address: int) -> None:
        assert self.is_idle, "memory freed under way"
        del self.allocated[address]

    allocate, free = allocate_host, free_host

    def submit_copies(
        self,
        tables: tuple[int, int, int],
        count: int,
        stream: int,
        source_order: int,
        overlap: bool = False,
        end: End = NO_END,
    ) -> None:
        with self._raising():
            super().submit_copies(tables, count, stream, source_order, overlap, end)

    def submit_launches(
        self, kernel: int, threads: int, launches: np.ndarray, stream: int, end: End = NO_END
    ) -> None:
        with self._raising():
            super().submit_launches(kernel, threads, launches, stream, end)

    # -- inside -----------------------------------------------------------------------

    def _make_functions(self) -> list[Callable[..., int]]:
        """The entry points for native code, in the order of `CudaFunctions`."""

        def batch(to: int, of: int, sizes: int, count: int, how: int, *rest: int) -> None:
            order = _CopyAttributes.from_address(how)
            *_, stream = rest
            self.copy_batch(
                (to, of, sizes), count, stream or 0, order.source_order, bool(order.flags)
            )

        def launch(kernel: int, blocks: int, *rest: int) -> None:
            _, _, threads, _, _, _, stream, arguments, _ = rest
            count = 4 if self.kernels.get(kernel) == "crc_blocks" else 2
            values = (ctypes.POINTER(ctypes.c_uint64) * count).from_address(arguments)
            self.launch(kernel, blocks, threads, stream or 0, [one[0] for one in values])

        word, pointer = ctypes.c_uint64, ctypes.c_void_p
        return [
            self._entry(batch, *([pointer] * 3), word, pointer, pointer, word, pointer, pointer),
            self._entry(lambda *a: self.copy(*a[:3], a[3] or 0), word, word, word, pointer),
            self._entry(launch, pointer, *([ctypes.c_uint] * 7), *([pointer] * 3)),
            self._entry(lambda e, s: self.record_event(e, s or 0), pointer, pointer),
            self._entry(lambda event: None, pointer),  # queries are not made from native code
            self._entry(self.synchronize_event, pointer),
            self._entry(lambda context: self.make_current(), pointer),
            self._entry(lambda mode: self.enter_own_thread(), pointer),
        ]

    def _entry(self, call: Callable[..., None], *types: type) -> Callable[..., int]:
        def entry(*arguments: int) -> int:
            try:
                call(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised by `_raising`
                self._raised.error = error
                return 999
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(entry)

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        """Raise what the stub raised in a call of native code, which must have reported it."""
        self._raised.error = None
        try:
            yield
        except CudaError as error:
            raise self._raised.error from error
        assert self._raised.error is None

    def _name_of(self, status: int) -> str:
        return f"CUDA error {status}"

    def _called(self, name: str) -> bool:
        """Count the call, or fail it; False if it is to be ignored."""
        self.callers.setdefault(name, set()).add(threading.get_ident())
        number = self.calls[name]
        self.calls[name] += 1
        undeclared = threading.get_ident() not in self._relaxed
        if self.capturing and undeclared and name in SPOILING_CALLS:
            self.spoilt.append(name)
            raise CudaError(name, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        if name in self.fail and number >= self.fail[name]:
            raise CudaError(name, "CUDA_ERROR_STUB")
        return name not in self.ignore

    def _move(self, destination: int, source: int, count: int, *, may_read_early: bool) -> Move:
        if self.regions is not None:
            for address in (destination, source):
                assert any(
                    first <= address and address + count <= first + size
                    for first, size in self.regions
                ), f"a descriptor of {count} bytes at {address:#x} crosses regions"
        early = may_read_early and self.random.random() < 0.5
        return Move(destination, source, count, ctypes.string_at(source, count) if early else None)


class Mark:
    """One recording of an event."""

    done = False


@dataclass
class Move:
    """One copy on its way. early: the source's bytes, read in the call."""

    destination: int
    source: int
    count: int
    early: bytes | None = None

    def run(self) -> None:
        content = ctypes.string_at(self.source, self.count) if self.early is None else self.early
        ctypes.memmove(self.destination, content, self.count)


@dataclass
class Work:
    """One operation of a stream: a wait, a recording, a batch of moves, or a kernel."""

    wait: Mark | None = None
    record: Mark | None = None
    moves: list[Move] = field(default_factory=list)
    kernel: Callable[[], None] | None = None


def make_crcs(table: int, count: int, out: int) -> list[int]:
    """What `crc_blocks` writes, by the library; returns the bytes of each part.

    The library's CRC of a part, less its CRC of as many zeros, is the CRC without inversions.
    """
    from crc32c import crc32c

    rows = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count)).from_address(table))
    words = np.ctypeslib.as_array((ctypes.c_uint32 * (32 * count)).from_address(out))
    lanes = words.reshape(count, 32)
    lanes[:] = np.random.default_rng(count).integers(0, 1 << 32, lanes.shape, np.uint32)
    sizes = rows.reshape(count, 2)[:, 1].tolist()
    for lane, (address, size) in zip(lanes, rows.reshape(count, 2).tolist(), strict=True):
        raw = crc32c(ctypes.string_at(address, size)) ^ crc32c(bytes(size))
        lane[0] = np.bitwise_xor.reduce(lane[1:]) ^ np.uint32(raw)  # their xor counts
    return sizes


@contextlib.contextmanager
def working_cuda() -> Iterator[FakeCuda]:
    """A stub that runs by itself, as a GPU does."""
    cuda, stopping = FakeCuda(), threading.Event()

    def work() -> None:
        while not stopping.is_set():
            if not cuda.step():
                stopping.wait(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield cuda
    finally:
        stopping.set()
        thread.join()
