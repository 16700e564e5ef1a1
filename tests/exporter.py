# SPDX-License-Identifier: Apache-2.0
"""An HTTP server of saved `/metrics` texts."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self


class Exporter:
    """Serves saved `/metrics` texts, one per scrape in order; the last one is repeated.

    None: there is no such page.
    """

    def __init__(self, texts: Sequence[str | None]) -> None:
        self._texts = list(texts)
        self._served = 0
        exporter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = exporter._next()
                self.send_response(404 if text is None else 200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def _next(self) -> str | None:
        text = self._texts[min(self._served, len(self._texts) - 1)]
        self._served += 1
        return text

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
