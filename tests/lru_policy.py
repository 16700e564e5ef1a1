# SPDX-License-Identifier: Apache-2.0
"""A user's eviction policy with the order of the native one, for tests to change."""

from __future__ import annotations

from collections.abc import Sequence


class LruPolicy:
    """Least recently used first, ties by slot. `peek` looks at every slot."""

    def __init__(self, used: Sequence[int]) -> None:
        self._used = used
        self.inside: set[int] = set()

    def admit(self, slot: int) -> None:
        self.inside.add(slot)

    def withdraw(self, slot: int) -> None:
        self.inside.discard(slot)

    def touch(self, slot: int) -> None:
        """Nothing to do: `peek` reads when each slot was last used."""

    def peek(self) -> int | None:
        return min(self.inside, key=lambda slot: (self._used[slot], slot), default=None)

    def victim(self) -> int | None:
        slot = self.peek()
        if slot is not None:
            self.withdraw(slot)
        return slot
