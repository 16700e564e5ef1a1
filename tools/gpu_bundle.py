# SPDX-License-Identifier: Apache-2.0
"""Packs what a GPU machine that reaches no package index lacks for all of `make gpu`.

    python3.12 tools/gpu_bundle.py dist/vllm_nvmeof_offload-*.whl
    # there, with torch for its CUDA version, triton and transformers installed:
    cat gpu-bundle.part* | tar xJ && export PYTHONPATH=$PWD/gpu-bundle
    make gpu GPU_PYTHON=python3 GPU_SERVER_ARGS="--attention-backend TRITON_ATTN"

Inside is a vLLM of a fifth of its size: without FlashAttention, the experts' kernels and third
parties', so with Triton's attention and no experts; and of its requirements those that an engine
and a server import. Run it with the Python whose version the machine has.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

VLLM = "0.33.0"
NAME = "gpu-bundle"
#: Of vLLM's wheel.
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
#: vLLM's attention does not import without one of FlashAttention's extensions.
STAND_IN = "vllm/vllm_flash_attn/_vllm_fa2_C.py"
#: What vLLM 0.33's engine and server import, found by importing them; and what ours needs.
REQUIRED = (
    *("annotated-types", "apache-tvm-ffi==0.1.11", "cachetools", "cbor2", "crc32c"),
    *("fastapi<0.137.0", "httpx2", "jmespath", "llguidance<1.8.0", "msgspec", "openai"),
    *("model-hosting-container-standards<1.0.0", "openai-harmony", "orjson"),
    *("partial-json-parser", "prometheus-fastapi-instrumentator", "pybase64", "pydantic"),
    *("pydantic-core", "pyzmq", "sniffio", "starlette", "typing-inspection", "uvicorn"),
    *("watchfiles", "xgrammar==0.2.8"),
)
#: vLLM's wheels are for this glibc and later.
PLATFORM = "manylinux_2_28_x86_64"


def pip(*arguments: str) -> None:
    """Raises: SystemExit: it failed; what it said stands above."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"gpu_bundle: failed: pip {' '.join(arguments)}")


def unpack_slim(wheel: Path, site: Path) -> int:
    """Unpack vLLM's wheel without LEFT_OUT; return the bytes that were left out."""
    left_out = 0
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if any(fnmatch(entry.filename, pattern) for pattern in LEFT_OUT):
                left_out += entry.file_size
            else:
                archive.extract(entry, site)
    (site / STAND_IN).write_text('"""Not here; attention is Triton\'s (tools/gpu_bundle.py)."""\n')
    return left_out


def pack(site: Path, out: Path, part_bytes: int) -> list[Path]:
    """Write `site` as parts of a tar.xz; return them."""
    for old in out.glob(f"{NAME}.part*"):
        old.unlink()
    prefix = out / f"{NAME}.part"
    tar = ["tar", "c", "-C", str(site.parent), "--exclude=__pycache__", site.name]
    split = ["split", "--numeric-suffixes", "-b", str(part_bytes), "-", str(prefix)]
    with (
        subprocess.Popen(tar, stdout=subprocess.PIPE) as tarring,
        subprocess.Popen(["xz", "-T0"], stdin=tarring.stdout, stdout=subprocess.PIPE) as packing,
    ):
        subprocess.run(split, stdin=packing.stdout, check=True)
    if tarring.returncode or packing.returncode:
        raise SystemExit("gpu_bundle: tar or xz failed; what it said stands above")
    return sorted(out.glob(f"{NAME}.part*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="ours, for this Python, of `make wheel`")
    parser.add_argument("--out", type=Path, default=Path("build"))
    parser.add_argument("--part-mib", type=int, default=1024, help="of one part, at most")
    given = parser.parse_args()
    if not given.wheel.is_file():
        parser.error(f"{given.wheel} is not there: `make distclean wheel PYTHON={sys.executable}`")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.out) as scratch:
        site = Path(scratch) / NAME
        site.mkdir()
        print(f"gpu_bundle: fetching vLLM {VLLM}", flush=True)
        binary = ("--no-deps", "--only-binary=:all:", "--platform", PLATFORM)
        pip("download", *binary, "--dest", scratch, f"vllm=={VLLM}")
        (wheel,) = Path(scratch).glob("vllm-*.whl")
        left_out = unpack_slim(wheel, site)
        wheel.unlink()
        print(f"gpu_bundle: left out {left_out >> 20} MiB of it; fetching what it imports")
        target = ("install", "--no-compile", "--target", str(site))
        pip(*target, *binary, "--platform", "manylinux2014_x86_64", *REQUIRED)
        shutil.rmtree(site / "bin", ignore_errors=True)
        pip(*target, "--no-deps", str(given.wheel))
        print("gpu_bundle: packing, half a minute", flush=True)
        for part in pack(site, given.out, given.part_mib << 20):
            print(f"gpu_bundle: {part}, {part.stat().st_size / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
