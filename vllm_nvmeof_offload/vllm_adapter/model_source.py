# SPDX-License-Identifier: Apache-2.0
"""Where a model's weights and code come from, and when that does not tell one from another.

A model is known by the content of its local files, or by the commit of a hub's repository. Some
ways to load weights take them from elsewhere: what such a server stores must not be adopted.

Read off vLLM's configuration objects by attribute, so that no vLLM is needed to test it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.vllm_adapter.weights import SUFFIXES, weights_digest

__all__ = ["FILE_FORMATS", "ModelSource", "drafter_of", "why_unknown"]

#: Load formats of vLLM 0.32 and 0.33 whose weights are the files of `model`, each time.
#: Not `npcache`: it reads a copy that an earlier start made, even if the files have changed.
FILE_FORMATS = frozenset(
    {
        *("auto", "hf", "safetensors", "pt", "mistral", "fastsafetensors", "instanttensor"),
        *("sharded_state", "runai_streamer", "runai_streamer_sharded"),
    }
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ModelSource:
    """model: a local path or a hub's name. code: Python files of the model's own are run.

    commit: of the hub's repository that has the weights; "": not known.
    """

    model: str
    commit: str = ""
    code: bool = False

    @staticmethod
    def of(model: Any) -> ModelSource:
        """The source of a `ModelConfig`."""
        return ModelSource(
            str(model.model), _commit_of_weights(model), bool(model.trust_remote_code)
        )

    @property
    def local(self) -> bool:
        return Path(self.model).exists()

    def identity(self) -> dict[str, str]:
        """Content, not place: the same weights elsewhere are the same model. Reads files."""
        path = Path(self.model)
        if not self.local:
            return {"model": self.model, "weights": f"revision:{self.commit}"}
        return {"model": path.resolve().name, "weights": weights_digest(path, code=self.code)}


def drafter_of(vllm_config: Any) -> Any:
    """The `ModelConfig` of speculative decoding's drafter; None: there is none with weights."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    draft = speculative.draft_model_config
    return None if draft is speculative.target_model_config else draft


def why_unknown(model: Any, load: Any, foreign_formats: Collection[str]) -> list[str]:
    """Why weights or code may change without a trace in the facts; empty: they cannot."""
    return [why for why in _reasons(model, load, foreign_formats) if why]


def _reasons(model: Any, load: Any, foreign_formats: Collection[str]) -> Iterator[str]:
    source = ModelSource.of(model)
    weights = str(getattr(model, "model_weights", "") or "")
    if "://" in weights or "://" in source.model:
        yield "the weights are streamed from a remote place, whose content may change"
    elif weights not in ("", source.model):
        yield f"the weights are those of {weights}, not of {source.model}"
    elif not source.local and not source.commit:
        yield "the model is no local directory and has no known revision"
    yield _unknown_format(str(load.load_format), load, foreign_formats)
    if source.code and _code_may_change(model, local=source.local):
        yield "the model's code is of no fixed commit (give --code-revision one)"


def _unknown_format(name: str, load: Any, foreign_formats: Collection[str]) -> str:
    if name == "dummy":
        return "the weights are dummies"
    if name not in FILE_FORMATS:
        return f"load format {name} takes weights from elsewhere than the model's files"
    if name in foreign_formats:
        return f"load format {name} has a loader that is not vLLM's own"
    options = load.model_loader_extra_config
    pattern = options.get("pattern") if isinstance(options, Mapping) else None
    if pattern is not None and (os.sep in pattern or Path(pattern).suffix not in SUFFIXES):
        return f"the weights' files are named {pattern}, which may lead elsewhere"
    return ""


def _commit_of_weights(model: Any) -> str:
    """vLLM pins the repository of the weights in `revision`: a name that knows its commit."""
    commit = _commit(model.revision)
    if commit or model.hf_config_path not in (None, "", model.model):
        return commit  # the configuration's commit is that of another repository
    return str(getattr(model.hf_config, "_commit_hash", None) or "")


def _commit(revision: Any) -> str:
    """The commit of a revision; "": a branch or tag, which may move."""
    resolved = str(getattr(revision, "resolved", None) or revision or "")
    return resolved if _COMMIT.fullmatch(resolved) else ""


def _code_may_change(model: Any, *, local: bool) -> bool:
    if _commit(model.code_revision):
        return False
    classes = str(model.hf_config.to_dict().get("auto_map") or "")
    # "repository--module.Class" is code of another repository.
    return "--" in classes or bool(model.code_revision and not local)
