# SPDX-License-Identifier: Apache-2.0
"""Descriptors with large numbers, as a process that holds many files has them."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

_ROOM = 256


@contextlib.contextmanager
def numbers_from(first: int) -> Iterator[None]:
    """What is opened meanwhile gets a number of at least `first`."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] < first + _ROOM:
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + _ROOM, limits[1]))
    taken = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        while taken[-1] < first - 1:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
