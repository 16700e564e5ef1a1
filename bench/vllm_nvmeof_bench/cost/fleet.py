# SPDX-License-Identifier: Apache-2.0
"""The servers of all arms, up at the same time; requests go to one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm_nvmeof_bench.cost.client import Client
from vllm_nvmeof_bench.cost.cpu import cpu_of_groups
from vllm_nvmeof_bench.cost.settings import (
    BASE,
    BLOCK_TOKENS,
    CPU_ONLY,
    PROMPT_ONLY,
    Settings,
)
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.servers.model import make_model
from vllm_nvmeof_bench.servers.server import OffloadSpec, Server, ServerError, ServerSpec

__all__ = ["Fleet", "extra_config", "plainly"]

Tell = Callable[[str], None]


def extra_config(arm: str, settings: Settings, target: Path) -> dict[str, Any]:
    """`kv_connector_extra_config` of an arm that offloads."""
    extra: dict[str, Any] = {"targets": [str(target)], "pool_bytes": settings.pool_bytes}
    if arm == PROMPT_ONLY:
        extra["offload_prompt_only"] = True
    if arm == CPU_ONLY:
        extra["pool_bytes"] = 0
    return extra


def server_spec(arm: str, settings: Settings, model: Path, home: Path) -> ServerSpec:
    offload = None
    if arm != BASE:
        extra = extra_config(arm, settings, home / arm)
        offload = OffloadSpec(size_gib=settings.staging_gib, extra=extra)
    return ServerSpec(
        model=model,
        max_model_len=settings.model_len,
        gpu_blocks=settings.gpu_blocks,
        block_size=BLOCK_TOKENS,
        cores_reserved=0,
        offload=offload,
    )


class Fleet:
    """Started one after the other, in `home`; a context manager, which stops them all.

    Raises (also on entry):
        BenchError: one did not start; its log lies in `logs`.
    """

    def __init__(self, settings: Settings, home: Path, logs: Path, tell: Tell) -> None:
        self._settings = settings
        self._home = home
        self._logs = logs
        self._tell = tell
        self._stack = ExitStack()
        self._runner = asyncio.Runner()
        self.servers: dict[str, Server] = {}
        self.clients: dict[str, Client] = {}

    def __enter__(self) -> Self:
        with self._stack as stack:
            stack.enter_context(self._runner)
            self._tell("making the model")
            model = make_model(self._home / "models", self._settings.shape)
            for arm in self._settings.arms:
                self._start(stack, arm, model)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def run(self, coroutine: Any) -> Any:
        """Run a client's coroutine to its end."""
        return self._runner.run(coroutine)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of every server so far, by arm."""
        found = cpu_of_groups(tuple(server.pid for server in self.servers.values()))
        return {arm: found[server.pid] for arm, server in self.servers.items()}

    def check(self) -> None:
        """Every server still runs.

        Raises:
            BenchError: one has ended.
        """
        for arm, server in self.servers.items():
            if not server.running:
                raise BenchError(f"arm {arm}: its server has ended; its log is {server.log_path}")

    def _start(self, stack: ExitStack, arm: str, model: Path) -> None:
        self._tell(f"starting vllm serve, arm {arm}")
        spec = server_spec(arm, self._settings, model, self._home)
        with plainly(arm):
            server = stack.enter_context(Server(spec, self._logs / f"{arm}.log"))
            server.wait_ready()
        self.servers[arm] = server
        client = self.clients[arm] = Client(server.url)
        stack.callback(lambda: self._runner.run(client.close()))


@contextmanager
def plainly(arm: str) -> Iterator[None]:
    """A server's failure as one line: what happened, and the log's last line of an error."""
    try:
        yield
    except ServerError as error:
        what, *tail = str(error).splitlines()
        reasons = [line for line in tail if "Error" in line] or tail[-1:] or [""]
        raise BenchError(f"arm {arm}: {what} … {reasons[-1].strip()}") from None
