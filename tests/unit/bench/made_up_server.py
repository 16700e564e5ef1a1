# SPDX-License-Identifier: Apache-2.0
"""A MADE-UP server of the OpenAI API on the loopback address: it computes nothing.

It remembers prompts by their first tokens, as a prefix cache of two levels would: prompts since its
last reset, up to a number of tokens, are found in "GPU memory", earlier ones in the "CPU tier". Its
answers depend only on the prompt. A word of a text is a token.
"""

from __future__ import annotations

import json
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

_PREFIX = 64
#: In every token's text: it ends a line of text in Python's eyes, and no line of a stream.
SEPARATOR = "\u2028"


class MadeUpServer:
    """A context manager. fails: each request whose prompt is this long is refused with `refusal`,
    and so is the list of models if it is -1.

    resets, metrics: whether it has these routes. skew: added to every answer's token. wavers:
    whether an answer also depends on the number of earlier requests. page: appended to its metrics,
    with the chunks stored and tokens loaded of our package if it is not empty. gpu_tokens: the size
    of its "GPU memory"; 0: unlimited. others: prompt tokens of other clients per request. model:
    its model's name.
    """

    def __init__(
        self,
        fails: int = 0,
        resets: bool = True,
        metrics: bool = True,
        skew: int = 0,
        wavers: bool = False,
        page: str = "",
        gpu_tokens: int = 0,
        others: int = 0,
        model: str = "made-up",
        refusal: str = "overloaded",
    ) -> None:
        self.fails, self.resets, self.metrics, self.skew = fails, resets, metrics, skew
        self.wavers, self.gpu_tokens, self.others = wavers, gpu_tokens, others
        self.asked, self._more, self.model, self.refusal = 0, page, model, refusal
        self.counts = {"prompt": 0, "gpu": 0, "cpu": 0}
        self._gpu: dict[tuple[int, ...], int] = {}
        self._cpu: set[tuple[int, ...]] = set()
        self._lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            owner = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def take(self, prompt: list[int]) -> None:
        """Count one prompt, and remember it."""
        key = tuple(prompt[:_PREFIX])
        with self._lock:
            self.asked += 1
            self.counts["prompt"] += len(prompt) + self.others
            if len(prompt) < _PREFIX:
                return
            if key in self._gpu:
                self.counts["gpu"] += len(prompt)
            elif key in self._cpu:
                self.counts["cpu"] += len(prompt)
            self._gpu[key] = len(prompt)
            self._cpu.add(key)
            while self.gpu_tokens and sum(self._gpu.values()) > self.gpu_tokens:
                del self._gpu[next(iter(self._gpu))]

    def forget(self) -> None:
        with self._lock:
            self._gpu.clear()

    def page(self) -> str:
        counts = self.counts
        source = "vllm:prompt_tokens_cached_by_source_total"
        ours = (
            f"vllm:nvmeof_stored_chunks_total {len(self._cpu)}\n"
            f'vllm:nvmeof_loaded_tokens_total{{source="cpu"}} {counts["cpu"]}\n'
        )
        return (
            f"{self._more and ours}{self._more}"
            f"vllm:prompt_tokens_total {counts['prompt']}\n"
            f"vllm:prefix_cache_hits_total {counts['gpu']}\n"
            f"vllm:external_prefix_cache_hits_total {counts['cpu']}\n"
            f'{source}{{source="host"}} {counts["cpu"]}\n'
        )


class _Handler(BaseHTTPRequestHandler):
    owner: MadeUpServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models" and self.owner.fails == -1:
            self._send(503, self.owner.refusal)
        elif self.path == "/v1/models":
            self._send(200, json.dumps({"data": [{"id": self.owner.model}]}))
        elif self.path == "/metrics" and self.owner.metrics:
            self._send(200, self.owner.page())
        else:
            self._send(404, "no such route")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/reset_prefix_cache" and self.owner.resets:
            self.owner.forget()
            self._send(200, json.dumps({"success": True}))
        elif self.path == "/v1/completions":
            self._complete(json.loads(body))
        else:
            self._send(404, "no such route")

    def _complete(self, asked: dict[str, Any]) -> None:
        assert asked["model"] == self.owner.model
        prompt = asked["prompt"]
        if isinstance(prompt, str):
            words = prompt.split()[-asked["truncate_prompt_tokens"] :]
            prompt = [zlib.crc32(word.encode()) for word in words]
        if self.owner.fails and len(prompt) == self.owner.fails:
            self._send(503, self.owner.refusal)
            return
        self.owner.take(prompt)
        count = asked["max_tokens"]
        token = (sum(prompt) + self.owner.skew + self.owner.asked * self.owner.wavers) % 1000
        events: list[dict[str, Any]] = [
            {"choices": [{"text": f"<{token + i}{SEPARATOR}>", "token_ids": [token + i]}]}
            for i in range(count)
        ]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        events.append({"choices": [], "usage": usage})
        name = {"id": f"cmpl-{self.owner.asked}"}
        lines = [f"data: {json.dumps(name | event, ensure_ascii=False)}\n\n" for event in events]
        self._send(200, "".join([*lines, "data: [DONE]\n\n"]))

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
