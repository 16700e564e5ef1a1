# SPDX-License-Identifier: Apache-2.0
"""Tells whether the user named `kv_load_failure_policy`, or vLLM's default filled it in.

vLLM's default, "fail", ends a request whose load fails; ours is "recompute", unless the user says
"fail". Nothing in a `KVTransferConfig` says where its value came from, so the default is
replaced by an equal string of a type of its own.

An object that was made before the plugin was loaded (`LLM(kv_transfer_config={…})` makes one so)
cannot be told apart; it counts as not named.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

__all__ = ["install", "named_by_user"]

_FIELD = "kv_load_failure_policy"
#: Objects made since `install`. They are held weakly, and not hashable, hence by id.
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _Default(str):
    """A default that nobody named; equal to, and pickled as, the plain string."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def install() -> None:
    """Mark the default from now on; once."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config.kv_transfer import KVTransferConfig

    field = KVTransferConfig.__dataclass_fields__.get(_FIELD)
    if field is None or not isinstance(field.default, str) or isinstance(field.default, _Default):
        return
    before = field.default
    made = KVTransferConfig.__post_init__

    @functools.wraps(made)
    def remember(self: Any) -> None:
        _known[id(self)] = self
        made(self)

    field.default = _Default(before)
    KVTransferConfig.__post_init__ = remember
    if rebuild_dataclass(KVTransferConfig, force=True, raise_errors=False) is False:
        field.default = before
        KVTransferConfig.__post_init__ = made


def named_by_user(transfer: Any) -> bool:
    """Whether the user, as far as can be told, chose this object's policy."""
    policy = getattr(transfer, _FIELD, None)
    if policy == "recompute":
        return True
    return _known.get(id(transfer)) is transfer and not isinstance(policy, _Default)
