# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that replaces the stock connector by ours in vLLM's own tests.

Loaded with `-p nvmeof_swap` before any of vLLM's test modules, so that what they build as
`OffloadingConnector`, and what vLLM's factory builds for them, is ours. Their rig has its own spec,
whose manager and worker are mocks that the tests script and inspect. Our connector's manager and
worker run in addition to the mocks: the manager is the real one, over an empty core; the worker
has nothing to report. Models that we refuse are accepted here, because these tests check that the
code around vLLM's connector leaves the behaviour of that connector unchanged. For the same reason
vLLM's own rule chooses the windows and states that are stored, and not `boundary_tokens`.

`NVMEOF_SWAP_REPORT` names a file for the number of calls of each of our methods, as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as stock
from vllm.v1.kv_offload.base import OffloadingSpec

from vllm_nvmeof_offload import connector as ours
from vllm_nvmeof_offload.config import Replica
from vllm_nvmeof_offload.groups import RankGroup
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.protocol import RankHello
from vllm_nvmeof_offload.vllm_adapter import vllm_release
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager

_calls: Counter[str] = Counter()


class QuietWorker:
    """A worker without failures and without jobs besides vLLM's."""

    has_reports = False

    def apply(self, commands: Any) -> None:
        assert not commands, "an empty core sent a command"

    def take_reports(self) -> tuple[list[Any], Counter[str]]:
        return [], Counter()

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def note_requests(self, requests: Any) -> None:
        return

    def take_invalid_blocks(self) -> set[int]:
        return set()

    def forget_blocks(self, requests: Any) -> None:
        return

    def take_failed_requests(self) -> set[str]:
        return set()


class SwappedConnector(ours.NVMeoFOffloadingConnector):
    """Our connector, with the real manager and a quiet worker besides the mocks of vLLM's tests."""

    @functools.cached_property
    def _manager(self) -> NVMeoFOffloadingManager:  # type: ignore[override]
        manager = NVMeoFOffloadingManager(CoreConfig(world_size=1, admission=False))
        # Attach at once, because no worker of ours sends a handshake.
        rank_groups = tuple(RankGroup(group, 1) for group in self._groups)
        hello = RankHello(0, 0, "", 1, 0, target_count=1, slot_bytes=8, groups=rank_groups)
        manager.attach([hello], 36, self._groups, self._view.queue(by_priority=False))
        self._view.manager = manager  # vLLM's side has the mock
        return manager

    @functools.cached_property
    def _worker(self) -> QuietWorker:  # type: ignore[override]
        return QuietWorker()


def _counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        _calls[name] += 1
        return method(*args, **kwargs)

    return call


def _swap() -> None:
    vllm_release.refuse_different()  # checks the real classes; the result is cached
    for name in ("refuse_unsupported", "choose_blocks_per_chunk", "deployed", "replica_of"):
        assert callable(getattr(ours, name))
        setattr(ours, name, lambda *_args, **_kwargs: None)
    ours.replica_of = lambda *_args: Replica()
    # Our connector refuses the spec that vLLM's tests configure, so it gets these keys instead;
    # every other key has its default.
    keys = {"boundary_tokens": 0, "allow_unknown_vllm": True, "share": "off"}
    config = ours.parse_config(keys, env={})
    ours.parse_config = lambda _extra: config
    assert callable(ours.keep_boundaries)
    ours.keep_boundaries = lambda *_args: 0
    ours.NVMeoFOffloadingSpec = OffloadingSpec  # type: ignore[misc]
    # An unknown release's self-test is a run of its own: here half of our server is replaced.
    assert callable(ours.NVMeoFOffloadingConnector._test_unknown)
    ours.NVMeoFOffloadingConnector._test_unknown = lambda *_args: None  # type: ignore[method-assign]
    for name, method in vars(ours.NVMeoFOffloadingConnector).items():
        if callable(method):
            setattr(SwappedConnector, name, _counted(name, method))
    stock.OffloadingConnector = SwappedConnector  # type: ignore[misc]


_swap()


def pytest_sessionfinish() -> None:
    Path(os.environ["NVMEOF_SWAP_REPORT"]).write_text(json.dumps(_calls))
