# SPDX-License-Identifier: Apache-2.0
"""Plays seeds, in memory if possible, because a seed does the I/O of hundreds of small files."""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from pathlib import Path

from vllm_nvmeof_offload import LOGGER_NAME

from .world import World

_MEMORY = Path("/dev/shm")


def play(seed: int, root: Path, lies: bool = False) -> Counter[str]:
    """Play one seed in the empty directory `root`; return what happened, counted."""
    world = World(root.resolve(), seed, lies)
    with world.disk.active():
        try:
            world.play()
        except AssertionError as error:
            command = f"python -m tests.faults.store --seed {seed}"
            raise AssertionError(f"{error} (replay: {command})") from error
        finally:
            world.disk.dead = True
            world.close()
    return world.counts


def play_in_memory(seed: int, lies: bool = False) -> Counter[str]:
    """Play one seed.

    Raises:
        AssertionError: a rule was broken; the message has the replay command.
    """
    # The package warns about every damage, and these tests damage files all the time.
    logger = logging.getLogger(LOGGER_NAME)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix="vnvme-store-", dir=place) as root:
            return play(seed, Path(root), lies)
    finally:
        logger.setLevel(level)
