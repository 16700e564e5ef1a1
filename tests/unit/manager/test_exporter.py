# SPDX-License-Identifier: Apache-2.0
"""The exporter: metrics and records over HTTP on the loopback address, and a text file."""

from __future__ import annotations

import json
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

from tests.exporter import Exporter as MetricsServer
from tests.process import listening
from tests.wait import wait_until
from vllm_nvmeof_offload import exporter
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.config import METRICS_ADDRESS, Replica
from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, ConfigError
from vllm_nvmeof_offload.exporter import Exporter, ExporterSettings, start_exporter
from vllm_nvmeof_offload.manager.request_log import Start
from vllm_nvmeof_offload.metrics import METRICS, PREFIX, exported

from .bench import Bench, keys_of
from .test_metrics_collector import collector

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


def test_names_are_the_same_whatever_format_prometheus_prefers(rig: Rig) -> None:
    accepted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    with rig.http() as http:
        plain, preferred = http.get("/metrics"), http.get("/metrics", headers={"accept": accepted})
    assert preferred.text == plain.text
    assert preferred.headers["content-type"].startswith("text/plain; version=0.0.4")


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


def test_a_start_does_not_wait_for_dns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(name: str = "") -> str:
        raise AssertionError(f"DNS was asked for {name}")

    monkeypatch.setattr(socket, "getfqdn", ask)
    with rig.http() as http:
        assert http.get("/metrics").status_code == 200


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
        assert "16 tokens did not arrive and were computed (chunks: 1 checksum_mismatch)" in said
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


def test_explain_takes_the_address_as_the_start_line_gives_it(rig: Rig) -> None:
    start(rig, "a")
    with rig.exporter("127.0.0.1:0") as exporter:
        assert exporter.where.endswith("/metrics")
        for url in (exporter.where, exporter.where + "/"):
            done = CliRunner().invoke(app, ["explain", "--last", "--url", url])
            assert (done.exit_code, done.output.startswith("request a\n")) == (0, True)


@pytest.mark.parametrize(
    "answer", ['{"detail": "Not Found"}', '{"error": {"message": "Not Found", "code": 404}}', "7"]
)
def test_explain_at_vllms_own_address_names_the_other_one(answer: str) -> None:
    with MetricsServer([answer]) as other:
        done = CliRunner().invoke(app, ["explain", "--last", "--url", f"http://{other.address}"])
    assert done.exit_code == 2
    assert "this seems to be vLLM's address, not that of metrics_listen" in done.output
    assert "the address in the server's start line" in done.output
    assert "None" not in done.output


def test_explain_says_how_to_turn_the_endpoint_on() -> None:
    with ReservedPort() as port:
        url = f"http://127.0.0.1:{port.number}"
        done = CliRunner().invoke(app, ["explain", "--last", "--url", url])
    assert done.exit_code == 2
    assert "VLLM_NVMEOF_METRICS_LISTEN=127.0.0.1:9808" in done.output
