# SPDX-License-Identifier: Apache-2.0
"""Ends an engine whose API server has died.

vLLM's engine process outlives a killed API server: nobody can ask it any more, and it keeps its
memory, its GPU, and the lock on its pool, so that the next server would start with an empty one
beside it. An engine within a process of its user's is left alone.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

from vllm_nvmeof_offload.names import LOGGER_NAME

__all__ = ["end_with_parent"]

logger = logging.getLogger(LOGGER_NAME)

#: What vLLM names its engine's process; a number may follow.
_ENGINE = "EngineCore"
_LOOK_S = 1.0
#: For vLLM's own way to end, before this process is killed.
_GRACE_S = 10.0

_watching = False


def end_with_parent() -> None:
    """From now on this process, if it is vLLM's engine, ends when the one does that made it."""
    global _watching
    parent = multiprocessing.parent_process()
    if _watching or not multiprocessing.current_process().name.startswith(_ENGINE):
        return
    if parent is None or parent.pid != os.getppid():
        return  # made by a server of forks, whose end says nothing
    _watching = True
    threading.Thread(
        target=_watch, args=(parent.pid, threading.Event()), name="orphan-watch", daemon=True
    ).start()


def _watch(parent: int, never: threading.Event) -> None:
    while os.getppid() == parent:
        never.wait(_LOOK_S)
    logger.error("the process %d that started this engine is gone: ending", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    never.wait(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
