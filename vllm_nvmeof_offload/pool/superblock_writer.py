# SPDX-License-Identifier: Apache-2.0
"""Superblocks of several directories, each written by a thread of its own for as long as it takes.

A reset must become durable on the targets that answer although another one hangs. A directory
has one thread at a time: while that hangs, the newest superblock waits for it, and replaces one
that has waited longer. So an older superblock never follows a newer one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.superblock import Superblock, write_superblock

__all__ = ["PATIENCE_S", "SuperblockWriter", "first_failure"]

logger = logging.getLogger(LOGGER_NAME)

#: How long a reset waits for a directory that does not answer while another one does.
PATIENCE_S = 2.0


def start_thread(run: Callable[[], None]) -> None:
    """Tests that want one order of events replace it by a plain call."""
    threading.Thread(target=run, name="io-superblock", daemon=True).start()


class SuperblockWriter:
    """One directory. `changed` is shared by all whose ends are waited for together."""

    def __init__(
        self, directory: Path, durable: Superblock | None, changed: threading.Condition
    ) -> None:
        """durable: what is there now; None: not known."""
        self.directory = directory
        self.durable = durable
        #: Why the last write failed; None if it did not.
        self.failure: OSError | None = None
        #: A thread writes, or hangs.
        self.busy = False
        self._next: Superblock | None = None
        self._changed = changed

    def write(self, superblock: Superblock) -> None:
        """Begin to replace the directory's superblock."""
        with self._changed:
            self._next, self.failure = superblock, None
            idle, self.busy = not self.busy, True
        if idle:
            try:
                start_thread(self._run)
            except RuntimeError:  # no thread can be started: this one waits for the disk instead
                self._run()

    def _run(self) -> None:
        try:
            while (superblock := self._take()) is not None:
                failure = None
                try:
                    write_superblock(self.directory, superblock)
                except OSError as error:
                    failure = error
                self._ended(superblock, failure)
        except BaseException:
            with self._changed:
                self.busy = False
                self._changed.notify_all()
            raise

    def _take(self) -> Superblock | None:
        with self._changed:
            superblock, self._next = self._next, None
            if superblock is None:
                self.busy = False
                self._changed.notify_all()
            return superblock

    def _ended(self, superblock: Superblock, failure: OSError | None) -> None:
        with self._changed:
            if failure is None:
                self.durable = superblock
            if self._next is None:
                self.failure = failure


def first_failure(
    writers: Sequence[SuperblockWriter], changed: threading.Condition
) -> OSError | None:
    """Wait for writes that have begun; return why one failed, or None.

    After `PATIENCE_S` those that hang are left to their threads, if any other has ended.
    """
    with changed:
        if not changed.wait_for(lambda: not any(writer.busy for writer in writers), PATIENCE_S):
            changed.wait_for(lambda: not all(writer.busy for writer in writers))
            for writer in writers:
                if writer.busy:
                    logger.warning(
                        "%s does not take its superblock: the reset goes on without it, and what "
                        "it holds stays void by the other targets' superblocks",
                        writer.directory,
                    )
        failures = (writer.failure for writer in writers if not writer.busy)
        return next((failure for failure in failures if failure is not None), None)
