# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans for a request's loads, in the trace that vLLM's front end started.

Without `--otlp-traces-endpoint`, requests have no trace headers, and the engine's process has no
tracer. The tracer exports in a separate thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

_PREFIX = "vllm.nvmeof."
#: Fields of a `LoadRecord` that become attributes of its span, prefixed with `_PREFIX`.
_FIELDS = (
    *("cpu_tokens", "pool_tokens", "shared_tokens", "failed_tokens"),
    *("was_cut_off", "saved_seconds"),
)


def trace_loads(headers: Any, records: Iterable[dict[str, Any]]) -> None:
    """Add a `kv_load` span for each load that has ended.

    `headers` are the request's `trace_headers`, and `records` are from `RequestLog.find`. A span
    begins when the request gets its GPU blocks, and ends when all chunks have an outcome.
    """
    with contextlib.suppress(ImportError):  # a release of vLLM without these functions
        from vllm.tracing import extract_trace_context, instrument_manual

        context = extract_trace_context(headers)
        for start in (start for record in records for start in record["starts"]):
            load, begun_ns = start["load"], round(1e9 * start["unix_seconds"])
            if load is None or load["seconds"] is None:
                continue
            found = {_PREFIX + key: load[key] for key in _FIELDS if load[key] is not None}
            end_ns = begun_ns + round(1e9 * load["seconds"])
            instrument_manual("kv_load", begun_ns, end_ns, found, context)
