# SPDX-License-Identifier: Apache-2.0
"""The only parser of configuration.

Values come from `kv_connector_extra_config`, and below it from `VLLM_NVMEOF_<KEY>` variables.
Unknown keys, wrong types and sizes that cannot work raise `ConfigError`, which names the key,
the value and the remedy. The keys themselves are in `config_keys.py`; what can only be judged
on a machine (memory, targets, slot sizes) is in `config_check.py`. Import all of it from here.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vllm_nvmeof_offload.config_check import (
    TargetInfo,
    check_fits,
    check_memory,
    check_targets,
    chunk_blocks,
    judge_access,
    resolve_pool_bytes,
)
from vllm_nvmeof_offload.config_keys import (
    VLLM_KEYS,
    OffloadConfig,
    default_staging_bytes,
    default_target,
)
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.units import format_bytes

__all__ = [
    "ALLOW_FAULTS",
    "ENV_PREFIX",
    "OffloadConfig",
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
