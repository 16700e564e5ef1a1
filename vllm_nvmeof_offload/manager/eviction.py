# SPDX-License-Identifier: Apache-2.0
"""Eviction: which evictable slot is given up first. One policy object per tier and target, pure.

A policy holds only *evictable* slots: the manager withdraws a slot while anything pins it and
admits it again afterwards. Being pinned is not being used: the manager keeps in an array when
each slot was last used (`Recency` in native/eviction.h), so that a write or its late release does
not make a chunk look recent, and does not reverse the order of a prefix's chunks.

`Lru` in native/eviction.h is what the manager uses. `LruPolicy` is the same order in Python, for
users' classes, which the manager calls once per slot.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.manager.handshake import CREDIT_SHARE, CREDITED, WritePolicy

__all__ = ["EvictionPolicy", "LruPolicy", "MakePolicy", "choose_policy", "try_policy"]


class EvictionPolicy(Protocol):
    """Order in which evictable slots are given up.

    Made with `used`: by slot, when it was last used. The manager keeps it and a policy reads it: a
    view of integers that cannot be written.
    The time grows with every use of any slot; a withdrawn slot may come back with any value.
    One is made for the CPU tier and one for each target, which have at least one slot; after each
    reset they are made again. All slots are withdrawn at first.
    """

    def admit(self, slot: int) -> None:
        """`slot` has become evictable."""

    def withdraw(self, slot: int) -> None:
        """`slot` is not evictable any more; unknown slots are ignored."""

    def touch(self, slot: int) -> None:
        """`used[slot]` has grown; unknown slots are ignored."""

    def peek(self) -> int | None:
        """The slot that `victim` would return."""

    def victim(self) -> int | None:
        """Remove and return the slot to evict next; None if there is none."""

    def __contains__(self, slot: int) -> bool: ...

    def __len__(self) -> int: ...


#: Makes a policy from the array of each slot's last use.
MakePolicy = Callable[[Sequence[int]], EvictionPolicy]


class LruPolicy:
    """Least recently used first, ties by slot: the order of the manager's own, for users' classes
    to begin with. `peek` looks at every slot."""

    def __init__(self, used: Sequence[int]) -> None:
        self._used = used
        self._inside: set[int] = set()

    def admit(self, slot: int) -> None:
        self._inside.add(slot)

    def withdraw(self, slot: int) -> None:
        self._inside.discard(slot)

    def touch(self, slot: int) -> None:
        """Nothing to do: `peek` reads when each slot was last used."""

    def peek(self) -> int | None:
        return min(self._inside, key=lambda slot: (self._used[slot], slot), default=None)

    def victim(self) -> int | None:
        slot = self.peek()
        if slot is not None:
            self.withdraw(slot)
        return slot

    def __contains__(self, slot: int) -> bool:
        return slot in self._inside

    def __len__(self) -> int:
        return len(self._inside)


_KEY = "eviction_policy"
#: By their configured names; `credited_lru` differs in `Recency`, not in the policy.
POLICIES: dict[str, MakePolicy] = {CREDITED: LruPolicy, "lru": LruPolicy}
_METHODS = ("admit", "withdraw", "touch", "peek", "victim", "__contains__", "__len__")
_TRIAL_SLOTS, _TRIAL_CALLS = 16, 2000


def credit_share(name: str, write_policy: WritePolicy = WritePolicy.THROUGH) -> float:
    """`CoreConfig.credit_share` for the policy `name`; 0 where chunks are written on eviction.

    Plain LRU finds more there: 52.2 % against 49.9 % by `bench simulate` on public agentic traces.
    """
    return CREDIT_SHARE if name == CREDITED and write_policy is WritePolicy.THROUGH else 0.0


def choose_policy(name: str) -> MakePolicy:
    """The class for the configured `name`: one of `POLICIES`, or "module:Class".

    A user's class is tried first, because one that loses slots would stop a server later.

    Raises:
        ConfigError: there is none of this name, or it does not work as a policy must.
    """
    if name in POLICIES:
        return POLICIES[name]
    make = _imported(name)
    missing = [method for method in _METHODS if not hasattr(make, method)]
    if missing:
        described = "EvictionPolicy in manager/eviction.py describes each"
        raise ConfigError(_KEY, name, f"has no {', '.join(missing)}; {described}")
    try:
        fault = try_policy(make)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        fault = f"it raises {type(error).__name__}: {error}"
    if fault:
        raise ConfigError(_KEY, name, f"is not an eviction policy: {fault}")
    return make


def _imported(name: str) -> Callable[..., EvictionPolicy]:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        known = ", ".join(f'"{one}"' for one in POLICIES)
        raise ConfigError(_KEY, name, f'no such policy; give {known} or "module:Class"')
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        remedy = f"{module} cannot be imported ({error}); install it, or put it on PYTHONPATH"
        raise ConfigError(_KEY, name, remedy) from error
    found: Callable[..., EvictionPolicy] | None = getattr(imported, attribute, None)
    if found is None:
        # A folder of this name is a module too, without a file.
        where = getattr(imported, "__file__", None) or ", ".join(getattr(imported, "__path__", ()))
        remedy = (
            f"the module, found at {where}, has no {attribute}; name a class that it defines, or "
            "put the directory of the right module on PYTHONPATH"
        )
        raise ConfigError(_KEY, name, remedy)
    return found


def try_policy(make: MakePolicy) -> str | None:
    """Play a fixed sequence of calls; return what is wrong with the answers, None if nothing is.

    Any order of eviction is right. Played over a view of an array, as the manager makes policies.
    """
    used = array("Q", bytes(8 * _TRIAL_SLOTS))
    policy, inside, state = make(memoryview(used).toreadonly()), set[int](), 1
    if policy.peek() is not None or policy.victim() is not None:
        return "it gives a slot where none is evictable"
    for now in range(1, _TRIAL_CALLS):
        state = state * 48271 % 0x7FFFFFFF  # the same calls at every start
        slot, call = state % _TRIAL_SLOTS, state // _TRIAL_SLOTS % 5
        if call == 0:
            expected = policy.peek()
            victim = policy.victim()
            if victim != expected:
                return f"peek gave {expected}, victim gave {victim}"
            if victim not in inside if inside else victim is not None:
                return f"victim gave {victim} where {sorted(inside)} were evictable"
            inside.discard(victim if victim is not None else -1)
        elif call == 1:
            policy.withdraw(slot)
            inside.discard(slot)
        elif call == 2:
            used[slot] = now
            policy.touch(slot)
        else:
            policy.admit(slot)
            inside.add(slot)
        if len(policy) != len(inside) or (slot in policy) != (slot in inside):
            return f"it does not know which slots are evictable: {sorted(inside)}"
    return None
