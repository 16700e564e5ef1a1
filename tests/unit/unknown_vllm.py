# SPDX-License-Identifier: Apache-2.0
"""Changes that turn the imported vLLM into one that we do not know; for plugin_probe.py's forks."""

from __future__ import annotations

import abc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def new_version() -> None:
    import vllm

    vllm.__version__ = "0.34.0"


def new_abstract_method() -> None:
    from vllm.v1.kv_offload.base import OffloadingManager

    OffloadingManager.pin_everything = abc.abstractmethod(lambda self: None)
    abc.update_abstractmethods(OffloadingManager)


def new_parameter() -> None:
    from vllm.v1.kv_offload.base import OffloadingWorker

    def submit_store(self: Any, job_id: int, priority: int, src_spec: Any, dst_spec: Any) -> bool:
        raise AssertionError("refused by its parameters, before anything is stored")

    OffloadingWorker.submit_store = abc.abstractmethod(submit_store)


def name_gone() -> None:
    import vllm.v1.kv_offload.base as base

    del base.TierFilter


def attribute_gone() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker

    class OffloadingConnectorWorker:
        def __init__(self) -> None:
            self.spec = None

    worker.OffloadingConnectorWorker = OffloadingConnectorWorker


CHANGES = (new_version, new_abstract_method, new_parameter, name_gone, attribute_gone)


def refuse(run: Any, serve: Callable[[], object], change: Callable[[], None], seen: Path) -> None:
    """What such a vLLM does: nothing else without our backend; with it an exception in a program,
    written to `seen`, and last the `vllm` command, whose end is this process's."""
    from vllm_nvmeof_offload import plugin

    change()
    plugin.register()
    ours = {"kv_connector": "NVMeoFOffloadingConnector", "kv_role": "kv_both"}
    found = {
        "none": run.cli(),
        "flag": run.cli("--kv-offloading-backend", "nvmeof", *run.transfer()),
        "json": run.cli(*run.transfer(**ours)),
        "api": run.api(kv_offloading_backend="nvmeof", kv_offloading_size=1),
    }
    seen.write_text(json.dumps(found))
    serve()
