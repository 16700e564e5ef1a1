# SPDX-License-Identifier: Apache-2.0
"""The simulator over a build of index and machine with the address and undefined sanitizers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PLACE = ROOT / "build" / "sanitized"
_MODULE = "vllm_nvmeof_offload.native._tiers"
_SANITIZERS = "address,undefined"


def start_again() -> None:
    """Run this program's command line again in a process that has the sanitizers' runtime, which
    must be there before anything else. The call returns only in that process."""
    if os.environ.get("NVMEOF_SIM_SANITIZED"):
        _load(next(_PLACE.glob("package/vllm_nvmeof_offload/native/_tiers*.so")))
        return
    _build()
    found = [_output("g++", f"-print-file-name={name}.so") for name in ("libasan", "libstdc++")]
    environment = {
        **os.environ,
        "NVMEOF_SIM_SANITIZED": "1",
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps much until its end
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    command = [sys.executable, "-m", "tests.sim", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, cwd=ROOT).returncode)


def _build() -> None:
    """Build the package into a folder of its own; nothing is compiled that has not changed."""
    settings = [f"cmake.define.SANITIZE={_SANITIZERS}", f"build-dir={_PLACE}/cmake"]
    # The simulator itself takes most of the time, and with more optimisation the compiler would.
    settings += ["cmake.build-type=None", "cmake.define.CMAKE_CXX_FLAGS=-O1"]
    options = [word for setting in settings for word in ("--config-settings", setting)]
    target = ["--no-build-isolation", "--target", str(_PLACE / "package"), "--reinstall"]
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run(
        [uv, "--quiet", "pip", "install", "--no-deps", *target, *options, str(ROOT)], check=True
    )


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _load(path: Path) -> None:
    """Let the package's native module be this one, before anything imports it."""
    spec = importlib.util.spec_from_loader(_MODULE, ExtensionFileLoader(_MODULE, str(path)))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_MODULE] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
