# SPDX-License-Identifier: Apache-2.0
"""`make gpu`: the bundle for a machine without a package index, and stages that end in time, keep
what they found and leave nothing running. Only `make soak` fetches packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_wheel import build_wheel
from tests.fabric.rig.packages import locked
from tests.process import wait_until
from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda, working_cuda
from tests.unit.tools.gpu_tools import ROOT, tool
from tests.upstream.releases import ReleaseUnavailableError, ask_index, opened
from vllm_nvmeof_offload.units import KIB, MIB

# Tools for a GPU machine: the first stage, over the stub of its driver, whose figures mean
# nothing; and libraries without the machine code of other GPUs.


gpu_smoke = tool("gpu_smoke")


@pytest.fixture
def working() -> Iterator[FakeCuda]:
    with working_cuda() as cuda:
        yield cuda


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_copies_of_every_arm_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    cuda, smoke = FakeCuda(), gpu_smoke.Smoke()
    gpu_smoke.report_world(smoke, cuda, 1, 2 * MIB, (4 * KIB,))
    lines = printed(capsys)
    assert not smoke.failed and not cuda.registered and not cuda.allocated
    assert lines[0]["gpu"] == "stub" and lines[1]["seconds"].keys() >= {"populate", "register"}
    rates = {line["arm"]: line["gb_per_s"] for line in lines[2:]}
    assert rates.keys() == {"dma", "dma_overlap", "kernel", "auto"}
    assert all(rate > 0 for arm in rates.values() for rate in arm.values())
    assert all(arm.keys() == {"store", "load", "both"} for arm in rates.values())


def test_an_arm_that_fails_is_named_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cuda, smoke = FakeCuda(ignore=("copy_batch",)), gpu_smoke.Smoke()
    gpu_smoke.report_world(smoke, cuda, 1, 2 * MIB, (4 * KIB,))
    lines = printed(capsys)
    assert smoke.failed
    failed = {line["step"]: line["failed"] for line in lines if "failed" in line}
    wrong = "ArithmeticError: the bytes that were copied back differ"
    assert failed["dma, 4096 bytes"] == failed["dma_overlap, 4096 bytes"] == wrong
    assert "kernel" in {line["arm"] for line in lines if "arm" in line}


def test_the_wait_behind_another_fence_is_measured(
    working: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = threading.Event()
    timer = threading.Timer(0.05, forward.set)

    def compute() -> None:
        working.on_model(lambda: forward.wait(20) and None)
        timer.start()

    gpu_smoke.report_fence(gpu_smoke.Smoke(), working, lambda: MODEL_STREAM, compute)
    timer.join()
    (line,) = printed(capsys)
    assert 0 < line["load_behind_a_pending_fence_ms"] < 1e3 * gpu_smoke.FENCE_S_MAX
    assert not working.registered and not working.allocated and not working.events


thin = tool("thin_fatbin").thin
PTX, CODE = 1, 2


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary with entries (kind, architecture, payload), laid out as nvcc does."""
    body = b""
    for kind, arch, payload in entries:
        head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload))
        body += head.ljust(28, b"\x01") + struct.pack("<I", arch).ljust(36, b"\x01") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_the_machine_code_for_this_gpu_stays() -> None:
    whole = [(CODE, 80, b"a" * 8), (CODE, 90, b"b" * 16), (PTX, 90, b"c" * 24)]
    library = b"elf" + fat_binary(*whole) + b"text" + fat_binary((CODE, 120, b"d" * 8)) + b"end"
    thinned = bytearray(library)
    assert thin(thinned, "sm_90") == (16 + 8, 8 + 24)
    kept = [(CODE, 80, bytes(8)), (CODE, 90, b"b" * 16), (PTX, 90, bytes(24))]
    # Without code for this GPU the driver needs the rest.
    assert thinned == (
        b"elf" + fat_binary(*kept) + b"text" + fat_binary((CODE, 120, b"d" * 8)) + b"end"
    )


def test_ptx_stays_where_there_is_no_machine_code() -> None:
    library = bytearray(fat_binary((CODE, 80, b"a" * 8), (PTX, 80, b"c" * 8)))
    before = bytes(library)
    assert thin(library, "sm_90") == (16, 0)
    assert library == before


@pytest.mark.parametrize("version", [2, 1])
def test_bytes_that_only_begin_like_a_fat_binary_stay(version: int) -> None:
    """Another version; and a size that ends behind the library."""
    library = bytearray(b"x" + struct.pack("<IHHQ", 0xBA55ED50, version, 16, 10_000) + b"data")
    before = bytes(library)
    assert thin(library, "sm_90") == (0, 0)
    assert library == before


def test_entries_of_an_unknown_form_are_an_error() -> None:
    library = bytearray(fat_binary((CODE, 80, b"a" * 8), (CODE, 90, b"b" * 8)))
    library[16 + 4] = 8  # the bytes of the first entry's header
    with pytest.raises(ValueError, match="the fat binary at byte 0 has an unknown kind of entry"):
        thin(library, "sm_90")


def test_an_architecture_has_a_number() -> None:
    with pytest.raises(ValueError, match="hopper is not an architecture such as sm_90"):
        thin(bytearray(), "hopper")


# `make gpu`: the bundle for a machine without a package index, and stages that end in time, keep
# what they found and leave nothing running. Only `make soak` fetches packages.


gpu = tool("gpu")
#: Runs one stage in a separate process, because the remains of a stage are killed.
PLAY = """
import json, os, sys
sys.path.insert(0, "tools")
from dataclasses import asdict
from pathlib import Path
from gpu_stage import pack, run_stage
command, limit_s, place = json.loads(sys.argv[1])
place = Path(place)
ended = run_stage(command, limit_s, os.environ, place / "found" / "log", place / "live", place)
pack([place / "found"], place / "all.tgz")
print(json.dumps(asdict(ended)))
"""


def play(place: Path, program: str, limit_s: float = 60) -> dict[str, object]:
    order = json.dumps([[sys.executable, "-u", "-c", program], limit_s, str(place)])
    done = subprocess.run(
        [sys.executable, "-c", PLAY, order], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ended: dict[str, object] = json.loads(done.stdout)
    return ended


def test_the_output_of_a_stage_is_kept_and_packed(tmp_path: Path) -> None:
    program = "print('one'); import sys; print('two', file=sys.stderr); sys.exit(3)"
    ended = play(tmp_path, program)
    assert (ended["code"], ended["timed_out"], ended["tail"]) == (3, False, "one\ntwo\n")
    assert (tmp_path / "live").read_text() == "one\ntwo\n"
    with tarfile.open(tmp_path / "all.tgz") as archive:
        log = archive.extractfile("found/log")
        assert log is not None and log.read() == b"one\ntwo\n"
    assert not (tmp_path / "all.tgz.part").exists()


@pytest.mark.slow  # the limit leaves a busy machine the time to start the program
def test_at_its_limit_a_stage_can_write_its_results(tmp_path: Path) -> None:
    program = """
import sys, time
try:
    print("begun")
    time.sleep(600)
except KeyboardInterrupt:
    open("found/partial", "w").write("half of it")
    sys.exit(2)
"""
    ended = play(tmp_path, program, limit_s=30)
    assert (ended["code"], ended["timed_out"], ended["tail"]) == (2, True, "begun\n")
    with tarfile.open(tmp_path / "all.tgz") as archive:
        assert {"found/partial", "found/log"} <= set(archive.getnames())


def test_no_process_outlives_its_stage(tmp_path: Path) -> None:
    """A server in a separate session whose parent has ended; it ignores SIGINT and SIGTERM."""
    server = (
        "import signal, time, os\n"
        "for one in (signal.SIGINT, signal.SIGTERM): signal.signal(one, signal.SIG_IGN)\n"
        "open('pid', 'w').write(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    program = f"""
import subprocess, sys, time, pathlib
subprocess.Popen([sys.executable, "-c", {server!r}], start_new_session=True)
while not (pathlib.Path("pid").exists() and pathlib.Path("pid").read_text()):
    time.sleep(0.01)
"""
    ended = play(tmp_path, program)
    assert (ended["code"], ended["timed_out"]) == (0, False)
    number = int((tmp_path / "pid").read_text())
    wait_until("the server's end", lambda: not Path(f"/proc/{number}").exists())


#: `gpu.run` with made-up stages, one of which waits to be ended.
RUN = """
import os, signal, sys
sys.path.insert(0, "tools")
from pathlib import Path
import gpu
place = Path(sys.argv[1])
gpu.RESULTS, gpu.LOGS = place / "bench", place / "logs"
WAITS = (
    "import pathlib, time; place = pathlib.Path('{}'); (place / '{}').touch()\\n"
    "while not (place / '{}').exists(): time.sleep(0.01)"
)
def stage(program, **more):
    return gpu.Stage(60, lambda name: [sys.executable, "-u", "-c", program], **more)
gpu.STAGES = {
    "bad": stage("print('not so'); raise SystemExit(3)"),
    "engine": stage("print('never')", engine=True),
    "good": stage("print('fine')"),
    "long": stage("import os, time; print('begun', os.getpid()); time.sleep(600)"),
    "here": stage(WAITS.format(place, "here", "there")),
    "there": stage(WAITS.format(place, "there", "here")),
}
gpu.why_no_engine = lambda: "no vLLM is installed"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
gpu.ITSELF = (sys.executable, "-u", "-c", os.environ["PROGRAM"], str(place), "--inside")
os.environ.setdefault("OUT", str(place / "out"))
if sys.argv[2] == "--inside":
    ((name, limit_s),) = gpu.chosen(sys.argv[3:])[0]
    sys.exit(not gpu.run_one(name, limit_s, dict(os.environ), None))
print(gpu.run(gpu.chosen(sys.argv[2:]), dict(os.environ)))
"""
ENV = {**os.environ, "PROGRAM": RUN}


def packed(place: Path) -> set[str]:
    with tarfile.open(place / "out" / "gpu.tgz") as archive:
        return {Path(name).name for name in archive.getnames()}


def test_a_stage_that_fails_does_not_stop_the_next_ones(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", RUN, str(tmp_path), "bad", "engine", "good"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    lines = [line.rsplit(", ", 1)[0] for line in done.stdout.splitlines()]
    assert lines == [
        "gpu: bad: at most 60 s",
        *("not so", "gpu: bad: FAILED (exit 3)"),
        "gpu: engine: left out: no vLLM is installed",
        "gpu: good: at most 60 s",
        *("fine", "gpu: good: ok"),
        "['bad']",
    ], done.stderr
    assert packed(tmp_path) >= {"gpu-bad.log", "gpu-good.log"}
    assert (tmp_path / "out" / "gpu.log").read_text() == "not so\nfine\n"


def test_stages_side_by_side_are_a_process_each(tmp_path: Path) -> None:
    """The two that wait for each other's file end only because both run."""
    command = [sys.executable, "-u", "-c", RUN, str(tmp_path), "here+there+bad+engine", "good"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    lines = [line.rsplit(", ", 1)[0] for line in done.stdout.splitlines()]
    assert lines[-1] == "['bad']", done.stderr
    assert {"gpu: here: ok", "gpu: there: ok", "gpu: bad: FAILED (exit 3)"} <= set(lines)
    assert "gpu: engine: left out: no vLLM is installed" in lines
    assert lines.index("gpu: good: at most 60 s") > lines.index("gpu: bad: FAILED (exit 3)")
    assert packed(tmp_path) >= {"gpu-here.log", "gpu-there.log", "gpu-bad.log", "gpu-good.log"}


@pytest.mark.parametrize("words", ["long", "long+good"])
def test_a_run_that_is_terminated_packs_its_results(tmp_path: Path, words: str) -> None:
    command = [sys.executable, "-u", "-c", RUN, str(tmp_path), words]
    with subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL) as process:
        live = tmp_path / "logs" / "gpu-long.log"
        wait_until("the stage's output", lambda: live.exists() and "\n" in live.read_text())
        number = int(live.read_text().split()[1])
        process.terminate()
        assert process.wait(60) == 143
    assert "gpu-long.log" in packed(tmp_path)
    wait_until("the stage's end", lambda: not Path(f"/proc/{number}").exists())


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/gpu.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is an NVIDIA GPU here")
def test_without_a_gpu_one_line_says_what_would_run() -> None:
    done = run()
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith("gpu: there is no NVIDIA GPU")
    for name, stage in gpu.STAGES.items():
        assert f"{name} (at most {stage.limit_s} s)" in line
    assert run("copies", "smoke:50").stderr.endswith(
        "run: copies (at most 180 s), smoke (at most 50 s)\n"
    )


@pytest.mark.parametrize("word", ["smok", "smoke:600", "smoke:0", "smoke:x"])
def test_invalid_stages_and_limits_are_refused(word: str) -> None:
    done = run(word)
    assert done.returncode == 1
    assert "the stages are" in done.stderr or "a limit is 1 to 560 seconds" in done.stderr


def test_every_stage_fits_in_one_command_and_names_existing_files() -> None:
    for name, stage in gpu.STAGES.items():
        assert 0 < stage.limit_s <= gpu.LIMIT_S_MAX < 600
        for word in stage.command(name):
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), f"{name}: {word}"


@pytest.mark.parametrize("name", ["sanitizer", "one", "kernel", "auto", "graphs"])
def test_the_tests_of_a_stage_are_found(name: str) -> None:
    """A test in `-k` may be renamed unnoticed: a stage without tests would pass."""
    command = gpu.STAGES[name].command(name)
    command = command[command.index(sys.executable) :]
    path = os.pathsep.join((str(ROOT), str(ROOT / "bench")))
    done = subprocess.run(
        [*command, "--collect-only", "-q"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_checkout_takes_the_native_core_of_a_wheel_once(tmp_path: Path) -> None:
    """All of its modules: the stages import each of them."""
    suffix = gpu.sysconfig.get_config_var("EXT_SUFFIX")
    wheel, checkout = tmp_path / "site", tmp_path / "main" / "vllm_nvmeof_offload"
    (checkout / "native").mkdir(parents=True)
    (wheel / "vllm_nvmeof_offload" / "native").mkdir(parents=True)
    modules = gpu.NATIVE_MODULES
    built = (ROOT / "CMakeLists.txt").read_text()
    assert set(modules) == {*re.findall(r"nanobind_add_module\((\w+)", built)} - {"_tiers_mutants"}
    for name in modules:
        (wheel / "vllm_nvmeof_offload" / "native" / f"{name}{suffix}").write_text(name)
    (wheel / "vllm_nvmeof_offload.libs").mkdir()
    (wheel / "vllm_nvmeof_offload.libs" / "libisal.so.2").write_text("isal")
    nowhere = str(tmp_path / "nowhere")
    assert gpu.take_native_core([nowhere, str(wheel)], checkout) == str(wheel)
    for name in modules:
        assert (checkout / "native" / f"{name}{suffix}").read_text() == name
    assert (tmp_path / "main" / "vllm_nvmeof_offload.libs" / "libisal.so.2").exists()
    assert gpu.take_native_core([str(wheel)], checkout) == "", "its own stays"


def test_stages_run_the_checkout_and_reach_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "gpu")
    env = gpu.environment([str(ROOT), "/a/wheel"])
    assert env["PYTHONPATH"] == f"{ROOT}{os.pathsep}/a/wheel"
    assert (env["PIP_NO_INDEX"], env["PYTHONUNBUFFERED"], env["HF_HUB_OFFLINE"]) == ("1", "1", "1")
    assert env.get("VLLM_TARGET_DEVICE") != "gpu"


bundle = tool("gpu_bundle")
KEPT = ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/__init__.py", "vllm/LICENSE")
HEAVY = (
    *("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"),
    *("vllm/vllm-rs", "vllm/third_party/deep_gemm/include/a/b.hpp"),
)
#: The architecture of the machines' torch 2.11.
TRITON = "3.6.0"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
NOT_BUILT = "no bundle in the user's cache: make soak builds it from the package index"
FAT = fat_binary((CODE, 80, b"a" * 64), (CODE, 90, b"b" * 64))
THIN = fat_binary((CODE, 80, bytes(64)), (CODE, 90, b"b" * 64))


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A wheel with files of vLLM's names, and a fat binary in its library."""
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*KEPT[1:], *HEAVY):
            archive.writestr(name, "12345")
        archive.writestr(KEPT[0], FAT)
    return wheel


def plan(place: Path) -> object:
    return bundle.Plan(place / "ours-cp312-cp312-manylinux_2_34_x86_64.whl", "sm_90", "3.12", place)


def test_only_the_needed_files_of_vllms_wheel_are_unpacked(made_up: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert bundle.unpack_slim(made_up, site, "sm_90") == 5 * len(HEAVY) + 64
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert found == {*KEPT, bundle.STAND_IN}
    assert (site / KEPT[0]).read_bytes() == THIN


def test_one_archive_has_packages_and_project_and_is_read_by_python_alone(
    made_up: Path, tmp_path: Path
) -> None:
    def install(_: object, site: Path) -> None:
        (site / "ours").mkdir()
        (site / "ours" / "__pycache__").mkdir()
        (site / "ours" / "__pycache__" / "left.pyc").touch()

    out = tmp_path / "out"
    lines: list[str] = []
    wanted = plan(out)
    size = bundle.build(wanted, lambda: made_up, install, lines.append)
    print(f"the project and a made-up vLLM: {size / bundle.MIB:.2f} MiB")
    assert [path.name for path in out.iterdir()] == ["gpu-bundle.tar.xz"]
    assert size < 2 * bundle.MIB, "the project's part of 60 MiB"
    assert lines[-1].endswith(f"gpu-bundle.tar.xz, {size / bundle.MIB:.1f} MiB")
    with opened(out / "gpu-bundle.tar.xz") as archive:
        archive.extractall(tmp_path)
    there = tmp_path / "gpu-bundle"
    assert (there / "site" / KEPT[0]).read_bytes() == THIN
    assert not list(there.rglob("__pycache__"))
    project = there / "project"
    for name in ("tools/gpu.py", "tests/gpu/test_copies.py", "kernels/copy_blocks.cu"):
        assert (project / name).read_bytes() == (ROOT / name).read_bytes()
    assert not (project / "docs").exists() and not (project / "bench" / "results").exists()
    if not Path("/dev/nvidiactl").exists():
        bare = {"PATH": "/nowhere", "HOME": str(tmp_path)}
        command = [sys.executable, "-I", "-S", str(project / "tools/gpu.py"), "smoke"]
        done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=60)
        assert done.stderr.endswith("here to run: smoke (at most 110 s)\n")


def test_an_archive_too_large_for_one_transfer_is_an_error(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MIB_MAX", 0)
    with pytest.raises(SystemExit, match=r"MiB is more than 0 MiB"):
        bundle.build(plan(tmp_path / "out"), lambda: made_up, lambda *_: None, lambda _: None)


def test_a_wheel_for_another_python_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_nvmeof_offload-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl"
    wheel.touch()
    command = [sys.executable, "tools/gpu_bundle.py", str(wheel)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is not for Python 3.12" in done.stderr


def real_bundle() -> Path:
    """For this Python, in the user's cache; beside it the directory `triton`."""
    return Path(bundle.cache_place()) / f"py{PYTHON}" / "gpu-bundle.tar.xz"


def test_the_real_bundle_is_small_enough_for_one_command(
    record_property: Callable[[str, object], None],
) -> None:
    """The one that `make soak` has built, if it has."""
    if not real_bundle().exists():
        pytest.skip(NOT_BUILT)
    size = real_bundle().stat().st_size / bundle.MIB
    print(f"gpu-bundle.tar.xz: {size:.1f} MiB")
    record_property("gpu_bundle_mib", round(size, 1))
    assert size < bundle.MIB_MAX


@pytest.mark.slow
def test_this_checkout_and_vllm_for_gpus_import_each_other(tmp_path: Path) -> None:
    """With the packages of the bundle that `make soak` has built."""
    triton = real_bundle().with_name("triton")
    if not (real_bundle().exists() and triton.exists()):
        pytest.skip(NOT_BUILT)
    with opened(real_bundle()) as archive:
        inside = [one for one in archive if one.name.startswith("gpu-bundle/site")]
        archive.extractall(tmp_path, members=inside)
    path = (ROOT, ROOT / "bench", tmp_path / "gpu-bundle" / "site", triton)
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tools/gpu_rehearsal.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"vLLM {bundle.VLLM}: " in done.stdout


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_the_real_bundle_is_built_and_all_in_it_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rehearsal takes torch from this environment, and Triton from the index."""
    try:
        ask_index(bundle.VLLM)
    except ReleaseUnavailableError as error:
        pytest.skip(str(error))
    wheel, _ = build_wheel(tmp_path / "dist")
    place = real_bundle().parent
    with locked(place):
        size = bundle.build(bundle.Plan(wheel, "sm_90", PYTHON, place))
        if not (place / "triton").exists():
            fresh = tmp_path / "triton"
            bundle.pip("install", "--no-deps", "--target", str(fresh), f"triton=={TRITON}")
            shutil.copytree(fresh, place / "triton")
    with capsys.disabled():
        print(f"gpu-bundle.tar.xz: {size / bundle.MIB:.1f} MiB")
    assert size < bundle.MIB_MAX * bundle.MIB
    test_this_checkout_and_vllm_for_gpus_import_each_other(tmp_path)
