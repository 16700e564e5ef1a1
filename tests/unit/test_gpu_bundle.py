# SPDX-License-Identifier: Apache-2.0
"""The bundle for a GPU machine without a package index; only `make soak` fetches packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_wheel import build_wheel
from tests.fabric.rig.packages import locked
from tests.unit.gpu_tools import ROOT, tool
from tests.unit.test_thin_fatbin import CODE, fat_binary
from tests.upstream.releases import ReleaseUnavailableError, ask_index, opened

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
