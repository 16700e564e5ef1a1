# SPDX-License-Identifier: Apache-2.0
"""Spans of loads, through vLLM's own functions and OpenTelemetry's SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_nvmeof_offload.manager.request_log import LoadRecord, RequestLog, Start
from vllm_nvmeof_offload.vllm_adapter.tracing import trace_loads

otel = pytest.importorskip("vllm.tracing.otel", reason="vLLM starts and ends the spans")
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is vLLM's extra")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    # The process's provider can be set only once.
    monkeypatch.setattr(otel.trace, "get_tracer", provider.get_tracer)
    yield spans
    provider.shutdown()


def start(load: LoadRecord | None) -> Start:
    sizes = {"tokens": 100, "gpu_tokens": 0, "found_tokens": 96, "loaded_tokens": 96}
    return Start(unix_seconds=1_800_000_000.25, chunk_tokens=16, load=load, **sizes)


def test_each_load_that_has_ended_is_a_span_of_the_requests_trace(exporter: object) -> None:
    log = RequestLog()
    log.started("a", start(LoadRecord(32, 64, 0, seconds=0.5, saved_seconds=1.5)))
    log.started("a", start(LoadRecord(16, 0, 0, seconds=0.125, was_cut_off=True)))
    log.started("a", start(LoadRecord(16, 0, 0)))  # has not ended
    log.started("a", start(None))
    trace_loads(HEADERS, log.find("a"))
    first, second = exporter.get_finished_spans()  # type: ignore[attr-defined]
    assert first.name == second.name == "kv_load"
    for span in (first, second):
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
    assert (first.end_time - first.start_time, second.end_time - second.start_time) == (
        500_000_000,
        125_000_000,
    )
    assert first.start_time == pytest.approx(1_800_000_000_250_000_000, abs=1000, rel=0)
    assert first.attributes["vllm.nvmeof.pool_tokens"] == 64
    assert first.attributes["vllm.nvmeof.saved_seconds"] == 1.5
    assert second.attributes["vllm.nvmeof.was_cut_off"] is True
    assert "vllm.nvmeof.saved_seconds" not in second.attributes, "the prefill rate is unknown"
