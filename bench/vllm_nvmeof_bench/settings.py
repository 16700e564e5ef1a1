# SPDX-License-Identifier: Apache-2.0
"""Benchmark settings: frozen dataclasses whose fields declare command-line options.

A field made by `option` is an option of `bench NAME` with the field's name, type and default. A
field that is a dataclass contributes the options of its fields. Other fields are fixed. Commas
separate the values of a tuple on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.results import BenchError

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """A field's option. flag: "" for the field's name. in_bytes: the value is a size such as 64KiB.
    repeated: the option is given once per value. argument: a positional argument without a default.
    recorded: whether conditions save the value."""

    help: str
    flag: str = ""
    min: float | None = None
    in_bytes: bool = False
    repeated: bool = False
    argument: bool = False
    recorded: bool = True


def option(default: Any, text: str, **given: Any) -> Any:
    """Declare a field with an option. text: its help. given: other fields of `Option`."""
    return field(default=default, metadata={_KEY: Option(text, **given)})


def size_option(default: Any, text: str, **given: Any) -> Any:
    """Declare an option for one or more sizes in bytes."""
    return option(default, text, in_bytes=True, **given)


def option_of(one: Any) -> Option | None:
    """Return the option that a field declares, if any."""
    found: Option | None = one.metadata.get(_KEY)
    return found


def recorded(settings: Any) -> dict[str, Any]:
    """Return the settings to save in the conditions, without paths, which are private."""
    found = asdict(settings)
    for one in fields(settings):
        declared = option_of(one)
        if (declared and not declared.recorded) or isinstance(found[one.name], Path):
            del found[one.name]
    return found


def check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raise BenchError if a given name is unknown or none is given. what: the kind of names."""
    for name in given:
        if name not in known:
            raise BenchError(f"no {what} {name!r}; choose from {', '.join(known)}")
    if not given:
        raise BenchError(f"nothing to measure: give at least one {what}")


def check_positive(settings: Any, *names: str) -> None:
    """Raise BenchError if a value in the fields `names` is below 1, or a tuple is empty."""
    for name in names:
        value = getattr(settings, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or min(numbers) < 1:
            raise BenchError(f"{name.replace('_', ' ')} must be at least 1")
