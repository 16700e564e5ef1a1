# SPDX-License-Identifier: Apache-2.0
"""Settings of a benchmark: frozen dataclasses whose fields declare their command-line options.

A field made by `option` is an option of `bench NAME`: its name, type, default and bounds are
those of the field, and its help is declared beside it. A field without `option` is fixed. A
field that is itself a dataclass contributes the options of its fields.

On the command line tuples are separated by commas; without the option the default applies.
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
    """help: one sentence. flag: if it is not the field's name. min: of a number.

    in_bytes: a size, such as 64KiB. repeated: the option is given once per value. argument: a
    positional argument, without a default. recorded: whether the conditions hold the value.
    """

    help: str
    flag: str = ""
    min: float | None = None
    in_bytes: bool = False
    repeated: bool = False
    argument: bool = False
    recorded: bool = True


def option(default: Any, text: str, **given: Any) -> Any:
    """A field with an option; text: its help; `given`: fields of `Option`."""
    return field(default=default, metadata={_KEY: Option(text, **given)})


def size_option(default: Any, text: str, **given: Any) -> Any:
    """An option in bytes, such as 64KiB, or several of them."""
    return option(default, text, in_bytes=True, **given)


def option_of(one: Any) -> Option | None:
    """The option that a dataclass field declares."""
    found: Option | None = one.metadata.get(_KEY)
    return found


def recorded(settings: Any) -> dict[str, Any]:
    """The settings as conditions hold them: without paths, which are nobody else's business."""
    found = asdict(settings)
    for one in fields(settings):
        declared = option_of(one)
        if (declared and not declared.recorded) or isinstance(found[one.name], Path):
            del found[one.name]
    return found


def check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raises: BenchError: a name that is not known, or no name at all."""
    for name in given:
        if name not in known:
            raise BenchError(f"no {what} {name!r}; there are {', '.join(known)}")
    if not given:
        raise BenchError(f"nothing to measure: give at least one {what}")


def check_positive(settings: Any, *names: str) -> None:
    """Raises: BenchError: one of these fields, or of its values, is below 1."""
    for name in names:
        value = getattr(settings, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or min(numbers) < 1:
            raise BenchError(f"{name.replace('_', ' ')} is at least 1")
