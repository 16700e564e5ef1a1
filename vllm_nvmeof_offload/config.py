# SPDX-License-Identifier: Apache-2.0
"""Configuration: the keys, their parser, and the checks that depend on this machine.

`kv_connector_extra_config` takes precedence over the environment variable `VLLM_NVMEOF_<KEY>`, and
the variable over the default. tools/config_doc.py generates docs/configuration.md from the keys.
"""

from __future__ import annotations

import difflib
import errno
import ipaddress
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from vllm_nvmeof_offload import SPEC_MODULE, SPEC_NAME
from vllm_nvmeof_offload.errors import ConfigError, raise_all
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.limits import (
    existing,
    is_on_root,
    memory_bytes,
    memory_left_bytes,
    space_bytes,
)
from vllm_nvmeof_offload.mounts import mount_of, read_mounts
from vllm_nvmeof_offload.protocol import AHEAD_CACHE_SHARE
from vllm_nvmeof_offload.units import GIB, KIB, MIB, PAGE_BYTES, format_bytes, parse_bytes

ENV_PREFIX = "VLLM_NVMEOF_"
#: Fault injection also needs this variable, so that no single mistake enables it.
ALLOW_FAULTS = "VLLM_NVMEOF_ALLOW_FAULT_INJECTION"
#: A JSON object with fields of `Tuning`, for benchmarks and tests with a server.
EXPERIMENT = "VLLM_NVMEOF_EXPERIMENT"

_STAGING_BYTES_DEFAULT_MAX = 8 * GIB
_POOL_BYTES_DEFAULT_MAX = 100 * GIB
POOL_BYTES_DEFAULT_MAX_LAYER = GIB
#: The minimum is two, so that one slot can be filled while the other is copied.
_STREAM_SLOTS_MIN = 2
#: The maximum number of reads for peers that one rank may have in progress.
_SERVE_SLOTS_MAX = 1024
_SECRET_BYTES_MIN, _SECRET_BYTES_MAX = 16, 4096
_MAKE_SECRET = "create one with `(umask 077; openssl rand -hex 32 > FILE)`; copy it to each server"
#: The limit is 1 EiB: a larger number is a mistake and would overflow 64-bit arithmetic.
_SIZE_BYTES_MAX = 1 << 60
PORT_MAX = (1 << 16) - 1
#: The first address at which `metrics_listen: "auto"` listens.
METRICS_ADDRESS = "127.0.0.1:9808"

#: vLLM's own keys, accepted in addition to ours.
_VLLM_KEYS = {
    *("spec_name", "spec_module_path", "blocks_per_chunk", "block_size", "offload_prompt_only"),
    *("self_describing_kv_events", "sync_load_budget_bytes", "canonical_layout"),
}
#: The `kv_connector_extra_config` entry for the stamps of the models' files, which the plugin takes
#: before vLLM reads the files. The entry is not a key, because users never set it.
WEIGHTS_SEEN = "_weights_seen"
#: Keys of other backends, each with the key that the error suggests instead.
_FOREIGN_KEYS = {
    "cpu_bytes_to_use": "staging_bytes",
    "num_cpu_blocks": "staging_bytes",
    "secondary_tiers": "targets",
    "root_dir": "targets",
}
#: The minimum similarity, from 0 to 1, of an unknown name to the key that the error suggests. It is
#: 0.632 for the typo pool_size and the key pool_bytes, but 0.621 for LMCache's max_local_disk_size
#: and our block_size, which must not be suggested.
_SIMILARITY_MIN = 0.63

#: Mistakes in a target: an unexpanded shell variable, or two paths separated by a comma or a colon.
_VARIABLE, _TWO_PATHS = re.compile(r"\$\w|\$\{"), re.compile(r"[:,]\s*[/~]")

#: The default maximum number of tokens per chunk; low, because a request reuses only whole chunks.
_CHUNK_TOKENS_MAX = 256

#: Values of `share` that are not group names.
_NO_GROUPS = frozenset({"off", "host"})

# -- keys ---------------------------------------------------------------------------------


def default_staging_bytes() -> int:
    return min(_STAGING_BYTES_DEFAULT_MAX, memory_bytes() // 4)


def default_target(env: Mapping[str, str]) -> str:
    return os.path.join(cache_home(env), "vllm-nvmeof", "pool")


def cache_home(env: Mapping[str, str]) -> str:
    """Return the user's cache directory, a relative path if the user has no home directory."""
    cache = env.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):  # the XDG specification says to ignore relative paths
        return cache
    return os.path.join(env.get("HOME") or os.path.expanduser("~"), ".cache")


def _parse_size(value: object) -> object:
    if not isinstance(value, int | float | str):
        raise ValueError("not a size")
    try:
        return parse_bytes(value)
    except OverflowError:
        raise ValueError("not a finite size") from None


_Size = Annotated[int, BeforeValidator(_parse_size), Field(le=_SIZE_BYTES_MAX)]
_Tokens = Annotated[int, Field(ge=0, le=1 << 30)]
_Strings = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
_SIZE = 'a size such as 1073741824 or "1GiB"'
_SIZE_FROM_PAGE = f"{_SIZE} of at least 4KiB"
_SIZE_TO_GIB = f"{_SIZE} from 4KiB to 1GiB"


def _key(default: Any, unit: str, allowed: str, meaning: str, **limits: Any) -> Any:
    """Declare a key. Error messages say "give", followed by `allowed`."""
    limits["default_factory" if callable(default) else "default"] = default
    extra: dict[str, Any] = {"unit": unit, "allowed": allowed}
    return Field(description=meaning, json_schema_extra=extra, **limits)


def _integer(default: int, unit: str, low: int, high: int, meaning: str) -> Any:
    return _key(default, unit, f"an integer from {low} to {high}", meaning, ge=low, le=high)


def _flag(default: bool, meaning: str) -> Any:
    return _key(default, "", "true or false", meaning)


_Count = Annotated[int, Field(ge=1)]
_Bytes = Annotated[int, Field(ge=PAGE_BYTES)]


class Tuning(BaseModel):
    """Settings that users need not change, each with the reason for its default. Benchmarks and
    tests set fields in code or, for a server, with `EXPERIMENT`. Sizes are in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    #: Slots per rank through which loads stream, doubled with peers. They take at most a quarter of
    #: the rank's pinned memory. 64 slots of 1 MiB hold `read_bytes_in_flight_max`.
    stream_slots: Annotated[int, Field(ge=_STREAM_SLOTS_MIN)] = 64
    #: The maximum number of reads, and of writes, in flight per target with io_uring. Doubling this
    #: and the read bytes in flight raised 512 KiB reads from 0.945 to 0.959 of a bare ring's rate,
    #: and left 4 MiB reads at 0.938.
    io_depth: _Count = 64
    #: The approximate size of the operations into which io_uring splits a chunk, so that a large
    #: operation does not delay others.
    io_split_bytes: _Bytes = MIB
    #: The number of I/O threads per rank if io_uring is denied, divided among the targets. Each
    #: target has at least two threads and reserves one for reads.
    io_threads: Annotated[int, Field(ge=2)] = 8
    #: The bound on bytes being read, per rank and, with io_uring, per target. Devices complete
    #: reads in bursts, so the bound is eight times what a 100 Gb/s link carries in 0.6 ms.
    read_bytes_in_flight_max: _Bytes = 64 * MIB
    #: The bound on bytes being written, per rank and, with io_uring, per target. With io_uring, the
    #: bound is lowered to what the target writes in 12.5 ms, but not below 32 MiB.
    write_bytes_in_flight_max: _Bytes = 64 * MIB
    #: The bound on bytes being written while reads are waiting or running, to keep reads fast. One
    #: write may always run.
    write_bytes_beside_reads_max: _Bytes = 512 * KIB
    #: The time after which a write counts as failed and its chunk remains only in the CPU tier. The
    #: limit is long, because no request waits for a write. It also applies to the superblock writes
    #: of a reset.
    write_deadline_ms: _Count = 30_000
    #: The engine that copies between a GPU and pinned memory. auto: the GPU's copy engines (dma),
    #: or a kernel on a few multiprocessors where calibration found it at least 1.5 times as fast.
    copy_backend: Literal["auto", "dma", "kernel"] = "auto"
    #: The processor that computes and verifies the checksums of whole chunks. gpu (unmeasured):
    #: during copies from or to GPU memory or, on vLLM's CPU engine, in the copying thread.
    checksum_at: Literal["cpu", "gpu"] = "cpu"
    #: A control file that makes pool I/O fail or deliver wrong KV; for tests only.
    fault_injection: Annotated[str, Field(min_length=1)] | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Tuning:
        """Read the settings from `EXPERIMENT`. Raises ConfigError for an unknown field, an invalid
        value, or fault injection that `ALLOW_FAULTS` does not allow."""
        text = env.get(EXPERIMENT, "{}")
        try:
            tuning = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            remedy = f"{where}: {first['msg']}; give a JSON object of {', '.join(cls.model_fields)}"
            raise ConfigError(EXPERIMENT, text, remedy.removeprefix(": ")) from None
        if tuning.fault_injection is not None and env.get(ALLOW_FAULTS) != "1":
            raise ConfigError(
                "fault_injection",
                tuning.fault_injection,
                "makes I/O fail and answers wrong on purpose; leave fault_injection out or, for a "
                f"test, also set the environment variable {ALLOW_FAULTS}=1",
            )
        return tuning


TUNING = Tuning()


class OffloadConfig(BaseModel):
    """All settings for one engine, frozen and equal in the scheduler and in every worker."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # fmt: off
    staging_bytes: _Size = _key(
        default_staging_bytes, "bytes", f"{_SIZE} above 0",
        "Pinned CPU memory of all ranks and replicas together, for the CPU tier and stream slots. "
        "Default: a quarter of the machine's or container's memory, at most 8 GiB.", gt=0)
    targets: _Strings = _key(
        lambda: [default_target(os.environ)], "directories", "one path or a list of paths",
        "Directories for the pool, preferably one xfs or ext4 file system per NVMe namespace. "
        "Default: $XDG_CACHE_HOME/vllm-nvmeof/pool.",
        min_length=1)
    pool_bytes: _Size | None = _key(
        None, "bytes", f"{_SIZE}, 0 for none, or null for the default",
        "Total pool size of all ranks, replicas and targets; 0: no pool. Default: 100 GiB or half "
        "of the targets' free space, whichever is less; at most 1 GiB in a container's own layer.",
        ge=0)
    allow_root_file_system: bool = _flag(
        False, "Accept targets on the root file system, which a pool would fill if the target's "
        "own file system is not mounted. The default target is always accepted.")
    chunk_bytes_min: _Size = _key(
        512 * KIB, "bytes", _SIZE_TO_GIB,
        "Smallest chunk size on one rank, from 4 KiB to 1 GiB; a chunk has at most 256 tokens. "
        "Overridden by blocks_per_chunk and block_size.", ge=PAGE_BYTES, le=GIB)
    ahead_cache_share: float = _key(
        AHEAD_CACHE_SHARE, "share", "a number from 0 to 1",
        "Share of the cache slots, from 0 to 1, that one load may fill from the pool. Chunks held "
        "or prefetched for preempted requests may use up to half of this share, and chunks "
        "prefetched for queued requests up to another half. 0: loads leave nothing in the CPU "
        "tier, and nothing is prefetched.",
        ge=0, le=1)
    retain_share: float = _key(
        0.25, "share", "a number from 0 to 0.5",
        "Share of each tier's slots, from 0 to 0.5, that requests with the same cache_salt can "
        "retain; all requests together can retain twice the share. 0: nothing is retained.",
        ge=0, le=0.5)
    admission: Literal["auto", "always"] = _key(
        "auto", "", '"auto" or "always"',
        "Choice between loading and recomputing a hit. auto: load if loading is expected to be "
        "faster at the measured rates; always: load every hit.")
    io_engine: Literal["auto", "uring", "threads"] = _key(
        "auto", "", '"auto", "uring" or "threads"',
        "Engine that reads and writes the pool. auto: io_uring, or threads if the kernel denies "
        "io_uring; uring: refuse to start without io_uring; threads: blocking calls in threads.")
    o_direct: Literal["auto", "on", "off"] = _key(
        "auto", "", '"auto", "on" or "off"',
        "Use of O_DIRECT, which bypasses the page cache. auto: if the file system supports "
        "O_DIRECT; on: refuse to start without O_DIRECT; off: never.")
    write_policy: Literal["through", "on_eviction", "off"] = _key(
        "through", "", '"through", "on_eviction" or "off"',
        "Time at which a chunk is written to the pool. through: after the store into the CPU tier; "
        "on_eviction: before the CPU tier reuses the chunk's slot, which causes far fewer writes, "
        "but unwritten chunks are lost at a restart; off: never.")
    eviction_policy: str = _key(
        "credited_lru", "", '"credited_lru", "lru", or "module:Class" of your own policy',
        "Policy that selects chunks for eviction. lru: least recently used; credited_lru: lru, but "
        "with write_policy=through the CPU tier keeps reused chunks longer; module:Class: your own "
        "policy (examples/04_custom_policy.py).", min_length=1)
    store_threshold: int = _integer(
        1, "sightings", 1, 1_000_000,
        "Number of requests that must have contained a chunk before the chunk is offloaded, as "
        "with vLLM's key of the same name. A value above 1 reduces writes, but preempted requests "
        "recompute chunks that no other request contained.")
    boundary_tokens: Literal["auto"] | _Tokens = _key(
        "auto", "tokens", '"auto", or an integer from 0 to 1073741824',
        "Tokens between boundaries at which windows and recurrent states are stored, in addition "
        "to the ends of prompts and answers. auto: at least 1024, and enough that a boundary takes "
        "at most half the bytes of full attention since the previous one; 0: only ends of prompts. "
        "Overridden by vLLM's --prefix-cache-retention-interval above 0.")
    one_copy: bool = _flag(
        False, "Store only one copy of KV that is identical on several ranks.")
    read_deadline_ms: int = _integer(
        5_000, "ms", 1, 3_600_000,
        "Time after which a read from the pool counts as failed and its tokens are recomputed.")
    share: str = _key(
        "host", "",
        '"off", "host", or the name of a group of servers: 1 to 64 letters, digits and . _ -',
        "Other servers whose chunks are loaded if model, weights and targets are the same. host: "
        "servers on this host, except on network file systems; off: none; any other name: servers "
        "of the group on any host. Pools stay separate; a group needs O_DIRECT.",
        pattern=r"^[A-Za-z0-9._-]{1,64}$")
    server_name: str = _key(
        "", "", "1 to 64 letters, digits and . _ -, or leave it out",
        "Name of this server in the leases of its pool, used if share names a group. A server "
        "adopts the pool last leased under its name. Default: the host's name.",
        pattern=r"^[A-Za-z0-9._-]{0,64}$")
    peers: _Strings = _key(
        list, "addresses", '"HOST:PORT" or a list of such addresses, as in the peers\' peer_listen',
        "HOST:PORT of each server that has the same targets and also reads for this server. Rank r "
        "connects to PORT + r; each data-parallel replica has a different port. Every chunk read "
        "by a peer is verified.", max_length=64)
    peer_listen: str = _key(
        "", "", '"HOST:PORT" with an address of this machine, or leave it out',
        "HOST:PORT at which this server accepts reads for servers that list the address in peers. "
        "Rank r of replica d uses PORT + d * ranks + r. Without share_secret_file, only a loopback "
        "address is accepted, through which every user of the host can read KV.")
    serve_bytes: _Size = _key(
        64 * MIB, "bytes", _SIZE_FROM_PAGE,
        "Pinned memory per rank, part of staging_bytes, for reads on behalf of peers; used with "
        "peer_listen.", ge=PAGE_BYTES)
    share_secret_file: str = _key(
        "", "file", "the path of a file with a secret, or leave it out",
        "File with a secret of 16 to 4096 bytes, the same on all peers and not readable by other "
        "users. Peers without the same secret are refused, and messages are encrypted, but chunks "
        "sent over RDMA are not. Default: none, which allows only loopback addresses.")
    metrics_listen: str = _key(
        "auto", "", '"auto", "off", "HOST:PORT" with an address of this machine, or the absolute '
        "path of a file that ends in .prom",
        "HOST:PORT of an HTTP endpoint with this package's metrics and records of recent requests; "
        "replica d uses PORT + d. auto: the first free port from 127.0.0.1:9808 on, if vLLM's Rust "
        "front end drops the metrics; off: none; a *.prom file: for a node exporter, written every "
        "15 s.",
        min_length=1)
    adopt: bool = _flag(True, "Use chunks that an earlier run left in the pool.")
    weights_never_change: bool = _flag(
        False, "Promise that weights never change in a running engine. A later run may then adopt "
        "chunks stored after a cache reset.")
    trust_weight_version: bool = _flag(
        False, "Use vLLM's weight_version (/finish_weight_update, /update_weight_version) as the "
        "name of new weights. Safe only if equal versions of a model mean equal weights in all "
        "training runs.")
    allow_unknown_vllm: bool = _flag(
        True, "Run with an unknown vLLM release if every interface that this package uses exists, "
        "and a self-test passes; false: refuse to start.")
    replicas: int = _key(
        1, "engines", "vLLM's --data-parallel-size, or leave it out",
        "Number of data-parallel replicas that share staging_bytes and pool_bytes. The plugin sets "
        "the number; without the plugin, give vLLM's --data-parallel-size.",
        ge=1, le=64)
    offload_prompt_only: bool = _flag(
        False, "A vLLM key: store only prompts. By default, answers are stored too.")
    blocks_per_chunk: int | None = _key(
        None, "blocks", "an integer of at least 1, or leave it out",
        "A vLLM key: blocks per chunk; overrides chunk_bytes_min.", ge=1)
    block_size: int | None = _key(
        None, "tokens", "a multiple of vLLM's --block-size, or leave it out",
        "A vLLM key: tokens per chunk; overrides chunk_bytes_min.", ge=1)
    self_describing_kv_events: bool = _flag(
        False, "A vLLM key: include token ids in KV events.")
    sync_load_budget_bytes: int = _key(
        0, "bytes", "0, or leave it out: a synchronous load that fails cannot be reported in time",
        "A vLLM key: bytes that are loaded synchronously.", ge=0, le=0)
    canonical_layout: Literal[False] = _key(
        False, "", "false, or leave it out: pools keep each rank's own layout",
        "A vLLM key: one layout for all ranks.")
    spec_name: Literal["NVMeoFOffloadingSpec"] = _key(
        SPEC_NAME, "", f'"{SPEC_NAME}", or leave it out', "A vLLM key: the name of our spec.")
    spec_module_path: str | None = _key(
        SPEC_MODULE, "", f'"{SPEC_MODULE}", or leave it out',
        "A vLLM key: the module of our spec.")
    # fmt: on
    _tuning: Tuning = PrivateAttr(TUNING)

    @property
    def tuning(self) -> Tuning:
        return self._tuning

    @field_validator("targets")
    @classmethod
    def _absolute(cls, targets: list[str]) -> list[str]:
        if not all(t.strip() for t in targets):
            raise ValueError("an empty path")
        if any(os.path.expanduser(t).startswith("~") for t in targets):
            raise ValueError("~ cannot be expanded: HOME and the user database name no directory")
        for target in targets:
            if _VARIABLE.search(target):
                raise ValueError(f"the variable in {target} is not expanded here")
            if _TWO_PATHS.search(target) and not os.path.exists(target):
                raise ValueError(f"{target} does not exist and looks like two paths")
        paths = [os.path.abspath(os.path.expanduser(t)) for t in targets]
        if len({os.path.realpath(p) for p in paths}) != len(paths):
            raise ValueError("the same directory twice")
        return paths

    @field_validator("share")
    @classmethod
    def _no_slip(cls, share: str) -> str:
        if share not in _NO_GROUPS and share.lower() in _NO_GROUPS | {"on", "none", "all"}:
            raise ValueError("too similar to another value to name a group")
        return share

    @model_validator(mode="after")
    def _o_direct_for_groups(self) -> OffloadConfig:
        if self.share_group and self.o_direct == "off" and self.pool_bytes != 0:
            remedy = (
                f"a host that reads through its page cache misses other hosts' writes; set "
                f'o_direct to "auto", or share to "host" instead of {self.share!r}'
            )
            raise ConfigError("o_direct", self.o_direct, remedy)
        return self

    @field_validator("peers", "peer_listen")
    @classmethod
    def _have_addresses(cls, given: Any) -> Any:
        addresses = given if isinstance(given, list) else [given] if given else []
        for one in addresses:
            _check_address(one)
        if len(set(addresses)) != len(addresses):
            raise ValueError("the same address twice")
        return given

    @field_validator("metrics_listen")
    @classmethod
    def _is_a_place(cls, listen: str) -> str:
        if listen not in ("auto", "off") and not is_text_file(listen):
            _check_address(listen)
        return listen

    @model_validator(mode="after")
    def _peers_have_a_pool_and_a_secret(self) -> OffloadConfig:
        for key, addresses in (("peers", self.peers), ("peer_listen", [self.peer_listen])):
            for one in filter(None, addresses):
                if self.pool_bytes == 0:
                    remedy = f"peers read pools, but pool_bytes=0 means no pool; leave out {key}"
                    raise ConfigError(key, one, remedy)
                if not self.share_secret_file and not _is_loopback(one):
                    remedy = (
                        "anyone on this network could read or forge KV; give a "
                        "share_secret_file, or an address in 127.0.0.0/8 or [::1]"
                    )
                    raise ConfigError(key, one, remedy)
        return self

    @property
    def share_group(self) -> str:
        """Return the name of the group of servers that share chunks; empty if there is none."""
        return "" if self.share in _NO_GROUPS else self.share

    @model_validator(mode="after")
    def _one_chunk_size(self) -> OffloadConfig:
        if self.blocks_per_chunk is not None and self.block_size is not None:
            remedy = f"blocks_per_chunk={self.blocks_per_chunk} also sets it; give only one"
            raise ConfigError("block_size", self.block_size, remedy)
        return self


def is_text_file(listen: str) -> bool:
    return os.path.isabs(listen) and listen.endswith(".prom")


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or any(map(str.isspace, host)):
        raise ValueError("no host before a port")
    if ":" in host and not (host[0] == "[" and host[-1] == "]"):
        raise ValueError("an IPv6 address needs brackets")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= PORT_MAX):
        raise ValueError(f"no port from 1 to {PORT_MAX}")


def describe_keys(env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return every key: name, unit, default on this machine, allowed values, meaning, variable."""
    env = os.environ if env is None else env
    variables = {key: variable for variable, key in _variables().items()}
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
            "variable": variables.get(name),
        }
        if notes["unit"] == "bytes" and default:
            row["default_text"] = format_bytes(default)
        rows.append(row)
    return rows


def find_key(name: str) -> str:
    """Return the key with this name or environment variable, or raise ConfigError."""
    key = _bare(name)
    if key not in OffloadConfig.model_fields:
        hint = _hint(name, list(OffloadConfig.model_fields))
        raise ConfigError("KEY", name, f"no key has this name; {hint}")
    return key


def _notes(key: str) -> dict[str, str]:
    notes = OffloadConfig.model_fields[key].json_schema_extra
    assert isinstance(notes, dict), key
    return {name: str(note) for name, note in notes.items()}


# -- parser -------------------------------------------------------------------------------


def parse_config(extra: Mapping[str, Any], env: Mapping[str, str] | None = None) -> OffloadConfig:
    """Parse `kv_connector_extra_config` and the environment variables for keys not given in it.

    Raises ConfigError for an unknown key or variable, a wrong type, a value that cannot work, and
    fault injection that `ALLOW_FAULTS` does not allow.
    """
    config, errors = diagnose(extra, env)
    raise_all(errors)
    return config


def diagnose(
    extra: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> tuple[OffloadConfig, list[ConfigError]]:
    """Parse like `parse_config`, but return the errors; keys with errors keep their defaults."""
    env = os.environ if env is None else env
    errors: list[ConfigError] = []
    values = _from_env(env, errors)
    for name, value in extra.items():
        if name in OffloadConfig.model_fields:
            values[name] = value
        elif name != WEIGHTS_SEEN:
            errors.append(_unknown(str(name), value, "key", list(OffloadConfig.model_fields)))
    values.setdefault("targets", [default_target(env)])
    config = None
    while config is None:  # each pass removes the values that were refused
        found: dict[str, Any] = {}
        try:
            config = OffloadConfig.model_validate(values)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                found.setdefault(str(one["loc"][0]), one)
        except ConfigError as error:  # two keys contradict each other
            errors.append(error)
            del values[error.key]
        errors += [_refusal(key, values.pop(key), key in extra, found[key]) for key in found]
    try:
        config._tuning = Tuning.from_env(env)
    except ConfigError as error:
        errors.append(error)
    return config, errors


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper()


def _variables() -> dict[str, str]:
    return {
        _variable(name): name
        for name in OffloadConfig.model_fields
        if name not in _VLLM_KEYS or name == "offload_prompt_only"
    }


def _from_env(env: Mapping[str, str], errors: list[ConfigError]) -> dict[str, Any]:
    known = _variables()
    values: dict[str, Any] = {}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in (ALLOW_FAULTS, EXPERIMENT):
            continue
        if variable in known:
            values[known[variable]] = _typed(known[variable], text)
        else:
            errors.append(_unknown(variable, text, "environment variable", list(known)))
    return values


def _typed(name: str, text: str) -> Any:
    if name == "targets" and not text.startswith("["):
        return text.split(os.pathsep)
    if name == "peers" and not text.startswith("["):
        return [one.strip() for one in text.split(",")]
    if OffloadConfig.model_fields[name].annotation is str:
        return text
    if OffloadConfig.model_fields[name].annotation is bool and text in ("0", "1"):
        return text == "1"
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false", "null") else text)
    except ValueError:
        return text  # a word or a size


def _unknown(name: str, value: object, kind: str, valid: list[str]) -> ConfigError:
    return ConfigError(name, value, f"unknown {kind}; {_hint(name, valid)}")


def _bare(name: str) -> str:
    return name.lower().removeprefix(ENV_PREFIX.lower())


def _hint(name: str, valid: list[str]) -> str:
    bare = {_bare(one): one for one in valid}
    close = difflib.get_close_matches(_bare(name), bare, n=1, cutoff=_SIMILARITY_MIN)
    near = _FOREIGN_KEYS.get(name) or next((bare[one] for one in close), "")
    return f"{f'did you mean {near}? ' if near else ''}`vllm-nvmeof config` lists all keys"


def _refusal(key: str, value: object, from_json: bool, error: Any) -> ConfigError:
    shown, wrong = key if from_json else _variable(key), value
    where, at = error["loc"][1:2], ""
    if isinstance(value, list) and where and isinstance(where[0], int):
        wrong, at = error["input"], f"element {where[0]}, "
    why = str(error["ctx"]["error"]) if error["type"] == "value_error" else ""
    if error["type"].endswith("_type"):
        at += f"a value of type {type(wrong).__name__}{', ' if at else ' '}"
    reason = f" ({why})" if why and repr(value) not in why else ""
    return ConfigError(shown, value, f"{at}cannot be used{reason}; give {_notes(key)['allowed']}")


@dataclass(frozen=True, slots=True)
class Replica:
    """One of `count` engines that share `pool_bytes` and `staging_bytes`. `server` identifies one
    run of the server and is the same on all ranks of all replicas."""

    index: int = 0
    count: int = 1
    server: str = ""

    @property
    def engine(self) -> str:
        """Return an identifier for this replica, the same on all its ranks, or "" if unknown."""
        return f"{self.server}/{self.index}" if self.server else ""


# -- checks on this machine ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetInfo:
    path: str
    file_system: str
    free_bytes: int


def check_targets(config: OffloadConfig, *, create: bool = True) -> list[TargetInfo]:
    """Create missing targets with mode 0700 and write a byte to each one; no-op without a pool.

    Raises ConfigError for a target that is not a directory, cannot be created or written to, or is
    on the root file system without permission. Without `create`, nothing on disk is changed.
    """
    if config.pool_bytes == 0:
        return []
    return [_check_target(path, config, create) for path in config.targets]


def _check_target(path: str, config: OffloadConfig, create: bool) -> TargetInfo:
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ConfigError(
            "targets", path, "not a directory; give a directory on a mounted file system"
        )
    if _needs_permission(path) and not config.allow_root_file_system:
        missing = "is on" if os.path.isdir(path) else "does not exist and would be created on"
        raise ConfigError(
            "targets",
            path,
            f"{missing} the root file system, or in a directory of another file system; mount the "
            "target's own file system or, if the pool may use this one, set "
            "allow_root_file_system to true",
        )
    try:
        if create:
            os.makedirs(path, mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=path) as probe:
                probe.write(b"\0")
                probe.flush()
        elif not _may_create(existing(Path(path))):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            "targets",
            path,
            f"cannot be written ({error.strerror}); mount it, give uid {os.geteuid()} write "
            "access, or name another directory (pool_bytes=0 runs without a pool)",
        ) from None
    place = existing(Path(path))
    return TargetInfo(path, _file_system(str(place)), shutil.disk_usage(place).free)


def _may_create(place: Path) -> bool:
    return os.access(place, os.W_OK | os.X_OK) and shutil.disk_usage(place).total > 0


def _needs_permission(path: str) -> bool:
    """Return whether a target needs `allow_root_file_system`. The default target never does."""
    return path != default_target(os.environ) and is_on_root(Path(path))


def judge_access(path: str) -> tuple[str, str]:
    """Return how other users can tamper with a target, and the remedy; both "" if they cannot.

    A user who owns a directory or may rename files in it can remove our keyspaces, but not read
    them. Root is not reported, because root can do this anywhere.
    """
    status, me = os.stat(path), os.geteuid()
    mode = stat.S_IMODE(status.st_mode)
    who = "they"
    if status.st_uid not in (me, 0):
        who = "that user"
        problem = f"belongs to uid {status.st_uid}, while this process runs as uid {me}"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        problem = f"can be written by other users (mode {mode:04o}, without the sticky bit)"
    else:
        return "", ""
    quoted = shlex.quote(path)
    remedy = f"chown {me} {quoted} && chmod 0700 {quoted}, or name another directory"
    return f"{problem}: {who} can remove or rename the pool", remedy


def _file_system(path: str) -> str:
    mount = mount_of(os.path.realpath(path), read_mounts())
    return mount.file_system if mount else "unknown"


def share_secret(config: OffloadConfig) -> bytes:
    """Return the stripped content of `share_secret_file`; empty if no file is configured. Raises
    ConfigError if the file cannot be used."""
    path = config.share_secret_file
    if not path:
        return b""
    try:
        # Opening a named pipe does not block either.
        with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            secret = file.read(_SECRET_BYTES_MAX + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); {_MAKE_SECRET}"
        raise ConfigError("share_secret_file", path, problem) from None
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        problem = f"not a file; {_MAKE_SECRET}"
    elif mode & (stat.S_IRWXG | stat.S_IRWXO):
        problem = f"open to other users (mode {mode:04o}); chmod 0600 {shlex.quote(path)}"
    elif status.st_uid not in (os.geteuid(), 0):
        problem = f"owned by uid {status.st_uid}; chown {os.geteuid()} {shlex.quote(path)}"
    elif len(secret) > _SECRET_BYTES_MAX:
        problem = f"longer than {_SECRET_BYTES_MAX} bytes; {_MAKE_SECRET}"
    elif len(secret := secret.strip()) < _SECRET_BYTES_MIN:
        problem = f"shorter than {_SECRET_BYTES_MIN} bytes; {_MAKE_SECRET}"
    else:
        return secret
    raise ConfigError("share_secret_file", path, problem)


def check_memory(config: OffloadConfig, node_count: int = 1, key: str = "staging_bytes") -> None:
    """Refuse staging if one of `node_count` machines or containers cannot hold its share. `key` is
    the option, key or variable that the user set."""
    most = memory_bytes()
    if config.staging_bytes // node_count > most:
        raise ConfigError(
            key,
            format_bytes(config.staging_bytes),
            f"this machine has only {format_bytes(most)} of memory; give less, and leave room for "
            "the engine",
        )


def check_memory_left(staging_bytes: int) -> None:
    """Refuse staging beyond the container's free memory: the kernel would otherwise kill a process.
    `staging_bytes` is for one rank, or for all ranks on this machine."""
    left = memory_left_bytes()
    if staging_bytes > left:
        raise ConfigError(
            "staging_bytes",
            format_bytes(staging_bytes),
            f"this container has {format_bytes(max(0, left))} of memory left; give less, or raise "
            "the container's limit",
        )


def check_space(config: OffloadConfig, held: Sequence[int]) -> None:
    """Refuse a configured pool if a file system has too little space beyond what must stay free.

    `held` has, for each target, the bytes of existing pools that this server may use. An existing
    pool keeps its size, even if the file system has become full.
    """
    by_device: dict[int, list[int]] = {}  # target positions, by device
    for at, target in enumerate(config.targets):
        by_device.setdefault(existing(Path(target)).stat().st_dev, []).append(at)
    each = (config.pool_bytes or 0) // len(config.targets)
    for targets in by_device.values():
        path = config.targets[targets[0]]
        free, kept = space_bytes(Path(path))
        ours = sum(held[at] for at in targets)
        room = max(ours, ours + free - kept)
        if each * len(targets) > room:
            most = room // len(targets) * len(config.targets) // MIB  # not rounded up
            raise ConfigError(
                "pool_bytes",
                format_bytes(config.pool_bytes or 0),
                f"needs {format_bytes(each * len(targets))} on the file system of {path}, which "
                f"has {format_bytes(free + ours)}, of which {format_bytes(kept)} must stay free; "
                f"give at most {most} MiB over all targets, or name larger targets",
            )


# -- resolved sizes -----------------------------------------------------------------------


def set_replicas(extra: MutableMapping[str, Any], count: int) -> None:
    """Write vLLM's `data_parallel_size` into `extra`; refuse a different number already there."""
    if count > 1 and extra.setdefault("replicas", count) != count:
        remedy = f"data_parallel_size is {count}; leave this key out"
        raise ConfigError("replicas", extra["replicas"], remedy)


def resolve_pool_bytes(config: OffloadConfig, held_bytes: int) -> int:
    """Return the size of the pool in bytes over all ranks and targets, or 0 for no pool.

    The default is half the sum of the targets' free space and `held_bytes`, the size of existing
    pools that this server may use; without `held_bytes`, every restart would halve the pool. The
    default is at most 100 GiB, or 1 GiB in a container's own layer.
    """
    if config.pool_bytes is not None:
        return config.pool_bytes
    free: dict[int, int] = {}  # by device: a file system with several targets counts once
    most = _POOL_BYTES_DEFAULT_MAX
    for target in config.targets:
        place = existing(Path(target))
        free[place.stat().st_dev] = shutil.disk_usage(place).free
        if is_container_layer(target):
            most = POOL_BYTES_DEFAULT_MAX_LAYER
    return min(most, (sum(free.values()) + held_bytes) // 2)


def is_container_layer(target: str) -> bool:
    """Return whether `target` is in the container's own layer, deleted with the container."""
    return _file_system(str(existing(Path(target)))) == "overlay"


def serve_slots(config: OffloadConfig, slot_bytes: int) -> int:
    """Return the number of slots into which a rank reads for peers. Raises ConfigError."""
    if not config.peer_listen:
        return 0
    slots = config.serve_bytes // slot_bytes
    if not slots:
        remedy = f"smaller than one slot; give at least {_at_least(slot_bytes)}, or no peer_listen"
        raise ConfigError("serve_bytes", format_bytes(config.serve_bytes), remedy)
    return min(slots, _SERVE_SLOTS_MAX)


def check_fits(
    config: OffloadConfig,
    slot_bytes: int,
    world_size: int,
    replicas: int = 1,
    held_bytes: int = 0,
) -> None:
    """Raise an error if the staging memory or pool is too small for the slots that every rank
    needs.

    The message states a size that is large enough. `slot_bytes` includes the header page and the
    padding. `held_bytes` is as in `resolve_pool_bytes`.
    """
    slots = _STREAM_SLOTS_MIN + 1 + serve_slots(config, slot_bytes)
    ranks, errors = world_size * replicas, []
    if config.staging_bytes // ranks < slots * slot_bytes:
        remedy = (
            f"too small for {slots} slots of {format_bytes(slot_bytes)} on each of {ranks} "
            f"rank(s); give at least {_at_least(slots * slot_bytes * ranks)}, or a smaller "
            f"{'serve_bytes or ' if config.peer_listen else ''}chunk_bytes_min"
        )
        errors.append(ConfigError("staging_bytes", format_bytes(config.staging_bytes), remedy))
    pool_bytes = resolve_pool_bytes(config, held_bytes)
    if pool_bytes and pool_bytes // ranks < slot_bytes:
        explicit = config.pool_bytes is not None
        remedy = (
            f"smaller than one slot of {format_bytes(slot_bytes)} on each of {ranks} rank(s)"
            f"{'' if explicit else ', which is half of the free space on the targets'}; give at "
            f"least {_at_least(slot_bytes * ranks)}, or 0 for no pool"
        )
        errors.append(ConfigError("pool_bytes", format_bytes(pool_bytes), remedy))
    raise_all(errors)


def _at_least(count: int) -> str:
    """Format `count` bytes as a value for the configuration, rounded up."""
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    unit, size = next((one for one in units if count >= 10 * one[1]), units[-1])
    return f'"{-(-count // size)}{unit}"'


# -- the chunk size -----------------------------------------------------------------------


def chunk_blocks(
    config: OffloadConfig, block_bytes: int, block_tokens: int, stages: int = 1
) -> int:
    """Return the blocks per chunk: the configured number, or enough for `chunk_bytes_min` within
    the token limit. `block_bytes` is a block's size on one rank, `block_tokens` its token count.
    Pipeline stages differ in bytes per block, so with several `stages` only the token limit
    applies."""
    if config.blocks_per_chunk is not None:
        return config.blocks_per_chunk
    if config.block_size is not None:
        return max(1, config.block_size // block_tokens)
    limit = _CHUNK_TOKENS_MAX // block_tokens
    wanted = -(-config.chunk_bytes_min // max(1, block_bytes)) if stages == 1 else limit
    return max(1, min(wanted, limit))


def blocks_of_chunk(
    config: OffloadConfig, groups: Sequence[GroupBlocks], block_bytes: int, stages: int
) -> tuple[int, str]:
    """Return the number of blocks per chunk, and a warning if it does not suit all groups, else "".

    Only a configured number can be unsuitable. Raises ConfigError if that number cannot work.
    `block_bytes` and `stages` are as in `chunk_blocks`.
    """
    blocks = chunk_blocks(config, block_bytes, groups[0].block_tokens, stages)
    fitting = blocks_that_fit(groups, blocks)
    keys = ("blocks_per_chunk", "block_size")
    given = next((key for key in keys if getattr(config, key) is not None), "")
    if not given:
        return fitting, ""
    value, tokens = getattr(config, given), groups[0].block_tokens
    if given == "block_size" and value % tokens:
        remedy = f"not a multiple of {tokens}, this model's tokens per block; leave it out"
        raise ConfigError(given, value, remedy)
    if blocks == fitting:
        return blocks, ""
    if reason := why_one_block(groups):
        raise ConfigError(given, value, f"{reason}; leave it out")
    return blocks, (
        f"{given}={value} makes chunks that exceed a window or do not divide an attention chunk, "
        f"and many such chunks are not stored: leave {given} out, or give at most {fitting} blocks "
        "per chunk"
    )


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """A group's blocks. `span_tokens` is the length of a window or an attention chunk."""

    kind: GroupKind
    block_tokens: int
    span_tokens: int | None = None

    def fits(self, blocks_per_chunk: int) -> bool:
        """Return whether vLLM still has all of a chunk's blocks when it computes the last one.

        vLLM frees the first blocks earlier if a chunk exceeds the window or spans two attention
        chunks.
        """
        tokens = self.block_tokens * blocks_per_chunk
        if self.span_tokens is None or blocks_per_chunk == 1:
            return True
        if self.kind is GroupKind.LOCAL:
            return self.span_tokens % tokens == 0
        return tokens <= self.span_tokens


def why_one_block(groups: Sequence[GroupBlocks]) -> str:
    if any(group.kind is GroupKind.STATE for group in groups):
        return "this model has states, each of which is one block"
    if len({group.block_tokens for group in groups}) > 1:
        return "the blocks of this model's KV cache groups have different numbers of tokens"
    return ""


def blocks_that_fit(groups: Sequence[GroupBlocks], wanted: int) -> int:
    """Return the largest number of blocks per chunk up to `wanted` that suits all groups."""
    if why_one_block(groups):
        return 1
    fitting = (n for n in range(wanted, 1, -1) if all(group.fits(n) for group in groups))
    return next(fitting, 1)
