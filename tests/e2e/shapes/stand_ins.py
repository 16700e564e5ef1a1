# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for parts of a GPU in an engine's process on a machine without a GPU."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

from vllm_nvmeof_offload.copy import calibration


def ask_as_on_a_gpu() -> None:
    """Make the connector request its layout as on a GPU, and the CPU's attention accept it.

    vLLM's CPU kernels use strides, so they also support the packed layout, in which all layers of
    a block are contiguous; the CPU backend only does not list that layout.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from vllm_nvmeof_offload import connector

    class Asked(CPUAttentionBackend):
        @classmethod
        def supported_kv_cache_layouts(cls) -> Any:
            return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    CPUAttentionBackend.supported_kv_cache_layouts = Asked.supported_kv_cache_layouts
    connector.current_platform = SimpleNamespace(is_cpu=lambda: False)


def copy_by_stub() -> None:
    """Build the worker as on a GPU, over a STUB of CUDA whose copies run late and reordered.

    The stub tests how the parts are assembled, and proves nothing about a GPU.
    """
    from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda
    from vllm_nvmeof_offload.worker import build

    def open_device(name: str) -> calibration.KvDevice:
        assert name == "cpu"
        cuda = FakeCuda(seed=os.getpid())
        threading.Thread(target=_go_on, args=(cuda,), name="stub-gpu", daemon=True).start()
        return calibration.KvDevice(cuda, lambda: MODEL_STREAM, ("a STUB stands in for the GPU",))

    build.open_device = open_device


def _go_on(cuda: Any) -> None:
    """Advance the stub, as a GPU advances by itself."""
    while True:
        if not cuda.step():
            threading.Event().wait(0.0005)
