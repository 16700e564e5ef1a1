# SPDX-License-Identifier: Apache-2.0
"""Texts that users read by themselves: metrics' HELP, configuration keys, commands' `--help`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
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


@pytest.mark.parametrize("name", METRICS)
def test_a_metrics_help_is_complete(name: str) -> None:
    assert not problem(METRICS[name].help, 4)


@pytest.mark.parametrize("row", describe_keys(), ids=lambda row: str(row["key"]))
def test_a_keys_meaning_is_complete(row: dict[str, str]) -> None:
    assert not problem(row["meaning"], 4)


@pytest.mark.parametrize(("where", "text"), list(cli_texts()))
def test_a_help_line_is_complete(where: str, text: str) -> None:
    assert not problem(text, 1), f"{where}: {text}"


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
