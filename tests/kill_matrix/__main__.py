# SPDX-License-Identifier: Apache-2.0
"""Which suite notices which mutant. `cover` first, then `run`, which goes on where it was ended.

    python -m tests.kill_matrix cover        # notes which test runs which line
    python -m tests.kill_matrix run          # writes each mutant into matrix.json when it is done
    python -m tests.kill_matrix show

Mutants are those of the simulator, each under its name, and those that `changes.py` makes. Each
runs the tests that run its lines, by suite, until one fails. The suite `sim` is the simulator's
rules; tests/sim/test_mutants.py says with which seed each of its own mutants is caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.kill_matrix.changes import FOLDERS, PACKAGE, ROOT, Change, chosen

MATRIX = ROOT / "tests" / "kill_matrix" / "matrix.json"
SCRATCH = ROOT / "build" / "kill-matrix"
LINES = SCRATCH / "lines.json"
SUITES = {
    "unit": ["tests/unit"],
    "contract": ["tests/contract"],
    "faults": ["tests/faults"],
    "sim": ["tests/sim/test_simulator.py"],
}
#: What drives the native core without Python above it that a change could name.
NATIVE_TESTS = (
    "tests/unit/manager",
    "tests/unit/tiers",
    "tests/unit/pipeline",
    "tests/contract",
)
_PLUGIN = ("-p", "tests.kill_matrix.plugin", "-p", "no:cacheprovider")
_MARKS = "not soak and not alone and not gpu"
_LIMIT_S = 900.0


def cover(suites: Iterable[str]) -> None:
    """Write down which tests run which lines, and which fail without a mutant."""
    import coverage

    SCRATCH.mkdir(parents=True, exist_ok=True)
    for old in SCRATCH.glob("coverage*"):
        old.unlink()
    places = [place for suite in suites for place in SUITES[suite]]
    command = ["-n", "2", "--dist", "loadscope", "-q", "-rfE", "--tb=no", "-m", _MARKS]
    environment = {"NVMEOF_COVERAGE": str(SCRATCH / "coverage")}
    _, done = _pytest([*command, *places], environment, None)
    failed = set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done, re.MULTILINE))
    data = coverage.CoverageData(str(SCRATCH / "coverage"))
    for part in SCRATCH.glob("coverage.*"):
        piece = coverage.CoverageData(str(part))
        piece.read()
        data.update(piece)
    lines: dict[str, dict[str, list[str]]] = {}
    for file in data.measured_files():
        if Path(file).is_relative_to(PACKAGE):
            by_line = data.contexts_by_lineno(file)
            lines[str(Path(file).relative_to(PACKAGE))] = {
                str(line): sorted(set(tests) - {""} - failed) for line, tests in by_line.items()
            }
    LINES.write_text(json.dumps({"failed": sorted(failed), "lines": lines}))
    print(f"{len(lines)} files; {len(failed)} tests fail without a mutant: {sorted(failed)}")


def run(count: int, jobs: int, only: str) -> None:
    """Run what the matrix does not have yet."""
    covered: dict[str, dict[str, list[str]]] = json.loads(LINES.read_text())["lines"]
    matrix: dict[str, Any] = json.loads(MATRIX.read_text()) if MATRIX.exists() else {"mutants": {}}
    matrix["command"] = f"python -m tests.kill_matrix run --new {count}"
    mutants = _of_the_simulator() | {change.name: change for change in chosen(count)}
    left = [name for name in mutants if name not in matrix["mutants"] and re.search(only, name)]
    print(f"{len(left)} of {len(mutants)} mutants are left", flush=True)

    def play(name: str) -> tuple[str, dict[str, Any]]:
        what = mutants[name]
        if isinstance(what, Change):
            found = _tests_of(covered, what.path, range(what.line, what.last_line + 1))
            environment, row = {"NVMEOF_CHANGE": name}, asdict(what)
        else:
            environment, row = {"NVMEOF_MUTANT": name}, {"kind": "of the simulator"}
            found = sorted(
                {test for path, lines in what or () for test in _tests_of(covered, path, lines)}
            )
            if what is None:
                found = list(NATIVE_TESTS)
        row["suites"] = {}
        for suite, places in SUITES.items():
            tests = [one for one in found if one.startswith(tuple(places))]
            row["suites"][suite] = _played(tests, environment) if tests else {"tests": 0}
        return name, row

    with ThreadPoolExecutor(jobs) as pool:
        for name, row in pool.map(play, left):
            matrix["mutants"][name] = row
            MATRIX.write_text(json.dumps(matrix, indent=1, sort_keys=True) + "\n")
            by = [suite for suite, one in row["suites"].items() if one.get("killed_by")]
            print(f"{name}: {', '.join(by) or 'not killed'}", flush=True)


def _tests_of(
    covered: dict[str, dict[str, list[str]]], path: str, lines: Iterable[int]
) -> list[str]:
    """The tests that run one of these lines; of the whole file where no test by itself does."""
    by_line = covered.get(path, {})
    found = {test for line in lines for test in by_line.get(str(line), ())}
    return sorted(found or {test for tests in by_line.values() for test in tests})


def _of_the_simulator() -> dict[str, list[tuple[str, range]] | None]:
    """By mutant: the files and lines of the package that it replaces, which may be none. None: it
    is a switch of the native core."""
    from tests.sim import test_mutants
    from tests.sim.mutants import MUTANTS, NATIVE

    assert test_mutants  # importing it registers the mutants
    found: dict[str, list[tuple[str, range]] | None] = dict.fromkeys(sorted(NATIVE))
    for name in sorted(MUTANTS.keys() - NATIVE):
        replaced: list[tuple[str, range]] = []
        found[name] = replaced
        for target, attribute, _ in MUTANTS[name]():
            real = getattr(target, attribute)
            code = getattr(getattr(real, "fget", real), "__code__", None)
            if code is not None and Path(code.co_filename).is_relative_to(PACKAGE):
                last = max(line for *_, line in code.co_lines() if line)
                path = str(Path(code.co_filename).relative_to(PACKAGE))
                replaced.append((path, range(code.co_firstlineno, last + 1)))
    return found


def _played(tests: list[str], environment: dict[str, str]) -> dict[str, Any]:
    began_s = time.monotonic()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as arguments:
        arguments.write("\n".join(tests))
        arguments.flush()
        options = ["-x", "-q", "-rfE", "--tb=no", "--timeout=120", "-m", _MARKS]
        status, text = _pytest([*options, f"@{arguments.name}"], environment, _LIMIT_S)
    killed_by = None
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        killed_by = first[1] if first else text.strip()[-200:]
    return {
        "tests": len(tests),
        "killed_by": killed_by,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _pytest(
    arguments: list[str], environment: dict[str, str], limit_s: float | None
) -> tuple[int, str]:
    """Return the exit status and what was printed."""
    path = os.pathsep.join([str(ROOT / "tests" / "kill_matrix" / "site"), str(ROOT)])
    command = [sys.executable, "-m", "pytest", *_PLUGIN, *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return pytest.ExitCode.INTERRUPTED, f"did not end within {limit_s:.0f} s"
    return done.returncode, done.stdout + done.stderr


def show() -> None:
    """Print how many mutants each suite kills, and those that none does or that none reaches."""
    rows = json.loads(MATRIX.read_text())["mutants"]
    killed, alone = Counter[str](), Counter[str]()
    for row in rows.values():
        by = [suite for suite, one in row["suites"].items() if one.get("killed_by")]
        killed.update(by)
        alone.update(by if len(by) == 1 else ())
    print(f"{len(rows)} mutants")
    for suite in SUITES:
        print(f"{suite:10} kills {killed[suite]:4}, of which no other does {alone[suite]:4}")
    for name, row in sorted(rows.items()):
        if not any(one.get("killed_by") for one in row["suites"].values()):
            is_run = any(one["tests"] for one in row["suites"].values())
            word = "survives" if is_run else "not reached"
            print(f"{word}: {name}  {row.get('before', '')!r} -> {row.get('after', '')!r}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kill_matrix", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("cover", help="note which test runs which line")
    verb = verbs.add_parser("run", help="run what is left")
    verb.add_argument(
        "--new", type=int, default=10, help=f"changes in each of {len(FOLDERS)} folders"
    )
    verb.add_argument("--jobs", type=int, default=2, help="mutants side by side")
    verb.add_argument("--only", default="", help="regular expression: the mutants to run")
    verbs.add_parser("show", help="print a summary")
    chosen_verb = parser.parse_args()
    if chosen_verb.verb == "cover":
        cover(SUITES)
    elif chosen_verb.verb == "run":
        run(chosen_verb.new, chosen_verb.jobs, chosen_verb.only)
    else:
        show()


if __name__ == "__main__":
    main()
