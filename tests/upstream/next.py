# SPDX-License-Identifier: Apache-2.0
"""Tries the newest vLLM that the package index has: `make vllm-next`.

Prints the difference of the interfaces that we use since the newest release that we know, what our
server makes of it, the self-test, and the result of vLLM's own tests of its offloading connector
with ours. The status is 1 if the release is refused or a test fails, and 2 if it cannot be had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.unit.adapter import ROOT, run_child
from tests.upstream import suite
from tests.upstream.releases import Release, ReleaseUnavailableError, newest, release
from vllm_nvmeof_offload.vllm_adapter import vllm_release


def interface(tree: Release) -> dict[str, Any]:
    """What `tests.upstream.interface` prints with this release."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream.interface"],
        cwd=ROOT,
        env=suite.environment(tree),
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("INTERFACE ")]
    if done.returncode or len(lines) != 1:
        return {"lines": {}, "refusal": f"its modules do not load: {done.stderr.strip()[-2000:]}"}
    found: dict[str, Any] = json.loads(lines[0].removeprefix("INTERFACE "))
    return found


def differences(known: dict[str, str], found: dict[str, str]) -> list[str]:
    """Lines that are other in `found`, as a diff."""
    lines: list[str] = []
    for name in sorted(known.keys() | found.keys()):
        before, now = known.get(name), found.get(name)
        if before == now:
            continue
        lines += [f"- {name} {before}"] if before is not None else []
        lines += [f"+ {name} {now}"] if now is not None else []
    return lines


def attempt(version: str, since: str) -> bool:
    """Print everything about a release; returns whether it can be served and passes."""
    tree = release(version)
    print(f"vLLM {version}; the newest known one is {since}", flush=True)
    found = interface(tree)
    changed = differences(interface(release(since))["lines"], found["lines"])
    print(f"interfaces that we use: {len(changed)} lines differ", *changed, sep="\n", flush=True)
    print("server:", found["refusal"] or "would start", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        tested = run_child("self_test_child", Path(scratch), suite.environment(tree))["whole"]
        print("self-test:", tested["error"] or "passed", flush=True)
        outcome = suite.run(tree, Path(scratch))
    print(
        f"vLLM's own tests with our connector: {len(outcome.passed)} passed, "
        f"{len(outcome.failed)} failed, {len(outcome.skipped)} skipped",
        *outcome.failed,
        sep="\n",
    )
    if outcome.failed:
        print(outcome.output)
    return not (found["refusal"] or tested["error"] or outcome.failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", help="default: the newest that the index has")
    asked = parser.parse_args().version
    try:
        good = attempt(asked or newest(), newest(vllm_release.KNOWN[-1]))
    except ReleaseUnavailableError as error:
        print(f"no release to try: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
