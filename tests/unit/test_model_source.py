# SPDX-License-Identifier: Apache-2.0
"""A server adopts KV only if it can identify its weights and code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_deployment import _config, _digest, made
from vllm_nvmeof_offload.vllm_adapter.deployment import describe

ONE, TWO = "1" * 40, "2" * 40


class Resolved(str):
    """A reply of huggingface_hub."""

    __slots__ = ("resolved",)
    resolved: str


def resolved(text: str, commit: str) -> Resolved:
    made = Resolved(text)
    made.resolved = commit
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "weights" / "tiny"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return directory


def _volatile(config: Any, **more: Any) -> str:
    return " ".join(describe(config, "0.32.0", **more).volatile)


def _loaded(model: Path, load_format: str, extra: Mapping[str, Any] = {}) -> Any:
    config = _config(str(model))
    config.load_config = made(
        "LoadConfig", load_format=load_format, model_loader_extra_config=extra
    )
    return config


# -- load formats -----------------------------------------------------------------------


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "sharded_state", "runai_streamer"])
def test_weights_from_the_models_files_are_known(model: Path, load_format: str) -> None:
    assert _volatile(_loaded(model, load_format)) == ""


@pytest.mark.parametrize(
    ("load_format", "extra"),
    [
        ("tensorizer", {"tensorizer_uri": "/elsewhere/v1.tensors"}),
        ("modelexpress", {}),
        ("ipc_cache", {"socket_path": "/run/weights.sock"}),
        ("npcache", {}),  # numpy files of an earlier start, whatever the model's are now
        ("a_plugins_own", {"where": 1}),
        ("sharded_state", {"pattern": "../other/model-rank-{rank}-part-{part}.safetensors"}),
        ("sharded_state", {"pattern": "model-rank-{rank}-part-{part}.weights"}),
    ],
)
def test_weights_from_elsewhere_are_not_adopted(
    model: Path, load_format: str, extra: Mapping[str, Any]
) -> None:
    assert "elsewhere" in _volatile(_loaded(model, load_format, extra))


def test_two_places_of_weights_are_two_keyspaces(model: Path) -> None:
    one, two = (
        _loaded(model, "tensorizer", {"tensorizer_uri": f"s3://bucket/{name}.tensors", "n": 1})
        for name in ("v1", "v2")
    )
    assert _digest(one) != _digest(two)
    turned = _loaded(model, "auto", {"a": 1, "b": 2}), _loaded(model, "auto", {"b": 2, "a": 1})
    assert _digest(turned[0]) == _digest(turned[1])


def test_a_plugins_loader_that_replaces_vllms_is_not_trusted(model: Path) -> None:
    config = _config(str(model))
    assert "not vLLM's own" in _volatile(config, foreign_code={"auto", "mine"})
    assert _volatile(config, foreign_code={"mine"}) == ""


@pytest.mark.parametrize("place", ["other/weights", "s3://bucket/weights"])
def test_weights_of_another_model_are_not_adopted(model: Path, place: str) -> None:
    config = _loaded(model, "runai_streamer")
    config.model_config.model_weights = place
    assert "the weights are" in _volatile(config)


# -- hub models -------------------------------------------------------------------------


def test_a_hub_model_is_the_commit_of_its_weights() -> None:
    """The commit is not that of its configuration, which may come from another repository."""
    digests = set()
    for commit in (ONE, TWO):
        config = _config("org/weights", commit="of-the-configuration")
        config.model_config.hf_config_path = "org/config"
        config.model_config.revision = resolved("main", commit)
        assert _volatile(config) == ""
        digests.add(_digest(config))
    assert len(digests) == 2


@pytest.mark.parametrize("revision", [None, "main", "v1.0", ONE[:12]])
def test_a_revision_that_can_move_is_not_adopted(revision: str | None) -> None:
    config = _config("org/weights", commit="of-the-configuration")
    config.model_config.hf_config_path = "org/config"
    config.model_config.revision = revision
    assert "no known revision" in _volatile(config)
    config.model_config.revision = ONE
    assert _volatile(config) == ""


# -- remote code ------------------------------------------------------------------------


def test_code_of_a_local_directory_counts_where_it_is_run(model: Path) -> None:
    trusting = _config(str(model))
    trusting.model_config.trust_remote_code = True
    before = _digest(trusting), _digest(_config(str(model)))
    (model / "modeling_tiny.py").write_text("scale = 1")
    after = _digest(trusting), _digest(_config(str(model)))
    assert after[0] != before[0]
    assert after[1] == before[1]
    (model / "modeling_tiny.py").write_text("scale = 2")
    assert _digest(trusting) not in (before[0], after[0])


@pytest.mark.parametrize(
    ("name", "auto_map", "code_revision", "known"),
    [
        ("org/name", "modeling.Model", None, True),
        ("org/name", "modeling.Model", "branch", False),
        ("org/name", "org/code--modeling.Model", None, False),
        ("org/name", "org/code--modeling.Model", ONE, True),
        (None, "modeling.Model", "branch", True),
        (None, "org/code--modeling.Model", None, False),
    ],
)
def test_code_of_another_repository(
    model: Path, name: str | None, auto_map: str, code_revision: str | None, known: bool
) -> None:
    config = _config(name or str(model))
    config.model_config.revision = resolved("main", ONE)
    config.model_config.hf_config.to_dict()["auto_map"] = {"AutoModel": auto_map}
    config.model_config.code_revision = code_revision
    assert _volatile(config) == ""
    config.model_config.trust_remote_code = True
    assert ("code" in _volatile(config)) is not known


# -- drafters ---------------------------------------------------------------------------


def _with_drafter(model: Path, drafter: Path | str) -> Any:
    config = _config(str(model))
    config.speculative_config = made(
        "SpeculativeConfig",
        method="draft_model",
        target_model_config=config.model_config,
        draft_model_config=_config(str(drafter)).model_config,
        draft_load_config=None,
    )
    return config


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    directory = tmp_path / "drafter"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"draft" * 99)
    return directory


def test_the_drafter_counts(model: Path, drafter: Path) -> None:
    config = _with_drafter(model, drafter)
    digests = [_digest(_config(str(model))), _digest(config)]
    (drafter / "model.safetensors").write_bytes(b"DRAFT" * 99)
    digests.append(_digest(config))
    config.speculative_config.draft_model_config.dtype = "torch.float16"
    digests.append(_digest(config))
    config.speculative_config.method = "eagle"
    digests.append(_digest(config))
    assert len(set(digests)) == len(digests)


def test_a_drafter_that_is_not_known_is_not_adopted(model: Path, drafter: Path) -> None:
    assert _volatile(_with_drafter(model, drafter)) == ""
    assert "drafter: " in _volatile(_with_drafter(model, "org/drafter"))
    config = _with_drafter(model, drafter)
    config.speculative_config.draft_load_config = _loaded(drafter, "dummy").load_config
    assert "drafter: the weights are dummies" in _volatile(config)


def test_drafts_without_a_model_change_nothing(model: Path) -> None:
    """For n-grams vLLM names the model itself as the drafter."""
    config = _with_drafter(model, model)
    config.speculative_config.draft_model_config = config.model_config
    assert _digest(config) == _digest(_config(str(model)))
    config.speculative_config.draft_model_config = None
    assert _digest(config) == _digest(_config(str(model)))
