# SPDX-License-Identifier: Apache-2.0
"""Our commands in the shape in which vLLM carries them inside its transfer jobs."""

from __future__ import annotations

from vllm.v1.kv_offload.base import LoadStoreSpec

from vllm_nvmeof_offload.protocol import LoadCommand, StoreCommand

__all__ = ["ChunkLoadSpec", "ChunkStoreSpec"]


class ChunkStoreSpec(LoadStoreSpec):
    """Destination of a store job."""

    def __init__(self, command: StoreCommand) -> None:
        self.command = command


class ChunkLoadSpec(LoadStoreSpec):
    """Source of a load job."""

    def __init__(self, command: LoadCommand) -> None:
        self.command = command
