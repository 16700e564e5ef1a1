# SPDX-License-Identifier: Apache-2.0
"""A configuration that was checked on this machine, by a starting server or by `config check`. All
checks run, so that a user sees every error at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from vllm_nvmeof_offload.config import (
    POOL_BYTES_DEFAULT_MAX_LAYER,
    OffloadConfig,
    TargetInfo,
    check_memory,
    check_memory_left,
    check_space,
    check_targets,
    default_target,
    is_container_layer,
    is_text_file,
    judge_access,
    resolve_pool_bytes,
    share_secret,
)
from vllm_nvmeof_offload.errors import ConfigError, errors_of, install_extra
from vllm_nvmeof_offload.fabric import shared_devices
from vllm_nvmeof_offload.pool.ownership import usable_bytes
from vllm_nvmeof_offload.units import format_bytes

_ANY_ADDRESS = ("*", "0.0.0.0", "[::]")
_PASSIVE = socket.AI_PASSIVE


@dataclass
class Configured:
    """A configuration, its usable targets, and the errors and warnings about both. `held_bytes` is
    the size of the existing pools on these targets that this server may reuse."""

    config: OffloadConfig
    targets: list[TargetInfo] = field(default_factory=list)
    held_bytes: int = 0
    errors: list[ConfigError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Append any ConfigError that the with-block raises to the errors."""
        try:
            yield
        except ConfigError as error:
            self.errors += errors_of(error)

    @property
    def pool_bytes(self) -> int:
        return resolve_pool_bytes(self.config, self.held_bytes)


def check_here(
    config: OffloadConfig,
    *,
    create: bool,
    node_count: int = 1,
    staging_key: str = "staging_bytes",
) -> Configured:
    """Check memory, targets, space and peers; with `create`, create missing targets.

    `node_count` is the number of machines that share the staging, and `staging_key` is the option,
    key or variable that set its size. Raises PoolError if an existing pool cannot be read.
    """
    found = Configured(config)
    with found.collecting():
        check_memory(config, node_count, staging_key)
        try:
            check_memory_left(config.staging_bytes // node_count)
        except ConfigError as error:
            if create:
                raise
            found.warnings.append(f"{error}; a server that is running now may be the reason")
    for path in config.targets:
        with found.collecting():
            alone = config.model_copy(update={"targets": [path]})
            found.targets += check_targets(alone, create=create)
    if len(found.targets) == len(config.targets):
        held = [usable_bytes([Path(target.path)]) for target in found.targets]
        found.held_bytes = sum(held)
        with found.collecting():
            if config.pool_bytes:
                check_space(config, held)
    found.warnings += _judge_targets(found)
    with found.collecting():
        share_secret(config)
    if (config.peer_listen or config.peers) and find_spec("zmq") is None:
        found.warnings.append(f"peers need more packages: {install_extra('peers')}")
    if config.peer_listen:
        _check_listen(found, "peer_listen", config.peer_listen, take_port=not create)
    _check_metrics_listen(found, take_port=not create)
    if not create:  # a name may become known later, and a server connects then
        found.warnings += _judge_peers(config)
    return found


def _judge_targets(found: Configured) -> Iterator[str]:
    config = found.config
    paths = [target.path for target in found.targets]
    missing = [one for one in paths if not os.path.isdir(one) and one != default_target(os.environ)]
    if missing:
        verb = "does not exist" if len(missing) == 1 else "do not exist"
        yield f"{', '.join(missing)} {verb}; a server would create it. Is its file system mounted?"
    for path in filter(os.path.isdir, paths):
        problem, remedy = judge_access(path)
        if problem:
            yield f"target {path} {problem}; {remedy}"
        if config.pool_bytes is None and is_container_layer(path):
            most = format_bytes(POOL_BYTES_DEFAULT_MAX_LAYER)
            yield (
                f"target {path} is in this container's own layer, on the node's disk: the pool "
                f"gets at most {most}; mount a volume and name it in targets, or set pool_bytes"
            )
    for name, held in shared_devices(paths).items():
        yield (
            f"{len(held)} targets share the space and rate of {name}; name one target per device: "
            f"{', '.join(held)}"
        )


def _check_listen(found: Configured, key: str, listen: str, *, take_port: bool) -> None:
    """Try to listen at an address, as rank 0 or the exporter would. A starting server tries any
    port, because another replica on this host may hold this one."""
    host = listen.rpartition(":")[0]
    is_taken, why_not = _why_no_listening(listen if take_port else f"{host}:0")
    if is_taken:
        found.warnings.append(f"{key}={listen!r}: {why_not}; a server needs a free port")
    elif why_not:
        found.errors.append(ConfigError(key, listen, f"{why_not}; give one of its addresses"))
    if host in _ANY_ADDRESS:
        found.warnings.append(
            f"{key}={listen!r} opens the port on every network of this machine; give the address "
            "of one network, or close the port to other networks"
        )


def _why_no_listening(address: str) -> tuple[bool, str]:
    """Try to bind to `HOST:PORT`. Return whether the port is taken, and an error ("" on
    success)."""
    host, _, port = address.rpartition(":")
    host = "" if host == "*" else host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=_PASSIVE)[0]
        with socket.socket(*found[:2]) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(found[4])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return True, "the port is in use now"
        return False, f"this machine cannot listen there ({error.strerror})"
    return False, ""


def _check_metrics_listen(found: Configured, *, take_port: bool) -> None:
    listen = found.config.metrics_listen
    directory = os.path.dirname(listen)
    if not is_text_file(listen):
        if listen not in ("auto", "off"):
            _check_listen(found, "metrics_listen", listen, take_port=take_port)
    elif not os.access(directory, os.W_OK | os.X_OK):
        remedy = f"cannot write to {directory}; create it, and give this user write access"
        found.errors.append(ConfigError("metrics_listen", listen, remedy))


def _judge_peers(config: OffloadConfig) -> Iterator[str]:
    for one in config.peers:
        host, _, port = one.rpartition(":")
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
        except OSError as error:
            yield f"peers={one!r}: no address is known for {host} here ({error.strerror})"
