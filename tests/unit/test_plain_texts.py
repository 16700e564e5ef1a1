# SPDX-License-Identifier: Apache-2.0
"""Texts that users read: metrics' HELP, keys and `--help`, each by itself; sentences of pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

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

#: Pronouns whose noun a text that is read alone does not have.
PRONOUN = re.compile(r"\b(them|they|these|those|it)\b", re.I)

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SENTENCE_WORDS_MAX = 30


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


def key_and_help_texts() -> Iterator[tuple[str, str]]:
    yield from ((name, metric.help) for name, metric in METRICS.items())
    yield from ((row["key"], row["meaning"]) for row in describe_keys())


def blocks(page: str) -> Iterator[str]:
    """The paragraphs and list items of a Markdown page, without headings, tables and code."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", page, flags=re.M | re.S)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_code = line.startswith("    ") and (not block or line.startswith("      "))
        is_prose = bool(line.strip()) and not is_code and line[0] not in "#|"
        if not is_prose or re.match(r"\s*([-*]|\d+\.) ", line):
            yield " ".join(block)
            block = []
        if is_prose:
            block.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())


def is_list_of_links(block: str) -> bool:
    """Whether more words are in the texts of links than beside them."""
    inside = re.findall(r"\[([^\]]*)\]\([^)]*\)", block)
    outside = re.sub(r"\[[^\]]*\]\([^)]*\)", "", block)
    return len(" ".join(inside).split()) > len(re.findall(r"\w+", outside))


def long_sentences(page: str) -> list[str]:
    """The sentences of a Markdown page that have too many words."""
    prose = (block for block in blocks(page) if not is_list_of_links(block))
    sentences = (one for block in prose for one in re.split(r"[.!?][\"')*`]*\s+", block))
    return [one for one in sentences if len(one.split()) > SENTENCE_WORDS_MAX]


def test_each_metrics_help_is_complete() -> None:
    assert problems(((name, metric.help) for name, metric in METRICS.items()), 4) == {}


def test_each_keys_meaning_is_complete() -> None:
    assert problems(((row["key"], row["meaning"]) for row in describe_keys()), 4) == {}


def test_each_help_line_is_complete() -> None:
    assert problems(cli_texts(), 1) == {}


def test_help_and_keys_name_their_nouns() -> None:
    texts = key_and_help_texts()
    assert {name: found[0] for name, text in texts if (found := PRONOUN.search(text))} == {}


def test_sentences_on_pages_are_short() -> None:
    names = {path.relative_to(ROOT).as_posix(): path for path in PAGES}
    found = {name: long_sentences(path.read_text()) for name, path in names.items()}
    assert {name: long for name, long in found.items() if long} == {}


def test_the_lint_finds_long_sentences() -> None:
    words = "word " * 31
    assert long_sentences(f"# Head\n\nShort. {words}\nend. Short.") == [f"{words}end"]
    assert long_sentences(f"* {words}")
    assert not long_sentences(f"| {words} |\n\n    {words}\n\n```\n{words}\n```\n# {words}")
    assert not long_sentences("* " + "[a text](page.md), " * 31)


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
