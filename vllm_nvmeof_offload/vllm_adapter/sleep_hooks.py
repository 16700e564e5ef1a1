# SPDX-License-Identifier: Apache-2.0
"""What a worker's connector does when vLLM sleeps: on a GPU the KV cache's memory is unmapped.

vLLM waits for what was submitted to the GPU. A load that still waits for its bytes, or a store
that was put off to the next step, would come later, and lose the CUDA context of the worker.
vLLM 0.32 does not call these hooks: there it must not sleep while requests run.
"""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.vllm_adapter.messages import NVMeoFConnectorMetadata

__all__ = ["SleepHooks"]


class SleepHooks:
    """Beside vLLM's OffloadingConnector."""

    connector_worker: Any
    _worker: Any

    def submit_deferred_stores(self) -> None:
        """Those of the last step that vLLM keeps for the next one."""
        nothing = NVMeoFConnectorMetadata(load_jobs={}, store_jobs={})
        self.connector_worker.handle_preemptions(nothing)

    def unregister_kv_caches(self) -> None:
        """Before sleep; vLLM may call it again while asleep."""
        self.submit_deferred_stores()
        self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """After waking up; likewise."""
        self._worker.wake()
