# SPDX-License-Identifier: Apache-2.0
"""The hardware and the load that a model is sized for."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from vllm_nvmeof_offload.commands.size.kv import Layout
from vllm_nvmeof_offload.commands.size.links import Link, parse_link
from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.units import GIB

__all__ = ["Deployment"]

#: The server's own default, so that the CPU tier comes out as it will be.
_STREAM_SLOTS: int = OffloadConfig.model_fields["stream_slots"].default


class Deployment(BaseModel):
    """Frozen. Bytes, seconds, tokens; links as they are written on the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int = Field(1, ge=1, description="GPUs of the whole deployment.")
    gpu_memory_bytes: int = Field(80 * GIB, gt=0, description="Memory of one GPU.")
    gpu_memory_utilization: float = Field(
        0.92, gt=0, le=1, description="Share of GPU memory that vLLM takes; its default."
    )
    gpu_reserve_bytes: int = Field(
        4 * GIB, ge=0, description="Of that, for activations and CUDA graphs. An assumption."
    )
    tensor_parallel: int = Field(1, ge=1, description="Tensor parallel size of one engine.")
    pipeline_parallel: int = Field(1, ge=1, description="Pipeline parallel size of one engine.")
    kv_element_bytes: int = Field(2, ge=1, description="Bytes of one element of the KV cache.")
    block_tokens: int = Field(16, ge=1, description="Tokens in one block.")
    blocks_per_chunk: int | None = Field(None, ge=1, description="None: as the server chooses.")
    staging_bytes: int = Field(
        8 * GIB, ge=0, description="Pinned CPU memory of one engine, over its ranks."
    )
    stream_slots: int = Field(_STREAM_SLOTS, ge=1, description="Of each rank; the default.")
    context_tokens: int = Field(32 << 10, ge=1, description="Context of one session.")
    concurrency: int = Field(16, ge=1, description="Sessions that come back at once.")
    drives: int = Field(24, ge=1, description="Drives in one enclosure.")
    drive_bytes: int = Field(15_360_000_000_000, gt=0, description="Of one drive. An assumption.")
    drive_fill: float = Field(
        0.9, gt=0, le=1, description="Share of a drive that the pool takes. An assumption."
    )
    drive_read_bytes_per_s: float = Field(
        6.5e9, gt=0, description="Sequential read rate of one drive. An assumption."
    )
    link: str = Field("2x100GbE", description="All links between enclosure and GPU hosts.")
    gpu_link: str = Field("pcie5x16", description="Link of one GPU to its host.")
    link_efficiency: float = Field(
        0.9, gt=0, le=1, description="Payload's share of a link's rate. An assumption."
    )
    ttft_seconds: float = Field(2.0, gt=0, description="Objective: time to first token.")

    @property
    def engines(self) -> int:
        return self.gpus // self.layout.ranks

    @property
    def layout(self) -> Layout:
        return Layout(
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            kv_bytes=self.kv_element_bytes,
            block_tokens=self.block_tokens,
            blocks_per_chunk=self.blocks_per_chunk,
        )

    @property
    def parsed_link(self) -> Link:
        return parse_link(self.link)

    @property
    def parsed_gpu_link(self) -> Link:
        return parse_link(self.gpu_link)

    def check(self) -> None:
        """Raises: ConfigError where GPUs and ranks do not go together."""
        ranks = self.layout.ranks
        if self.gpus % ranks:
            up = -(-self.gpus // ranks) * ranks
            remedy = f"an engine takes {ranks} (--tp times --pp); give a multiple, such as {up}"
            raise ConfigError("--gpus", self.gpus, remedy)
