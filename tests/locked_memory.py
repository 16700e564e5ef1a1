# SPDX-License-Identifier: Apache-2.0
"""Whether io_uring may register what a test gives it."""

from __future__ import annotations

import os
import resource

import pytest

_IS_BOUND = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY

#: The limit is for all processes of a user together, so that tests side by side run into it.
needs_locked_memory = pytest.mark.skipif(
    os.geteuid() != 0 and _IS_BOUND,
    reason="this user's locked memory is limited: ulimit -l unlimited, or run as root",
)
