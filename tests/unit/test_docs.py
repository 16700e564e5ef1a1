# SPDX-License-Identifier: Apache-2.0
"""Documents name only existing files, headings, metrics, configuration keys and commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands import EXIT_CODES
from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
METRICS = {metric.name for metric in (*COUNTERS.values(), *GAUGES.values())}
#: Code spans that look like files of this repository.
FILES = re.compile(r"`((?:docs|examples|tests|kernels|tools|bench|requirements)/[\w./@-]*)`")


def anchors(path: Path) -> set[str]:
    """The anchors of its headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def commands() -> set[str]:
    """Every command of `vllm-nvmeof`, its groups and their commands."""
    found, waiting = set(), [("", typer.main.get_command(app))]
    while waiting:
        prefix, group = waiting.pop()
        if not hasattr(group, "list_commands"):
            continue
        context = typer.Context(group)
        for name in group.list_commands(context):
            found.add(f"{prefix}{name}")
            command = group.get_command(context, name)
            assert command is not None, name
            waiting.append((f"{prefix}{name} ", command))
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_resolve(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        place = path.parent / name if name else path
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target
    for name in FILES.findall(text):
        assert (ROOT / name).exists() or (path.parent / name).exists(), name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_metrics_and_commands_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"vllm:nvmeof_\w+", text):
        assert name in METRICS or name.removesuffix("_total") in METRICS or name.endswith("_"), name
    known = commands()
    for words in re.findall(r"(?<![\w/-])vllm-nvmeof ([a-z][a-z-]*(?: [a-z][a-z-]+)?)", text):
        first = words.split()[0]
        has_more = any(command.startswith(f"{first} ") for command in known)
        assert (words if has_more and " " in words else first) in known, words


def test_the_page_has_the_table_of_exit_codes() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M)
    assert {int(code): says.replace("`", "") for code, says in rows} == EXIT_CODES


def test_every_key_in_the_readmes_table_is_one() -> None:
    table = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(table) == 6
    assert set(table) <= set(OffloadConfig.model_fields)
