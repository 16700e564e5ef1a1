# SPDX-License-Identifier: Apache-2.0
"""Decides which vLLM is served.

vLLM's offloading interface changes with its releases. One that calls us with other parameters, or
leaves out a call that we rely on, would give wrong tokens without an error. Therefore every vLLM
must have all capabilities that we use (`capabilities`), and our classes must fit to its own; else
it is refused, with what it lacks.

A release is *known* when vLLM's own tests have passed with our connector. An unknown one, with
everything that we use, is served after a self-test (`self_test`), unless `allow_unknown_vllm` is
false.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vllm_nvmeof_offload import CONNECTOR_MODULE
from vllm_nvmeof_offload.errors import ConfigError, IntegrationError
from vllm_nvmeof_offload.vllm_adapter import capabilities

#: Releases of vLLM, by their first two numbers.
KNOWN = ("0.32", "0.33")

UNKNOWN = "unknown"
_RELEASES = " or ".join(KNOWN)


def version() -> str:
    """Version of the vLLM that is imported, or `unknown`."""
    return str(getattr(sys.modules.get("vllm"), "__version__", UNKNOWN))


def release() -> str:
    """The known release that this vLLM is, or `unknown`."""
    numbers = re.match(r"\d+\.\d+(?=\.)", version())
    return numbers[0] if numbers and numbers[0] in KNOWN else UNKNOWN


def unknown_version() -> str | None:
    """Why this vLLM's release is unknown, with the remedy; None: it is known."""
    if release() != UNKNOWN:
        return None
    return (
        f"vLLM {version()} is not known to this vllm-nvmeof-offload; use vLLM {_RELEASES}, or a "
        "vllm-nvmeof-offload that knows this one"
    )


def refuse_different() -> None:
    """Refuse a vLLM that lacks what we use, with an `IntegrationError`: one line with the remedy.

    Whether its release is known makes no difference.
    """
    found = _difference()
    if found is None:
        return
    raise IntegrationError(
        f"this vLLM {version()} differs from what this vllm-nvmeof-offload uses ({found}); use a "
        f"release of vLLM {_RELEASES}, or a vllm-nvmeof-offload that knows this one"
    )


def refuse_unknown(allowed: bool) -> None:
    """Refuse an unknown release, unless `allowed`: the value of `allow_unknown_vllm`."""
    problem = unknown_version()
    if problem is not None and not allowed:
        raise ConfigError(
            "allow_unknown_vllm", allowed, f"{problem}; true serves it after a self-test"
        )


@functools.cache
def _difference() -> str | None:
    """The first difference between this vLLM's interface and what we use of it."""
    try:
        found = next(capabilities.missing(), None)
        if found is not None:
            return found
        connector = importlib.import_module(CONNECTOR_MODULE)
    except (ImportError, AttributeError) as error:
        return str(error).partition(" (/")[0]  # without the file's path
    return next(_differences(connector), None)


def _differences(connector: Any) -> Iterator[str]:
    """Methods of vLLM's classes that ours lack, or override with other parameters."""
    for cls in (
        connector.NVMeoFOffloadingConnector,
        connector.NVMeoFOffloadingManager,
        connector.worker_class(),
        connector.NVMeoFOffloadingSpec,
    ):
        base = next(one for one in cls.__mro__ if _is_vllms(one.__module__))
        for name in sorted(cls.__abstractmethods__):
            yield f"{base.__name__}.{name} is new"
        for name, theirs in inspect.getmembers(base, inspect.isfunction):
            method = getattr(cls, name)
            if inspect.isfunction(method) and not accepts(method, theirs):
                yield f"{base.__name__}.{name}{inspect.signature(theirs)} has other parameters"


def _is_vllms(module: str) -> bool:
    """Whether a module is vLLM's own: this package may be in vLLM's tree."""
    ours = CONNECTOR_MODULE.removesuffix("connector")
    return module.startswith("vllm.") and not module.startswith(ours)


def accepts(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether `ours` accepts every call that `theirs` accepts."""
    signature = inspect.signature(ours)
    calls = [
        p
        for p in inspect.signature(theirs).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    places = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # A parameter with a default may be passed by name only, to our `**kwargs` too.
    called = [p.name for p in calls if p.default is p.empty or p.name in signature.parameters]
    try:
        signature.bind(**{p.name: None for p in calls})
    except TypeError:
        return False
    return places[: len(called)] == called
