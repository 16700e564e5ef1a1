# SPDX-License-Identifier: Apache-2.0
"""The servers that a benchmark compares, and the benchmark's run on them.

A server is started here, as an arm in `ARMS`, or is already running and given by URL. `target` and
`peer_target` use a stand-in for an NVMe-oF target: a throttled directory on the local disk. Both
arms of a pair (`full` and `peer_full`, `pool` and `peer`, `target` and `peer_target`) have the same
CPU memory and chunk size, and store the same tokens. Our arms can name a copy backend, as in
full:dma or full:kernel.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import vllm_nvmeof_bench
from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.home import OnProgress, drop_logs, home_in, progress, quiet_interpreter
from vllm_nvmeof_bench.results import MB, BenchError, dump
from vllm_nvmeof_bench.servers import smollm2
from vllm_nvmeof_bench.servers.client import Client, Tokens
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import HybridShape, ModelShape, make_model
from vllm_nvmeof_bench.servers.server import (
    BLOCK_TOKENS,
    STREAM_SLOTS,
    OffloadSpec,
    ReservedPort,
    Server,
    ServerError,
    ServerSpec,
    group_cpu_s,
    on_blocks,
)
from vllm_nvmeof_bench.settings import option, recorded
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_offload.copy.base import Backend
from vllm_nvmeof_offload.fabric import read_gpus, read_text
from vllm_nvmeof_offload.units import MIB, slot_stride_bytes

_READ_DEADLINE_MS = 60_000
_SMALL = ModelShape(layers=4, hidden=256, intermediate=1024, heads=2, kv_heads=2)
_LARGE = ModelShape(
    layers=8, hidden=2048, intermediate=7168, heads=16, kv_heads=4, positions_max=131_072
)
#: A model with which two cores compute about 3,000 tokens/s.
_MEDIUM = ModelShape(layers=4, hidden=512, intermediate=2048, heads=4, kv_heads=2)
_BYTES = {"float32": 4, "bfloat16": 2}
_RANDOM, _REAL = "random", "smollm2"
_SHAPES = {
    "medium": _MEDIUM,
    "gemma3": HybridShape(kind="gemma3", layers=6),
    "lfm2": HybridShape(kind="lfm2", layers=9),
    _REAL: smollm2.SHAPE,
}

#: A note printed with the peer's figures.
PEER_NOTE = (
    "peer: vLLM's own TieringOffloadingSpec with its fs tier. It refuses vLLM's CPU engine; a "
    "subclass made for this benchmark adds a worker that copies between host buffers with the "
    "same thread and memmove as our arms. The manager, the tiers and the files are vLLM's."
)


@dataclass(frozen=True)
class Arm:
    """One server. about: a description. tier: what the CPU tier holds: "all", a "third" or "none".

    url: URL of a running server, about which nothing else is known. copy_backend: for our arms on a
    GPU, "dma" or "kernel"; empty: chosen by calibration. place: name of the directory for its pool
    or files, if not the arm's name: arms may share one. peer: use vLLM's tiering. The tier below
    its CPU tier is the one in `_SECONDARY`, or vLLM's fs tier; its package must be installed.
    """

    name: str
    about: str
    tier: str = "none"
    pool: bool = False
    throttled: bool = False
    peer: bool = False
    url: str | None = None
    copy_backend: str = ""
    place: str = ""

    @property
    def directory(self) -> str:
        """The name of the arm's pool or file directory."""
        return self.place or self.name


ARMS = {
    arm.name: arm
    for arm in (
        Arm("none", "GPU memory only"),
        Arm("cpu", "our CPU tier, which holds all, without a pool", "all"),
        Arm("third", "our CPU tier, which holds a third, without a pool", "third"),
        Arm("pool", "our CPU tier, which holds a third, and pool", "third", pool=True),
        Arm("target", "as pool, on a throttled disk", "third", pool=True, throttled=True),
        Arm("full", "our CPU tier, which holds all, and pool", "all", pool=True),
        Arm("peer", "vLLM's tiering with fs; its CPU tier holds a third", "third", pool=True,
            peer=True),
        Arm("peer_target", "as peer, on a throttled disk", "third", True, True, True),
        Arm("peer_full", "vLLM's tiering with fs; its CPU tier holds all", "all", pool=True,
            peer=True),
        Arm("lifeboat", "vLLM's tiering with Lifeboat; its CPU tier holds a third", "third", True,
            peer=True),
        Arm("kvcr", "vLLM's tiering with KVCR, which has as much memory again; its CPU tier holds "
            "a third", "third", True, peer=True),
    )
}  # fmt: skip


def arms_option(*default: str) -> Any:
    """Return the option for the arms to start."""
    gpu = "on a GPU, also with a copy backend, as in full:dma or full:kernel"
    return option(default, f"Servers to start: {','.join(ARMS)}; {gpu}.")


@dataclass(frozen=True)
class ServerSettings:
    """Server settings that all benchmarks of whole servers share."""

    arms: tuple[str, ...] = arms_option("none", "full", "pool", "peer_full", "peer")
    base_urls: tuple[str, ...] = option(
        (),
        "Server to measure instead, as NAME=http://HOST:PORT. Repeatable. Without "
        "VLLM_SERVER_DEV_MODE=1 on the server, figures include hits in GPU memory.",
        recorded=False,
        flag="--base-url",
        repeated=True,
    )
    token_ids: str = option(
        "", "Range LOW:HIGH of prompts' token IDs. Default with --base-url: 1000:30000."
    )
    target_mb_per_s: int = option(
        200, "Read and write limit of the stand-in for a target in MB/s.", min=1
    )
    model: str = option(
        _RANDOM,
        f"Model of the servers to start: {_RANDOM}, medium (random, 18 M parameters, for a CPU), "
        f"gemma3 or lfm2 (random, with windows or states) or {_REAL} (45 KiB of KV per token).",
    )
    server_args: str = option(
        "", "More arguments of `vllm serve` for the servers to start, in one quoted text."
    )
    third_tokens: int = option(
        0, "Tokens in a CPU tier that holds a third; 0: a third of all stored tokens.", min=0
    )
    directory: Path = option(
        Path("build/bench/disk"), "Directory for the pools of the servers to start.", flag="--dir"
    )

    def servers(self) -> list[Arm]:
        """Return the servers to measure; raise BenchError as `arms_of` does."""
        return arms_of(self.arms, self.base_urls)

    def sizes_of(self, working: int, request_max: int, gpu: int, **more: Any) -> Sizes:
        """Return sizes for the servers to start, in tokens. more: fields of `Sizes`."""
        if self.model in _SHAPES:
            more |= {"shape": _SHAPES[self.model], "dtype": "float32"}
        elif self.model != _RANDOM:
            raise BenchError(f"--model {self.model!r}: give {_RANDOM}, {' or '.join(_SHAPES)}")
        if self.third_tokens:
            more["third_tokens"] = self.third_tokens
        args = {"target_mb_per_s": self.target_mb_per_s, "server_args": self.server_args}
        return Sizes(working, request_max, gpu, **args, **more)


def arms_of(names: Sequence[str], base_urls: Sequence[str]) -> list[Arm]:
    """Return the arms to compare: the servers at `base_urls` (NAME=URL or URL), else `names`. Raise
    BenchError if a name is unknown or used twice, or a URL is malformed."""
    found = [_remote(text, number) for number, text in enumerate(base_urls)]
    found = found or [_named(name) for name in names]
    if not found:
        raise BenchError("nothing to measure: give at least one arm")
    if len({arm.name for arm in found}) < len(found):
        raise BenchError("two arms have the same name: give each NAME=URL another name")
    return found


def _named(text: str) -> Arm:
    name, colon, backend = text.partition(":")
    if name not in ARMS:
        raise BenchError(f"no arm {name!r}; choose from {', '.join(ARMS)}, or --base-url")
    arm = ARMS[name]
    if not colon:
        return arm
    known = [one.value for one in (Backend.DMA, Backend.KERNEL)]  # values of `copy_backend`
    if backend not in known or arm.peer or arm.tier == "none":
        raise BenchError(f"no arm {text!r}: only ours may be followed by :{' or :'.join(known)}")
    return replace(arm, name=text, about=f"{arm.about}; copies by {backend}", copy_backend=backend)


def _remote(text: str, number: int) -> Arm:
    name, equals, url = text.partition("=")
    if not equals or "/" in name:
        name, url = f"server{number + 1}", text
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"--base-url {text!r}: give NAME=http://HOST:PORT")
    return Arm(name, "a server given by its URL", url=url.rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True)
class Sizes:
    """The sizes of the servers that a benchmark starts.

    working_tokens, third_tokens: tokens in a CPU tier that holds all, and in one that holds a third
    (None: a third of working_tokens). request_tokens_max: longest prompt with its answer.
    gpu_tokens: tokens in the GPU cache (ordinary memory on a CPU engine). target_mb_per_s: rate of
    the throttled stand-in. models: directory for random models. server_args: quoted for a shell.
    """

    working_tokens: int
    request_tokens_max: int
    gpu_tokens: int
    third_tokens: int | None = None
    max_num_seqs: int = 16
    target_mb_per_s: int = 200
    shape: ModelShape = field(default_factory=lambda: _SMALL if has_cpu_engine() else _LARGE)
    dtype: str = field(default_factory=lambda: "float32" if has_cpu_engine() else "bfloat16")
    models: Path = Path("build/models")
    server_args: str = ""

    def __post_init__(self) -> None:
        try:
            shlex.split(self.server_args)
        except ValueError as error:
            raise BenchError(f"--server-args {self.server_args!r}: {error}") from None
        if self.gpu_tokens < self.request_tokens_max:
            raise BenchError(
                f"a GPU cache of {self.gpu_tokens} tokens does not hold one request of "
                f"{self.request_tokens_max}"
            )

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of all layers per token."""
        return self.shape.kv_bytes_per_token * _BYTES[self.dtype] // _BYTES["float32"]

    @property
    def chunk_bytes(self) -> int:
        """The size of one group's KV in one block, the smallest chunk that any arm can use."""
        return BLOCK_TOKENS * self.kv_bytes_per_token // self.shape.groups

    @property
    def pool_bytes(self) -> int:
        """The size of a pool: room for twice as many bytes as are ever stored."""
        return 2 * self.slots(self.working_tokens) * slot_stride_bytes(self.chunk_bytes) + 64 * MIB

    def tokens_of(self, tier: str) -> int:
        """Return the number of tokens in a CPU tier that holds `tier`: "all" or "third"."""
        if tier == "all":
            return self.working_tokens
        return self.working_tokens // 3 if self.third_tokens is None else self.third_tokens

    def staging_bytes(self, tier: str) -> int:
        """Return the bytes of a server's pinned memory, with stream slots. The CPU tier of vLLM's
        tiering gets the same size."""
        slots = self.slots(self.tokens_of(tier)) + STREAM_SLOTS
        return slots * slot_stride_bytes(self.chunk_bytes)

    def slots(self, tokens: int) -> int:
        """Return the number of cache slots that a CPU tier needs for this many tokens."""
        return max(STREAM_SLOTS, math.ceil(tokens / BLOCK_TOKENS) * self.shape.groups)


def engine_id(name: str) -> str:
    """Return the engine ID of a peer's server; vLLM names its shared memory after it."""
    return f"bench-{os.getpid()}-{name}"


def offload_of(arm: Arm, sizes: Sizes, place: Path) -> OffloadSpec | None:
    """Return an arm's offloading settings, if any. place: directory for its pool or files."""
    if arm.tier == "none":
        return None
    if arm.peer:
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": sizes.staging_bytes(arm.tier),
            "block_size": BLOCK_TOKENS,
            "offload_prompt_only": False,
            "secondary_tiers": [_SECONDARY.get(arm.name, _fs)(place, sizes)],
        }
        if has_cpu_engine():
            extra["spec_name"] = "HostTieringOffloadingSpec"
            extra["spec_module_path"] = "vllm_nvmeof_bench.serve.peer"
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": engine_id(arm.name),
        }
        return OffloadSpec(None, extra, transfer)
    return OffloadSpec.sized(
        sizes.slots(sizes.tokens_of(arm.tier)),
        sizes.chunk_bytes,
        sizes.pool_bytes if arm.pool else 0,
        place,
        read_deadline_ms=_READ_DEADLINE_MS,
        **({"copy_backend": arm.copy_backend} if arm.copy_backend else {}),
    )


def _fs(place: Path, _: Sizes) -> dict[str, object]:
    return {"type": "fs", "root_dir": str(place)}


def _lifeboat(place: Path, sizes: Sizes) -> dict[str, object]:
    """Return Lifeboat's tier, set up for one GPU node, without a dashboard or exporter."""
    place.mkdir(parents=True, exist_ok=True)
    tier = {"name": "nvme", "type": "nvme", "enabled": True, "path": str(place / "kv")}
    settings = {
        "extends": "single_node_gpu",
        "device": "cpu" if has_cpu_engine() else "cuda",
        "storage": {"tiers": [tier | {"capacity_gb": max(1, sizes.pool_bytes / 1e9)}]},
        "dashboard": {"enabled": False},
        "telemetry": {"prometheus": {"enabled": False}},
    }
    path = place / "lifeboat.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML too
    module = "lifeboat_cache.integrations.vllm_tier"
    return {"type": "LifeboatTier", "module_path": module, "lifeboat_config": str(path)}


def _kvcr(place: Path, sizes: Sizes) -> dict[str, object]:
    """Return KVCR's tier with a file. Its own memory is as large as the CPU tier, because what a
    store has in excess of it is dropped."""
    with ReservedPort() as port:
        control = {"control_ports": [port.number], "control_host": "127.0.0.1"}
    file_bytes = sizes.pool_bytes // sizes.chunk_bytes * sizes.chunk_bytes
    return control | {
        "type": "kvcr",
        "router_capabilities": ["router_hint"],
        "control_advertise_host": "127.0.0.1",
        "operation_timeout_ms": 5000,
        "abandon_timeout_ms": 10_000,
        "secondary_g2_slots": sizes.staging_bytes("third") // sizes.chunk_bytes,
        "g3": {"paths": [f"{place}/kv"], "capacity_bytes_per_file": file_bytes, "backend": "POSIX"},
    }


#: Arm → its tier below vLLM's CPU tier.
_SECONDARY = {"lifeboat": _lifeboat, "kvcr": _kvcr}


def server_spec(arm: Arm, sizes: Sizes, model: Path, place: Path) -> ServerSpec:
    package = Path(vllm_nvmeof_bench.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", ""))))
    return ServerSpec(
        model=model,
        max_model_len=on_blocks(sizes.request_tokens_max + 1),
        gpu_blocks=sizes.gpu_tokens // BLOCK_TOKENS * sizes.shape.groups + 1,
        max_num_seqs=sizes.max_num_seqs,
        cores_reserved=0,
        offload=offload_of(arm, sizes, place),
        dtype=sizes.dtype,
        extra_args=tuple(shlex.split(sizes.server_args)),
        # The HTTP route that empties the GPU's prefix cache needs the development mode.
        env={"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path},
    )


#: Servers to start concurrently: one per four cores, but at least two.
_AT_ONCE = max(2, (os.cpu_count() or 1) // 4)
#: Token IDs that are ordinary tokens in nearly all models' vocabularies.
_REMOTE_TOKENS = Tokens(1000, 30000)


@dataclass
class Fleet:
    """The clients of all servers, and the servers started here, by name. restart: restarts the
    latter, without deleting their directories."""

    runner: asyncio.Runner
    clients: dict[str, Client] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)
    restart: Callable[[], None] = lambda: None

    def run(self, coroutine: Any) -> Any:
        """Run a client's coroutine to completion."""
        return self.runner.run(coroutine)

    def cpu_s(self, name: str) -> float | None:
        """Return the CPU seconds that a server has used; None if it was not started here."""
        server = self.servers.get(name)
        return None if server is None else group_cpu_s(server.pid)

    def shuffled(self, words: str) -> list[str]:
        """Return the servers' names in a random order that depends on `words`."""
        return random.Random(words).sample(list(self.clients), len(self.clients))


@contextmanager
def serving(
    wanted: Mapping[str, ServerSpec | str],
    logs: Path,
    on_step: Callable[[str], None],
    throttles: Mapping[str, Throttle],
) -> Iterator[Fleet]:
    """Start the wanted servers, a few at a time, or connect to their URLs; stop them at the end.

    throttles: server name → disk throttle of all processes that the server starts.

    Raises: BenchError: a server did not start (its log is in `logs`), or does not answer.
    """
    ours = {name: spec for name, spec in wanted.items() if not isinstance(spec, str)}
    # The key of servers given by URL, as for other OpenAI clients.
    key = os.environ.get("OPENAI_API_KEY")
    with ExitStack() as stack:
        fleet = Fleet(stack.enter_context(asyncio.Runner()))

        def connect(name: str, client: Client) -> None:
            fleet.clients[name] = client
            stack.callback(lambda: fleet.run(client.close()))
            fleet.run(client.model())

        def start() -> None:
            for at in range(0, len(ours), _AT_ONCE):
                some = list(ours)[at : at + _AT_ONCE]
                on_step("starting vllm serve: " + ", ".join(some))
                for name in some:
                    server = stack.enter_context(Server(ours[name], logs / f"{name}.log"))
                    fleet.servers[name] = server
                    if name in throttles:
                        throttles[name].add_group(server.pid)
                for name in some:
                    _wait_ready(name, fleet.servers[name])
                    connect(name, Client(fleet.servers[name].url))

        def restart() -> None:
            for server in fleet.servers.values():
                server.stop()
            start()

        for name, spec in wanted.items():
            if isinstance(spec, str):
                connect(name, Client(spec, model="", api_key=key))
        start()
        fleet.clients = {name: fleet.clients[name] for name in wanted}
        fleet.restart = restart
        yield fleet
        on_step("stopping the servers")


def _wait_ready(name: str, server: Server) -> None:
    """Wait until a server is ready; raise BenchError with the log's last error."""
    try:
        server.wait_ready()
    except ServerError as error:
        what, *tail = str(error).splitlines()
        reasons = [line for line in tail if "Error" in line] or tail[-1:] or [""]
        raise BenchError(f"arm {name}: {what} … {reasons[-1].strip()}") from None


@dataclass(frozen=True)
class Run:
    """A running measurement, which appends to `samples` and adds to `conditions`."""

    fleet: Fleet
    tokens: Tokens
    samples: list[Any]
    conditions: dict[str, Any]
    on_progress: OnProgress


def run(
    name: str,
    settings: ServerSettings,
    sizes: Sizes,
    measure: Callable[[Run], None],
    json_path: Path,
    quiet: bool = True,
    logged: Callable[[str], bool] = lambda what: True,
) -> None:
    """Start the servers, or connect to them, measure, and write the JSON file of benchmark `name`.

    The file of an interrupted measurement contains the samples so far, and `cut_off` in its
    conditions. If the run fails, the logs of the started servers are kept next to the file. quiet:
    disable garbage collection, which long measurements need. logged: see `progress`.

    Raises: BenchError: the benchmark cannot run here, or a server does not start or answer.
    """
    arms = settings.servers()
    ours = [arm for arm in arms if arm.url is None]
    logs = json_path.parent / f"{name}-logs"
    tokens = _tokens(settings, sizes, bool(ours))
    pools = sum(arm.pool for arm in arms)
    disk_bytes = pools * sizes.pool_bytes + 256 * MIB if pools else 0
    with ExitStack() as stack:
        on_progress = stack.enter_context(progress(logged))
        home = stack.enter_context(home_in(settings.directory, disk_bytes))
        conditions = {**_conditions(arms, sizes, home), "token_ids": [tokens.low, tokens.high]}
        throttles = _places(stack, ours, sizes, home)
        wanted: dict[str, ServerSpec | str] = {arm.name: arm.url for arm in arms if arm.url}
        if ours:
            on_progress(0, 0, "making the model")
            model = _made(sizes)
            wanted = {
                arm.name: server_spec(arm, sizes, model, home / arm.directory) for arm in ours
            }
        fleet = stack.enter_context(serving(wanted, logs, partial(on_progress, 0, 0), throttles))
        models = {name: fleet.run(one.model()) for name, one in fleet.clients.items()}
        conditions |= {"models": models, "settings": recorded(settings)}
        conditions["load_average_at_start"] = load_average()
        samples: list[Any] = []
        try:
            with quiet_interpreter() if quiet else nullcontext():
                measure(Run(fleet, tokens, samples, conditions, on_progress))
        except BaseException:
            conditions["cut_off"] = True
            raise
        finally:
            if samples:
                conditions["load_average_at_end"] = load_average()
                dump(json_path, name, samples, conditions)
    drop_logs(logs, [arm.name for arm in ours])


def _made(sizes: Sizes) -> Path:
    """Make the model unless it exists; return its directory."""
    if sizes.shape == smollm2.SHAPE:
        return smollm2.make()
    return make_model(sizes.models.resolve(), sizes.shape)


def command(name: str, text: str, kind: type[Any]) -> Command:
    """Return a command that measures servers. text: the help text. kind: the settings class, with
    the methods `sizes` and `measure`."""

    def start(settings: Any, json_path: Path) -> None:
        run(name, settings, settings.sizes(), settings.measure, json_path)

    return Command(name, text, kind, start)


def _tokens(settings: ServerSettings, sizes: Sizes, ours: bool) -> Tokens:
    """Return the token IDs for prompts. ours: whether servers are started here."""
    default = Tokens(high=sizes.shape.vocab) if ours else _REMOTE_TOKENS
    tokens = Tokens.parse(settings.token_ids) if settings.token_ids else default
    if ours and tokens.high > sizes.shape.vocab:
        raise BenchError(
            f"token ids up to {tokens.high}: the model started here has only {sizes.shape.vocab}"
        )
    return tokens


def _places(stack: ExitStack, arms: Sequence[Arm], sizes: Sizes, home: Path) -> dict[str, Throttle]:
    """Create a directory per arm; return arm → throttle. Raise ThrottleError if this machine does
    not support throttles."""
    throttles = {}
    for arm in arms:
        place = home / arm.directory
        place.mkdir(exist_ok=True)
        if arm.peer:  # a killed peer leaves its CPU tier's file behind
            left = Path("/dev/shm") / f"vllm_offload_{engine_id(arm.name)}.mmap"
            stack.callback(left.unlink, missing_ok=True)
        if arm.throttled:
            rate = sizes.target_mb_per_s * MB
            throttles[arm.name] = stack.enter_context(Throttle(place, rate, rate))
    return throttles


def _conditions(arms: Sequence[Arm], sizes: Sizes, directory: Path) -> dict[str, Any]:
    """Return the conditions before the servers start."""
    found = at_start(directory)
    found["arms"] = {arm.name: _described(arm, sizes) for arm in arms}
    if any(arm.peer for arm in arms) and has_cpu_engine():
        found["peer_note"] = PEER_NOTE
    if not has_cpu_engine():
        found["gpus"] = [f"{gpu.name}, driver {gpu.driver}" for gpu in read_gpus()]
    if any(arm.throttled for arm in arms):
        found["stand_in"] = (
            f"the NVMe-oF target is a stand-in: a directory on the local disk, with reads and "
            f"writes limited by a control group to {sizes.target_mb_per_s} MB/s each"
        )
        # A kernel thread dispatches the reads. Traced waits for a core: 6.0 s, and 4 ms without it.
        if read_text("/proc/sys/kernel/sched_autogroup_enabled") == "1":
            found["stand_in"] += (
                "; set kernel.sched_autogroup_enabled to 0, or its reads stall behind busy cores"
            )
    if any(arm.url is None for arm in arms):
        kind = sizes.shape.kind if isinstance(sizes.shape, HybridShape) else "Llama"
        real = sizes.shape == smollm2.SHAPE
        found["model"] = {
            "name": f"{smollm2.NAME if real else f'random {kind}'}, {sizes.dtype}",
            "parameters": sizes.shape.parameters,
            "kv_bytes_per_token": sizes.kv_bytes_per_token,
            "shape": asdict(sizes.shape),
        }
        found["gpu_tokens"] = sizes.gpu_tokens
        found["chunk_bytes"] = sizes.chunk_bytes
    return found


def _described(arm: Arm, sizes: Sizes) -> dict[str, Any]:
    described: dict[str, Any] = {"says": arm.about}
    if arm.tier != "none":
        described["staging_bytes"] = sizes.staging_bytes(arm.tier)
    if arm.pool and not arm.peer:
        described["pool_bytes"] = sizes.pool_bytes
    if arm.throttled:
        described["throttled_mb_per_s"] = sizes.target_mb_per_s
    return described
