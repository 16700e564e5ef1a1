# SPDX-License-Identifier: Apache-2.0
"""One job of ours: a process with the product's engine on a pool of its own, driven by lines.

    python -m vllm_nvmeof_bench.latency.worker DIRECTORY PAYLOAD_BYTES SLOTS SEED

It prints `{"engine": …}` when everything was written once, then answers each line of JSON
(`Order`'s fields) with one (`Answer`'s). It ends at the end of its input.
"""

from __future__ import annotations

import collections
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_nvmeof_bench.home import quiet_interpreter
from vllm_nvmeof_bench.pool.arms import EngineMover, Ground, Job, Mover, fill, open_engine
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import slot_stride_bytes

_POLL_S = 1.0
_STALL_S = 60.0


@dataclass(frozen=True)
class Order:
    """Keep `depth` in flight for ramp_s + run_s, of which run_s counts."""

    case: str
    depth: int
    ramp_s: float
    run_s: float


@dataclass(frozen=True)
class Answer:
    """latencies_us: of what was submitted after the ramp, also if it ended after the run.

    seconds: from the end of the ramp to the last of them; cpu_s: of the process meanwhile.
    """

    latencies_us: list[float]
    seconds: float
    cpu_s: float


def drive(
    mover: Mover,
    slots: int,
    order: Order,
    dice: random.Random,
    clock: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.process_time,
) -> Answer:
    """Random slots, none twice at a time, closed loop; what is in flight at the end is awaited.

    Raises:
        BenchError: an operation failed, or nothing ends for a minute.
    """
    free = list(range(slots))
    dice.shuffle(free)
    waiting = collections.deque(free)
    handed: dict[int, tuple[float, int]] = {}  # token → when, which slot
    token, latencies = 0, []
    begun_s = clock()
    counted_s, end_s = begun_s + order.ramp_s, begun_s + order.ramp_s + order.run_s
    counted_cpu_s: float | None = None
    now_s = stalled_s = begun_s
    while True:
        if counted_cpu_s is None and now_s >= counted_s:
            counted_s, counted_cpu_s = now_s, cpu()
        while now_s < end_s and len(handed) < order.depth:
            token += 1
            slot = waiting.popleft()
            handed[token] = (clock(), slot)
            mover.submit(Job(token, order.case == "read", (slot,)))
        if not handed:
            break
        done = mover.poll(_POLL_S)
        now_s = clock()
        if done:
            stalled_s = now_s
        elif now_s - stalled_s > _STALL_S:
            raise BenchError(f"nothing ended for {_STALL_S:.0f} s")
        for one in done:
            since_s, slot = handed.pop(one)
            waiting.append(slot)
            if counted_cpu_s is not None and since_s >= counted_s:
                latencies.append(1e6 * (now_s - since_s))
    cpu_s = cpu() - (counted_cpu_s or 0.0)
    return Answer([round(one, 1) for one in latencies], now_s - counted_s, cpu_s)


def main(directory: Path, payload_bytes: int, slots: int, seed: int) -> None:
    """Open, print the engine, and answer until the input ends."""
    dice = random.Random(seed)
    staging = Staging(slot_stride_bytes(payload_bytes), slots, 0)
    fill(staging, seed)
    ground = Ground(directory, payload_bytes, slots, staging)
    engine = open_engine("ours", ground)
    mover = EngineMover(engine, ground)
    print(json.dumps({"engine": engine.name}), flush=True)
    with quiet_interpreter():
        for line in sys.stdin:
            answer = drive(mover, slots, Order(**json.loads(line)), dice)
            print(json.dumps(asdict(answer)), flush=True)
    mover.close()
    ground.pool.close()
    staging.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
    except (BenchError, OffloadError, OSError) as error:
        sys.exit(f"{error}")
