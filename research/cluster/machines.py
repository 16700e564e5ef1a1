# SPDX-License-Identifier: Apache-2.0
"""A cluster described in a file: its nodes, links, compute and memory, and the model's sizes."""

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
    """A cluster. Nodes of one kind are equal, and an engine is a node. Rates are per node and
    direction."""

    name: str
    prefill: int
    decode: int  # 0: prefill nodes decode too, without transfers
    storage_bytes_per_s: float  # of a node's link to the pool
    compute_bytes_per_s: float  # of a node's links to other nodes together
    bytes_per_token: float
    flop_per_token: float
    flop_per_s: float
    weight_bytes: float  # that a decode step reads
    memory_bytes_per_s: float  # of a node's GPUs together
    step_s_min: float = 0.0  # shortest decode step
    flop_per_pair: float = 0.0  # attention, per pair of a new token and an earlier one
    request_s: float = 0.0  # fixed time per prompt
    step_kv_share: float = 0.0  # share of the KV in a decode node's memory that a step reads
    prefill_tokens_max: float = 0.0  # KV that a node's GPU memory holds; 0: no bound
    decode_tokens_max: float = 0.0  # the same on a decode node
    #: Outstanding tokens above which a prefill node gets no prompts.
    batch_tokens_max: float = 2_000_000
    drives: int = 0  # in an enclosure that all nodes share; 0: no enclosure
    drive_bytes_per_s: float = 0.0
    enclosure_bytes_per_s: float = 0.0
    local: bool = False  # only the node that stored a chunk can read it
    report_s: float = 0.05  # interval of reports of a peer's queue
    chunk_tokens: int = 256
    places: int = 0  # chunks in flight on a link that loads share; 0: loads are sequential

    def __post_init__(self) -> None:
        positive = ("prefill", "storage_bytes_per_s", "compute_bytes_per_s", "bytes_per_token")
        model = ("flop_per_token", "flop_per_s", "weight_bytes", "memory_bytes_per_s")
        for one in (*positive, *model, "report_s", "chunk_tokens"):
            if getattr(self, one) <= 0:
                raise BenchError(f"{self.name}: {one} must be above 0")
        for field in fields(self):
            if field.type in ("float", "int") and getattr(self, field.name) < 0:
                raise BenchError(f"{self.name}: {field.name} must be at least 0")

        if self.places and (self.decode or self.drives):
            raise BenchError(f"{self.name}: places needs decode = 0 and drives = 0")

    @property
    def shared_bytes_per_s(self) -> float:
        """Return the rate at which all nodes together can read from the enclosure; 0: no bound."""
        rates = (self.drives * self.drive_bytes_per_s, self.enclosure_bytes_per_s)
        return min((rate for rate in rates if rate), default=0.0)

    def step_s(self, held_tokens: float) -> float:
        """Return the seconds per answer token on a decode node that holds this much KV."""
        read_bytes = self.weight_bytes
        if self.step_kv_share:
            read_bytes += self.step_kv_share * held_tokens * self.bytes_per_token
        step_s = read_bytes / self.memory_bytes_per_s
        return step_s if step_s > self.step_s_min else self.step_s_min

    def compute_s(self, before: float, new: float) -> float:
        """Return the seconds to compute `new` tokens after `before` others on a prefill node."""
        pairs = new * (before + new / 2)
        flop = new * self.flop_per_token + pairs * self.flop_per_pair
        return self.request_s + flop / self.flop_per_s


def read_machines(path: Path, name: str) -> Machines:
    """Read the cluster `name` from a machine file. Raises BenchError if there is no such file or
    cluster, or a value is invalid."""
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
    """Return a table's values, completed by those of the tables in its `like` chain."""
    found: dict[str, Any] = {}
    for _ in range(_LIKE_MAX):
        if not isinstance(content.get(name), dict):
            raise BenchError(f"{path}: no cluster {name!r}; choose from {', '.join(content)}")
        found = content[name] | found
        if "like" not in content[name]:
            return {key: value for key, value in found.items() if key != "like"}
        name = content[name]["like"]
    raise BenchError(f"{path}: {name!r}: a chain of more than {_LIKE_MAX} `like` references")


def _model_bytes(model: str) -> float:
    """Return KV bytes per token of a preset or config.json, as `vllm-nvmeof size` computes them."""
    place = Path(model)
    shape = read_model(place) if place.exists() else preset(model)
    deployment = Deployment(kv_element_bytes=shape.kv_element_bytes("auto"))
    return float(KvSizes(shape, deployment).token_bytes())
