# SPDX-License-Identifier: Apache-2.0
"""A real server's metrics, a real Prometheus, and the rules and dashboard in `examples/`.

The texts come from the server of `test_faults`, before its faults and after them. If this module
runs without `test_faults`, it starts a server for a moment.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm_nvmeof_bench.servers.server import ReservedPort

from tests.e2e import faults_rig as rig
from tests.e2e.prometheus_rig import Prometheus, RigUnavailableError, tool
from tests.exporter import Exporter
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
