# SPDX-License-Identifier: Apache-2.0
"""Models that can be named instead of giving a config.json: the few numbers that sizing needs.

Facts of the models' published configurations (each model's page on Hugging Face has the file);
`presets.json` has them under config.json's own names.
"""

from __future__ import annotations

import difflib
import functools
import json
from importlib import resources
from typing import Any

from vllm_nvmeof_offload.commands.size.config_json import parse_model
from vllm_nvmeof_offload.commands.size.model import ModelShape
from vllm_nvmeof_offload.errors import ConfigError

__all__ = ["preset", "preset_names"]


def preset_names() -> list[str]:
    """Names of all presets, as on Hugging Face."""
    return sorted(_presets())


def preset(name: str, weights_bytes: int | None = None) -> ModelShape:
    """The model called `name`: in full, or by its last part, in any case.

    Raises:
        ConfigError: no such preset; names the nearest ones.
    """
    found = {full.lower(): full for full in _presets()}
    short = {full.lower().rpartition("/")[2]: full for full in _presets()}
    full = found.get(name.lower()) or short.get(name.lower())
    if full is None:
        near = difflib.get_close_matches(name.lower(), [*short, *found], n=3, cutoff=0.4)
        hint = ", ".join(short.get(one) or found[one] for one in near) or ", ".join(preset_names())
        raise ConfigError("--preset", name, f"not known; did you mean {hint}? Else give --model")
    return parse_model(_presets()[full], full, weights_bytes)


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("presets.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)["models"]
    return found
