# SPDX-License-Identifier: Apache-2.0
"""`make test` with scripted suites, what its gate has, and the mutants of the kill matrix."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gate
from tests.contract.rig import ENGINES
from tests.fabric.scenarios import BOOTS
from tests.kill_matrix import changes
from tests.process import wait_until
from tests.sim.mutants import MUTANTS

ROOT = Path(__file__).parents[3]
SUITES = {
    "fast": "tests/unit",
    "clocks": "(alone or fabric) and not soak",
    "e2e": "tests/e2e",
}
WAITS = """
import signal, sys
from pathlib import Path
here, suite = Path(sys.argv[1]), sys.argv[2]
def end(number, frame):
    (here / "interrupted").write_text(suite)
    sys.exit(2)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
(here / "waiting").touch()
signal.pause()
"""
#: In place of the environment's Python: pytest is this script, everything else is real.
PYTHON = """#!/usr/bin/env bash
[ "$1" = -m ] || exec {python} "$@"
here={here}
case "$* " in
*" -m (alone or fabric) and not soak "*) suite=clocks ;;
*" -m alone and not soak "*) suite=alone ;;
*" tests/unit "*) suite=fast ;;
*" tests/fabric "*) suite=fabric ;;
*" tests/e2e "*) suite=e2e ;;
esac
echo "$*" >"$here/$suite.args"
echo "$suite" >>"$here/started"
if [ -e "$here/$suite.waits" ]; then
    exec {python} -c '{waits}' "$here" "$suite"
fi
echo "closing line of $suite"
[ ! -e "$here/$suite.fails" ]
"""


class Make:
    """The project's Makefile with a made-up environment whose suites the test controls."""

    def __init__(self, here: Path) -> None:
        self.here = here
        for name in ("stamp", "tests-stamp"):
            (here / name).touch()
        python = here / "python"
        python.write_text(PYTHON.format(python=sys.executable, here=here, waits=WAITS))
        python.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start it in a separate process group, as a shell does for Ctrl-C."""
        stamps = f"STAMP={self.here}/stamp", f"TESTS_STAMP={self.here}/tests-stamp"
        made_up = (f"BIN={self.here}", *stamps, "SETUP_INPUTS=")
        # The suite that runs this test was started by make, too.
        outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PART")
        return subprocess.Popen(
            ["make", *arguments, *made_up],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in outer},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return the exit status and everything printed."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def started(self) -> list[str]:
        return (self.here / "started").read_text().split()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return Make(tmp_path)


@pytest.mark.parametrize("jobs", [(), ("-j4",), ("JOBS=0",)])
def test_all_suites_run_when_some_fail_and_the_end_names_those(
    make: Make, jobs: tuple[str, ...]
) -> None:
    (make.here / "fast.fails").touch()
    (make.here / "clocks.fails").touch()
    status, output = make.run("test", *jobs)
    assert status != 0
    assert make.started() == list(SUITES)
    closing = output[output.index("closing line of e2e") :].splitlines()
    assert closing[1:3] == ["test suites passed: e2e", "test suites FAILED: fast, clocks"]
    assert all(f"closing line of {name}" in output for name in SUITES)
    for name, mark in SUITES.items():
        assert mark in (make.here / f"{name}.args").read_text()
    assert "jobserver" not in output


@pytest.mark.parametrize(
    ("goal", "part"), [("test", "--part gate"), ("test-rest", "--part rest"), ("test-all", "")]
)
def test_each_goal_runs_its_part_of_every_suite(make: Make, goal: str, part: str) -> None:
    status, output = make.run(goal)
    assert status == 0
    assert make.started() == list(SUITES)
    assert output.splitlines()[-1] == "test suites passed: fast, clocks, e2e"
    for name in SUITES:
        arguments = (make.here / f"{name}.args").read_text()
        assert part in arguments
        assert ("--part" in arguments) == bool(part)


def test_the_fast_tests_are_followed_by_those_that_run_alone(make: Make) -> None:
    (make.here / "fast.fails").touch()
    status, output = make.run("test-fast")
    assert status != 0
    assert make.started() == ["fast", "alone"]
    assert "test suites FAILED: fast\n" in output


@pytest.mark.parametrize("suite", ["fabric", "e2e"])
def test_one_suite_can_run_by_itself(make: Make, suite: str) -> None:
    (make.here / f"{suite}.fails").touch()
    assert make.run(f"test-{suite}")[0] != 0
    assert make.started() == [suite]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_suite_that_runs_and_starts_no_other(
    make: Make, number: signal.Signals
) -> None:
    (make.here / "clocks.waits").touch()
    process = make.start("test")
    try:
        wait_until("the suite that waits", (make.here / "waiting").exists)
        if number == signal.SIGINT:  # as a terminal does
            os.killpg(process.pid, number)
        else:
            process.terminate()
        output, _ = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended, as they must
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert (make.here / "interrupted").read_text().split() == ["clocks"]
    assert make.started() == ["fast", "clocks"]
    assert f"{number.name} ended clocks; not run: e2e" in output


def test_a_python_that_is_not_here_is_named_before_a_wheel_is_removed(tmp_path: Path) -> None:
    kept = tmp_path / "vllm_nvmeof_offload-1.whl"
    kept.touch()
    done = subprocess.run(
        ["bash", "tools/wheel.sh", sys.prefix, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONS": "3.99"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "PYTHONS: no Python 3.99 here" in done.stderr
    assert kept.exists()


@pytest.mark.parametrize("name", [*gate.END_TO_END, *gate.SLOW, *gate.NOT])
def test_what_is_named_exists(name: str) -> None:
    file, *parts = name.partition("[")[0].rstrip(":").split("::")
    assert (gate.ROOT / file).exists()
    text = (gate.ROOT / file).read_text() if parts else ""
    for part in parts:
        assert f"def {part}" in text or f"class {part}" in text


def test_engines_are_those_of_the_contract() -> None:
    assert ENGINES.keys() > gate.ENGINES


def test_scenarios_are_played() -> None:
    assert {name for boot in BOOTS for name in boot} >= gate.SCENARIOS


@pytest.mark.parametrize(
    ("file", "mutant"),
    [
        ("vllm_nvmeof_offload/manager/look_up.py", "first_miss_is_not_asked_again"),
        ("vllm_nvmeof_offload/native/tiers/index.h", "doom_ignores_the_generation"),
    ],
)
def test_a_file_has_the_mutants_that_break_something_in_it(file: str, mutant: str) -> None:
    found = gate.mutants_of([file, "README.md"])
    assert mutant in found
    assert len(found) < len(MUTANTS) / 2


def test_the_simulator_has_all_mutants() -> None:
    assert gate.mutants_of(["tests/sim/world.py"]) == set(MUTANTS)
    assert gate.mutants_of(["README.md"]) == set()


def test_a_process_runs_under_a_change_and_so_do_its_children() -> None:
    file = changes.PACKAGE / "manager" / "load_or_recompute.py"
    change = next(one for one in changes.changes_of(file) if one.kind == "constant")
    module = ".".join(file.relative_to(changes.ROOT).with_suffix("").parts)
    program = f"import {module} as m; print(type(m.__loader__).__name__ == 'Changed')"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    for name in (change.name, ""):
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(changes.__file__).with_name("site")),
            "NVMEOF_CHANGE": name,
        }
        done = subprocess.run(
            [sys.executable, "-c", child], env=environment, capture_output=True, text=True
        )
        assert done.stdout == f"{bool(name)}\n", done.stderr
