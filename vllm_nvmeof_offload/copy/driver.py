# SPDX-License-Identifier: Apache-2.0
"""A thin layer over cuda-python: the NVIDIA driver calls that this package needs, on one GPU.

Streams, events, kernels, addresses and sizes are plain integers. Native code (native/copies/cuda.h)
makes the calls for every copy, with one release of the interpreter lock per batch. All other calls
use cuda-python, which releases the lock in each. NVRTC compiles the kernels once per GPU
architecture, without nvcc or a GPU, and the machine code is stored in the user's cache.

No other module calls CUDA, so tests can replace `Cuda`.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib
import os
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.config import cache_home
from vllm_nvmeof_offload.errors import EngineError, install_extra
from vllm_nvmeof_offload.native import core

#: Values of CUmemcpySrcAccessOrder: the source is read in stream order, or at any time after the
#: call, even before the stream reaches the copy.
ORDER_STREAM, ORDER_ANY = 1, 3
_PREFER_OVERLAP_WITH_COMPUTE = 1  # CUmemcpyFlags
_NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC_NO_TIMING = 1 | 2
_HOST_PORTABLE_MAPPED = 1 | 2
_ATTRIBUTE_HOST_POINTER_IS_DEVICE_POINTER = 91
_ATTRIBUTE_HOST_NUMA_ID = 134
_ATTRIBUTE_CAPABILITY = (75, 76)
#: The first driver version with the batch call, in the form that reports the failing copy.
_BATCH = "cuMemcpyBatchAsync", 12080
#: The other functions that native code calls, in the order of `CudaFunctions`, with their version.
_CALLED = (
    *("cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord", "cuEventQuery", "cuEventSynchronize"),
    *("cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"),
)
_CALLED_VERSION = 12000

#: The end of a submission: the event to record after it (or 0), and the event's waiter (or None).
End: TypeAlias = tuple[int, core.EventWaiter | None]
NO_END: Final[End] = (0, None)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. The location hints are for managed memory, which is not used here."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


#: The attributes are created only once, because the driver only reads them.
_MADE = {
    (order, overlap): _CopyAttributes(
        order, (ctypes.c_int * 4)(), _PREFER_OVERLAP_WITH_COMPUTE if overlap else 0
    )
    for order in (ORDER_STREAM, ORDER_ANY)
    for overlap in (False, True)
}
_ATTRIBUTES = {key: ctypes.addressof(made) for key, made in _MADE.items()}


class CudaError(EngineError):
    """An error from a CUDA call. `name` is CUDA's name for the error."""

    def __init__(self, call: str, name: str, detail: str = "") -> None:
        super().__init__(f"{call}: {name}{detail}")
        self.call = call
        self.name = name

    @property
    def while_capturing(self) -> bool:
        """Return whether a CUDA graph was being captured, so that a retry can succeed."""
        return self.name.startswith("CUDA_ERROR_STREAM_CAPTURE_")


class CudaFacts:
    """Properties of this GPU. `uuid` is 32 hex digits; `numa_node` is None if unknown."""

    def __init__(self, name: str, uuid: str, driver_version: int, arch: str, node: int) -> None:
        self.name = name
        self.uuid = uuid
        self.driver_version = driver_version
        self.arch = arch
        self.numa_node = node if node >= 0 else None


class Cuda:
    """One GPU, in the context that torch uses too. Every method may raise `CudaError`."""

    def __init__(self, device_index: int) -> None:
        """Open the GPU. Raises: EngineError: no cuda-python, no driver, or no such GPU."""
        try:
            self._api = importlib.import_module("cuda.bindings.driver")
            self._enter("cuInit", 0)
        except ImportError as error:
            raise EngineError(
                f"copies to a GPU need cuda-python ({error}): {install_extra('cuda')}"
            ) from None
        except RuntimeError as error:  # the driver's library is missing
            raise EngineError(f"no NVIDIA driver here: {error}") from None
        self._device = self._enter("cuDeviceGet", device_index)
        self._context = self._enter("cuDevicePrimaryCtxRetain", self._device)
        self._thread = threading.local()
        self.make_current()
        self.facts = self._facts()
        self.host_pointers_work_in_kernels = bool(
            self._attribute(_ATTRIBUTE_HOST_POINTER_IS_DEVICE_POINTER)
        )
        batch = self._address_of(*_BATCH)
        self.has_batch = batch != 0
        called = [self._address_of(name, _CALLED_VERSION) for name in _CALLED]
        if not all(called):
            raise EngineError("this NVIDIA driver is older than CUDA 12.0")
        self.functions = core.CudaFunctions(int(self._context), [batch, *called])

    # -- the GPU ----------------------------------------------------------------------

    def make_current(self) -> None:
        """Make the context current on this thread. Repeated calls cost almost nothing."""
        if not getattr(self._thread, "current", False):
            self._enter("cuCtxSetCurrent", self._context)
            self._thread.current = True

    def enter_models_thread(self) -> None:
        """Make the context current on the model's thread. The thread's capture mode is not changed,
        because the thread is not capturing between the model's calls."""
        self.make_current()
        self._thread.mode_is_final = True

    def enter_own_thread(self) -> None:
        """Make the context current on a thread that runs no part of the model.

        vLLM captures CUDA graphs in a mode in which calls from other threads, such as registering
        memory or querying an event, fail and invalidate the capture (vllm#46933), unless the thread
        declares that its calls are unrelated to any capture.
        """
        self.make_current()
        if not getattr(self._thread, "mode_is_final", False):
            mode = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            self._enter("cuThreadExchangeStreamCaptureMode", mode)
            self._thread.mode_is_final = True

    def release(self) -> None:
        """Release the context. Call no other method afterwards."""
        self._enter("cuDevicePrimaryCtxRelease", self._device)

    # -- streams and events -----------------------------------------------------------

    def create_stream(self, urgent: bool = False) -> int:
        """Create a stream that does not wait for the default stream.

        With `urgent` its kernels run first. Otherwise it has the lowest priority, like the default
        stream. Copies then do not yield to the model, but hardly delay it, because their launches
        are short and use few thread blocks.
        """
        priority = self._enter("cuCtxGetStreamPriorityRange")[1 if urgent else 0]
        return int(self._enter("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, priority))

    def destroy_stream(self, stream: int) -> None:
        self._enter("cuStreamDestroy", stream)

    def synchronize_stream(self, stream: int) -> None:
        self._enter("cuStreamSynchronize", stream)

    def stream_is_done(self, stream: int) -> bool:
        return self._is_done("cuStreamQuery", *self._api.cuStreamQuery(stream))

    def wait_event(self, stream: int, event: int) -> None:
        """Make later work on `stream` wait for the last recording of `event`."""
        self._enter("cuStreamWaitEvent", stream, event, 0)

    def create_event(self) -> int:
        return int(self._enter("cuEventCreate", _EVENT_BLOCKING_SYNC_NO_TIMING))

    def record_event(self, event: int, stream: int) -> None:
        if status := self.functions.record(event, stream):
            raise CudaError("cuEventRecord", self._name_of(status))

    def event_is_done(self, event: int) -> bool:
        return self._is_done("cuEventQuery", self.functions.query(event))

    def destroy_event(self, event: int) -> None:
        self._enter("cuEventDestroy", event)

    # -- copies and kernels -----------------------------------------------------------

    def submit_copies(
        self,
        tables: tuple[int, int, int],
        count: int,
        stream: int,
        source_order: int,
        overlap: bool = False,
        end: End = NO_END,
    ) -> None:
        """Submit all copies, in few calls if the driver has the batch call, and mark their end.

        `tables` holds the addresses of three uint64[count] arrays, which are read before this
        returns: destinations, sources and sizes in bytes.
        """
        attributes = _ATTRIBUTES[source_order, overlap]
        failed = self.functions.submit_copies(tables, count, stream, attributes, end)
        self._check(failed, count)

    def load_kernel(self, code: bytes, name: str) -> int:
        """Load a kernel from a cubin by its C name. It stays loaded until the process exits."""
        library = self._enter("cuLibraryLoadData", code, [], [], 0, [], [], 0)
        kernel = self._enter("cuLibraryGetKernel", library, name.encode())
        return int(self._enter("cuKernelGetFunction", kernel))

    def submit_launches(
        self,
        kernel: int,
        threads: int,
        launches: npt.NDArray[np.uint64],
        stream: int,
        end: End = NO_END,
    ) -> None:
        """Launch a kernel once per row of `launches`, and then mark their end.

        `launches` is uint64[n, m]: the number of thread blocks, and the kernel's m - 1 arguments.
        `threads` is per block.
        """
        failed = self.functions.submit_launches(kernel, threads, launches, stream, end)
        self._check(failed, len(launches))

    # -- memory -----------------------------------------------------------------------

    def register(self, address: int, count: int) -> None:
        """Pin host memory, so that DMA runs at full rate and kernels can use the host address."""
        self._enter("cuMemHostRegister", address, count, _HOST_PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        self._enter("cuMemHostUnregister", address)

    def allocate_host(self, count: int) -> int:
        return int(self._enter("cuMemHostAlloc", count, _HOST_PORTABLE_MAPPED))

    def free_host(self, address: int) -> None:
        self._enter("cuMemFreeHost", address)

    def allocate(self, count: int) -> int:
        return int(self._enter("cuMemAlloc", count))

    def free(self, address: int) -> None:
        self._enter("cuMemFree", address)

    # -- inside -----------------------------------------------------------------------

    def _enter(self, call: str, *arguments: Any) -> Any:
        status, *values = getattr(self._api, call)(*arguments)
        if status:
            raise CudaError(call, status.name)
        return values[0] if len(values) == 1 else tuple(values) or None

    def _check(self, failed: tuple[str, int, int] | None, count: int) -> None:
        if failed is not None:
            call, status, at = failed
            what = "launch" if call == "cuLaunchKernel" else "copy"
            detail = "" if call == "cuEventRecord" else f", {what} {at} of {count}"
            raise CudaError(call, self._name_of(status), detail)

    def _is_done(self, call: str, status: int) -> bool:
        if status and status != _NOT_READY:
            raise CudaError(call, self._name_of(status))
        return not status

    def _name_of(self, status: int) -> str:
        try:
            return str(self._api.CUresult(status).name)
        except ValueError:  # an error newer than these bindings
            return f"CUDA error {status}"

    def _attribute(self, number: int) -> int:
        return int(
            self._enter("cuDeviceGetAttribute", self._api.CUdevice_attribute(number), self._device)
        )

    def _facts(self) -> CudaFacts:
        name: bytes = self._enter("cuDeviceGetName", 128, self._device)
        major, minor = (self._attribute(number) for number in _ATTRIBUTE_CAPABILITY)
        try:
            node = self._attribute(_ATTRIBUTE_HOST_NUMA_ID)
        except CudaError:  # unknown to drivers before 12.2
            node = -1
        return CudaFacts(
            name=name.split(b"\0")[0].decode(),
            uuid=bytes(self._enter("cuDeviceGetUuid", self._device).bytes).hex(),
            driver_version=self._enter("cuDriverGetVersion"),
            arch=f"sm_{major}{minor}",
            node=node,
        )

    def _address_of(self, name: str, version: int) -> int:
        """Return the address of the driver's function; 0 if this driver lacks it."""
        try:
            address, _ = self._enter("cuGetProcAddress", name.encode(), version, 0)
        except CudaError:
            return 0
        return int(address or 0)


COPY_BLOCKS = "copy_blocks.cu"


def kernel_source(name: str = COPY_BLOCKS) -> str:
    """Return the CUDA source, from this directory in a wheel or from `kernels/` in a checkout.

    Raises: EngineError: neither file exists.
    """
    here = Path(__file__).parent
    for path in (here / name, here.parents[1] / "kernels" / name):
        if path.exists():
            return path.read_text(encoding="utf-8")
    raise EngineError(f"{name} is missing from this installation")


def compile_kernels(arch: str, name: str = COPY_BLOCKS, log: TextIO | None = None) -> bytes:
    """Compile the kernels to machine code (a cubin) for `arch`, such as sm_90.

    The assembler's report on registers and spills is written to `log`. Raises: EngineError:
    cuda-core or NVRTC is missing, or NVRTC cannot compile for this architecture.
    """
    source = kernel_source(name)
    try:
        core = importlib.import_module("cuda.core")
        verbose = {"ptxas_options": ["-v"]} if log is not None else {}
        options = core.ProgramOptions(arch=arch, std="c++17", name=name, **verbose)
        code: bytes = core.Program(source, "c++", options).compile("cubin", logs=log).code
    except ImportError as error:
        raise EngineError(
            f"the kernels need cuda-core ({error}): {install_extra('cuda')}"
        ) from None
    except Exception as error:
        # cuda-core's errors (no NVRTC library, an unknown architecture) have no public base.
        raise EngineError(f"NVRTC: {error}") from error
    return code


def load_or_compile(arch: str, directory: Path, name: str = COPY_BLOCKS) -> bytes:
    """Return the kernels of `name` for `arch`, from `directory` if this user has compiled them
    before.

    Raises: EngineError: as `compile_kernels`.
    """
    digest = hashlib.sha256(kernel_source(name).encode()).hexdigest()[:16]
    path = directory / f"{Path(name).stem}-{digest}-{arch}.cubin"
    try:
        return _read_own(path)
    except OSError:
        code = compile_kernels(arch, name)
        replace_file(path, code)
        return code


def load_cached_kernel(cuda: Cuda, name: str = COPY_BLOCKS) -> int:
    """Load the kernel in the source `name`, which has the file's name without the suffix. Raises
    EngineError, with the cause, if the kernel is not available here."""
    if not cuda.host_pointers_work_in_kernels:
        raise EngineError("kernels cannot access host memory at its host address here")
    code = load_or_compile(cuda.facts.arch, cache_directory(), name)
    return cuda.load_kernel(code, Path(name).stem)


def _read_own(path: Path) -> bytes:
    """Read a file that only this user can have written. Raises OSError otherwise."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, "can be written by another user", str(path))
        return file.read()


def cache_directory() -> Path:
    """Return the directory for compiled kernels and measured tables."""
    base = cache_home(os.environ)
    if not os.path.isabs(base):  # without a home directory nothing is saved
        base = os.devnull
    return Path(base) / "vllm-nvmeof" / "copy"


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically, because other ranks also write it. Ignore failures, which cost
    only time."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        return
