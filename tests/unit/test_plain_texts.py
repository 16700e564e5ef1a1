# SPDX-License-Identifier: Apache-2.0
"""Texts that users read by themselves: metrics' HELP, configuration keys, commands' `--help`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import click
import typer

from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.config import describe_keys
from vllm_nvmeof_offload.metrics import METRICS

#: A first word that refers to another sentence, or begins a fragment.
HEADLESS = re.compile(
    r"(as|for|how|if|its?|of|that|the(ir|m|se|y)|this|those|wh(at|en|ere|ich|o|ose|y))$", re.I
)
#: Words and phrases that need a sentence before this one, or that people do not say.
DIALECT = re.compile(
    r"\blikewise\b|\bthose of them\b|\banew\b|\bsooner\b|\bnobody\b|\bthe same as above\b|"
    r"\bof its own accord\b|\bbeside it\b|\btold\b|\btells?\b",
    re.I,
)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and group of `vllm-nvmeof`, by its words."""
    waiting: list[tuple[str, click.Command]] = [("vllm-nvmeof", typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        yield words, command
        inner = getattr(command, "commands", {})
        waiting += [(f"{words} {name}", one) for name, one in inner.items()]


def cli_texts() -> Iterator[tuple[str, str]]:
    for words, command in commands():
        yield words, command.help or ""
        for parameter in command.params:
            if parameter.name not in ("help", "install_completion", "show_completion"):
                yield f"{words} {parameter.name}", getattr(parameter, "help", None) or ""


def problem(text: str, words_min: int) -> str:
    """Return why `text` is not complete by itself; "" if it is."""
    words = re.findall(r"[\w'-]+", text)
    if len(words) < words_min:
        return f"fewer than {words_min} words"
    if HEADLESS.match(words[0]):
        return f"begins with {words[0]}"
    if not (text[0].isupper() or text[0].isdigit() or text[0] in "-$"):
        return "begins with a small letter"
    if not text.rstrip().endswith((".", "?", ")")):
        return "does not end with a full stop"
    found = DIALECT.search(text)
    return f"has {found[0]!r}" if found else ""


def problems(texts: Iterable[tuple[str, str]], words_min: int) -> dict[str, str]:
    """Return by name what is wrong with a text."""
    return {name: why for name, text in texts if (why := problem(text, words_min))}


def test_each_metrics_help_is_complete() -> None:
    assert problems(((name, metric.help) for name, metric in METRICS.items()), 4) == {}


def test_each_keys_meaning_is_complete() -> None:
    assert problems(((row["key"], row["meaning"]) for row in describe_keys()), 4) == {}


def test_each_help_line_is_complete() -> None:
    assert problems(cli_texts(), 1) == {}


def test_the_lint_finds_forbidden_texts() -> None:
    for text in (
        "",
        "What these steps took.",
        "Those of them that did not come: computed again.",
        "bytes that were moved by it.",
        "Reads with the I/O engine, likewise.",
        "Bytes that were written to a target",
    ):
        assert problem(text, 4)
