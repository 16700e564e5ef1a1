# SPDX-License-Identifier: Apache-2.0
"""Changes that turn the imported vLLM into another one; for plugin_probe.py's forks."""

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


def new_version_and_parameter() -> None:
    new_version()
    new_parameter()


def new_options() -> None:
    """A later release whose calls take more than those that we know, and need not."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.kv_offload.base import OffloadingWorker

    new_version()

    def submit_store(
        self: Any, job_id: int, src_spec: Any, dst_spec: Any, urgent: bool = False
    ) -> bool:
        raise AssertionError("only looked at")

    def on_new_request(self: Any, request: Any, session: str | None = None) -> None:
        raise AssertionError("only looked at")

    OffloadingWorker.submit_store = abc.abstractmethod(submit_store)
    OffloadingConnector.on_new_request = on_new_request


#: With these the backend is refused.
REFUSED = (
    *(new_abstract_method, new_parameter, name_gone, attribute_gone),
    new_version_and_parameter,
)
#: With these it is served, unless the configuration is strict.
SERVED = (new_version, new_options)
_OURS = {"kv_connector": "NVMeoFOffloadingConnector", "kv_role": "kv_both"}


def refuse(run: Any, serve: Callable[[], object], change: Callable[[], None], seen: Path) -> None:
    """What such a vLLM does: nothing else without our backend; with it an exception in a program,
    written to `seen`, and last the `vllm` command, whose end is this process's."""
    from vllm_nvmeof_offload import plugin

    change()
    plugin.register()
    found = {
        "none": run.cli(),
        "flag": run.cli("--kv-offloading-backend", "nvmeof", *run.transfer()),
        "json": run.cli(*run.transfer(**_OURS)),
        "api": run.api(kv_offloading_backend="nvmeof", kv_offloading_size=1),
    }
    seen.write_text(json.dumps(found))
    serve()


def serve(run: Any, change: Callable[[], None]) -> dict[str, Any]:
    """The configurations of such a vLLM."""
    from vllm_nvmeof_offload import plugin

    change()
    plugin.register()
    return {
        "none": run.cli(),
        "served": run.cli(*run.transfer(**_OURS)),
        "strict": run.cli(*run.transfer({"allow_unknown_vllm": False}, **_OURS)),
    }
