# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.faults.store --seed N` replays a seed; `--seconds S` plays random seeds."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter

from .world import play_in_memory


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.store", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument("--first", type=int, help="soak: the first seed (default: random)")
    parser.add_argument("--count", type=int, default=10**9, help="soak: how many seeds")
    parser.add_argument("--seconds", type=float, default=60.0, help="soak: how long")
    parser.add_argument("--keep-going", action="store_true", help="soak: list every failing seed")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        print(dict(play_in_memory(arguments.seed)))
        return 0
    first = arguments.first if arguments.first is not None else secrets.randbits(40)
    print(f"first seed {first}", flush=True)
    end_s = time.monotonic() + arguments.seconds
    total: Counter[str] = Counter()
    failed = played = 0
    for seed in range(first, first + arguments.count):
        if time.monotonic() > end_s:
            break
        played += 1
        try:
            total.update(play_in_memory(seed))
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {str(error).splitlines()[0]}", flush=True)
            if not arguments.keep_going:
                raise
    print(f"{played} seeds, {failed} failed; {dict(sorted(total.items()))}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
