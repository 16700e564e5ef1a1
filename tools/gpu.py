# SPDX-License-Identifier: Apache-2.0
"""Run the checks and benchmarks that need an NVIDIA GPU in stages; called by `make gpu`.

    python3 tools/gpu.py [--bundle gpu-bundle.tar.xz] [STAGE[:SECONDS][+STAGE…] ...]

Each stage ends within its limit, which is below ten minutes. Stages joined by + run concurrently,
which suits tests but distorts benchmarks. After each stage all results so far are packed into
gpu.tgz in the directory named by the variable OUT; gpu.log there has the output of a stage that
runs alone. Only this Python is needed: no network, make, tar or xz. gpu_stage.py runs a stage.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_stage import Ended, pack, run_stage  # noqa: E402 - a script's neighbour

RESULTS = ROOT / "build" / "bench"
LOGS = ROOT / "build" / "logs"
#: The maximum limit of a stage: some machines allow a command ten minutes, including packing.
LIMIT_S_MAX = 560
BUNDLE = "gpu-bundle"
NATIVE_MODULES = "_tiers", "_native"
#: The command that runs a single stage with this process's path.
ITSELF = (sys.executable, str(Path(__file__).resolve()), "--inside")
NEEDED = ("numpy", "pytest", "torch", "cuda.bindings", "cuda.core", "pydantic", "rich", "typer")
_SHAPES = "tests/e2e/shapes"


@dataclass(frozen=True)
class Stage:
    """A stage. `engine` is whether it needs a vLLM for GPUs with our plugin."""

    limit_s: int
    command: Callable[[str], list[str]]
    engine: bool = False


def run_pytest(*arguments: str, timeout_s: int = 150) -> Callable[[str], list[str]]:
    """Return a pytest command without the project's settings, whose plugins may be missing."""

    def command(name: str) -> list[str]:
        limit = ["--timeout", str(timeout_s)] if there("pytest_timeout") else []
        return [
            *(sys.executable, "-P", "-m", "pytest", "--import-mode=importlib"),
            *("-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(ROOT), "-v", "-ra"),
            *(*limit, "--junitxml", str(RESULTS / f"gpu-{name}.xml"), *arguments),
        ]

    return command


def bench(name: str, json: str, *arguments: str) -> Callable[[str], list[str]]:
    def command(_: str) -> list[str]:
        call = [sys.executable, "-P", "-m", "vllm_nvmeof_offload.cli", "bench", *name.split()]
        return [*call, *arguments, "--json", str(RESULTS / f"{json}.json")]

    return command


def servers(name: str, *arguments: str) -> Callable[[str], list[str]]:
    given = ("--server-args", os.environ.get("GPU_SERVER_ARGS", ""))
    return bench(f"serve {name}", f"{name}-gpu", *arguments, *given)


def sanitizer(name: str) -> list[str]:
    # Some calls that torch makes fail, which is harmless.
    tool = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"]
    chosen = "(contiguous or per_layer) and (38 or 36 or 9216)"
    call = run_pytest("tests/gpu/test_copies.py", "-m", "gpu", "-k", chosen)(name)
    return [*tool, "--error-exitcode", "9", "--target-processes", "all", *call]


def engine(*files: str) -> Callable[[str], list[str]]:
    return run_pytest(*files, "-m", "not soak", timeout_s=300)


STAGES: dict[str, Stage] = {
    "smoke": Stage(110, lambda _: [sys.executable, "-P", str(ROOT / "tools/gpu_smoke.py")]),
    "one": Stage(
        190,
        run_pytest(f"{_SHAPES}/test_on_gpu.py", "-m", "gpu", "-k", "dma and BLHNC"),
        engine=True,
    ),
    "copies": Stage(180, run_pytest("tests/gpu", "-m", "gpu")),
    "sanitizer": Stage(240, sanitizer),
    "kernel": Stage(240, run_pytest(f"{_SHAPES}/test_on_gpu.py", "-k", "kernel"), engine=True),
    "auto": Stage(190, run_pytest(f"{_SHAPES}/test_on_gpu.py", "-k", "auto"), engine=True),
    "graphs": Stage(190, run_pytest(f"{_SHAPES}/test_on_gpu.py", "-k", "graphs"), engine=True),
    "failing": Stage(190, engine(f"{_SHAPES}/test_failing_reads.py"), engine=True),
    "groups": Stage(
        300,
        engine(f"{_SHAPES}/test_groups.py", "-k", "TestLfm2 or (TestGemma and not TestGemma4)"),
        engine=True,
    ),
    "tokens": Stage(240, engine("tests/e2e/test_tokens.py"), engine=True),
    "preempt": Stage(240, engine("tests/e2e/test_preempt.py"), engine=True),
    "faults": Stage(240, engine("tests/e2e/test_faults.py"), engine=True),
    "checksums": Stage(240, engine("tests/e2e/test_checksum_at.py"), engine=True),
    "bench": Stage(
        300,
        bench("copy", "copy", "--rounds", "3", "--parts", "transfer,few,both,submit,loops"),
    ),
    "benchdisk": Stage(240, bench("copy", "copy-disk", "--rounds", "3", "--parts", "disk")),
    "crc": Stage(150, bench("copy", "crc", "--rounds", "3", "--parts", "crc")),
    "hotpath": Stage(240, bench("hotpath", "hotpath-gpu", "--repeats", "3")),
    "ttft": Stage(
        560,
        servers(
            *("ttft", "--lengths", "4096,16384,32768", "--rounds", "2"),
            *("--arms", "none,full:dma,full:kernel,pool:dma,peer_full"),
        ),
        engine=True,
    ),
    "stall": Stage(
        400,
        servers("stall", "--rounds", "3", "--arms", "none,full,pool,peer_full"),
        engine=True,
    ),
    "shapes": Stage(560, engine(f"{_SHAPES}/test_answers.py"), engine=True),
    "weights": Stage(560, engine(f"{_SHAPES}/test_weights.py"), engine=True),
}


def there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def why_no_engine() -> str:
    """Return why stages that need an engine cannot run here, or ""."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "no vLLM is installed"
    if "cpu" in version:
        return f"vLLM {version} is a build for CPUs"
    plugins = {one.name for one in metadata.entry_points(group="vllm.general_plugins")}
    return "" if "nvmeof" in plugins else "vLLM does not see our plugin: install our wheel"


def chosen(words: list[str]) -> list[list[tuple[str, int]]]:
    """Return the names and limits of the stages in `words`, grouped by word; without words, of all
    stages, one per group. Raises SystemExit if a stage is unknown or a limit is out of range."""
    return [[_stage(one) for one in word.split("+")] for word in words or STAGES]


def _stage(word: str) -> tuple[str, int]:
    name, _, limit = word.partition(":")
    if name not in STAGES:
        raise SystemExit(f"gpu: no stage {name}; the stages are {', '.join(STAGES)}")
    if limit and not (limit.isdecimal() and 0 < int(limit) <= LIMIT_S_MAX):
        raise SystemExit(f"gpu: {word}: a limit is 1 to {LIMIT_S_MAX} seconds")
    return name, int(limit or STAGES[name].limit_s)


def unpacked(bundle: Path, place: Path) -> Path:
    """Return the bundle's packages, unpacked in `place`."""
    about = bundle.stat()
    mark, wanted = place / "unpacked", f"{about.st_size} {about.st_mtime_ns}"
    if not (mark.exists() and mark.read_text() == wanted):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        with tarfile.open(bundle) as archive:
            # Available since Python 3.11.4.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(place)
        mark.write_text(wanted)
    return place / BUNDLE / "site"


def take_native_core(path: list[str], package: Path = ROOT / "vllm_nvmeof_offload") -> str:
    """Copy the native core of an installed wheel into a checkout without one, which is first on the
    path; return its origin."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = [f"{module}{suffix}" for module in NATIVE_MODULES]
    for place in map(Path, path):
        core = place / package.name / "native"
        if package / "native" == core or not all((core / name).exists() for name in modules):
            continue
        if not (missing := [name for name in modules if not (package / "native" / name).exists()]):
            return ""
        libraries = place / f"{package.name}.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, package.parent / libraries.name, dirs_exist_ok=True)
        for name in missing:
            shutil.copy2(core / name, package / "native" / name)
        return str(place)
    return ""


def environment(path: list[str]) -> dict[str, str]:
    """Return the variables of every stage: the checkout precedes installed packages, there is no
    network, and output is not buffered."""
    from vllm_nvmeof_bench.servers.engine import engine_environment

    return engine_environment() | {
        # A machine without a network can have no other address.
        "VLLM_HOST_IP": "127.0.0.1",
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo"),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PIP_NO_INDEX": "1",
    }


def left_out(name: str) -> str:
    """Return why a stage cannot run here, or ""."""
    if STAGES[name].engine and (why := why_no_engine()):
        return why
    if name == "sanitizer" and shutil.which("compute-sanitizer") is None:
        return "no compute-sanitizer on PATH (part of the CUDA toolkit)"
    return ""


def run(groups: list[list[tuple[str, int]]], env: dict[str, str]) -> list[str]:
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    failed = []

    def keep() -> None:
        if out:
            pack([RESULTS, LOGS], out / "gpu.tgz")

    for group in groups:
        try:
            if len(group) > 1:
                failed += run_together(group, env, keep)
            elif not run_one(*group[0], env, out / "gpu.log" if out else None):
                failed.append(group[0][0])
        finally:  # also if this process receives a signal
            keep()
    return failed


def run_one(name: str, limit_s: int, env: dict[str, str], live: Path | None) -> bool:
    """Run a stage; return False if it failed. Its output is also appended to `live`."""
    if why := left_out(name):
        print(f"gpu: {name}: left out: {why}", flush=True)
        return True
    print(f"gpu: {name}: at most {limit_s} s", flush=True)
    log = LOGS / f"gpu-{name}.log"
    ended = run_stage(STAGES[name].command(name), limit_s, env, log, live, ROOT)
    print(f"{ended.tail}gpu: {name}: {describe(ended)}, {ended.seconds:.0f} s", flush=True)
    return ended.code == 0 and not ended.timed_out


def run_together(
    group: list[tuple[str, int]], env: dict[str, str], keep: Callable[[], None]
) -> list[str]:
    """Run stages concurrently, calling `keep` after each; return the names of failed ones. Each
    runs in a separate process, because the processes that a stage leaves are killed at its end."""
    env = {"OMP_NUM_THREADS": "4", **{key: value for key, value in env.items() if key != "OUT"}}
    processes = {}
    try:
        for name, limit_s in group:
            command = [*ITSELF, f"{name}:{limit_s}"]
            processes[name] = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        for process in processes.values():
            print(process.communicate()[0], end="", flush=True)
            keep()
    finally:
        for process in processes.values():
            process.terminate()
            process.wait()
    return [name for name, process in processes.items() if process.returncode]


def describe(ended: Ended) -> str:
    if ended.timed_out:
        return "STOPPED AT ITS LIMIT"
    return "ok" if ended.code == 0 else f"FAILED (exit {ended.code})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE[:SECONDS]", help=", ".join(STAGES))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bundle", type=Path, help="archive built by gpu_bundle.py")
    parser.add_argument("--at", type=Path, default=Path("/tmp") / BUNDLE, help="where to unpack it")
    given = parser.parse_args()
    stages = chosen(given.stages)
    if not Path("/dev/nvidiactl").exists():
        plan = ", ".join(
            " with ".join(f"{name} (at most {limit_s} s)" for name, limit_s in group)
            for group in stages
        )
        raise SystemExit(f"gpu: there is no NVIDIA GPU with a driver here to run: {plan}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if given.inside:
        ((name, limit_s),) = stages[0]
        raise SystemExit(0 if run_one(name, limit_s, dict(os.environ), None) else 1)
    site = ROOT.parent / "site"  # exists if this is a bundle's own source
    if given.bundle:
        site = unpacked(given.bundle, given.at)
    installed = [str(site)] if site.is_dir() else []
    installed += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = [str(ROOT), str(ROOT / "bench"), *installed]
    sys.path[:0] = path
    if missing := [name for name in NEEDED if not there(name)]:
        raise SystemExit(
            f"gpu: {sys.executable} lacks {', '.join(missing)}: pip install '.[cuda,dev,bench]' "
            "from an index, or --bundle with an archive built by tools/gpu_bundle.py"
        )
    if place := take_native_core([*installed, *sys.path]):
        print(f"gpu: the native core comes from {place}")
    if failed := run(stages, environment(path)):
        raise SystemExit(f"gpu: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
