# SPDX-License-Identifier: Apache-2.0
"""An engine's own exporter of metrics and request records: an HTTP endpoint, or a text file.

vLLM's Python front end exports the same series at its `/metrics`; its Rust front end drops them.
The exporter reads values that the scheduler's thread has already collected, and never blocks that
thread.

HTTP requests are answered one at a time, each within seconds, so that clients cannot exhaust memory
or threads. `/requests/…` answers only clients on this host, because its records name requests.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.config import METRICS_ADDRESS, PORT_MAX, Replica, is_text_file
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.manager.request_log import RequestLog
from vllm_nvmeof_offload.metrics import METRICS, PREFIX, Series, exported

#: The time between two writes of the text file.
_FILE_PERIOD_S = 15.0
#: A client is disconnected after this time, which bounds the delay of other clients and of `stop`.
_CLIENT_S = 2.0
#: The number of ports to try, from the default port upward, if no address is configured.
_PORTS_TRIED = 64

Snapshot = Callable[[], tuple[Mapping[Series, float], Mapping[Series, float]]]


@dataclass(frozen=True, slots=True)
class ExporterSettings:
    """An exporter's settings. `listen` is the value of `metrics_listen`, and `labels` are vLLM's
    own. `is_dropped` states whether vLLM's front end drops a connector's statistics."""

    listen: str
    replica: Replica
    labels: Mapping[str, str]
    is_dropped: bool

    @property
    def is_on(self) -> bool:
        return self.is_dropped if self.listen == "auto" else self.listen != "off"


class Exporter(Collector):
    """An exporter that runs until `stop`. `where` is its address or file, as logged. Raises
    ConfigError if the exporter cannot listen at the configured address."""

    def __init__(
        self, settings: ExporterSettings, snapshot: Snapshot, request_log: RequestLog
    ) -> None:
        self._snapshot, self._request_log = snapshot, request_log
        self._labels = settings.labels
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._ended = threading.Event()
        self._server: WSGIServer | None = None
        if is_text_file(settings.listen):
            stem, suffix = os.path.splitext(settings.listen)
            replica = settings.replica
            self.where = f"{stem}-{replica.index}{suffix}" if replica.count > 1 else settings.listen
            target: Callable[[], None] = self._write_files
        else:
            self._server = _listen(settings, self.answer)
            host, port = self._server.server_address[:2]
            host = host.decode() if isinstance(host, bytes) else host
            self.where = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
            target = self._server.serve_forever
        self._thread = threading.Thread(target=target, name="nvmeof-metrics", daemon=True)
        self._thread.start()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for series, value in (item for part in self._snapshot() for item in part.items()):
            name, values = exported(series)
            if name not in families:
                declared = METRICS[name.removeprefix(PREFIX)]
                kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
                names = [*self._labels, *(label.name for label in declared.labels)]
                families[name] = kind(name, declared.help, labels=names)
            families[name].add_metric([*self._labels.values(), *values], value)
        yield from families.values()

    def stop(self) -> None:
        """Stop exporting, and remove the file, so that no scraper mistakes it for current
        metrics."""
        self._ended.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._thread.join(_CLIENT_S)

    def _write_files(self) -> None:
        failure = ""
        while not self._ended.is_set():
            try:
                write_to_textfile(self.where, self._registry)
            except OSError as error:
                if failure != str(error.strerror):
                    failure = str(error.strerror)
                    logger.warning("cannot write metrics to %s: %s", self.where, failure)
            self._ended.wait(_FILE_PERIOD_S)
        with suppress(OSError):
            os.unlink(self.where)

    def answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"].encode("latin-1").decode(errors="replace")
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return []
        if path == "/metrics":
            # Do not use OpenMetrics, where prometheus_client may replace the colon in the names.
            start_response("200 OK", [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")])
            return [generate_latest(self._registry)]
        status, body = self._records(path, environ)
        start_response(status, [("Content-Type", "application/json")])  # wsgiref changes the list
        return [json.dumps(body).encode()]

    def _records(self, path: str, environ: Mapping[str, Any]) -> tuple[str, object]:
        name = path.removeprefix("/requests/")
        if name == path:
            return "404 Not Found", {"error": "try /metrics, /requests/last or /requests/ID"}
        client = ipaddress.ip_address(environ["REMOTE_ADDR"])
        if not (getattr(client, "ipv4_mapped", None) or client).is_loopback:
            return "403 Forbidden", {"error": "requests are shown only to clients on this host"}
        found = self._request_log.find(None if name == "last" else name)
        if not found:
            return "404 Not Found", {"error": f"no record of request {name}"}
        return "200 OK", [{**self._labels, **one} for one in found]


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Suppress the access log."""

    def handle(self) -> None:
        # The socket's own timeout restarts with every byte.
        timer = threading.Timer(_CLIENT_S, self._disconnect)
        timer.start()
        with suppress(OSError):  # the client disconnected or was too slow
            super().handle()
        timer.cancel()

    def _disconnect(self) -> None:
        with suppress(OSError):  # the request has just ended
            self.connection.shutdown(socket.SHUT_RDWR)


class _Server(WSGIServer):
    def server_bind(self) -> None:
        """Bind without asking DNS for this host's name, which could delay the start."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", int(self.server_address[1])
        self.setup_environ()


def start_exporter(
    settings: ExporterSettings, snapshot: Snapshot, request_log: RequestLog
) -> Exporter | None:
    """Return the exporter, or None if it is off or cannot listen; a failure is only logged."""
    if not settings.is_on:
        return None
    try:
        return Exporter(settings, snapshot, request_log)
    except ConfigError as error:
        logger.warning("the engine's own exporter of metrics is off: %s", error)
        return None


def _listen(settings: ExporterSettings, app: Callable[..., Iterable[bytes]]) -> WSGIServer:
    """Listen at the configured address or, with "auto", at the first free port from the default.
    Raises ConfigError if no port is free."""
    is_default = settings.listen == "auto"
    address = METRICS_ADDRESS if is_default else settings.listen
    host, _, first = address.rpartition(":")
    host, port = host.strip("[]"), int(first) + settings.replica.index
    last = min(PORT_MAX, port + _PORTS_TRIED - 1 if is_default else port)
    while True:
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            made = type("_ServerOf", (_Server,), {"address_family": info[0]})
            return make_server(str(info[4][0]), port, app, made, _Handler)
        except (OSError, OverflowError) as error:
            if port >= last:
                remedy = f'cannot listen on port {port} ({error}); give a free port, or "off"'
                raise ConfigError("metrics_listen", settings.listen, remedy) from None
        port += 1
