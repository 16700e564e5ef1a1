# SPDX-License-Identifier: Apache-2.0
"""The load formats of the installed vLLM: our table matches it; a plugin's code is detected."""

from __future__ import annotations

import json

from tests.unit.imported_vllm import ImportedVllm

_CHILD = """
import json
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor import model_loader
from vllm.model_executor.models import ModelRegistry
from vllm_nvmeof_offload.vllm_adapter import weights
from vllm_nvmeof_offload.vllm_adapter.deployment import foreign_code

known = sorted(weights.FILE_FORMATS - set(model_loader._LOAD_FORMAT_TO_MODEL_LOADER))
before = sorted(foreign_code())

@register_model_loader("hf")
@register_model_loader("mine")
class Mine(DefaultModelLoader):
    pass

ModelRegistry.register_model("LlamaForCausalLM", "mine:Llama")

print("RESULT " + json.dumps([known, before, sorted(foreign_code())]))
"""


def test_a_plugins_loader_and_model_are_noticed(imported_vllm: ImportedVllm) -> None:
    done = imported_vllm.run(["-c", _CHILD])
    assert done.returncode == 0, done.stderr
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    unknown_to_vllm, before, after = json.loads(result.removeprefix("RESULT "))
    assert unknown_to_vllm == []
    assert before == []
    assert after == ["LlamaForCausalLM", "hf", "mine"]
