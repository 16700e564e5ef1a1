# SPDX-License-Identifier: Apache-2.0
"""Import the modules that the stages of `make gpu` import, on a machine without a GPU.

    PYTHONPATH=gpu-bundle/project:gpu-bundle/project/bench:gpu-bundle/site \\
        python3.12 gpu-bundle/project/tools/gpu_rehearsal.py

Without a GPU, Triton has no active driver, and vLLM replaces its kernels with placeholders, so that
errors in the kernels would appear only on a GPU. This program therefore makes Triton's NVIDIA
driver look active. It needs torch, triton and transformers in the GPU machine's versions. It prints
a line per module that cannot be imported, and exits with 1 if there is one.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from gpu import take_native_core  # noqa: E402 - a script's neighbour

#: The modules that an engine with our models and an API server import, including late imports.
ENGINE = (
    *("vllm.triton_utils", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"),
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner", "vllm.lora.ops.triton_ops"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.warmup.kernel_warmup"),
    *("vllm.v1.attention.backends.triton_attn", "vllm.v1.spec_decode.utils"),
    *("vllm.v1.sample.ops.topk_topp_triton", "vllm.v1.kv_offload.cpu.swap_blocks_triton"),
    *("vllm.v1.kv_offload.cpu.gpu_worker", "vllm.v1.kv_offload.tiering.spec"),
    # Imported when a model is loaded.
    "vllm.model_executor.layers.quantization.online.base",
)
#: Packages whose modules are all imported.
PACKAGES = ("vllm.v1.worker.gpu", "vllm_nvmeof_offload", "vllm_nvmeof_bench")
TESTS = (
    *("tests.gpu.test_copies", "tests.gpu.test_checksums"),
    "tests.gpu.test_pool",
    *("tests.e2e.shapes.test_on_gpu", "tests.e2e.shapes.zygote", "tests.e2e.servers"),
)


def activate_triton() -> None:
    """Make only Triton's NVIDIA driver look active."""
    from triton.backends import backends

    for name, backend in backends.items():
        active = name == "nvidia"
        backend.driver.is_active = staticmethod(lambda active=active: active)
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise SystemExit("gpu_rehearsal: vLLM does not treat Triton as active")


def modules() -> list[str]:
    found = [*ENGINE, *TESTS]
    for name in PACKAGES:
        package = importlib.import_module(name)
        inside = pkgutil.walk_packages(package.__path__, f"{name}.", onerror=lambda _: None)
        found += [name, *(one.name for one in inside if not one.name.endswith("__main__"))]
    return found


def main() -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    site = ROOT.parent / "site"
    if site.is_dir():  # this is a bundle's own source
        take_native_core([str(site)])
    activate_triton()
    names, failed = modules(), 0
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - other people's import-time code
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
    vllm = importlib.import_module("vllm.version").__version__
    print(f"vLLM {vllm}: {len(names) - failed} modules imported, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
