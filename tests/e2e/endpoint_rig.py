# SPDX-License-Identifier: Apache-2.0
"""The engine's own endpoint, compared with vLLM's `/metrics`, and `vllm-nvmeof explain`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner
from vllm_nvmeof_bench.servers.server import MODEL_NAME, Server

from tests.wait import wait_until
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.metrics import PREFIX

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Endpoint:
    """The endpoint of a server's only engine, whose `metrics_listen` is this address."""

    def __init__(self, server: Server, listen: str) -> None:
        self._server, self._url = server, f"http://{listen}"

    def agrees(self) -> None:
        """Wait until vLLM's `/metrics`, a message behind, has the same series and values."""
        wait_until("equal metrics", lambda: _equal(samples(self._url), self._theirs()), 30)
        theirs = self._theirs()
        assert len(theirs) > 100
        assert {dict(labels)["model_name"] for _, labels in theirs} == {MODEL_NAME}

    def _theirs(self) -> Samples:
        return samples(self._server.url)

    def explains_a_load(self, prompt_tokens: int, loaded: int) -> None:
        """The last request loaded so many tokens, all or most of them from the pool."""
        (record,) = self._explained("--last")
        assert self._explained(record["request"]) == [record]
        short = record["request"].rpartition("-")[0]
        assert self._explained(short) == [record], "the id in the answer is shorter"
        (start,) = record["starts"]
        assert (start["tokens"], start["gpu_tokens"]) == (prompt_tokens, 0)
        assert start["loaded_tokens"] == start["found_tokens"] == loaded
        assert start["computed_tokens"] == prompt_tokens - loaded
        load = start["load"]
        assert load["cpu_tokens"] + load["pool_tokens"] == loaded
        assert load["pool_tokens"] > loaded / 2
        assert load["seconds"] > 0
        text = self._explain("--last")
        assert max(map(len, text.splitlines())) <= 80
        assert f"loaded {loaded:,} tokens" in " ".join(text.split())

    def logs_a_request(self, prompt: Sequence[int]) -> None:
        """A request that asks for its record finds it in the log."""
        params = {"nvmeof": {"explain": True}, "max_load_tokens": 0}
        body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 1}
        answer = httpx.post(
            f"{self._server.url}/v1/completions",
            json={**body, "kv_transfer_params": params},
            timeout=120,
            trust_env=False,
        )
        answer.raise_for_status()
        name = answer.json()["id"]
        wait_until("its record in the log", lambda: bool(self._logged(name)), 30)
        (record,) = self._logged(name)
        assert record["starts"][0]["loaded_tokens"] == 0
        assert "the request limits its loads: max_load_tokens=0" in record["starts"][0]["why"]

    def _logged(self, name: str) -> list[dict[str, Any]]:
        lines = self._server.log_path.read_text().splitlines()
        texts = [
            line.partition(": request ")[2] or line.partition("] request ")[2] for line in lines
        ]
        found = [json.loads(text) for text in texts if text.startswith("{")]
        return [one for one in found if one["request"].startswith(name)]

    def _explained(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._explain(*arguments, "--json"))
        return found

    def _explain(self, *arguments: str) -> str:
        done = CliRunner().invoke(app, ["explain", *arguments, "--url", self._url])
        assert done.exit_code == 0, done.output
        return done.output


def samples(url: str) -> Samples:
    """This package's series at `url`/metrics."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX) and not sample.name.endswith("_created")
    }


def _equal(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> bool:
    """Whether both have the same series with the same values; vLLM adds up increases."""
    return ours.keys() == theirs.keys() and all(
        math.isclose(value, theirs[key], rel_tol=1e-9, abs_tol=1e-9) for key, value in ours.items()
    )
