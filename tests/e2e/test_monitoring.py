# SPDX-License-Identifier: Apache-2.0
"""A real server's metrics, a real Prometheus, and the rules and dashboard in `examples/`.
Prometheus is Debian's, unpacked into the user's cache once per machine; nothing is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm_nvmeof_bench.servers.server import ReservedPort

from tests.e2e import servers as rig
from tests.exporter import Exporter
from tests.fabric.rig.packages import RigUnavailableError, apt_in, locked, run_tool, unpack
from vllm_nvmeof_offload import exporter
from vllm_nvmeof_offload.config import Replica
from vllm_nvmeof_offload.manager.request_log import RequestLog
from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, METRICS, PREFIX, Series

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
RULES = EXAMPLES / "rules.yml"
DASHBOARD = json.loads((EXAMPLES / "dashboard.json").read_text())
QUERIES = [
    (panel["title"], target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
#: What Grafana puts in its variables' place.
VARIABLES = {"$instance": ".*", "$__rate_interval": "1m"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two scrapes of one server, with requests between them."""
    if len(rig.scrapes) < 2:
        with rig.start(rig.spec(tmp_path_factory.mktemp("pool")), "monitoring") as server:
            rig.keep_scrape(server)
            for _ in range(2):
                rig.ask(server, rig.prompts())
            rig.keep_scrape(server)
    return rig.scrapes


@pytest.fixture(scope="module")
def prometheus(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    try:
        tool("prometheus")
    except RigUnavailableError as error:
        pytest.skip(str(error))
    with (
        Exporter(texts) as exporter,
        Prometheus(tmp_path_factory.mktemp("prometheus"), exporter.address, RULES) as server,
    ):
        server.wait_for("count_over_time(up[1m]) >= 3")
        yield server


@pytest.fixture(scope="module")
def own_prometheus(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes an engine's own endpoint, with the values of the last text."""
    try:
        tool("prometheus")
    except RigUnavailableError as error:
        pytest.skip(str(error))
    gauges: dict[Series, float] = {}
    counts: dict[Series, float] = {}
    for family in text_string_to_metric_families(texts[-1]):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX).removesuffix("_total")
            if sample.name.startswith(PREFIX) and name in METRICS:
                values = [sample.labels[label.name] for label in METRICS[name].labels]
                (counts if name in COUNTERS else gauges)[(name, *values)] = sample.value
    labels = {"model_name": "demo", "engine": "0"}
    with ReservedPort() as port:
        address = f"127.0.0.1:{port.number}"
        settings = exporter.ExporterSettings(address, Replica(), labels, is_dropped=True)
        own = exporter.Exporter(settings, lambda: (counts, gauges), RequestLog())
        try:
            with Prometheus(tmp_path_factory.mktemp("own"), address, RULES) as server:
                server.wait_for("count_over_time(up[1m]) >= 3")
                yield server
        finally:
            own.stop()


def filled(query: str) -> str:
    """The query with values in place of Grafana's variables."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


def exported(text: str) -> set[str]:
    """The names of this package's metrics in the text's TYPE lines."""
    return set(re.findall(rf"^# TYPE ({PREFIX}\w+) (?:counter|gauge)$", text, re.MULTILINE))


def test_a_server_exports_every_declared_metric_and_no_other(texts: list[str]) -> None:
    declared = {f"{m.name}_total" for m in COUNTERS.values()} | {m.name for m in GAUGES.values()}
    names = {name for name in exported(texts[-1]) if not name.endswith("_created")}
    assert names == declared
    for name in declared:
        assert re.search(rf"^{re.escape(name)}\{{", texts[0], re.MULTILINE), (
            f"{name} has no series before the first request"
        )


def test_promtool_finds_only_the_colon_in_vllms_names(texts: list[str]) -> None:
    try:
        promtool = tool("promtool")
    except RigUnavailableError as error:
        pytest.skip(str(error))
    ours = [line for line in texts[-1].splitlines(keepends=True) if PREFIX in line]
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input="".join(ours),
        capture_output=True,
        text=True,
        check=False,
    )
    findings = (done.stdout + done.stderr).splitlines()
    assert [one for one in findings if "should not contain ':'" not in one] == []


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_each_query_of_the_dashboard_returns_series(
    prometheus: Prometheus, title: str, query: str
) -> None:
    assert prometheus.query(filled(query)), f"{title}: nothing"


def test_each_alert_runs_on_what_a_server_exports(prometheus: Prometheus) -> None:
    answer = prometheus.rules()
    assert {rule["name"] for rule in answer} == set(alerts())
    for rule in answer:
        assert rule["health"] == "ok", rule
        for name in re.findall(rf"{PREFIX}\w+", rule["query"]):
            assert prometheus.query(name), f"{rule['name']}: the server exports no {name}"


def test_dashboard_and_alerts_find_their_series_at_an_engines_own_endpoint(
    own_prometheus: Prometheus,
) -> None:
    queries = [query for _, query in QUERIES if PREFIX in query]
    assert len(queries) > len(QUERIES) - 5
    for query in map(filled, queries):
        assert own_prometheus.query(query), query
    for rule in own_prometheus.rules():
        for name in re.findall(rf"{PREFIX}\w+", rule["query"]):
            assert own_prometheus.query(name), name


def test_alerts_fire_on_a_fault_and_not_on_a_healthy_server() -> None:
    try:
        promtool = tool("promtool")
    except RigUnavailableError as error:
        pytest.skip(str(error))
    command = [promtool, "test", "rules", "rules_test.yml"]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = (EXAMPLES / "rules_test.yml").read_text()
    for name in alerts():
        assert f"alertname: {name}, exp_alerts: []" in tested, "on a healthy server"
        assert f"""alertname="{name}",alertstate="firing""" in tested, "on a fault"


def alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", RULES.read_text())


_READY_S = 60.0


def tool(name: str) -> Path:
    """The path of `prometheus` or `promtool`, from the system or from Debian's package.

    Raises:
        RigUnavailableError: with the reason and the remedy.
    """
    own = shutil.which(name)
    if own is not None:
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(cache) / "vllm-nvmeof" / "prometheus"
    with locked(place):
        found = place / "root" / "usr" / "bin" / name
        if not found.exists():
            if shutil.which("apt-get") is None:
                raise RigUnavailableError(
                    "there is no apt-get here to download Prometheus: install it"
                )
            archives = place / "apt" / "archives"
            run_tool(["apt-get", *apt_in(place), "-qq", "download", "prometheus"], archives)
            (archive,) = archives.glob("prometheus_*.deb")
            unpack(archive, place / "root")
            shutil.rmtree(place / "apt")
    return found


class Prometheus:
    """Scrapes `address` every second, on the loopback address, with these alert rules."""

    def __init__(self, directory: Path, address: str, rules: Path) -> None:
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
            f"rule_files: ['{rules}']\n"
            "scrape_configs:\n"
            f"  - {{job_name: vllm, static_configs: [{{targets: ['{address}']}}]}}\n"
        )
        self._reserved = ReservedPort()
        port = self._reserved.number
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(tool("prometheus")),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._http = httpx.Client(base_url=self.url, timeout=10, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(20)
        self._reserved.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query; AssertionError if it is refused."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer.get("error"))
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        """The rules and how their last evaluation went."""
        self.wait_for("count_over_time(up[1m]) >= 2")
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """Wait until the query returns a series."""
        deadline, never = time.monotonic() + _READY_S, threading.Event()
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()
            with suppress(httpx.TransportError, ValueError):
                if found := self.query(expression):
                    return found
            never.wait(0.1)
        raise AssertionError(f"{expression} returns nothing\n{self._log.read_text()[-2000:]}")
