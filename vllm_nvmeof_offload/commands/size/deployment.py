# SPDX-License-Identifier: Apache-2.0
"""The hardware and the load for which a model is sized, with their options, help texts, and bounds.

Every run of the command imports this module, so its imports are few.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.units import parse_bytes

_GENERATIONS, _LANES = (3, 4, 5, 6), (1, 2, 4, 8, 16)
_LINK = re.compile(r"^\s*(?:(\d+)\s*x\s*)?(.+?)\s*$", re.IGNORECASE)
_PCIE_NAME = re.compile(r"^pcie\s*(?:gen)?\s*(\d)\s*x\s*(\d+)$", re.IGNORECASE)
_NETWORK = re.compile(r"^(\d+(?:\.\d+)?)\s*(?:gbe|gbps|gbit/s|gb/s|gbib|gib)$", re.IGNORECASE)
_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}
#: vLLM's options → fields of `Deployment`.
VLLM_OPTIONS = {
    "tensor-parallel-size": "tensor_parallel",
    "pipeline-parallel-size": "pipeline_parallel",
    "prefill-context-parallel-size": "prefill_context_parallel",
    "decode-context-parallel-size": "decode_context_parallel",
    "block-size": "block_tokens",
}
_BOUNDS = {
    "ge": (operator.ge, "greater than or equal to"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "less than or equal to"),
}


@dataclass(frozen=True, slots=True)
class Link:
    """`count` links, each with a line rate of `bytes_per_s` in one direction."""

    count: int
    bytes_per_s: float

    @property
    def total_bytes_per_s(self) -> float:
        return self.count * self.bytes_per_s


def pcie_bytes_per_s(gt_per_s: float, lanes: int) -> float:
    """Return a PCIe link's rate in one direction: data bits without the line encoding."""
    encoding = 8 / 10 if gt_per_s <= 5 else 128 / 130 if gt_per_s < 64 else 242 / 256
    return gt_per_s * 1e9 * encoding / 8 * lanes


def parse_link(text: str) -> Link:
    """Parse `100GbE`, `2x400GbE`, `pcie5x16` or `2x12.5GB/s`; raise ValueError for other text."""
    match = _LINK.match(text)
    count, name = (int(match.group(1) or 1), match.group(2)) if match else (0, "")
    rate, pcie, network = 0.0, _PCIE_NAME.match(name), _NETWORK.match(name)
    if pcie:
        generation, lanes = map(int, pcie.groups())
        if generation in _GENERATIONS and lanes in _LANES:
            rate = pcie_bytes_per_s(2**generation, lanes)
    elif network and "B/s" not in name:
        # Case matters only here: 100Gb/s is in bits, 12.5GB/s in bytes.
        rate = float(network.group(1)) * 1e9 / 8
    else:
        with contextlib.suppress(ValueError):
            rate = parse_rate(name)
    if rate and count:
        return Link(count, rate)
    form = "100GbE, 2x400GbE, pcie5x16 or a rate such as 12.5GB/s"
    raise ValueError(f"{text!r} is not a link; write {form}")


def parse_rate(text: str) -> float:
    """Parse a rate above 0, such as `6.5GB/s`, into bytes/s; raise ValueError for other text."""
    amount, slash, per = text.strip().rpartition("/")
    if slash and per.lower() == "s" and (rate := parse_bytes(amount)) > 0:
        return float(rate)
    raise ValueError(f"{text!r} is not a rate above 0; write 6.5GB/s or 900MiB/s")


def parse_duration(text: str) -> float:
    """Parse a duration above 0, such as `500ms`, into seconds; raise ValueError for other text."""
    return _scaled(text, _SECONDS, "a duration above 0; write 2s, 500ms or 14d")


def parse_tokens(text: str) -> int:
    """Parse a token count above 0, such as `128k` (k: 1024); raise ValueError for other text."""
    return int(_scaled(text, _TOKENS, "a number of tokens above 0; write 32768 or 128k"))


def _scaled(text: str, units: Mapping[str, float], what: str) -> float:
    if match := _NUMBER.match(text):
        value = float(match.group(1)) * units.get(match.group(2).lower(), 0)
        if value > 0:
            return value
    raise ValueError(f"{text!r} is not {what}")


def _link_text(text: str) -> str:
    parse_link(text)
    return text


#: Orders of the KV cache's dimensions in GPU memory: layers (L), blocks (B), heads, tokens, values.
BLOCKS_OUTERMOST, LAYERS_OUTERMOST = "BLHNC", "LBHNC"


def _layout_name(text: str) -> str:
    known = (BLOCKS_OUTERMOST, LAYERS_OUTERMOST)
    if text.upper() in known:
        return text.upper()
    raise ValueError(f"{text!r} is not a known layout; write {' or '.join(known)}")


def _option(
    default: Any, flag: str, text: str, read: Callable[[str], Any] | None = None, **bounds: float
) -> Any:
    """Declare a field with the option `flag`. `read` converts text to the value."""
    metadata = {"flag": flag, "help": text, "read": read, "bounds": bounds}
    return field(default=default, metadata=metadata)


_count = functools.partial(_option, ge=1)
_share = functools.partial(_option, gt=0, le=1)
_size = functools.partial(_option, read=parse_bytes)
_rate = functools.partial(_option, read=parse_rate)
_time = functools.partial(_option, read=parse_duration)
_link = functools.partial(_option, read=_link_text)


def _server_stream_slots() -> int:
    from vllm_nvmeof_offload.config import TUNING

    return TUNING.stream_slots


@dataclass(frozen=True)
class Deployment:
    """The hardware and the load. Values are numbers, or text as on the command line.

    `gpus`, `drives` and `link` are for the whole deployment, `staging_bytes` and the parallel sizes
    for one engine, `stream_slots` for one rank. Raises ConfigError, which names the option, for an
    unusable value.
    """

    gpus: int = _count(None, "--gpus", "GPUs of all engines. Default: one engine's GPUs.")
    gpu_memory_bytes: int = _size("80GiB", "--gpu-memory", "Memory of one GPU.", gt=0)
    gpu_memory_utilization: float = _share(
        0.92, "--gpu-utilization", "Share of GPU memory that vLLM uses."
    )
    gpu_reserve_bytes: int = _size(
        "4GiB", "--gpu-reserve", "GPU memory for activations and CUDA graphs, within vLLM's share."
    )
    tensor_parallel: int = _count(1, "--tp", "Tensor parallel size of one engine.")
    pipeline_parallel: int = _count(1, "--pp", "Pipeline parallel size of one engine.")
    prefill_context_parallel: int = _count(1, "--pcp", "Prefill context parallel size.")
    decode_context_parallel: int = _count(
        1,
        "--dcp",
        "Decode context parallel size: the number of ranks of --tp, --pcp or both that share a "
        "block's tokens.",
    )
    kv_element_bytes: int = 2
    layout: str = _option(
        BLOCKS_OUTERMOST,
        "--layout",
        "Order of the KV cache in GPU memory: BLHNC, which this package requests, or LBHNC, the "
        "only order of vLLM's CPU engine.",
        _layout_name,
    )
    block_tokens: int | None = _count(
        None, "--block-tokens", "Tokens in a block. Default: the size that the kernels need."
    )
    blocks_per_chunk: int | None = _count(
        None, "--blocks-per-chunk", "Blocks per chunk. Default: the server's choice."
    )
    staging_bytes: int = _size("8GiB", "--staging", "Pinned CPU memory of one engine.")
    stream_slots: int = field(default_factory=_server_stream_slots)
    context_tokens: int = _option("32k", "--context", "Tokens per session.", parse_tokens, ge=1)
    concurrency: int = _count(16, "--concurrency", "Sessions that return at the same time.")
    drives: int = _count(24, "--drives", "Drives in the enclosure.")
    drive_bytes: int = _size("15.36TB", "--drive-bytes", "Capacity of one drive.", gt=0)
    drive_fill: float = _share(0.9, "--drive-fill", "Share of a drive that the pool uses.")
    drive_read_bytes_per_s: float = _rate(
        "6.5GB/s", "--drive-read", "Sequential read rate of one drive."
    )
    link: str = _link("2x100GbE", "--link", "All links between the enclosure and the GPU hosts.")
    gpu_link: str = _link("pcie5x16", "--gpu-link", "Link of one GPU to its host.")
    link_efficiency: float = _share(0.9, "--link-efficiency", "Payload share of a link's rate.")
    ttft_seconds: float = _time("2s", "--ttft", "Target time to first token.")
    prefill_tokens_per_s: float | None = _option(
        None,
        "--prefill-tokens-per-s",
        "Prompt tokens that one engine computes per second at this context length, to compare "
        "computing with loading. Default: unknown.",
        gt=0,
    )
    users: int = _count(
        None,
        "--users",
        "Users, each with one session in the pool. Default: ten times the concurrency.",
    )
    daily_tokens: int = _option(
        None,
        "--daily-tokens",
        "Tokens per user and day in prompts and answers, each written to the pool once. Default: "
        "one context.",
        parse_tokens,
        ge=1,
    )
    prefill_nodes: int | None = _count(
        None,
        "--prefill-nodes",
        "Prefill nodes of a cluster in which decode nodes read for prefill nodes; needs "
        "--decode-nodes.",
    )
    decode_nodes: int | None = _count(
        None,
        "--decode-nodes",
        "Decode nodes of a cluster, which also read for prefill nodes; needs --prefill-nodes.",
    )
    node_gpus: int = _count(
        8, "--node-gpus", "GPUs per cluster node, each with a link to other nodes."
    )
    node_storage_links: int = _count(
        1, "--node-storage-links", "Links from one cluster node to the pool."
    )
    node_link: str = _link(
        "400GbE", "--node-link", "One link of a cluster node, to the pool or to other nodes."
    )
    node_memory_bytes_per_s: float = _rate(
        "500GB/s", "--node-memory", "Memory bandwidth of one cluster node."
    )
    turn_compute_seconds: float | None = _time(
        None, "--turn-compute", "Time a cluster node needs to compute a turn's new tokens."
    )
    turn_gap_seconds: float = _time(
        "5s", "--turn-gap", "Time from an agent's first token to its next turn."
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value, option = getattr(self, one.name), one.metadata
            if option and value is not None:
                value = read_option(option["flag"], value, option["read"], **option["bounds"])
                object.__setattr__(self, one.name, value)
        object.__setattr__(self, "gpus", self.gpus or self.ranks)
        object.__setattr__(self, "users", self.users or 10 * self.concurrency)
        object.__setattr__(self, "daily_tokens", self.daily_tokens or self.context_tokens)
        if (self.prefill_nodes is None) != (self.decode_nodes is None):
            name = "--decode-nodes" if self.prefill_nodes is None else "--prefill-nodes"
            given = self.prefill_nodes or self.decode_nodes
            raise ConfigError(name, given, "give --prefill-nodes and --decode-nodes")

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pipeline_parallel

    @property
    def stage_ranks(self) -> int:
        """Return the ranks of a pipeline stage; decode context parallelism adds none."""
        return self.tensor_parallel * self.prefill_context_parallel

    def on_one_rank(self) -> Deployment:
        sizes: Any = dict.fromkeys((n.name for n in fields(self) if "_parallel" in n.name), 1)
        return replace(self, **sizes)

    @property
    def ranks_words(self) -> str:
        others = {"--pcp": self.prefill_context_parallel, "--dcp": self.decode_context_parallel}
        more = (f" {flag} {size}" for flag, size in others.items() if size > 1)
        return f"--tp {self.tensor_parallel}{''.join(more)}"

    @property
    def engines(self) -> int:
        return self.gpus // self.ranks


def read_option(flag: str, value: Any, read: Callable[[str], Any] | None, **bounds: float) -> Any:
    """Parse and check the `value` of option `flag`. Raises ConfigError if it is unusable."""
    if read is not None and isinstance(value, str):
        try:
            value = read(value)
        except ValueError as error:
            remedy = str(error).removeprefix(f"{value!r} ")
            raise ConfigError(flag, value, remedy) from None
    for name, bound in bounds.items():
        keeps, words = _BOUNDS[name]
        if not keeps(value, bound):
            raise ConfigError(flag, value, f"give a value {words} {bound}")
    return value
