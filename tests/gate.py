# SPDX-License-Identifier: Apache-2.0
"""The gate: the tests that `make test` runs. `make test-all` also runs the others.

In the gate is what is quick. Of what is not, it has what stands between a fault and wrong tokens:
one server of each kind that a fault would show in, one boot of the fabric, one build with
sanitizers, and the simulator's mutants of the modules that differ from the main branch.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NATIVE = "vllm_nvmeof_offload/native"

#: Beginnings of the names of tests; each of them starts a server or an engine.
END_TO_END = (
    "tests/e2e/test_tokens.py",
    "tests/e2e/test_restart.py",  # SIGKILL, and a full disk
    "tests/e2e/test_faults.py",
    "tests/e2e/test_preempt.py",
    "tests/e2e/test_parallel.py",  # two ranks
    "tests/e2e/test_share.py::test_what_one_has_stored_the_other_loads",
    "tests/e2e/test_share_quantized.py",
    # One model of each kind of KV cache group; full attention is in all of the above.
    "tests/e2e/shapes/test_groups.py::TestGemma::",
    "tests/e2e/shapes/test_groups.py::TestLfm2::",
    "tests/e2e/shapes/test_latent_attention.py::test_it_is",
    "tests/e2e/shapes/test_latent_attention.py::test_the_bytes",
)
#: Slow, and in the gate nevertheless.
SLOW = (
    "tests/native/test_native.py::test_core[address,undefined]",
    # What it plays, another test counts.
    "tests/sim/test_simulator.py::test_no_rule_breaks_where_copies_check_payloads[1]",
    "tests/faults/test_store_faults.py::test_a_load_gives_the_right_bytes_or_a_miss[0]",
    "tests/faults/test_kill.py::test_acknowledged_chunks_survive_sigkill[uring]",
)
#: Left to `make test-rest`: tests of the benchmarks and of `make gpu`; preemption, which
#: test_tokens.py and test_preempt.py have.
NOT = (
    "tests/unit/bench/",
    "tests/unit/copies/test_copy_bench.py",
    "tests/unit/tools/test_gpu.py",
    "tests/e2e/test_faults.py::test_preemption_and_many_at_once",
    # It searches seeds for a case that the simulation is to reach.
    "tests/faults/test_store_faults.py::test_a_crash_loses_a_name_now_and_then",
    # More seeds of the rules that the first two batches play, and other numbers of engines.
    *(f"tests/sim/test_simulator.py::test_no_rule_breaks[{batch}]" for batch in range(2, 8)),
    *(
        f"tests/sim/test_simulator.py::test_no_rule_breaks_{what}[{count}]"
        for what, counts in (
            ("beside_other_engines", "13"),
            ("while_peers_read_for_us", "13"),
            ("while_we_read_for_peers", "02"),
        )
        for count in counts
    ),
)
#: The contract's engines: one of each kind, and each behind the injector of faults.
ENGINES = {"faulty-threads", "faulty-uring", "threads-direct", "uring-direct"}
#: Played in one boot.
SCENARIOS = {
    "all-lost-past-fast-io-fail:uring",
    "medium-hangs:uring",
    "leased-region-taken-over:uring",
}


def has(item: Any) -> bool:
    """Whether this item of pytest is in the gate."""
    name: str = item.nodeid
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if name.startswith(NOT):
        return False
    if name.startswith("tests/e2e/"):
        return name.startswith(END_TO_END) and parameters.get("io") != "denied"
    if name.startswith("tests/fabric/") and "scenario" in parameters:
        return parameters["scenario"] in SCENARIOS
    if name.startswith("tests/sim/test_mutants.py::test_a_broken_rule_is_caught"):
        return parameters["name"] in _mutants()
    if parameters.get("make_rig", "uring-direct") not in ENGINES:
        return False
    return name.startswith(SLOW) or item.get_closest_marker("slow") is None


@functools.cache
def _mutants() -> set[str]:
    """The simulator's mutants of what differs from the main branch."""
    return mutants_of(changed())


def changed() -> list[str]:
    """The files that differ from where the main branch of `origin` is; none without it."""
    base = _git("merge-base", "HEAD", "origin/HEAD") or _git("merge-base", "HEAD", "origin/main")
    return _git("diff", "--name-only", base[0]) if base else []


def mutants_of(files: Iterable[str]) -> set[str]:
    """The mutants that break something in one of these files; all, where it is the simulator."""
    from tests.sim.mutants import MUTANTS
    from tests.sim.mutants import NATIVE as SWITCHES

    files = set(files)
    if any(file.startswith("tests/sim/") for file in files):
        return set(MUTANTS)
    found = set()
    for name in MUTANTS:
        if name not in SWITCHES and files & {_file_of(target) for target, *_ in MUTANTS[name]()}:
            found.add(name)
    for file in files:
        if file.startswith(NATIVE) and (ROOT / file).exists():
            found |= set(re.findall(r'mutant\("(\w+)"\)', (ROOT / file).read_text())) & SWITCHES
    return found


def _file_of(target: Any) -> str:
    module = sys.modules.get(getattr(target, "__module__", getattr(target, "__name__", "")))
    file = getattr(module, "__file__", None)
    return str(Path(file).relative_to(ROOT)) if file and Path(file).is_relative_to(ROOT) else ""


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []
