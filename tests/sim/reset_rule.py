# SPDX-License-Identifier: Apache-2.0
"""Rule 15: each lane's superblock and later writes wait for what is in their own way only."""

from __future__ import annotations

from collections.abc import Container

from vllm_nvmeof_offload.pool.format import Stamp

from .base import Violation


class ResetRule:
    """One lane of one rank: its superblocks that are owed, and the stamp of its writes."""

    def __init__(self, target: int, stamp: Stamp) -> None:
        self._target = target
        self._begun = 0  # resets
        self._not_offered = 0  # superblocks
        self._undecided = 0
        self._named = stamp
        #: Of a write that is submitted now.
        self.stamp = stamp

    def began(self, named: Stamp, unnamed: Stamp) -> None:
        """The rank begins a reset."""
        self._begun += 1
        self._not_offered += 1
        self._undecided += 1
        self._named, self.stamp = named, unnamed

    def offered(self) -> int:
        """The engine got a superblock. Returns the number of its reset."""
        self._not_offered -= 1
        if self._not_offered < 0:
            raise Violation("15", f"a superblock of target {self._target} that no reset asks for")
        return self._begun - self._not_offered

    def ended(self, reset: int, *, ok: bool, late: bool) -> None:
        """The engine has answered, for the last time."""
        if ok and reset == self._begun:
            self.stamp = self._named
        if not late:
            self._undecided -= 1

    def given_up(self) -> None:
        """Its deadline has passed."""
        self._undecided -= 1

    def check(self, running: Container[int], resetting: Container[int]) -> None:
        """Check after a turn of the pipeline. running: targets with a write that is waited for;
        resetting: those with a superblock that is."""
        target = self._target
        if self._not_offered and target not in running and target not in resetting:
            raise Violation("15", f"target {target} has to wait with its superblock for others")

    def check_write(self, what: object, stamp: Stamp | None) -> None:
        """Check a write that is submitted."""
        if self._undecided:
            raise Violation("15", f"{what} passes a superblock of its lane")
        if stamp != self.stamp:
            raise Violation("15", f"{what} carries {stamp}, not {self.stamp}")
