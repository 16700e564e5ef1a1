# SPDX-License-Identifier: Apache-2.0
"""A cluster as a file describes it: nodes, links, compute, memory, and bytes of the model."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.results import BenchError

from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import KvSizes
from vllm_nvmeof_offload.commands.size.model import preset, read_model

KNOWN = Path(__file__).with_name("machines.toml")
_LIKE_MAX = 8


@dataclass(frozen=True)
class Machines:
    """A cluster. Nodes of one kind are alike; an engine is a node. Rates are of one node and in
    one direction.

    decode 0: prefill nodes decode too, and nothing is handed on. storage: the node's link to
    the pool. compute: its links to other nodes together. flop_per_pair: attention's, per pair of
    a new token and one before it. request_s: what a prompt takes besides, however short it is.
    weight_bytes: what a step of decoding reads of the model; memory_bytes_per_s: a node's GPUs
    together; step_s_min: no step is shorter. step_kv_share: of the KV in a decode node's memory,
    what a step reads. *_tokens_max: of KV in a node's GPU memory, 0: no bound. batch_tokens_max:
    outstanding at a prefill node, before it gets no more. drives: of an enclosure that all nodes
    share; 0: none in the way. local: only the node that stored a chunk can read it. report_s: how
    old a peer's report of its queue becomes. places: chunks in flight at a link that loads share;
    0: loads are read one after the other.
    """

    name: str
    prefill: int
    decode: int
    storage_bytes_per_s: float
    compute_bytes_per_s: float
    bytes_per_token: float
    flop_per_token: float
    flop_per_s: float
    weight_bytes: float
    memory_bytes_per_s: float
    step_s_min: float = 0.0
    flop_per_pair: float = 0.0
    request_s: float = 0.0
    step_kv_share: float = 0.0
    prefill_tokens_max: float = 0.0
    decode_tokens_max: float = 0.0
    batch_tokens_max: float = 2_000_000
    drives: int = 0
    drive_bytes_per_s: float = 0.0
    enclosure_bytes_per_s: float = 0.0
    local: bool = False
    report_s: float = 0.05
    chunk_tokens: int = 256
    places: int = 0

    def __post_init__(self) -> None:
        positive = ("prefill", "storage_bytes_per_s", "compute_bytes_per_s", "bytes_per_token")
        model = ("flop_per_token", "flop_per_s", "weight_bytes", "memory_bytes_per_s")
        for one in (*positive, *model, "report_s", "chunk_tokens"):
            if getattr(self, one) <= 0:
                raise BenchError(f"{self.name}: {one} is above 0")
        for field in fields(self):
            if field.type in ("float", "int") and getattr(self, field.name) < 0:
                raise BenchError(f"{self.name}: {field.name} is at least 0")

        if self.places and (self.decode or self.drives):
            raise BenchError(f"{self.name}: places are for nodes that decode, each with its drives")

    @property
    def shared_bytes_per_s(self) -> float:
        """What all nodes together can read of the enclosure; 0: it bounds nothing."""
        rates = (self.drives * self.drive_bytes_per_s, self.enclosure_bytes_per_s)
        return min((rate for rate in rates if rate), default=0.0)

    def step_s(self, held_tokens: float) -> float:
        """Seconds per token of the answers of a decode node that holds so many tokens' KV."""
        read_bytes = self.weight_bytes
        if self.step_kv_share:
            read_bytes += self.step_kv_share * held_tokens * self.bytes_per_token
        step_s = read_bytes / self.memory_bytes_per_s
        return step_s if step_s > self.step_s_min else self.step_s_min

    def compute_s(self, before: float, new: float) -> float:
        """Seconds in which a prefill node computes `new` tokens behind `before` others."""
        pairs = new * (before + new / 2)
        flop = new * self.flop_per_token + pairs * self.flop_per_pair
        return self.request_s + flop / self.flop_per_s


def read_machines(path: Path, name: str) -> Machines:
    """The cluster of this name.

    Raises: BenchError: no such file or name, or a value that cannot be used.
    """
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BenchError(f"{path}: cannot be read ({error})") from None
    given = _inherited(content, name, path)
    if "model" in given:
        given["bytes_per_token"] = _model_bytes(str(given.pop("model")))
    known = {one.name: one for one in fields(Machines)}
    if unknown := sorted(set(given) - set(known)):
        raise BenchError(f"{path}, {name}: unknown {', '.join(unknown)}")
    try:
        return Machines(name, **given)
    except TypeError as error:
        missing = str(error).partition("argument")[2].lstrip("s: ") or str(error)
        raise BenchError(f"{path}, {name}: needs {missing}") from None


def _inherited(content: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    """The values of a table over those of the tables that it is like."""
    found: dict[str, Any] = {}
    for _ in range(_LIKE_MAX):
        if not isinstance(content.get(name), dict):
            raise BenchError(f"{path}: no cluster {name!r}; there are {', '.join(content)}")
        found = content[name] | found
        if "like" not in content[name]:
            return {key: value for key, value in found.items() if key != "like"}
        name = content[name]["like"]
    raise BenchError(f"{path}: {name!r} is like another one more than {_LIKE_MAX} times over")


def _model_bytes(model: str) -> float:
    """KV bytes of a token, as `vllm-nvmeof size` computes them for a preset or a config.json."""
    place = Path(model)
    shape = read_model(place) if place.exists() else preset(model)
    deployment = Deployment(kv_element_bytes=shape.kv_element_bytes("auto"))
    return float(KvSizes(shape, deployment).token_bytes())
