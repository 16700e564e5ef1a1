# SPDX-License-Identifier: Apache-2.0
"""The only parser of configuration.

Values come from `kv_connector_extra_config`, and below it from `VLLM_NVMEOF_<KEY>` variables.
Unknown keys, wrong types and sizes that cannot work raise `ConfigError`, which names the key,
the value and the remedy. The keys themselves are in `config_keys.py`; what can only be judged
on a machine (memory, targets, slot sizes) is in `config_check.py`. Import all of it from here.

Every configuration key with its unit, default, limits and meaning, in one place.

Judges a parsed configuration on this machine: memory, targets, sizes of slots.

Every refusal is a `ConfigError` that names the key, the value and the remedy.

One of several engines that share the configured sizes.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.names import SPEC_MODULE, SPEC_NAME
from vllm_nvmeof_offload.units import GIB, KIB, MIB, PAGE_BYTES, format_bytes, parse_bytes

__all__ = [
    "ALLOW_FAULTS",
    "CHUNK_TOKENS_MAX",
    "ENV_PREFIX",
    "POOL_BYTES_DEFAULT_MAX",
    "STREAM_SLOTS_MIN",
    "VLLM_KEYS",
    "OffloadConfig",
    "Replica",
    "TargetInfo",
    "check_fits",
    "check_memory",
    "check_targets",
    "chunk_blocks",
    "default_staging_bytes",
    "default_target",
    "describe_keys",
    "judge_access",
    "parse_config",
    "resolve_pool_bytes",
]


STAGING_BYTES_DEFAULT_MAX = 8 * GIB
#: No machine has an EiB; a larger number is a slip, and would overflow 64-bit arithmetic.
SIZE_BYTES_MAX = 1 << 60
_MS_MAX = 3_600_000

#: Keys of vLLM's own that may stand beside ours.
VLLM_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "blocks_per_chunk",
        "block_size",
        "offload_prompt_only",
        "self_describing_kv_events",
        "sync_load_budget_bytes",
        "canonical_layout",
    }
)


def default_staging_bytes() -> int:
    """Pinned memory when none was asked for: a quarter of physical memory, at most 8 GiB."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(STAGING_BYTES_DEFAULT_MAX, physical // 4)


def default_target(env: Mapping[str, str]) -> str:
    """The pool directory when none was given, from `XDG_CACHE_HOME` or `HOME` in `env`."""
    cache = env.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification ignores relative values
        cache = os.path.join(env.get("HOME") or os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "vllm-nvmeof", "pool")


def _size(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a size")
    try:
        return parse_bytes(value)
    except OverflowError:
        raise ValueError("not a finite size") from None


def _paths(value: object) -> object:
    return [value] if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_size), Field(le=SIZE_BYTES_MAX)]
_SIZE = 'a size such as 1073741824 or "1GiB"'


def _key(default: Any, unit: str, allowed: str, meaning: str, **limits: Any) -> Any:
    """One key. `allowed` completes the sentence "give …" in refusals."""
    extra: dict[str, Any] = {"unit": unit, "allowed": allowed}
    if callable(default):
        return Field(
            default_factory=default, description=meaning, json_schema_extra=extra, **limits
        )
    return Field(default=default, description=meaning, json_schema_extra=extra, **limits)


class OffloadConfig(BaseModel):
    """All settings of one engine. Frozen; the same object in the scheduler and every worker."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)

    staging_bytes: Size = _key(
        default_staging_bytes, "bytes", f"{_SIZE} above 0",
        "Pinned CPU memory over all ranks and replicas: the CPU tier and the slots that loads "
        "stream through. Default: a quarter of physical memory, at most 8 GiB.",
        gt=0,
    )  # fmt: skip
    targets: Annotated[list[str], BeforeValidator(_paths)] = _key(
        lambda: [default_target(os.environ)], "directories", "one path or a list of paths",
        "Directories that hold the pool, each best on a file system of its own on an NVMe "
        "namespace. Default: $XDG_CACHE_HOME/vllm-nvmeof/pool.",
        min_length=1,
    )  # fmt: skip
    pool_bytes: Size | None = _key(
        None, "bytes", f"{_SIZE}, 0 for none, or null for the default",
        "Size of the pool over all ranks, replicas and targets; 0: no pool, the CPU tier only. "
        "Default: the smaller of 100 GiB and half of what is free on the targets.",
        ge=0,
    )  # fmt: skip
    chunk_bytes_min: Size = _key(
        512 * KIB, "bytes", f"{_SIZE} from 4KiB to 1GiB",
        "Blocks are grouped into chunks of at least this size a rank, unless blocks_per_chunk or "
        "block_size says how many.",
        ge=PAGE_BYTES, le=GIB,
    )  # fmt: skip
    stream_slots: int = _key(
        64, "slots", "an integer from 2 to 65536",
        "Pinned slots of each rank that loads from the pool stream through; bounded by a quarter "
        "of the rank's staging.",
        ge=2, le=65536,
    )  # fmt: skip
    land_cache_share: float = _key(
        0.5, "share", "a number from 0 to 1",
        "Share of the cache slots that one load may fill with what it reads from the pool.",
        ge=0, le=1,
    )  # fmt: skip
    reload_cache_share: float = _key(
        0.25, "share", "a number from 0 to 1",
        "Share of the cache slots that preempted requests may hold: their chunks are kept there, "
        "or fetched from the pool, until they run again.",
        ge=0, le=1,
    )  # fmt: skip
    prefetch_cache_share: float = _key(
        0.25, "share", "a number from 0 to 1",
        "Share of the cache slots that may be filled from the pool for requests that wait in "
        "vLLM's queue. 0: no prefetch.",
        ge=0, le=1,
    )  # fmt: skip
    admission: Literal["auto", "always"] = _key(
        "auto", "", '"auto" or "always"',
        "auto: what is found is loaded where that is sooner than computing it again, by the rates "
        "learned so far; always: it is loaded.",
    )  # fmt: skip
    prefill_tokens_per_s: float | None = _key(
        None, "tokens/s", "a number above 0, or null to learn it",
        "How fast the model computes prompts, for admission. Default: learned from its steps.",
        gt=0,
    )  # fmt: skip
    read_bytes_per_s: Size | None = _key(
        None, "bytes/s", f"{_SIZE} above 0, or null to learn it",
        "How fast each rank reads the pool, all targets together, for admission. Default: "
        "learned from its reads.",
        gt=0,
    )  # fmt: skip
    copy_backend: Literal["auto", "dma", "kernel"] = _key(
        "auto", "", '"auto", "dma" or "kernel"',
        "What moves bytes between a GPU and pinned memory. auto: dma, or kernel where it was "
        "measured to be 1.5 times as fast; dma: the copy engines alone; kernel: a kernel on a few "
        "multiprocessors alone, for comparisons. Without a GPU it means nothing.",
    )  # fmt: skip
    io_engine: Literal["auto", "uring", "threads"] = _key(
        "auto", "", '"auto", "uring" or "threads"',
        "How staging and pool exchange bytes. auto: io_uring, or threads where it is denied; "
        "uring: refuse to start where it is denied.",
    )  # fmt: skip
    io_depth: int = _key(
        64, "operations", "an integer from 1 to 4096",
        "Reads, and as many writes, that io_uring keeps in flight on each target.",
        ge=1, le=4096,
    )  # fmt: skip
    io_split_bytes: Size = _key(
        MIB, "bytes", f"{_SIZE} from 4KiB to 1GiB",
        "io_uring cuts a chunk into operations of about this size, so that none delays the others "
        "for long.",
        ge=PAGE_BYTES, le=GIB,
    )  # fmt: skip
    io_threads: int = _key(
        8, "threads", "an integer from 2 to 256",
        "I/O threads of each rank with the threads engine; one is kept for reads.",
        ge=2, le=256,
    )  # fmt: skip
    o_direct: Literal["auto", "on", "off"] = _key(
        "auto", "", '"auto", "on" or "off"',
        "Whether pool I/O bypasses the page cache. auto: where the file system can; on: refuse "
        "to start where it cannot.",
    )  # fmt: skip
    write_policy: Literal["through", "on_eviction", "off"] = _key(
        "through", "", '"through", "on_eviction" or "off"',
        "through: what is stored in the CPU tier is written to the pool behind it; on_eviction: "
        "only when the CPU tier is about to need its room, which writes less and loses more at a "
        "restart; off: the pool is only read.",
    )  # fmt: skip
    eviction_policy: str = _key(
        "credited_lru", "", '"credited_lru", "lru", or "module:Class" of a policy of your own',
        "Which chunk goes first where room is needed. lru: the least recently used; credited_lru: "
        "the same, but in the CPU tier what later requests came back for counts as used later "
        "(as lru where write_policy is not through, which finds more there); "
        "examples/04_custom_policy.py has one of another kind, for both tiers.",
        min_length=1,
    )  # fmt: skip
    store_threshold: int = _key(
        1, "sightings", "an integer from 1 to 1000000",
        "A chunk is offloaded on its n-th sighting: the n-th request that has it, as vLLM's key "
        "of this name counts. 1: at once. More spares the device what is never asked for again.",
        ge=1, le=1_000_000,
    )  # fmt: skip
    read_deadline_ms: int = _key(
        5_000, "ms", "an integer from 1 to 3600000",
        "A pool read that takes longer counts as failed; its request recomputes.",
        ge=1, le=_MS_MAX,
    )  # fmt: skip
    write_deadline_ms: int = _key(
        30_000, "ms", "an integer from 1 to 3600000",
        "A pool write that takes longer counts as failed; the chunk stays in the CPU tier only.",
        ge=1, le=_MS_MAX,
    )  # fmt: skip
    read_bytes_in_flight_max: Size = _key(
        64 * MIB, "bytes", f"{_SIZE} of at least 4KiB",
        "Bound on bytes being read, for each rank, and with io_uring for each of its targets.",
        ge=PAGE_BYTES,
    )  # fmt: skip
    write_bytes_in_flight_max: Size = _key(
        32 * MIB, "bytes", f"{_SIZE} of at least 4KiB",
        "Bound on bytes being written, for each rank, and with io_uring for each of its targets.",
        ge=PAGE_BYTES,
    )  # fmt: skip
    write_bytes_beside_reads_max: Size = _key(
        512 * KIB, "bytes", f"{_SIZE} of at least 4KiB",
        "The same bound while reads wait or run: what keeps reads quick. One operation may always "
        "run.",
        ge=PAGE_BYTES,
    )  # fmt: skip
    adopt: bool = _key(
        True, "", "true or false", "Whether chunks that an earlier run left in the pool are used."
    )
    weights_never_change: bool = _key(
        False, "", "true or false",
        "Say true if the weights are never updated in a running engine: chunks stored after a "
        "cache reset may then be adopted by a later run.",
    )  # fmt: skip
    replicas: int = _key(
        1, "engines", "vLLM's --data-parallel-size, or leave it out",
        "Data-parallel replicas that share staging_bytes and pool_bytes. Our plugin sets it.",
        ge=1, le=64,
    )  # fmt: skip
    weights_seen: dict[str, str] = _key(
        dict, "", "a mapping of models to stamps, or leave it out",
        "Stamps of the files of each model from before vLLM read them. Our plugin sets it.",
    )  # fmt: skip
    fault_injection: str | None = _key(
        None, "file", "the path of a control file, or null",
        "FOR TESTS: a file that makes pool I/O fail or deliver wrong KV. Refused unless the "
        "environment variable VLLM_NVMEOF_ALLOW_FAULT_INJECTION is 1; logged.", min_length=1,
    )  # fmt: skip
    offload_prompt_only: bool = _key(
        False, "", "true or false",
        "vLLM's key: store prompts only. Ours is false, so that what a preempted request has "
        "generated comes back too.",
    )  # fmt: skip
    blocks_per_chunk: int | None = _key(
        None, "blocks", "an integer of at least 1, or leave it out",
        "vLLM's key: blocks in one chunk; overrides chunk_bytes_min.", ge=1,
    )  # fmt: skip
    block_size: int | None = _key(
        None, "tokens", "a multiple of vLLM's --block-size, or leave it out",
        "vLLM's key: tokens in one chunk; overrides chunk_bytes_min.", ge=1,
    )  # fmt: skip
    self_describing_kv_events: bool = _key(
        False, "", "true or false", "vLLM's key: put token ids into KV events."
    )
    sync_load_budget_bytes: int = _key(
        0, "bytes", "0, or leave it out: a synchronous load that fails cannot be reported in time",
        "vLLM's key; must be 0.", ge=0, le=0,
    )  # fmt: skip
    canonical_layout: Literal[False] = _key(
        False, "", "false, or leave it out: pools keep each rank's own layout",
        "vLLM's key; must be false.",
    )  # fmt: skip
    spec_name: Literal["NVMeoFOffloadingSpec"] = _key(
        SPEC_NAME, "", f'"{SPEC_NAME}", or leave it out', "vLLM's key: the name of our spec."
    )
    spec_module_path: str | None = _key(
        SPEC_MODULE, "", f'"{SPEC_MODULE}", or leave it out', "vLLM's key: where our spec lives."
    )

    @field_validator("targets")
    @classmethod
    def _absolute(cls, targets: list[str]) -> list[str]:
        if not all(t.strip() for t in targets):
            raise ValueError("an empty path")
        paths = [os.path.abspath(os.path.expanduser(t)) for t in targets]
        if len({os.path.realpath(p) for p in paths}) != len(paths):
            raise ValueError("the same directory twice")
        return paths

    @model_validator(mode="after")
    def _one_chunk_size(self) -> OffloadConfig:
        if self.blocks_per_chunk is not None and self.block_size is not None:
            raise ConfigError(
                "block_size", self.block_size,
                f"blocks_per_chunk={self.blocks_per_chunk} says it already; give only one of them",
            )  # fmt: skip
        return self


@dataclass(frozen=True, slots=True)
class Replica:
    """One of `count` engines that share `pool_bytes` and `staging_bytes`.

    server: the same for all ranks of all of them, another one at every start.
    """

    index: int = 0
    count: int = 1
    server: str = ""

    @property
    def engine(self) -> str:
        """The same on all ranks of this replica, and of no other engine; "": not known."""
        return f"{self.server}/{self.index}" if self.server else ""


ENV_PREFIX = "VLLM_NVMEOF_"
#: Beside the key `fault_injection`, and only in the environment: one slip turns no faults on.
ALLOW_FAULTS = "VLLM_NVMEOF_ALLOW_FAULT_INJECTION"
#: Keys of other backends that people bring along, and what they are called here.
_FOREIGN_KEYS = {
    "cpu_bytes_to_use": "staging_bytes",
    "num_cpu_blocks": "staging_bytes",
    "secondary_tiers": "targets",
    "root_dir": "targets",
}


def parse_config(extra: Mapping[str, Any], env: Mapping[str, str] | None = None) -> OffloadConfig:
    """Parse `kv_connector_extra_config`, completed from the environment.

    `env` defaults to this process's. What `extra` names wins over its variable.

    Raises:
        ConfigError: an unknown key or variable, a wrong type, a value that cannot work, or
            fault injection that `ALLOW_FAULTS` does not allow.
    """
    env = os.environ if env is None else env
    values = {**_from_env(env), **extra}
    for name in extra:
        if name not in OffloadConfig.model_fields:
            raise _unknown(str(name), extra[name], "", list(OffloadConfig.model_fields))
    values.setdefault("targets", [default_target(env)])
    try:
        config = OffloadConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        raise _refusal(key, values[key], key in extra, first) from None
    if config.fault_injection is not None and env.get(ALLOW_FAULTS) != "1":
        raise ConfigError(
            "fault_injection" if "fault_injection" in extra else _variable("fault_injection"),
            config.fault_injection,
            "makes I/O fail and answers wrong on purpose; leave it out, or, for a test, set "
            f"the environment variable {ALLOW_FAULTS}=1 beside it",
        )
    return config


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper()


def _variables() -> dict[str, str]:
    """Variable → key, for every key of ours and for the one of vLLM's that we give a default."""
    return {
        _variable(name): name
        for name in OffloadConfig.model_fields
        if name not in VLLM_KEYS or name == "offload_prompt_only"
    }


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    known = _variables()
    values: dict[str, Any] = {}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == ALLOW_FAULTS:
            continue
        if variable not in known:
            raise _unknown(variable, text, "environment variable ", list(known))
        values[known[variable]] = _typed(known[variable], text)
    return values


def _typed(name: str, text: str) -> Any:
    """The value that `text` stands for in a variable; checked later like any other."""
    if name == "targets" and not text.startswith("["):
        return text.split(os.pathsep)
    if OffloadConfig.model_fields[name].annotation is str:
        return text
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false", "null") else text)
    except ValueError:
        return text  # a word or a size


def _unknown(name: str, value: object, what: str, valid: list[str]) -> ConfigError:
    hint = _FOREIGN_KEYS.get(name)
    if hint is None:
        close = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
        hint = close[0]
    remedy = f"unknown {what or 'key '}; did you mean {hint}? `vllm-nvmeof config` lists them all"
    return ConfigError(name, value, remedy.replace(" ;", ";"))


def _refusal(key: str, value: object, from_json: bool, error: Any) -> ConfigError:
    """The plain sentence for a pydantic error."""
    shown = key if from_json else _variable(key)
    allowed = _notes(key)["allowed"]
    why = str(error["ctx"]["error"]) if error["type"] == "value_error" else ""
    given = f"a value of type {type(value).__name__} " if error["type"].endswith("_type") else ""
    reason = f" ({why})" if why and repr(value) not in why else ""
    return ConfigError(shown, value, f"{given}cannot be used{reason}; give {allowed}")


def _notes(key: str) -> dict[str, str]:
    """`unit` and `allowed` of a key."""
    notes = OffloadConfig.model_fields[key].json_schema_extra
    assert isinstance(notes, dict), key
    return {name: str(note) for name, note in notes.items()}


def describe_keys(env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Every key: its name, unit, default on this machine, meaning, variable, allowed values."""
    env = os.environ if env is None else env
    rows = []
    for name, field in OffloadConfig.model_fields.items():
        notes = _notes(name)
        default = field.get_default(call_default_factory=True, validated_data={})
        row: dict[str, Any] = {
            "key": name,
            "unit": notes["unit"],
            "default": [default_target(env)] if name == "targets" else default,
            "allowed": notes["allowed"],
            "meaning": field.description,
            "variable": _variable(name) if name in _variables().values() else None,
        }
        if notes["unit"] == "bytes" and default:
            row["default_text"] = format_bytes(default)
        rows.append(row)
    return rows


POOL_BYTES_DEFAULT_MAX = 100 * GIB
#: One slot to read into while the other is copied from.
STREAM_SLOTS_MIN = 2
CHUNK_TOKENS_MAX = 256


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """One usable target: its directory, file system, device number and free bytes."""

    path: str
    file_system: str
    device: int
    free_bytes: int


def check_targets(config: OffloadConfig) -> list[TargetInfo]:
    """Create each target with mode 0700 if it is missing, and prove that it can be written.

    Does nothing, and returns nothing, where there is no pool (`pool_bytes` 0).

    Raises:
        ConfigError: a target is no directory, or cannot be created or written.
    """
    if config.pool_bytes == 0:
        return []
    return [_check_target(path) for path in config.targets]


def _check_target(path: str) -> TargetInfo:
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ConfigError(
            "targets", path, "not a directory; give a directory on a mounted file system"
        )
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        raise ConfigError(
            "targets",
            path,
            f"cannot be written ({error.strerror}); mount it, give uid {os.geteuid()} write "
            "access, or name another directory (pool_bytes=0 runs without a pool)",
        ) from None
    return TargetInfo(path, _file_system(path), os.stat(path).st_dev, shutil.disk_usage(path).free)


def judge_access(path: str) -> tuple[str, str]:
    """Return in which way other users can meddle with a target, and the remedy; "" for neither.

    Whoever may rename in a directory, or owns it, can put our keyspaces away, though not read
    them. Root can do that everywhere and is not named.
    """
    status = os.stat(path)
    me = os.geteuid()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (me, 0):
        problem = f"belongs to uid {status.st_uid}, while this process runs as uid {me}"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        problem = f"can be written by other users (mode {mode:04o}, without the sticky bit)"
    else:
        return "", ""
    who = "that user" if status.st_uid not in (me, 0) else "they"
    place = shlex.quote(path)
    remedy = f"chown {me} {place} && chmod 0700 {place}, or name another directory"
    return f"{problem}: {who} can remove or rename the pool", remedy


def _file_system(path: str) -> str:
    """Type of the file system that holds `path`, as the kernel's mount table names it."""
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                _, point, type_name, *_ = line.split(" ")
                point = point.encode(errors="surrogateescape").decode("unicode_escape")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, type_name
    except OSError:
        return kind
    return kind


def check_memory(config: OffloadConfig, node_count: int = 1, key: str = "staging_bytes") -> None:
    """Refuse staging that the machine's memory cannot hold; `key` is what the user set.

    Raises:
        ConfigError: the share of one of `node_count` machines exceeds physical memory.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.staging_bytes // node_count > physical:
        raise ConfigError(
            key,
            format_bytes(config.staging_bytes),
            f"this machine has {format_bytes(physical)} of memory; give less than that, and "
            "leave room for the engine",
        )


def resolve_pool_bytes(config: OffloadConfig, held_bytes: int) -> int:
    """Size of the pool in bytes over all ranks and targets; 0: none.

    Without `pool_bytes`: the smaller of 100 GiB and half of what the targets could hold, which
    is what is free there and what the pool holds already (else every restart would halve it).
    Targets on one file system count once.

    held_bytes: on the targets, of pools that this server may use. Other files there are not the
    server's to give away, so `pool.engines.bytes_of_pools` counts pools alone.
    """
    if config.pool_bytes is not None:
        return config.pool_bytes
    free: dict[int, int] = {}
    for target in config.targets:
        place = _existing_parent(target)
        free[os.stat(place).st_dev] = shutil.disk_usage(place).free
    return min(POOL_BYTES_DEFAULT_MAX, (sum(free.values()) + held_bytes) // 2)


def _existing_parent(path: str) -> str:
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def chunk_blocks(config: OffloadConfig, block_bytes: int, block_tokens: int) -> int:
    """Blocks in one chunk: as configured, else enough for `chunk_bytes_min`.

    block_bytes: one rank's bytes of one block; block_tokens: tokens in it. A chunk is what a
    returning or preempted request loses at its end, so that it is bounded in tokens too.
    """
    if config.blocks_per_chunk is not None:
        return config.blocks_per_chunk
    if config.block_size is not None:
        return max(1, config.block_size // block_tokens)
    wanted = -(-config.chunk_bytes_min // max(1, block_bytes))
    return max(1, min(wanted, CHUNK_TOKENS_MAX // block_tokens))


def check_fits(
    config: OffloadConfig,
    slot_bytes: int,
    world_size: int,
    replicas: int = 1,
    held_bytes: int = 0,
) -> None:
    """Refuse staging or a pool that cannot hold the slots every rank needs.

    slot_bytes: header page and padded payload of one rank's part of a chunk. held_bytes: see
    `resolve_pool_bytes`.

    Raises:
        ConfigError: naming the size that would be enough.
    """
    slots = STREAM_SLOTS_MIN + 1
    ranks = world_size * replicas
    if config.staging_bytes // ranks < slots * slot_bytes:
        raise ConfigError(
            "staging_bytes",
            format_bytes(config.staging_bytes),
            f"too small for {slots} slots of {format_bytes(slot_bytes)} on each of {ranks} "
            f"rank(s); give at least {_at_least(slots * slot_bytes * ranks)}, or a smaller "
            "chunk_bytes_min",
        )
    pool_bytes = resolve_pool_bytes(config, held_bytes)
    if pool_bytes and pool_bytes // ranks < slot_bytes:
        explicit = config.pool_bytes is not None
        raise ConfigError(
            "pool_bytes",
            format_bytes(pool_bytes),
            f"smaller than one slot of {format_bytes(slot_bytes)} on each of {ranks} rank(s)"
            f"{'' if explicit else ', which is half of what is free on the targets'}; give at "
            f"least {_at_least(slot_bytes * ranks)}, or 0 for no pool",
        )


def _at_least(count: int) -> str:
    """`count` bytes so that the user can paste it: never rounded down."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= 10 * size:
            return f'"{-(-count // size)}{unit}"'
    return f'"{-(-count // 1024)}KiB"'
