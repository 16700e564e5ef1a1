# SPDX-License-Identifier: Apache-2.0
"""One plain line for what stops a server: vLLM buries exceptions under tracebacks of processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.names import LOGGER_NAME

__all__ = ["said_plainly"]

logger = logging.getLogger(LOGGER_NAME)


@contextlib.contextmanager
def said_plainly() -> Iterator[None]:
    """Log an `OffloadError` as the reason why there is no server, and pass it on."""
    try:
        yield
    except OffloadError as error:
        logger.error("cannot serve: %s", error)
        raise
