# SPDX-License-Identifier: Apache-2.0
"""Polling for conditions that send no notification."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def wait_until(what: str, condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Poll `condition`, leaving the processor to those it waits for."""
    deadline, never = time.monotonic() + limit_s, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {limit_s:.0f} s"
        never.wait(0.02)
