# SPDX-License-Identifier: Apache-2.0
"""Each row of `errors.ERRORS` that storage can return, as every engine reports it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_nvmeof_offload.errors import ERRORS, OutcomeKind, Scope, io_error
from vllm_nvmeof_offload.pool.pool import Pool

from .fuse_mount import FaultyMount
from .kit import Bench, make_spec, name

#: errno → retryable, scope. As in the kernel (`blk_path_error`), an operation that the device
#: itself refused is not retried.
ROWS = {
    errno.EIO: (True, Scope.SLOT),
    errno.ENODATA: (False, Scope.SLOT),
    errno.EREMOTEIO: (False, Scope.TARGET),
    errno.EILSEQ: (False, Scope.SLOT),
    errno.EBADE: (False, Scope.TARGET),
    errno.ENOSPC: (False, Scope.SLOT),
    errno.EOPNOTSUPP: (False, Scope.TARGET),
    errno.ENOLINK: (True, Scope.TARGET),
    errno.ENODEV: (False, Scope.TARGET),
    errno.ENXIO: (False, Scope.TARGET),
    errno.ESHUTDOWN: (False, Scope.TARGET),
    errno.EROFS: (False, Scope.TARGET),
    errno.ETIMEDOUT: (True, Scope.TARGET),
}


@pytest.fixture
def bench(engine_name: str, faulty_mount: FaultyMount) -> Iterator[Bench]:
    bench = Bench(engine_name, Pool.open(make_spec(faulty_mount.place / "t", slots=4)))
    bench.store((slot, name(slot)) for slot in range(2))
    yield bench
    faulty_mount.rules()
    assert bench.close()


def test_errnos_are_reported_with_their_meaning(bench: Bench, faulty_mount: FaultyMount) -> None:
    rows = dict(ROWS)
    if bench.is_uring:
        # Linux 6.18 retries such an operation forever on a file that can be polled. FUSE's files
        # can be polled; those of block devices and disk file systems cannot (io_read,
        # io_wq_submit_work).
        del rows[errno.EOPNOTSUPP]
    for number, row in rows.items():
        for what in ("read", "write"):
            faulty_mount.rules({"op": what, "do": "errno", "value": number})
            op = bench.read(0, 0, name(0)) if what == "read" else bench.write(3, 1, name(3))
            (completion,) = bench.run(op)
            assert completion.outcome == io_error(number), (what, os.strerror(number))
            assert (completion.outcome.retryable, completion.outcome.scope) == row
            assert errno.errorcode[number] in str(completion.outcome)
            assert number in ERRORS


def test_a_read_of_no_bytes_has_no_errno_and_the_targets_scope(
    engine_name: str, tmp_path: Path
) -> None:
    """As on a namespace that is disabled under an open file: `pread` returns 0 forever."""
    bench = Bench(engine_name, Pool.open(make_spec(tmp_path, slots=2)))
    bench.store([(1, name(1))])
    os.truncate(bench.pool.directories[0] / "slab", 0)
    (completion,) = bench.run(bench.read(1, 0, name(1)))
    assert completion.outcome == io_error(0)
    assert completion.outcome.kind is OutcomeKind.IO_ERROR
    assert (completion.outcome.retryable, completion.outcome.scope) == (False, Scope.TARGET)
    assert "no bytes" in str(completion.outcome)
    assert 0 in ERRORS
    assert bench.close()


def test_an_errno_outside_the_table_has_the_slots_scope_and_is_final() -> None:
    outcome = io_error(errno.ELOOP)
    assert (outcome.retryable, outcome.scope) == (False, Scope.SLOT)
