# SPDX-License-Identifier: Apache-2.0
"""A process without some of its permissions: `python -m tests.faults.denied_child JSON`.

Opens a pool, gives up the rights that JSON names, chooses an engine, stores and loads, and prints
as JSON the engine that ran, its log, and whether the bytes were right.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import struct
import sys
from pathlib import Path

import numpy as np

from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.errors import OK, EngineError
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.pool.pool import Pool

from .kit import ENGINES, Bench, content, make_spec, name

SYSCALLS = {"setup": 425, "enter": 426, "register": 427}
NOBODY = 65534

_INSTRUCTION = struct.Struct("<HBBI")
_LOAD_NUMBER = _INSTRUCTION.pack(0x20, 0, 0, 0)
_ALLOW = _INSTRUCTION.pack(0x06, 0, 0, 0x7FFF0000)


def deny(syscalls: list[str], error_number: int) -> None:
    """Install a seccomp filter: each of these io_uring calls fails with `error_number`."""
    refuse = _INSTRUCTION.pack(0x06, 0, 0, 0x00050000 | error_number)
    code = _LOAD_NUMBER
    for syscall in syscalls:
        skip_one_unless_equal = _INSTRUCTION.pack(0x15, 0, 1, SYSCALLS[syscall])
        code += skip_one_unless_equal + refuse
    code += _ALLOW
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_no_new_privs, pr_set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) == 0
    assert libc.prctl(pr_set_seccomp, filter_mode, program, 0, 0) == 0, ctypes.get_errno()


def main() -> None:
    job = json.loads(sys.argv[1])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(LOGGER_NAME).addHandler(handler)
    content(name(0))  # numpy loads modules at its first use, which user `nobody` may not read
    targets = [Path(job["target"]) / str(number) for number in range(job.get("targets", 1))]
    pool = Pool.open(make_spec(*targets, slots=9, payload_bytes=job["payload_bytes"]))
    lines.clear()
    if job.get("memlock_bytes") is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (job["memlock_bytes"],) * 2)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if job.get("deny"):
        deny(job["deny"], job["errno"])
    fallbacks: tuple[str, ...] = ()

    def choose(pool: Pool, memory: memoryview, base_address: int) -> object:
        nonlocal fallbacks
        limits = TUNING
        engine, fallbacks = choose_io_engine(job["wanted"], pool, memory, base_address, limits)
        return engine

    ENGINES["chosen"] = choose  # type: ignore[assignment]
    try:
        bench = Bench("chosen", pool, staging_slots=8)
    except EngineError as error:
        pool.close()
        print(json.dumps({"error": str(error), "log": lines}))
        return
    bench.store((slot, name(slot)) for slot in range(8))
    reads = bench.run(*(bench.read(slot, slot, name(slot)) for slot in range(8)))
    right = all(bench.right(slot, name(slot)) for slot in range(8))
    ok = right and all(completion.outcome == OK for completion in reads)
    report = {"name": bench.engine.name, "fallbacks": fallbacks, "log": lines, "ok": ok}
    assert np.frombuffer(bench.memory, np.uint8).size >= 8 * pool.slot_bytes
    assert bench.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
