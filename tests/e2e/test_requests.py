# SPDX-License-Identifier: Apache-2.0
"""The commands in docs/requests.md work on a real server as the page says."""

from __future__ import annotations

import gzip
import http.server
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_nvmeof_bench.servers.client import Metrics
from vllm_nvmeof_bench.servers.server import MODEL_NAME, Server

from tests.e2e import servers as rig
from tests.e2e.servers import LOADED
from tests.process import wait_until
from vllm_nvmeof_offload.protocol import SavedSessions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "requests.md"
HINTS = "vllm:nvmeof_kv_hints_total"
RETAINED = "vllm:nvmeof_slots_retained"
#: The trace to which the commands' requests belong.
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def commands() -> dict[str, str]:
    """The commands of docs/requests.md by the headings of their sections."""
    sections = PAGE.read_text().split("\n## ")[1:]
    found = {}
    for section in sections:
        heading, _, text = section.partition("\n")
        (found[heading],) = re.findall(r"^    ask '.*(?:\n     .*)*", text, re.MULTILINE)
    (ask,) = re.findall(r"^    ask\(\) \{\n(?:     .*\n)+    \}\n", PAGE.read_text(), re.MULTILINE)
    return {heading: ask + command for heading, command in found.items()}


class Shell:
    """Runs commands of the page for one prompt, whose KV is not in GPU memory."""

    def __init__(self, server: Server, prompt: list[int], others: list[list[int]]) -> None:
        self._server, self._others, self._before = server, others, Metrics("")
        names = {"URL": server.url, "MODEL": MODEL_NAME, "PROMPT": json.dumps(prompt)}
        self._environment = {**os.environ, "no_proxy": "*", **names}

    def run(self, command: str, *, cold: bool = True) -> dict[str, Any]:
        """cold: the prompt's KV is only in the pool, because others have filled the CPU tier."""
        if cold:
            rig.ask_and_settle(self._server, self._others)
        rig.forget_gpu(self._server)
        self._before = rig.metrics(self._server)
        more = rf"-H 'traceparent: 00-{TRACE}-00f067aa0ba902b7-01' -w '\n%{{http_code}}'"
        command = command.replace("curl -s ", f"curl -s {more} ", 1)
        done = subprocess.run(
            ["bash", "-c", command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        body, _, status = done.stdout.rpartition("\n")
        assert status == "200", done.stdout
        rig.settle(self._server)
        answer: dict[str, Any] = json.loads(body)
        return answer

    def grown(self, name: str, **labels: str) -> float:
        """The growth of a counter since the last command began."""
        return rig.grown(self._server, self._before, name, **labels)


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of an OpenTelemetry collector, and the spans that have reached it."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/v1/traces", spans
        listening.shutdown()


def test_the_commands_of_the_page_on_requests(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    pytest.importorskip("opentelemetry.proto", reason="the trace's collector reads its messages")
    page, prompts = commands(), rig.prompts()
    spec = rig.spec(tmp_path / "pool")
    with collector() as (address, spans):
        traced = replace(
            spec,
            extra_args=(*spec.extra_args, "--otlp-traces-endpoint", address),
            env={**spec.env, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
        )
        with rig.start(traced, "requests") as server:
            run_all(server, page, prompts)
        assert not page, "a command of the page was not run"
    loads = [span for span in spans if span.name == "kv_load"]
    assert loads, "the server has exported its spans at its end"
    requests = {span.trace_id.hex() for span in spans if span.name == "llm_request"}
    assert {span.trace_id.hex() for span in loads} == {TRACE} <= requests


def run_all(server: Server, page: dict[str, str], prompts: list[list[int]]) -> None:
    """Run every command of the page, and remove it from `page`."""
    rig.ask_and_settle(server, prompts)
    shell = Shell(server, prompts[0], prompts[1:])
    shell.run(page.pop("Limit what is loaded"))
    assert shell.grown(LOADED) == 0
    shell.run(page.pop("Limit from where"))
    assert shell.grown(LOADED, source="pool") == 0
    shell.run(page.pop("Name helpers"))
    assert shell.grown("vllm:nvmeof_peer_hints_total", helper="unknown") == 1
    assert shell.grown(LOADED, source="pool") >= rig.CHUNK_TOKENS, "as without the limits"
    shell.run(page.pop("Ask for the reason"))
    assert shell.grown(LOADED, source="pool") >= rig.CHUNK_TOKENS
    (logged,) = re.findall(r'request (\{"request": .*\})$', server.log(), re.MULTILINE)
    assert json.loads(logged)["starts"][0]["load"]["pool_tokens"] >= rig.CHUNK_TOKENS
    answer = shell.run(page.pop("Retain a session"))
    assert answer["kv_transfer_params"] == {"nvmeof": {"retention": "retain"}}
    chunks = len(prompts[0]) // rig.CHUNK_TOKENS  # the figure follows with the next step
    rig.wait_for(server, "retained chunks", lambda now: now.value(RETAINED, tier="pool") >= chunks)
    answer = shell.run(page.pop("Give hints"))
    kinds = ("prefetch", "retain", "demote", "unknown", "malformed", "drop")
    assert [shell.grown(HINTS, advice=kind) for kind in kinds] == [1, 1, 1, 0, 0, 0]
    assert answer["kv_transfer_params"] == documented_answer()
    salted = page.pop("Separate tenants")
    assert shell.run(salted)["kv_transfer_params"] is None
    assert shell.grown(LOADED) == 0, "what was stored without the salt is not found"
    shell.run(salted, cold=False)
    assert shell.grown(LOADED) >= rig.CHUNK_TOKENS


def complete(server: Server, prompt: list[int], salt: str, **ours: object) -> dict[str, Any]:
    """Ask over HTTP with these keys of ours, and wait until every chunk is written."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    body |= {"cache_salt": salt, "return_token_ids": True}
    if ours:
        body["kv_transfer_params"] = {"nvmeof": ours}
    done = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)
    done.raise_for_status()
    rig.settle(server)
    answer: dict[str, Any] = done.json()
    return answer


class Tenants:
    """Requests with salts to one server after the other, whose answers never change."""

    server: Server

    def __init__(self, prompts: list[list[int]], others: list[list[int]]) -> None:
        self._prompts, self._others = prompts, others
        self._first: dict[tuple[str, int], list[int]] = {}

    def ask(self, prompt: list[int], salt: str, **ours: object) -> str:
        """Return what became of the retention that was asked for."""
        answer = complete(self.server, prompt, salt, **ours)
        self._first[salt, self._prompts.index(prompt)] = answer["choices"][0]["token_ids"]
        nvmeof: dict[str, str] = (answer["kv_transfer_params"] or {}).get("nvmeof", {})
        return nvmeof.get("retention", "")

    def drop(self, salt: str, session: str) -> None:
        drop = {"retain_s": 0, "session": session}
        assert complete(self.server, [5, 6, 7], salt, **drop)["kv_transfer_params"]

    def press(self) -> None:
        """Ask the others, which fill both tiers."""
        for prompt in self._others:
            complete(self.server, prompt, "others")
        rig.forget_gpu(self.server)

    def loaded(self, prompt: list[int], salt: str) -> int:
        """The whole chunks of the prompt that are loaded; the answer is the first one."""
        before = rig.metrics(self.server)
        answer = complete(self.server, prompt, salt)["choices"][0]
        assert answer["token_ids"] == self._first[salt, self._prompts.index(prompt)]
        sources = ("cpu", "pool")
        tokens = sum(rig.grown(self.server, before, LOADED, source=source) for source in sources)
        rig.forget_gpu(self.server)
        return int(tokens) // rig.CHUNK_TOKENS


CHUNKS = rig.PROMPT_TOKENS // rig.CHUNK_TOKENS


def test_a_session_outlives_pressure_until_its_time_or_its_end(tmp_path: Path) -> None:
    """Four prompts of 15 or 16 chunks, of two tenants, in a pool of 80 chunks. Eight other prompts
    evict all that is not retained. A tenant may retain 32 chunks: two sessions."""
    prompts = rig.prompts(count=12)
    asked, others = prompts[:8:2], [prompts[1], *prompts[8:], *prompts[3:8:2]]
    spec = rig.spec(tmp_path / "pool", pool_bytes=80 * rig.SLOT_BYTES, retain_share=0.4)
    tenants = Tenants(prompts, others)
    with rig.start(spec, "retained") as server:
        tenants.server = server
        assert tenants.ask(asked[0], "a", retain_s=3600, session="kept") == "retain"
        assert tenants.ask(asked[1], "a", retain_s=3600, session="dropped") == "retain"
        assert tenants.ask(asked[2], "b", retain_s=1, session="kept") == "retain"
        assert tenants.ask(asked[3], "b") == ""
        assert tenants.ask(asked[3], "b", retain_s=-1) == "malformed"
        tenants.drop("a", "dropped")
        tenants.drop("b", "kept")  # the same name under another salt is another session
        wait_until(
            "the second's end", lambda: rig.settle(server).value(RETAINED, tier="pool") <= 15
        )
        tenants.press()
        assert tenants.loaded(asked[0], "a") == CHUNKS, "retained"
        assert tenants.loaded(asked[1], "a") == 0, "dropped by its name"
        assert tenants.loaded(asked[2], "b") == 0, "its time has passed"
        assert tenants.loaded(asked[3], "b") == 0, "nothing was asked for"
        tenants.press()
        assert tenants.loaded(asked[0], "a") == CHUNKS, "still"


def test_a_session_outlives_a_killed_server_until_its_time_or_its_end(tmp_path: Path) -> None:
    """As above, but the server is killed before the pressure."""
    prompts, pool = rig.prompts(count=12), tmp_path / "pool"
    asked, others = prompts[:6:2], [prompts[1], *prompts[8:], *prompts[3:8:2]]
    spec = rig.spec(pool, pool_bytes=80 * rig.SLOT_BYTES, retain_share=0.4)
    tenants = Tenants(prompts, others)

    def saved() -> int:
        files = list(pool.glob("*/engine-0/rank-0/sessions"))
        return len(SavedSessions.decode(files[0].read_bytes()).sessions) if files else 0

    with rig.start(spec, "kept") as server:
        tenants.server = server
        assert tenants.ask(asked[0], "a", retain_s=3600, session="kept") == "retain"
        assert tenants.ask(asked[1], "a", retain_s=3600, session="dropped") == "retain"
        assert tenants.ask(asked[2], "b", retain_s=20, session="short") == "retain"
        ends_s = time.time() + 20
        wait_until("all three on disk", lambda: saved() == 3)
        tenants.drop("a", "dropped")
        wait_until("the drop on disk", lambda: saved() == 2)
        server.kill()
    wait_until("the end of the short one", lambda: time.time() > ends_s)
    with rig.start(spec, "kept again") as server:
        tenants.server = server
        tenants.press()
        assert tenants.loaded(asked[0], "a") == CHUNKS, "retained"
        assert tenants.loaded(asked[1], "a") == 0, "dropped before the server was killed"
        assert tenants.loaded(asked[2], "b") == 0, "its time passed while no server ran"
        tenants.press()
        assert tenants.loaded(asked[0], "a") == CHUNKS, "still"


def test_one_tenants_chunks_are_removed_from_a_pool(tmp_path: Path) -> None:
    prompts, pool = rig.prompts(count=4), tmp_path / "pool"
    spec, tenants = rig.spec(pool), Tenants(prompts, [])

    def remove() -> subprocess.CompletedProcess[str]:
        (keyspace,) = pool.glob("*/engine-0")
        command = ["pool", "rm", str(keyspace.parent), "--salt", "-", "--yes", "--json"]
        return subprocess.run(
            [sys.executable, "-m", "vllm_nvmeof_offload.cli", *command],
            input="a\n",
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    with rig.start(spec, "two tenants") as server:
        tenants.server = server
        for prompt, salt in itertools.product(prompts[::2], ("a", "b")):
            tenants.ask(prompt, salt)
        running = remove()
        assert running.returncode and "is in use" in running.stderr
    removed = remove()
    assert removed.returncode == 0, removed.stderr
    report = json.loads(removed.stdout)
    assert sum(one["removed"] for one in report["removed"]) == 2 * CHUNKS
    assert report["unknown"] == 0
    with rig.start(spec, "one tenant") as server:
        tenants.server = server
        for prompt in prompts[::2]:
            assert tenants.loaded(prompt, "a") == 0
            assert tenants.loaded(prompt, "b") == CHUNKS


def documented_answer() -> Any:
    text = PAGE.read_text()
    (shown,) = re.findall(r'^    "kv_transfer_params": (.*(?:\n     .*)*)', text, re.MULTILINE)
    return json.loads(shown)
