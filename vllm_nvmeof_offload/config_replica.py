# SPDX-License-Identifier: Apache-2.0
"""One of several engines that share the configured sizes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Replica"]


@dataclass(frozen=True, slots=True)
class Replica:
    """One of `count` engines that share `pool_bytes` and `staging_bytes`.

    server: the same for all ranks of all of them, another one at every start.
    """

    index: int = 0
    count: int = 1
    server: str = ""

    @property
    def engine(self) -> str:
        """The same on all ranks of this replica, and of no other engine; "": not known."""
        return f"{self.server}/{self.index}" if self.server else ""
