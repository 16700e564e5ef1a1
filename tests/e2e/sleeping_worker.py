# SPDX-License-Identifier: Apache-2.0
"""A stand-in for sleep on a GPU, which vLLM's CPU worker ignores, and for a trainer beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.e2e.servers import TRAINED


class SleepingWorker(CPUWorker):
    """Sleep overwrites weights and KV cache, so that a use of either is noticed.

    The numbers are finite, because vLLM's CPU attention multiplies masked positions by 0.
    """

    _kept: dict[str, torch.Tensor] | None = None

    def load_model(self, *args: Any, **more: Any) -> None:
        self._trained = Path(self.model_config.model) / TRAINED  # `reload_weights` changes it
        super().load_model(*args, **more)

    def sleep(self, level: int = 1) -> None:
        """Level 1 keeps a copy of the weights. Level 2 keeps nothing but buffers, as on a GPU."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        self._kept = {name: p.data.clone() for name, p in parameters.items()} if level == 1 else {}
        for one in (*parameters.values(), *self.model_runner.kv_caches):
            one.data.fill_(0.01)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if self._kept is not None and (tags is None or "weights" in tags):
            for name, parameter in self.model_runner.get_model().named_parameters():
                if name in self._kept:
                    parameter.data.copy_(self._kept[name])
            self._kept = None
        if self._trained.exists():  # the trainer writes into this process, not through the engine
            self.reload_weights(weights_path=self._trained.read_text())
