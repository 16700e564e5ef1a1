# SPDX-License-Identifier: Apache-2.0
"""Pack everything that `make gpu` needs on a GPU machine without a package index.

    python3 tools/gpu_bundle.py --arch sm_90 --python 3.12 WHEEL

    # on that machine, with torch for its CUDA, triton and transformers installed, in a checkout:
    python3 tools/gpu.py --bundle gpu-bundle.tar.xz smoke one copies
    # or without a checkout: the archive contains this source in gpu-bundle/project
    python3 -m tarfile -e gpu-bundle.tar.xz
    python3 gpu-bundle/project/tools/gpu.py smoke one copies

The archive contains our wheel, vLLM reduced to a fifth of its size, and the packages that an engine
and a server import. This vLLM lacks FlashAttention, the kernels for experts and third-party
kernels, so it runs Triton's attention and no experts. Its machine code is for one GPU architecture.
For the stage ttft, set GPU_SERVER_ARGS="--attention-backend TRITON_ATTN".
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from thin_fatbin import thin  # noqa: E402 - a script's neighbour

VLLM = "0.33.0"
NAME = "gpu-bundle"
MIB = 1 << 20
#: A device machine accepts 64 MiB per command, including the checkout.
MIB_MAX = 60
LEFT_OUT = (
    "vllm/vllm_flash_attn/*.so",
    "vllm/_moe_C*",
    "vllm/_flash*",
    "vllm/_deepselect*",
    "vllm/_qutlass*",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
)
#: vLLM's attention cannot be imported without one of FlashAttention's extensions.
STAND_IN = "vllm/vllm_flash_attn/_vllm_fa2_C.py"
#: The packages that vLLM 0.33's engine and server and our package import, found by importing them.
REQUIRED = (
    *("annotated-types", "apache-tvm-ffi==0.1.11", "cachetools", "cbor2", "crc32c"),
    *("compressed-tensors==0.17.0", "fastapi<0.137.0", "httpx2", "ijson", "jmespath"),
    *("llguidance<1.8.0", "loguru", "msgspec", "openai"),
    *("model-hosting-container-standards<1.0.0", "openai-harmony", "orjson"),
    *("partial-json-parser", "prometheus-fastapi-instrumentator", "pybase64", "pydantic"),
    *("pydantic-core", "pyzmq", "sniffio", "starlette", "typing-inspection", "uvicorn"),
    *("watchfiles", "xgrammar==0.2.8"),
)
#: The oldest glibc for which vLLM's wheels are built.
PLATFORM = "manylinux_2_28_x86_64"
#: Parts of this source tree that no stage needs.
NOT_CARRIED = ("bench/results/", "docs/")


@dataclass(frozen=True)
class Plan:
    """A bundle of our `wheel` for Python `python` (3.12) and the GPU's `arch` (sm_90), in
    `place`."""

    wheel: Path
    arch: str
    python: str
    place: Path

    @property
    def archive(self) -> Path:
        return self.place / f"{NAME}.tar.xz"


def pip(*arguments: str) -> None:
    """Run pip. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"gpu_bundle: failed: pip {' '.join(arguments)}")


def cache_place() -> Path:
    """Return the directory that caches vLLM's wheel (340 MB)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-nvmeof" / "gpu"


def vllm_wheel() -> Path:
    """Return vLLM's wheel for CUDA; download it from the package index the first time."""
    place = cache_place()
    if not (known := list(place.glob(f"vllm-{VLLM}-*.whl"))):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as fresh:
            platform = ("--only-binary=:all:", "--platform", PLATFORM)
            pip("download", "--no-deps", *platform, "--dest", fresh, f"vllm=={VLLM}")
            (found,) = Path(fresh).glob("vllm-*.whl")
            known = [found.rename(place / found.name)]
    return known[0]


def install(plan: Plan, site: Path) -> None:
    """Install our wheel and vLLM's imports, built for the GPU machine's Python and glibc."""
    binary = ("--no-deps", "--only-binary=:all:", "--python-version", plan.python)
    # Our wheel can need a later glibc. The last part of its file name is its platform tags.
    own = plan.wheel.stem.split("-")[-1].split(".")
    target = ("install", "--no-compile", "--upgrade", "--target", str(site))
    platforms = [PLATFORM, "manylinux2014_x86_64"]
    for tags, packages in ((platforms, REQUIRED), (own, (str(plan.wheel),))):
        pip(*target, *binary, *(f"--platform={tag}" for tag in tags), *packages)
    shutil.rmtree(site / "bin", ignore_errors=True)


def unpack_slim(wheel: Path, site: Path, arch: str) -> int:
    """Unpack vLLM's wheel without LEFT_OUT and code for other GPUs; return the bytes left out."""
    left_out = 0
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if any(fnmatch(entry.filename, pattern) for pattern in LEFT_OUT):
                left_out += entry.file_size
                continue
            path = Path(archive.extract(entry, site))
            if path.suffix == ".so":
                library = bytearray(path.read_bytes())
                left_out += thin(library, arch)[1]
                path.write_bytes(library)
    (site / STAND_IN).write_text('"""Not here; attention is Triton\'s (tools/gpu_bundle.py)."""\n')
    return left_out


def copy_project(target: Path, root: Path = ROOT) -> None:
    """Copy this checkout's files that git tracks or would add."""
    listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(["git", "-C", root, *listed], check=True, capture_output=True, text=True)
    for name in filter(None, done.stdout.split("\0")):
        if not name.startswith(NOT_CARRIED) and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def pack(tree: Path, archive: Path) -> int:
    fresh = archive.with_name(archive.name + ".part")
    with tarfile.open(fresh, "w:xz") as tar:
        tar.add(
            tree,
            arcname=tree.name,
            filter=lambda entry: None if entry.name.endswith("__pycache__") else entry,
        )
    os.replace(fresh, archive)
    return archive.stat().st_size


def build(
    plan: Plan,
    vllm: Callable[[], Path] = vllm_wheel,
    install: Callable[[Plan, Path], None] = install,
    log: Callable[[str], None] = lambda text: print(f"gpu_bundle: {text}", flush=True),
) -> int:
    """Build the archive; return its size. Raises SystemExit if pip fails or the archive is larger
    than a GPU machine accepts."""
    plan.place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan.place) as scratch:
        tree = Path(scratch) / NAME
        site = tree / "site"
        site.mkdir(parents=True)
        log(f"vLLM {VLLM}")
        left_out = unpack_slim(vllm(), site, plan.arch)
        log(f"left out {left_out / MIB:.0f} MiB; installing its imports and {plan.wheel.name}")
        install(plan, site)
        copy_project(tree / "project")
        log("packing, one or two minutes")
        size = pack(tree, plan.archive)
    log(f"{plan.archive}, {size / MIB:.1f} MiB")
    if size > MIB_MAX * MIB:
        raise SystemExit(f"gpu_bundle: {size / MIB:.1f} MiB is more than {MIB_MAX} MiB")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="our wheel for that Python, by `make wheel`")
    parser.add_argument("--arch", default="sm_90", help="the machine's GPU (default: %(default)s)")
    parser.add_argument(
        "--python", default="3.12", help="the machine's Python (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("build"), help="directory of the archive")
    given = parser.parse_args()
    if not given.wheel.is_file():
        parser.error(f"{given.wheel} does not exist: PYTHONS={given.python} make wheel")
    if f"cp{given.python.replace('.', '')}-" not in given.wheel.name:
        parser.error(f"{given.wheel.name} is not for Python {given.python}")
    build(Plan(given.wheel, given.arch, given.python, given.out))


if __name__ == "__main__":
    main()
