# SPDX-License-Identifier: Apache-2.0
"""Compiles the copy kernels by NVRTC, once per GPU architecture, and caches the machine code.

It needs no nvcc, and no GPU to compile.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import stat
import tempfile
from pathlib import Path
from typing import TextIO

from vllm_nvmeof_offload.errors import EngineError

#: File name of the kernel.
COPY_BLOCKS = "copy_blocks.cu"


def kernel_source(name: str = COPY_BLOCKS) -> str:
    """Return the CUDA source: beside this file in an installed wheel, in `kernels/` in a checkout.

    Raises: EngineError: neither exists.
    """
    here = Path(__file__).parent
    for path in (here / name, here.parents[1] / "kernels" / name):
        if path.exists():
            return path.read_text(encoding="utf-8")
    raise EngineError(f"{name} is missing from this installation")


def compile_kernels(arch: str, name: str = COPY_BLOCKS, log: TextIO | None = None) -> bytes:
    """Compile machine code (a cubin) for `arch`, such as sm_90.

    log: gets the assembler's report on each kernel's registers and spills.

    Raises: EngineError: no cuda-core, no NVRTC, or it cannot compile for this architecture.
    """
    source = kernel_source(name)
    try:
        core = importlib.import_module("cuda.core")
        verbose = {"ptxas_options": ["-v"]} if log is not None else {}
        options = core.ProgramOptions(arch=arch, std="c++17", name=name, **verbose)
        code: bytes = core.Program(source, "c++", options).compile("cubin", logs=log).code
    except ImportError as error:
        raise EngineError(
            f"the kernels need cuda-core ({error}): pip install 'vllm-nvmeof-offload[cuda]'"
        ) from None
    except Exception as error:
        # cuda-core's errors have no public base: no NVRTC library, or an unknown architecture.
        raise EngineError(f"NVRTC: {error}") from error
    return code


def load_or_compile(arch: str, directory: Path) -> bytes:
    """Return the copy kernel, from `directory` if this user has compiled it for `arch` before."""
    digest = hashlib.sha256(kernel_source().encode()).hexdigest()[:16]
    path = directory / f"copy_blocks-{digest}-{arch}.cubin"
    try:
        return _read_own(path)
    except OSError:
        code = compile_kernels(arch)
        replace_file(path, code)
        return code


def _read_own(path: Path) -> bytes:
    """Read code that only this user can have written. Raises OSError otherwise."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, "can be written by another user", str(path))
        return file.read()


def cache_directory() -> Path:
    """Return the directory of compiled kernels and measured tables."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative values
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "vllm-nvmeof" / "copy"


def replace_file(path: Path, content: bytes) -> None:
    """Write whole or not at all: other ranks may write the same file. Failure costs only time."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        return
