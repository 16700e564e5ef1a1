# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.sim --seed N` replays; `--seconds S` or `--steps N` soaks from a random or given
seed. `--sanitize` does it over a build with sanitizers."""

from __future__ import annotations

import argparse
import logging
import math
import secrets
import sys
import time
from collections import Counter

from . import sanitized

if "--sanitize" in sys.argv:
    sanitized.start_again()

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.manager.handshake import CREDITED

from .base import CHOSEN_BY_NAME, PROFILES
from .shapes import FULL, SHAPES
from .world import play

_PROGRESS_S = 60.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument(
        "--profile",
        choices=sorted({*PROFILES, *CHOSEN_BY_NAME}),
        help="default: the seed chooses",
    )
    parser.add_argument(
        "--ranks", type=int, help="default: the seed chooses; every eighth seed has 1 to 8"
    )
    parser.add_argument("--policy", default=CREDITED, help="a value of eviction_policy")
    parser.add_argument("--shape", choices=(FULL, *SHAPES), help="default: the seed chooses")
    parser.add_argument("--sets", type=int, choices=(0, 1, 2), help="default: the seed chooses")
    parser.add_argument("--owners", type=int, help="other engines; default: the seed chooses")
    parser.add_argument(
        "--peers", type=int, default=0, help="that read for each rank; a soak: in every fourth seed"
    )
    parser.add_argument(
        "--serve", action="store_true", help="peers ask for chunks; a soak: in every fourth seed"
    )
    parser.add_argument(
        "--checks",
        action="store_true",
        help="copies of loads check payloads; a soak: in every third seed",
    )
    parser.add_argument("--first", type=int, help="soak: the first seed (default: random)")
    parser.add_argument("--count", type=int, default=10**9, help="soak: how many seeds")
    parser.add_argument("--seconds", type=float, help="soak: how long (default: 60, or --steps)")
    parser.add_argument("--steps", type=float, help="soak: until so many steps were simulated")
    parser.add_argument("--sanitize", action="store_true", help="over a build with sanitizers")
    parser.add_argument("--keep-going", action="store_true", help="soak: list every failing seed")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    logger.setLevel(logging.CRITICAL)  # faults are what is wanted here
    if arguments.seed is not None:
        print(
            dict(
                play(
                    arguments.seed,
                    arguments.profile,
                    arguments.ranks,
                    arguments.policy,
                    arguments.shape,
                    arguments.sets,
                    arguments.owners,
                    arguments.peers,
                    arguments.serve,
                    arguments.checks,
                )
            )
        )
        return 0
    first = arguments.first if arguments.first is not None else secrets.randbits(40)
    print(f"first seed {first}", flush=True)
    steps_max = math.inf if arguments.steps is None else arguments.steps
    seconds = arguments.seconds or (60.0 if arguments.steps is None else math.inf)
    end_s = time.monotonic() + seconds
    total: Counter[str] = Counter()
    failed = played = 0
    began_s = told_s = time.monotonic()
    for seed in range(first, first + arguments.count):
        if time.monotonic() > end_s or total["steps"] >= steps_max:
            break
        if time.monotonic() > told_s + _PROGRESS_S:
            told_s = time.monotonic()
            rate = total["steps"] / (told_s - began_s)
            done = f"{played} seeds, {total['steps']:,} steps, {rate:,.0f} a second"
            print(f"{done}; {failed} failed", file=sys.stderr, flush=True)
        played += 1
        try:
            ranks = arguments.ranks or (1 + seed // 8 % 8 if seed % 8 == 0 else None)
            peers = arguments.peers or (1 + seed // 4 % 3 if seed % 4 == 1 else 0)
            serve = arguments.serve or seed % 4 == 2
            checks = arguments.checks or seed % 3 == 0
            rest = arguments.policy, arguments.shape, arguments.sets, arguments.owners, peers, serve
            total.update(play(seed, arguments.profile, ranks, *rest, checks))
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {str(error).splitlines()[0]}", flush=True)
            if not arguments.keep_going:
                raise
    print(f"{played} seeds, {failed} failed; {dict(total)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
