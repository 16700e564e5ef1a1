# SPDX-License-Identifier: Apache-2.0
"""Build and run the I/O core's native test program, plain and under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("NATIVE_TEST_SEED", "20261121"))
SEEDS = int(os.environ.get("NATIVE_TEST_SEEDS", "4"))
#: The time to compile and run one program: 900 s while other jobs used both cores.
LIMIT_S = 2400

pytestmark = pytest.mark.timeout(LIMIT_S)


def build(sanitize: str) -> Path:
    """Configure and compile under build/, so that a second run finds the program up to date."""
    place = ROOT / "build" / "native-tests" / (sanitize.replace(",", "-") or "plain")
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert cmake is not None, "cmake is one of the development dependencies"
    options = ["-DNVMEOF_NATIVE_TESTS=ON", f"-DSANITIZE={sanitize}", "-DCMAKE_BUILD_TYPE=None"]
    # Assertions are on. Optimization would add more compile time than it saves.
    flags = "-DCMAKE_CXX_FLAGS=-O0"
    if cache := shutil.which("ccache"):
        options.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={cache}")
    environment = {**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(place), *options, flags],
        [cmake, "--build", str(place), "--target", "test_core", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    return place / "test_core"


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_core(sanitize: str, tmp_path: Path) -> None:
    command = [str(build(sanitize)), str(tmp_path), str(SEED), str(SEEDS)]
    if sanitize == "thread":
        # ThreadSanitizer's shadow memory conflicts with full randomisation of addresses.
        command = ["setarch", "--addr-no-randomize", *command]
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": f"halt_on_error=1:suppressions={Path(__file__).parent}/tsan.supp",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout does not suit ThreadSanitizer")
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}{done.stderr}"
