# SPDX-License-Identifier: Apache-2.0
"""The commands `vllm-nvmeof config …`: the list of keys, and the check of a configuration.

`config check` runs the checks that a starting server runs, without vLLM. Sizes that depend on the
model are computed from its config.json, as in `vllm-nvmeof size`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from vllm_nvmeof_offload import BACKEND
from vllm_nvmeof_offload.commands import plain_console, print_json
from vllm_nvmeof_offload.commands.size.deployment import VLLM_OPTIONS, Deployment
from vllm_nvmeof_offload.commands.size.kv import REFUSED, REMEDY, KvSizes
from vllm_nvmeof_offload.commands.size.model import ModelShape, preset, read_model
from vllm_nvmeof_offload.config import (
    ENV_PREFIX,
    check_fits,
    describe_keys,
    diagnose,
    find_key,
    resolve_pool_bytes,
    set_replicas,
)
from vllm_nvmeof_offload.errors import ConfigError, PoolError, errors_of, raise_all
from vllm_nvmeof_offload.manager.eviction import choose_policy
from vllm_nvmeof_offload.native import Tiers
from vllm_nvmeof_offload.pool.ownership import usable_bytes
from vllm_nvmeof_offload.targets.configured import Configured, check_here
from vllm_nvmeof_offload.units import format_bytes, slot_stride_bytes
from vllm_nvmeof_offload.vllm_adapter.configure import EXTRA, TRANSFER_FIELDS, extra_of, take_size

_COLUMNS_MAX = 100
_TRANSFER = "kv-transfer-config"

# -- the keys -----------------------------------------------------------------------------


def _rows() -> list[dict[str, Any]]:
    """Return the rows of `describe_keys`, with the default of pool_bytes on this machine."""
    settings = diagnose({})[0].model_copy(update={"pool_bytes": None})
    held = 0
    with contextlib.suppress(PoolError):  # another user's pool
        held = usable_bytes([Path(target) for target in settings.targets])
    rows = describe_keys()
    for row in rows:
        if row["key"] == "pool_bytes":
            row["default"] = resolve_pool_bytes(settings, held)
            row["default_text"] = format_bytes(row["default"])
    return rows


def _print_row(row: dict[str, Any], *more: str) -> None:
    default = row["default"]
    text = row.get("default_text") or json.dumps(default)
    if default in (None, "", []):
        text = "none"
    unit = f" ({row['unit']})" if row["unit"] else ""
    width = min(Console().width, _COLUMNS_MAX)
    typer.echo(f"{row['key']}{unit}; default {text}")
    for line in (row["meaning"], f"Give {row['allowed']}.", *more):
        lines = textwrap.wrap(line, width - 4, break_long_words=False, break_on_hyphens=False)
        typer.echo(textwrap.indent("\n".join(lines), "    "))


def print_keys(as_json: bool) -> None:
    rows = _rows()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        _print_row(row)
    plain_console().print(
        f"\nSet keys in {EXTRA} of --kv-transfer-config, or keys of this package in environment "
        f"variables, such as {ENV_PREFIX}STAGING_BYTES. `vllm-nvmeof config show KEY` shows a key.",
    )


def print_key(name: str, as_json: bool) -> None:
    """Print the output of `config show`. Raises ConfigError for an unknown key."""
    key = find_key(name)
    (row,) = (row for row in _rows() if row["key"] == key)
    variable = row["variable"]
    row["environment"] = None if variable is None else os.environ.get(variable)
    if as_json:
        print_json(row)
        return
    line = "No environment variable sets this key."
    if variable is not None:
        value = row["environment"]
        line = f"{variable} is not set." if value is None else f"Set here: {variable}={value}"
    _print_row(row, line)


# -- the check ----------------------------------------------------------------------------


def check(
    source: str, model: str | None, kv_dtype: str, as_json: bool, given: dict[str, Any]
) -> None:
    """Run `config check`. `given` has fields of `Deployment`. Raises ConfigError with all errors,
    after printing JSON if `as_json`."""
    errors: list[ConfigError] = []
    extra: dict[str, Any] = {}
    key, named, line = "staging_bytes", None, ""
    try:
        transfer, options = _read(source)
        has_flag = None if options is None else _has_flag(options, transfer)
        extra = extra_of(transfer, has_flag)
        if options is not None:
            key = _take_options(options, extra, given)
            named = options.get("model")
            if kv_dtype == "auto":
                kv_dtype = str(options.get("kv-cache-dtype", "auto"))
    except ConfigError as error:
        errors += errors_of(error)
    settings, wrong = diagnose(extra)
    errors += wrong
    if any(one.key.lower().endswith("targets") for one in wrong):
        settings = settings.model_copy(update={"pool_bytes": 0})  # no targets to check
    found = check_here(settings, create=False, staging_key=key)
    found.errors[:0] = errors
    with found.collecting():
        _check_policy(settings.eviction_policy)
    with found.collecting():
        if (shape := _find_model(found, model, named)) is not None:
            line = _check_model(found, shape, kv_dtype, given)
    _print(found, line, as_json)
    raise_all(found.errors)


def _print(found: Configured, line: str, as_json: bool) -> None:
    settings = found.config
    pool_bytes = found.pool_bytes
    if as_json:
        wrong = [{"key": e.key, "value": repr(e.value), "message": str(e)} for e in found.errors]
        print_json(
            {
                "config": settings.model_dump(),
                "pool_bytes_resolved": pool_bytes,
                "errors": wrong,
                "warnings": found.warnings,
            }
        )
        return
    if found.errors:
        return
    typer.echo(f"staging  {format_bytes(settings.staging_bytes)} of pinned memory")
    typer.echo(f"pool     {format_bytes(pool_bytes) if pool_bytes else 'none'}")
    for target in found.targets:
        free = format_bytes(target.free_bytes)
        typer.echo(f"target   {target.path} ({target.file_system}, {free} free)")
    if line:
        typer.echo(f"model    {line}")
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _read(source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a --kv-transfer-config and, for a YAML file, vLLM's other options by name. `source` is
    JSON or a file name. The JSON can be just the kv_connector_extra_config."""
    text, is_yaml = source, False
    if not source.lstrip().startswith("{"):
        is_yaml = Path(source).suffix in (".yaml", ".yml")
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError("file", source, f"cannot be read ({reason})") from None
    value = _parse(text, source, is_yaml)
    if not is_yaml:
        whole = any(name in TRANSFER_FIELDS for name in value)
        return (value if whole else {EXTRA: value}), None
    options: dict[str, Any] = {}
    for option, setting in value.items():
        name, *path = str(option).split(".")
        name = name.replace("_", "-")
        if name != _TRANSFER:
            options[name] = setting
            continue
        given: Any = setting
        if not path and not isinstance(setting, dict):
            given = _parse(str(setting), f"--{_TRANSFER}", is_yaml=False)
        for part in reversed(path):
            given = {part: given}
        _merge(options.setdefault(_TRANSFER, {}), given)
    return options.pop(_TRANSFER, {}), options


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _parse(text: str, source: str, is_yaml: bool) -> dict[str, Any]:
    kind = "YAML" if is_yaml else "JSON"
    try:
        if is_yaml:
            yaml: Any = importlib.import_module("yaml")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
        else:
            value = json.loads(text)
    except ValueError as error:
        raise ConfigError(kind, source, f"does not parse: {error}") from None
    except ModuleNotFoundError:
        remedy = "PyYAML, a dependency of vLLM, is missing: pip install pyyaml"
        raise ConfigError(kind, source, remedy) from None
    if not isinstance(value, dict):
        raise ConfigError(kind, source, "not an object; give { … }")
    return value


def _has_flag(options: dict[str, Any], transfer: dict[str, Any]) -> bool:
    """Return whether a YAML file has the backend's flag; refuse a file without our backend."""
    backend = options.get("kv-offloading-backend")
    if backend != BACKEND and not transfer:
        remedy = f"the file does not select this backend; give kv-offloading-backend: {BACKEND}"
        raise ConfigError("kv-offloading-backend", backend, remedy)
    return bool(backend == BACKEND)


def _take_options(options: dict[str, Any], extra: dict[str, Any], given: dict[str, Any]) -> str:
    """Apply vLLM's options to `extra` and `given`; the command's own options in `given` win.
    Return the name of the option or key that sets `staging_bytes`."""
    for name, field in VLLM_OPTIONS.items():
        if name in options and given[field] in (None, 1):
            given[field] = _number(options, name, int)
    if "data-parallel-size" in options:
        set_replicas(extra, _number(options, "data-parallel-size", int))
    if "kv-offloading-size" in options:
        return take_size(extra, _number(options, "kv-offloading-size", float))
    return "staging_bytes"


def _number(options: dict[str, Any], name: str, kind: Callable[[Any], Any]) -> Any:
    try:
        return kind(options[name])
    except (TypeError, ValueError):
        raise ConfigError(f"--{name}", options[name], "give a number") from None


def _find_model(found: Configured, model: str | None, named: Any) -> ModelShape | None:
    """Return the shape of `model` or, if that is None, of `named`, the YAML file's model; None if
    its shape is unknown. Both can be a config.json, its directory, or the name of a known model."""
    name = str(model or named or "")
    if name and not Path(name).exists():
        with contextlib.suppress(ConfigError):
            return preset(name)
    if model is not None or Path(name or "/no").exists():
        return read_model(Path(name))
    if name:
        hint = "give --model with its config.json"
        found.warnings.append(f"sizes that depend on the model {name} were not checked; {hint}")
    return None


def _check_model(found: Configured, shape: ModelShape, kv_dtype: str, given: dict[str, Any]) -> str:
    config = found.config
    element_bytes = shape.kv_element_bytes(kv_dtype)
    deployment = Deployment(kv_element_bytes=element_bytes, **given)
    sizes = KvSizes(shape, deployment)
    if not sizes.works:
        raise ConfigError("model", shape.name, f"{REFUSED}; {REMEDY}")
    blocks, problem = sizes.plan.blocks_of_chunk(config)
    if problem:
        found.warnings.append(problem)
    sizes = KvSizes(shape, replace(deployment, blocks_per_chunk=blocks))
    slot_bytes = slot_stride_bytes(max(one.payload_bytes for one in sizes.groups()))
    check_fits(config, slot_bytes, deployment.ranks, config.replicas, found.held_bytes)
    ranks = deployment.ranks * config.replicas
    cpu, pool = (size // ranks // slot_bytes for size in (config.staging_bytes, found.pool_bytes))
    line = (
        f"{shape.name}: chunks of {sizes.chunk_tokens} tokens in slots of "
        f"{format_bytes(slot_bytes)}; on each rank {cpu} in staging, {pool} in the pool"
    )
    if every := sizes.boundary_tokens:  # 0: the model needs no boundaries
        if config.boundary_tokens != "auto":
            every = -(-config.boundary_tokens // sizes.unit_tokens) * sizes.unit_tokens
        line += f"; a boundary every {every} tokens" if every else "; boundaries end prompts only"
    return line


def _check_policy(name: str) -> None:
    """Try an eviction policy on a small CPU tier in which one slot stays in use. Raises ConfigError
    if no policy has this name, or if the policy raises or returns the slot in use."""
    make, generation = choose_policy(name), 0
    try:
        tiers = Tiers(4, [], key_bytes=8, policy=make)
        for number in range(64):
            keys = [(number << 32).to_bytes(8, "big")]
            batch, _, _, generation = tiers.plan_store(keys, None, generation)
            tiers.report(0, batch)  # the store is complete
            tiers.touch(keys)
            if number == 0:
                tiers.plan_load(keys, 0)  # a load that never completes
    except Exception as error:
        why = f"it raises {type(error).__name__}: {error}"
        raise ConfigError("eviction_policy", name, f"not an eviction policy: {why}") from error
