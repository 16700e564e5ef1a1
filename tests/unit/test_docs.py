# SPDX-License-Identifier: Apache-2.0
"""Documents name only existing files, headings, metrics, configuration keys and commands; those
that are generated have exactly what the code has, whose metrics follow Prometheus' conventions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands import EXIT_CODES
from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, PREFIX, Metric

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
METRICS = {metric.name for metric in (*COUNTERS.values(), *GAUGES.values())}
#: Code spans that look like files of this repository.
FILES = re.compile(r"`((?:docs|examples|tests|kernels|tools|bench|requirements)/[\w./@-]*)`")
SOURCES = sorted(
    path
    for folder in ("vllm_nvmeof_offload", "bench/vllm_nvmeof_bench", "tests", "tools", "kernels")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".h", ".cpp", ".cu", ".def")
)
#: Rules as comments cite them, by one or two numbers; and what the simulator says is broken.
CITED = re.compile(r"\brules? (\d+)(?:(,| and| or| to) (\d+))?", re.I)
BROKEN = re.compile(r'Violation\(\s*"(\w+)"')


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


def rules_cited(text: str) -> set[str]:
    """The numbers of rules, and whatever stands in their place, that a source cites."""
    cited = set(BROKEN.findall(text))
    for first, joint, last in CITED.findall(text):
        between = range(int(first), int(last) + 1) if joint == " to" else ()
        cited |= {first, last or first, *map(str, between)}
    return cited


def test_every_rule_that_is_cited_is_on_the_page() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    rules = re.findall(r"^(\d+)\. \*\*", page, re.M)
    assert rules == [str(number) for number in range(1, len(rules) + 1)]
    for path in SOURCES:
        for rule in rules_cited(path.read_text()):
            assert rule in rules or re.fullmatch(r"[a-z]+", rule), f"{path}: rule {rule}"
    assert rules_cited('Rules 7 to 9, rule 2. Violation("leak"') == {*"2789", "leak"}


def test_the_page_draws_the_states_that_the_code_has() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = (ROOT / "vllm_nvmeof_offload/native/common/transitions.def").read_text()
    steps = re.findall(r"^STEP\((\w+), (\w+), (\w+)\)$", table, re.M)
    drawn = re.findall(r"^ *([A-Z]+) --> ([A-Z]+): ", page, re.M)
    assert set(drawn) == {(one, to) for one, event, to in steps if event != "DOOM"}


EVERY = [*COUNTERS.values(), *GAUGES.values()]
#: Words that Prometheus' conventions replace by base units, or by suffixes of their own.
NOT_BASE_UNITS = re.compile(r"_(ms|us|milliseconds|microseconds|kib|mib|gib|kb|mb|gb|percent)(_|$)")


@pytest.mark.parametrize("tool", ["metrics_doc.py", "config_doc.py"])
def test_the_generated_documents_are_up_to_date(tool: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / tool), "--check"]
    done = subprocess.run(command, cwd=tmp_path, check=False)
    assert done.returncode == 0, f"run tools/{tool}"


def test_the_document_has_every_metric_and_no_other() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    listed = re.findall(rf"^- `({PREFIX}\w+)` \(", text, re.M)
    expected = [f"{m.name}_total" for m in COUNTERS.values()] + [m.name for m in GAUGES.values()]
    assert listed == expected


def test_the_document_has_every_key_and_no_other() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert sorted(listed) == sorted(OffloadConfig.model_fields)


def test_names_follow_the_conventions() -> None:
    for metric in EVERY:
        _check(metric)


def _check(metric: Metric) -> None:
    # Routers count a server's engines by the text `engine="` in its figures.
    assert not any(label.name.endswith("engine") for label in metric.labels)
    name = metric.name.removeprefix(PREFIX)
    assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name)
    assert not name.endswith("_total"), "vLLM's client adds it"
    assert not NOT_BASE_UNITS.search(name)
    for unit in ("bytes", "seconds"):
        if metric.unit == unit:
            assert name.endswith(f"_{unit}"), f"a metric in {unit} ends with it"
    assert metric.help.endswith(".")
    assert len({label.name for label in metric.labels}) == len(metric.labels)
    for label in metric.labels:
        assert bool(label.values) != bool(label.source), (
            "bounded: by fixed values or a stated source"
        )
