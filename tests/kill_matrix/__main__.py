# SPDX-License-Identifier: Apache-2.0
"""Finds the suites that detect each mutant: first `cover`, then `run`, which can be continued.

    python -m tests.kill_matrix cover        # notes which test runs which line
    python -m tests.kill_matrix run          # writes each mutant into build/kill-matrix/matrix.json
    python -m tests.kill_matrix show

Mutants are those of the simulator, each under its name, and those that `changes.py` makes. Each
runs the tests that run its lines, by suite, until one fails. The suite `sim` is the simulator's
rules; tests/sim/test_mutants.py says with which seed each of its own mutants is caught.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.kill_matrix.changes import FOLDERS, PACKAGE, ROOT, Change, chosen
from tests.kill_matrix.plugin import NO_MUTANT, SUITES, suite_of

SCRATCH = ROOT / "build" / "kill-matrix"
MATRIX = SCRATCH / "matrix.json"
LINES = SCRATCH / "lines.json"
#: What drives the native core without Python above it that a change could name.
NATIVE_TESTS = (
    "tests/unit/manager",
    "tests/unit/tiers",
    "tests/unit/pipeline",
    "tests/contract/test_native_lanes.py",
)
_PLUGIN = ("-p", "tests.kill_matrix.plugin", "-p", "no:cacheprovider")
_MARKS = "not soak and not alone and not gpu"
_TEST_LIMIT_S = 60
#: The status of a process that was ended because it took too long.
_HANGS = 99
#: What takes long to import, and is imported before a mutant's process is forked.
_HEAVY = ("numpy", "torch", "vllm.config", "vllm.v1.kv_cache_interface")
_EARLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")

_Covered = dict[str, dict[str, list[str]]]


def cover(suites: Iterable[str]) -> None:
    """Write down which tests run which lines, and which fail without a mutant."""
    import coverage

    SCRATCH.mkdir(parents=True, exist_ok=True)
    for old in SCRATCH.glob("coverage*"):
        old.unlink()
    places = [place for suite in suites for place in SUITES[suite]]
    environment = {"NVMEOF_COVERAGE": str(SCRATCH / "coverage")}
    failed = _failed(places, environment)
    failed |= _failed(list(NATIVE_TESTS), {"NVMEOF_MUTANT": NO_MUTANT})
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


def run(count: int, jobs: int, only: str, limit_s: float) -> None:
    """Run what the matrix does not have yet."""
    noted = json.loads(LINES.read_text())
    covered: _Covered = noted["lines"]
    rows: dict[str, Any] = json.loads(MATRIX.read_text()) if MATRIX.exists() else {}
    lines_run = Counter[str]()
    for by_line in covered.values():
        for running in by_line.values():
            lines_run.update(running)
    for module in _HEAVY:
        importlib.import_module(module)
    # In a process of its own: a mutant's module is imported only under its change.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        simulators = pool.apply(_of_the_simulator)
    mutants = simulators | {change.name: change for change in chosen(count)}
    left = [name for name in mutants if name not in rows and re.search(only, name)]
    print(f"{len(left)} of {len(mutants)} mutants are left", flush=True)
    playing: dict[int, tuple[str, dict[str, Any]]] = {}
    while left or playing:
        while left and len(playing) < jobs:
            name = left.pop(0)
            what = mutants[name]
            row = asdict(what) if isinstance(what, Change) else {"kind": "of the simulator"}
            tests = _tests_under(what, covered, lines_run)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    _play(name, isinstance(what, Change), tests, noted["failed"], limit_s)
                finally:
                    os._exit(pytest.ExitCode.INTERNAL_ERROR)
            playing[pid] = name, row
        pid, status = os.wait()
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # servers of a test that was ended
        name, row = playing.pop(pid)
        row["suites"] = _suites(pid, status)
        if "path" not in row:
            own = f"tests/sim/test_mutants.py::test_a_broken_rule_is_caught[{name}]"
            row["suites"]["sim"] = {"killed_by": own}
        rows[name] = row
        MATRIX.write_text(json.dumps(rows))
        by = [suite for suite, one in row["suites"].items() if one.get("killed_by")]
        print(f"{name}: {', '.join(by) or 'not killed'}", flush=True)


def _tests_under(
    what: Change | list[tuple[str, range]] | None, covered: _Covered, lines_run: Counter[str]
) -> list[str]:
    """Those that run fewest lines first, by file: most are quick, and of one thing."""
    if isinstance(what, Change):
        found = _tests_of(covered, what.path, range(what.line, what.last_line + 1))
    elif what is None:
        return list(NATIVE_TESTS)
    else:
        found = {test for path, lines in what for test in _tests_of(covered, path, lines)}
        found = {test for test in found if not test.startswith("tests/sim/")}
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(found):
        by_file[test.partition("::")[0]].append(test)
    files = sorted(by_file.values(), key=lambda tests: min(lines_run[test] for test in tests))
    return [test for tests in files for test in tests]


def _play(
    name: str, is_change: bool, tests: list[str], without: list[str], limit_s: float
) -> NoReturn:
    """In a forked process: run the tests, and end."""
    os.setsid()
    place = SCRATCH / f"played-{os.getpid()}"
    with place.with_suffix(".txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    site = ROOT / "tests" / "kill_matrix" / "site"
    path = os.pathsep.join([str(site), str(ROOT)])
    os.environ.update(PYTHONPATH=path, NVMEOF_PLAYED=str(place), NVMEOF_LIMIT_S=str(limit_s))
    os.environ["NVMEOF_CHANGE" if is_change else "NVMEOF_MUTANT"] = name
    if is_change:
        runpy.run_path(str(site / "sitecustomize.py"))
    timer = threading.Timer(len(SUITES) * (limit_s + 2 * _TEST_LIMIT_S), os._exit, [_HANGS])
    timer.daemon = True
    timer.start()
    arguments = place.with_suffix(".tests")
    arguments.write_text("\n".join(tests))
    options = ["-q", "--tb=short", f"--timeout={_TEST_LIMIT_S}", "-m", _MARKS, *_EARLY]
    options += [f"--deselect={test}" for test in without]
    status = pytest.main([*_PLUGIN, *options, f"@{arguments}"]) if tests else 0
    sys.stdout.flush()
    os._exit(int(status))


def _suites(pid: int, status: int) -> dict[str, Any]:
    """What the process has written down by suite. Where it crashed, its last test killed."""
    place = SCRATCH / f"played-{pid}"
    suites: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {}
    running = suites.pop("running", None)
    code = os.waitstatus_to_exitcode(status)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        if running:
            suites[suite_of(running)].setdefault("killed_by", running)
        elif not any(one.get("killed_by") for one in suites.values()):
            raise RuntimeError(f"a mutant's process ended with {code}: {place}.txt")
    return {suite: suites.get(suite, {"tests": 0}) for suite in SUITES}


def _tests_of(covered: _Covered, path: str, lines: Iterable[int]) -> set[str]:
    """The tests that run one of these lines; of the whole file where no test by itself does."""
    by_line = covered.get(path, {})
    found = {test for line in lines for test in by_line.get(str(line), ())}
    return found or {test for tests in by_line.values() for test in tests}


def _of_the_simulator() -> dict[str, list[tuple[str, range]] | None]:
    """By mutant: the files and lines of the package that it replaces, which may be none. None: it
    is a switch of the native core."""
    from tests.sim.mutants import MUTANTS, NATIVE

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


def _failed(places: list[str], environment: dict[str, str]) -> set[str]:
    """Run the tests of these places side by side."""
    options = ["-n", "2", "--dist", "loadscope", "-q", "-rfE", "--tb=no", "-m", _MARKS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *_PLUGIN, *options, *places],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(done.stdout + done.stderr)
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE))


def show() -> None:
    """Print how many mutants each suite kills, and by name those that no test of the gate kills,
    that none at all kills, and that none reaches."""
    rows = json.loads(MATRIX.read_text())
    gate = _tests_of_the_gate()
    killed, alone = Counter[str](), Counter[str]()
    others: dict[str, list[str]] = defaultdict(list)
    for name, row in sorted(rows.items()):
        tests = {
            suite: one["killed_by"] for suite, one in row["suites"].items() if "killed_by" in one
        }
        killed.update([*tests])
        alone.update([*tests] if len(tests) == 1 else [])
        if not tests:
            is_run = any(one["tests"] for one in row["suites"].values())
            text = f"{name}  {row.get('before', '')!r} -> {row.get('after', '')!r}"
            others["survive" if is_run else "are not reached"].append(text)
        elif not gate & set(tests.values()):
            others["are killed by make test-all, and by make test if their module differs"].append(
                f"{name}: {', '.join(tests.values())}"
            )
    print(f"{len(rows)} mutants")
    for suite in SUITES:
        print(f"{suite:10} kills {killed[suite]:4}, of which no other does {alone[suite]:4}")
    for how, names in others.items():
        print(f"\n{len(names)} {how}:", *names, sep="\n  ")


def _tests_of_the_gate() -> set[str]:
    places = [place for suite in SUITES.values() for place in suite]
    command = [sys.executable, "-m", "pytest", "--part", "gate", "--collect-only", "-q", *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


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
    verb.add_argument("--limit", type=float, default=30.0, help="seconds of a mutant and suite")
    verb.add_argument("--only", default="", help="regular expression: the mutants to run")
    verbs.add_parser("show", help="print a summary")
    chosen_verb = parser.parse_args()
    if chosen_verb.verb == "cover":
        cover(SUITES)
    elif chosen_verb.verb == "run":
        run(chosen_verb.new, chosen_verb.jobs, chosen_verb.only, chosen_verb.limit)
    else:
        show()


if __name__ == "__main__":
    main()
