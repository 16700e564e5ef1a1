# SPDX-License-Identifier: Apache-2.0
"""Metrics of the core: declared, exported, over HTTP and in a file; and lines of the log."""

from __future__ import annotations

import ast
import json
import logging
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner
from vllm_nvmeof_bench.servers.server import ReservedPort

import vllm_nvmeof_offload
from tests.exporter import Exporter as MetricsServer
from tests.process import listening, wait_until
from vllm_nvmeof_offload import LOGGER_NAME, exporter
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.config import METRICS_ADDRESS, Replica
from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, ConfigError, io_error
from vllm_nvmeof_offload.exporter import Exporter, ExporterSettings, start_exporter
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.manager.request_log import Start
from vllm_nvmeof_offload.manager.requests import Suspension
from vllm_nvmeof_offload.manager.telemetry import (
    PERIOD_S,
    FailureLog,
    MetricsCollector,
    config_labels,
    start_line,
)
from vllm_nvmeof_offload.metrics import (
    COUNTERS,
    GAUGES,
    METRICS,
    PREFIX,
    Series,
    exported,
)
from vllm_nvmeof_offload.protocol import (
    LevelReport,
    RankHello,
    RateReport,
    Verdict,
    VerdictReport,
)

from .bench import Bench, hello, keys_of

TOKENS = 16
TARGETS = ("/mnt/one", "/mnt/two")


def hellos(ranks: int = 1, **changes: object) -> list[RankHello]:
    one = hello(0, 4, 8, (), target_count=2)
    one = replace(one, targets=TARGETS, stream_slots=3, io_engine="io_uring", copy_engine="memcpy")
    return [replace(one, rank=rank, **changes) for rank in range(ranks)]  # type: ignore[arg-type]


def collector(bench: Bench, **changes: object) -> MetricsCollector:
    ranks_hellos = hellos(bench.ranks, **changes)
    config = {"prompts_only": "no", "vllm": "0.32", **config_labels(ranks_hellos, CoreConfig())}
    return MetricsCollector(bench.core, Suspension(), ranks_hellos, config)


def names_of(values: dict[Series, float]) -> set[str]:
    return {exported(series)[0].removeprefix(PREFIX) for series in values}


def test_the_first_time_every_series_is_exported() -> None:
    metrics = collector(Bench(targets=2, tokens_per_chunk=TOKENS))
    counters, gauges = metrics.take_increases(), metrics.take_gauges()
    assert names_of(counters) == set(COUNTERS)
    assert names_of(gauges) == set(GAUGES)
    assert set(counters.values()) == {0}
    for series in (*counters, *gauges):
        name, labels = exported(series)
        declared = METRICS[name.removeprefix(PREFIX)].labels
        for label, value in zip(declared, labels, strict=True):
            assert value in label.values or label.source
    assert gauges["target_info", "1", "/mnt/two"] == 1
    assert gauges["capacity_tokens", "pool"] == 8 * TOKENS


def test_afterwards_only_changed_series_are_exported() -> None:
    bench = Bench(targets=2)
    metrics = collector(bench)
    metrics.take_increases(), metrics.take_gauges()
    assert (metrics.take_increases(), metrics.take_gauges()) == ({}, {})
    bench.store(1)
    assert metrics.take_increases() == {"stored_chunks": 1}
    changed = {"entries", "slots_used", "writes_pending"}
    assert names_of(metrics.take_gauges()) == changed
    assert names_of(metrics.take_gauges(unchanged_too=True)) == set(GAUGES)


def test_every_failure_was_exported_as_0_before() -> None:
    bench = Bench(pool=8, targets=2)
    metrics = collector(bench)
    first = metrics.take_increases()
    bench.store(1)
    (write,) = bench.writes()
    bench.done(write.op, (0, io_error(5)))
    bench.core.reset()
    (reset,) = bench.core.take_commands()
    bench.done(reset.op, (0, CHECKSUM_MISMATCH))
    assert metrics.take_increases().keys() <= first.keys()


def test_queue_lengths_and_rates_of_all_ranks_are_exported() -> None:
    bench = Bench(ranks=2, targets=2)
    metrics = collector(bench)
    bench.core.report([LevelReport(0, 1, read_waiting=2), LevelReport(1, 3, writes_in_flight=1)])
    bench.core.report([RateReport(0, 1, 50.0, 70.0), RateReport(1, 1, 40.0, 90.0)])
    gauges = metrics.take_gauges()
    assert gauges["slots_used", "stream"] == 4
    assert gauges["queued_operations", "read"] == 2
    assert gauges["operations_in_flight", "store"] == 1
    assert gauges["target_bytes_per_second", "1", "store"] == 40, "the slowest rank's"
    assert gauges["target_bytes_per_second", "1", "load"] == 70


def test_fallbacks_are_exported_by_part() -> None:
    lines = ("io_uring registered→unregistered: ENOMEM", "o_direct→buffered on /mnt/one: EINVAL")
    gauges = collector(Bench(ranks=2, targets=2), fallbacks=lines).take_gauges()
    seen = [gauges["fallbacks", part] for part in ("io_uring", "registration", "o_direct")]
    assert seen == [0, 2, 2]


# -- the start line -----------------------------------------------------------------------


def test_the_start_line_names_sizes_engines_and_fallbacks() -> None:
    bench = Bench(ranks=2, targets=2, tokens_per_chunk=TOKENS)
    ranks_hellos = hellos(
        2, volatile=("hashes are seeded",), fallbacks=("io_uring→threads: EPERM",)
    )
    ranks_hellos[1] = replace(
        ranks_hellos[1], io_engine="threads", volatile=("hashes are seeded", "files moved")
    )
    ranks_hellos = [replace(one, checksums="256 B ahead") for one in ranks_hellos]
    line = start_line(ranks_hellos, bench.core)
    assert "\n" not in line
    for part in (
        "CPU tier of 64 tokens (4 cache slots of 8.0 KiB) and 3 stream slots",
        "on 2 ranks",
        "pool of 128 tokens (8 slots",
        "/mnt/one, /mnt/two",
        "engine io_uring on rank 0, threads on rank 1",
        "checksums read 256 B ahead",
        "copies by memcpy",
        "evicts by credited_lru",
        "0 chunks adopted (0 tokens)",
        "NOTHING IS ADOPTED: hashes are seeded; files moved",
    ):
        assert part in line
    assert line.count("FALLBACK") == 1, "once, not once per rank"
    assert "no pool" in start_line(hellos(), Bench(pool=0).core)
    assert "lease" not in line


@pytest.mark.parametrize(
    ("alone", "group", "said"),
    [
        ("", "", "loads chunks stored by other servers of this host"),
        ("", "team-a", "loads chunks stored by other servers of group team-a"),
        ("there is no pool", "team-a", "SHARES NOTHING: there is no pool"),
    ],
)
def test_the_start_line_names_who_shares_and_who_leases(alone: str, group: str, said: str) -> None:
    core = Bench(ranks=2, targets=2).core
    assert start_line(hellos(2), core, alone, group).endswith(f"; {said}")
    leased = [replace(one, lease_name="host-a") for one in hellos(2)]
    parts = start_line(leased, core, alone, group).split("; ")
    assert parts[-2:] == ["holds the lease on its pool as host-a", said]


# -- failures as log lines ----------------------------------------------------------------


@pytest.fixture
def logger(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """`caplog` gets our records even if vLLM's logger, the parent of ours, does not propagate."""
    ours = logging.getLogger(LOGGER_NAME)
    propagates, ours.propagate = ours.propagate, False
    ours.addHandler(caplog.handler)
    yield
    ours.removeHandler(caplog.handler)
    ours.propagate = propagates


def fail(bench: Bench, number: int, outcome: object) -> None:
    bench.store(number)
    load = bench.core.prepare_load(keys_of(number))
    bench.done(load.op, (0, outcome))  # type: ignore[arg-type]


def test_a_failure_is_logged_at_once_and_then_once_per_minute(
    caplog: pytest.LogCaptureFixture, logger: None
) -> None:
    bench = Bench(pool=0)
    failure_log = FailureLog(bench.core, (), lambda: bench.now_s)
    failure_log.log_new()
    fail(bench, 1, CHECKSUM_MISMATCH)
    failure_log.log_new()
    for number in (2, 3, 4):
        fail(bench, number, CHECKSUM_MISMATCH)
        bench.now_s += 1
        failure_log.log_new()
    bench.now_s += PERIOD_S
    failure_log.log_new()
    failure_log.log_new()
    fail(bench, 5, CANCELLED)
    failure_log.log_new()
    follows = "could not be loaded: checksum_mismatch; their tokens are recomputed"
    assert caplog.messages == [f"1 chunk {follows}", f"3 chunks {follows}"]


def test_the_first_chunk_that_is_lost_before_its_write_is_logged(
    caplog: pytest.LogCaptureFixture, logger: None
) -> None:
    bench = Bench(cache=2)
    failure_log = FailureLog(bench.core, TARGETS, lambda: bench.now_s)
    bench.core.report([VerdictReport(0, 0, Verdict.SUSPECT)])
    bench.store(1, 2)
    failure_log.log_new()
    for number in (3, 4):
        bench.store(number)
        failure_log.log_new()
    (line,) = caplog.messages
    assert "before they are written (1 so far)" in line


# -- every counter that the source counts is declared, and the reverse ----------------

PACKAGE = Path(vllm_nvmeof_offload.__file__).parent


def counts() -> Iterator[tuple[str, list[ast.expr]]]:
    """The place, name and labels of every `counters[…] += …` in the product, and of what the native
    core counts."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        tuples = {
            ast.unparse(node.targets[0]): node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_NATIVE_COUNTS":
                assert isinstance(node.value, ast.Tuple)
                for one in node.value.elts:
                    yield path.name, one.elts if isinstance(one, ast.Tuple) else [one]
            if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Subscript):
                continue
            if ast.unparse(node.target.value).endswith("counters"):
                key = tuples.get(ast.unparse(node.target.slice), node.target.slice)
                parts = key.elts if isinstance(key, ast.Tuple) else [key]
                yield f"{path.name}:{node.lineno}", parts


def test_every_counted_name_is_declared_with_its_labels() -> None:
    for where, (name, *values) in counts():
        assert isinstance(name, ast.Constant) and name.value in COUNTERS, where
        labels = COUNTERS[name.value].labels
        assert len(values) == len(labels), where
        for label, value in zip(labels, values, strict=True):
            literal = isinstance(value, ast.Constant) and label.values
            assert not literal or value.value in label.values, f"{where}: {label.name}"


def test_every_declared_counter_is_counted_somewhere() -> None:
    counted = {name.value for _, (name, *_) in counts() if isinstance(name, ast.Constant)}
    assert counted == COUNTERS.keys()


# -- the log lines of a suspension ----------------------------------------------------


class LogRig:
    """A suspension, its clock and its log lines."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, LOGGER_NAME)
        self.now_s = 1000.0
        self.suspension = Suspension(lambda: self.now_s)
        self._caplog = caplog

    def lines(self) -> list[str]:
        lines = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return lines


def test_beginning_and_end_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = LogRig(caplog)
    rig.suspension.begin("my_monitor", ["a", "b"], known=False)
    (line,) = rig.lines()
    assert line.startswith("my_monitor may have changed the weights")
    assert "2 requests with older KV are not stored" in line
    assert "weights_never_change" in line
    rig.now_s += 20
    rig.suspension.ended("a")
    assert rig.lines() == []
    rig.suspension.ended("b")
    assert rig.lines() == [
        "every request is stored again, 20 s after a call that may have changed weights"
    ]
    rig.suspension.ended("b")
    assert rig.lines() == []


def test_a_lasting_suspension_is_logged_once_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    rig = LogRig(caplog)
    rig.suspension.begin("reload_weights", ["a"], known=True)
    assert "weights_never_change" not in rig.lines()[0]
    for _ in range(125):
        rig.suspension.log_while_it_lasts()
        rig.now_s += 1
    first, second = rig.lines()
    assert first.startswith("1 requests are still not stored, 60 s after a call")
    assert "120 s after" in second


def test_repeated_calls_are_logged_once_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    rig = LogRig(caplog)
    for _ in range(150):
        rig.suspension.begin("my_monitor", [], known=False)
        rig.suspension.log_while_it_lasts()
        rig.now_s += 1
    lines = rig.lines()
    assert len(lines) == 3
    assert all("every request is stored" in line for line in lines)


def test_a_later_change_replaces_an_earlier_one(caplog: pytest.LogCaptureFixture) -> None:
    rig = LogRig(caplog)
    rig.suspension.begin("my_monitor", ["a"], known=False)
    rig.suspension.begin("my_monitor", ["b"], known=False)
    assert rig.suspension.requests == {"b"}


# -- the exporter: HTTP on the loopback address, and a text file ----------------------

LABELS = {"model_name": "m", "engine": "3"}
OFF = ExporterSettings("off", Replica(), LABELS, is_dropped=False)
DEFAULT_PORT = int(METRICS_ADDRESS.rpartition(":")[2])


class Rig:
    """A core with two targets, and exporters of its metrics."""

    def __init__(self) -> None:
        self.bench = Bench(targets=2, tokens_per_chunk=16)
        self.metrics = collector(self.bench)

    @contextmanager
    def exporter(self, listen: str, **changes: Any) -> Iterator[Exporter]:
        settings = replace(OFF, listen=listen, **changes)
        exporter = Exporter(settings, self.metrics.snapshot, self.bench.core.request_log)
        try:
            yield exporter
        finally:
            exporter.stop()

    @contextmanager
    def http(self) -> Iterator[httpx.Client]:
        with ReservedPort() as port, self.exporter(f"127.0.0.1:{port.number}") as exporter:
            assert exporter.where == f"http://127.0.0.1:{port.number}/metrics"
            url = exporter.where.removesuffix("/metrics")
            with httpx.Client(base_url=url, trust_env=False) as client:
                yield client


@pytest.fixture
def rig() -> Rig:
    return Rig()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_series_is_served_with_vllms_names_labels_and_the_same_values(rig: Rig) -> None:
    with rig.http() as http:
        zeros = samples(http.get("/metrics").text)
        assert set(zeros.values()) == {0}, "counters start at 0 before the first step"
        rig.bench.store(1)
        counters = rig.metrics.take_increases()
        gauges = rig.metrics.take_gauges()
        served = samples(http.get("/metrics").text)
        expected = {}
        for series, value in {**counters, **gauges}.items():
            name, values = exported(series)
            metric = METRICS[name.removeprefix(PREFIX)]
            own = zip((label.name for label in metric.labels), values, strict=True)
            suffix = "_total" if metric.kind == "counter" else ""
            expected[name + suffix, tuple(sorted([*LABELS.items(), *own]))] = value
        assert served == expected
        assert zeros.keys() < served.keys(), "gauges follow with the first step"
        rig.bench.store(2)
        rig.metrics.take_increases()
        key = f"{PREFIX}stored_chunks_total", tuple(sorted(LABELS.items()))
        assert samples(http.get("/metrics").text)[key] == 2, "counts, not increases"


def test_it_listens_on_the_loopback_address_and_nowhere_else(rig: Rig) -> None:
    before = listening()
    with rig.http() as http:
        (port,) = sorted(set(listening()) - set(before))
        assert port == http.base_url.port
    assert set(listening()) == set(before), "stopped"


def test_nothing_listens_unless_vllm_drops_the_metrics_or_a_key_says_so() -> None:
    on = [
        replace(OFF, listen=listen, is_dropped=is_dropped).is_on
        for listen in ("auto", "off", "127.0.0.1:1", "/x.prom")
        for is_dropped in (False, True)
    ]
    assert on == [False, True, False, False, True, True, True, True]


def test_replicas_and_servers_have_different_ports(rig: Rig) -> None:
    with rig.exporter("auto") as one, rig.exporter("auto") as two:
        ports = [int(each.where.split(":")[-1].split("/")[0]) for each in (one, two)]
        assert DEFAULT_PORT <= ports[0] < ports[1]
        assert all(each.where.startswith("http://127.0.0.1:") for each in (one, two))
        with rig.exporter("auto", replica=Replica(20, 32)) as replica:
            assert f":{DEFAULT_PORT + 20}/" in replica.where
    with ReservedPort() as port:
        base = f"127.0.0.1:{port.number - 1}"
        with rig.exporter(base, replica=Replica(1, 2)) as second:
            assert f":{port.number}/" in second.where


def test_a_configured_port_that_is_taken_is_refused(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"metrics_listen=.*give a free port"):
            Exporter(replace(OFF, listen=address), rig.metrics.snapshot, rig.bench.core.request_log)


def test_an_address_that_cannot_be_used_ends_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "METRICS_ADDRESS", "203.0.113.1:9808")  # of no machine
    settings = replace(OFF, listen="auto", is_dropped=True)
    arguments = rig.metrics.snapshot, rig.bench.core.request_log
    assert start_exporter(settings, *arguments) is None
    assert start_exporter(replace(settings, listen="203.0.113.1:9808"), *arguments) is None
    assert start_exporter(OFF, *arguments) is None


def test_an_idle_client_does_not_keep_others_from_their_answers(rig: Rig) -> None:
    with rig.http() as http:
        address = ("127.0.0.1", int(http.base_url.port or 0))
        with socket.create_connection(address), socket.create_connection(address) as half:
            half.sendall(b"GET /met")
            assert http.get("/metrics", timeout=60).status_code == 200


def test_a_client_that_sends_a_byte_at_a_time_is_disconnected(rig: Rig) -> None:
    with (
        rig.http() as http,
        socket.create_connection(("127.0.0.1", int(http.base_url.port or 0))) as slow,
    ):
        for _ in range(40):
            slow.sendall(b"G")
            if select.select([slow], [], [], 0.5)[0]:
                break
        else:
            pytest.fail("still connected")


@pytest.mark.parametrize("count", [1, 2])
def test_a_text_file_has_the_same_metrics_until_the_server_stops(
    rig: Rig, tmp_path: Path, count: int
) -> None:
    rig.metrics.take_increases(), rig.metrics.take_gauges()
    listen, replica = str(tmp_path / "nvmeof.prom"), Replica(count - 1, count)
    before = listening()
    with rig.exporter(listen, replica=replica) as exporter:
        file = tmp_path / ("nvmeof.prom" if count == 1 else "nvmeof-1.prom")
        assert exporter.where == str(file)
        wait_until("the file", file.exists, 10)
        assert listening() == before, "no port"
        with rig.http() as http:
            assert samples(file.read_text()) == samples(http.get("/metrics").text)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_ends_nothing(rig: Rig, tmp_path: Path) -> None:
    with rig.exporter(str(tmp_path / "none" / "nvmeof.prom")):
        rig.bench.store(1)


# -- records ------------------------------------------------------------------------------


def start(rig: Rig, name: str, loaded: int = 0, **more: Any) -> None:
    tokens = {"tokens": 100, "gpu_tokens": 0, "found_tokens": loaded, "chunk_tokens": 16}
    one = Start(**{**tokens, "loaded_tokens": loaded, **more})
    rig.bench.core.request_log.started(name, one)


def test_records_are_served_by_id_and_the_last_one_by_name(rig: Rig) -> None:
    with rig.http() as http:
        assert http.get("/requests/last").status_code == 404
        for name in ("cmpl-a-0-12ab", "cmpl-a-1-34cd", "cmpl-ab", "x/ü"):
            start(rig, name)
        assert [one["request"] for one in http.get("/requests/last").json()] == ["x/ü"]
        named = http.get("/requests/cmpl-a").json()
        assert [one["request"] for one in named] == ["cmpl-a-0-12ab", "cmpl-a-1-34cd"]
        assert named[0]["engine"] == "3"
        (one,) = http.get("/requests/x%2F%C3%BC").json()
        assert one["starts"][0]["computed_tokens"] == 100
        assert http.get("/requests/unknown").status_code == 404
        assert http.get("/").status_code == 404
        assert http.post("/requests/last").status_code == 405
        assert http.post("/metrics").status_code == 405


def test_records_are_shown_only_to_clients_on_this_host(rig: Rig) -> None:
    start(rig, "a")
    with rig.exporter("auto") as exporter:
        for address, path, status in (
            ("10.0.0.7", "/requests/last", "403 Forbidden"),
            ("10.0.0.7", "/requests/a", "403 Forbidden"),
            ("10.0.0.7", "/metrics", "200 OK"),
            ("127.0.0.1", "/requests/a", "200 OK"),
            ("::1", "/requests/a", "200 OK"),
            ("::ffff:127.0.0.1", "/requests/a", "200 OK"),
            ("::ffff:10.0.0.7", "/requests/a", "403 Forbidden"),
        ):
            environ: dict[str, Any] = {"REMOTE_ADDR": address, "PATH_INFO": path}
            setup_testing_defaults(environ)
            got: list[str] = []
            body = b"".join(exporter.answer(environ, lambda status, _, got=got: got.append(status)))
            assert got == [status]
            assert (b"tokens" in body) is (status == "200 OK")


def explain(http: httpx.Client, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *arguments, "--url", str(http.base_url)])
    return done.exit_code, done.output


def test_explain_prints_what_became_of_a_request_in_eighty_columns(rig: Rig) -> None:
    bench, core = rig.bench, rig.bench.core
    core.admission.prefill_rate = 10.0
    bench.store(1, 2, 3)
    command = core.prepare_load(keys_of(1, 2, 3))
    planned = core.planned
    bench.now_s += 1.5
    bench.done(command.op, (2, CHECKSUM_MISMATCH))
    start(rig, "chatcmpl-7-ab12cd34", 48, load=planned)
    with rig.http() as http:
        code, text = explain(http, "chatcmpl-7")
        assert code == 0
        assert all(len(line) <= 80 for line in text.splitlines())
        said = " ".join(text.split())
        assert "loaded 48 tokens: 48 from the CPU tier" in said
        assert "computed 68 tokens" in said, "52 that were not found, 16 that failed"
        assert "waited 1.500 s for the load; computing: about 3.200 s, so 1.700 s saved" in said
        assert "16 tokens failed to load and were recomputed (chunks: 1 checksum_mismatch)" in said
        assert explain(http, "--last") == (0, text)
        code, text = explain(http, "--last", "--json")
        assert json.loads(text)[0]["starts"][0]["load"]["failed_tokens"] == 16
        code, text = explain(http, "unknown")
        assert (code, "no record of request unknown" in text) == (2, True)
        assert explain(http)[0] == explain(http, "one", "--last")[0] == 2


def test_an_id_cannot_control_the_terminal(rig: Rig) -> None:
    start(rig, "cmpl-\x1b[2Jx")
    with rig.http() as http:
        assert explain(http, "--last")[1].startswith("request cmpl-\\x1b[2Jx\n")


@pytest.mark.parametrize(
    "answer", ['[{"request": "a"}]', "[1]", '{"error": "\x1b[2J"}', "[" * 10**5]
)
def test_another_servers_answer_is_refused_in_one_line(answer: str) -> None:
    with MetricsServer([answer]) as other:
        done = CliRunner().invoke(app, ["explain", "--last", "--url", f"http://{other.address}"])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert "\x1b" not in done.output and done.output.count("\n") == 1


@pytest.mark.parametrize(
    "answer", ['{"detail": "Not Found"}', '{"error": {"message": "Not Found", "code": 404}}', "7"]
)
def test_explain_at_vllms_own_address_names_the_other_one(answer: str) -> None:
    with MetricsServer([answer]) as other:
        done = CliRunner().invoke(app, ["explain", "--last", "--url", f"http://{other.address}"])
    assert done.exit_code == 2
    assert "this seems to be vLLM's address, not the exporter's" in done.output
    assert "the address in the server's start line" in done.output
    assert "None" not in done.output
