# SPDX-License-Identifier: Apache-2.0
"""A reset while a write hangs: the other targets neither wait nor fail."""

from __future__ import annotations

from tests.chunks import Reported
from vllm_nvmeof_offload.errors import DEADLINE
from vllm_nvmeof_offload.protocol import OpKind, ResetCommand

from .bench import TAG, WRITE_S, Bench


def _hung_write(target_count: int = 2) -> Bench:
    """Write 10, of target 0, is past its deadline and with the kernel."""
    bench = Bench(target_count=target_count)
    for op, slot in ((1, 0), (2, 1)):
        bench.stored(op, slot, number=op)
    bench.write(10, 1, cache=0, pool=0)
    bench.pipeline.step()
    bench.hang(WRITE_S)
    assert Reported(10, 0, DEADLINE, released=False) in bench.reports()
    return bench


def test_a_reset_does_not_wait_for_a_write_that_hangs() -> None:
    bench = _hung_write()
    bench.pipeline.command(ResetCommand(11, TAG, named=True))
    bench.pipeline.step()
    assert [op.kind for op in bench.io.started] == [OpKind.WRITE, OpKind.RESET]


def test_writes_to_other_targets_follow_a_reset_while_one_hangs() -> None:
    bench = _hung_write()
    hung = next(iter(bench.io.ops))
    bench.pipeline.command(ResetCommand(11, TAG, named=True))
    bench.write(12, 2, cache=1, pool=1)
    bench.pipeline.step()
    assert [op.pool_slot for op in bench.io.started if op.kind is OpKind.WRITE] == [0]
    for token in [token for token in bench.io.ops if token != hung]:
        bench.io.complete(token)
    bench.pipeline.step()
    assert [op.pool_slot for op in bench.io.started if op.kind is OpKind.WRITE] == [0, 1]
    bench.io.complete(next(token for token in bench.io.ops if token != hung))
    bench.now_s += 10 * WRITE_S
    bench.pipeline.step()
    assert [r for r in bench.reports() if isinstance(r, Reported)] == [Reported(11), Reported(12)]
    bench.io_done()
    assert Reported(10, 0, None) in bench.reports()
    assert bench.idle()


def test_a_reset_waits_for_a_write_that_may_still_end_in_time() -> None:
    bench = Bench(target_count=2)
    bench.stored(1, 0, number=1)
    bench.write(10, 1, cache=0, pool=0)
    bench.pipeline.step()
    bench.pipeline.command(ResetCommand(11, TAG, named=True))
    bench.pipeline.step()
    assert [op.kind for op in bench.io.started] == [OpKind.WRITE]
    bench.hang(WRITE_S)
    assert [op.kind for op in bench.io.started] == [OpKind.WRITE, OpKind.RESET]
