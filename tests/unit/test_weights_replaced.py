# SPDX-License-Identifier: Apache-2.0
"""Weights replaced while a server starts: the loaded weights differ from the files on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process import wait_until
from tests.unit.adapter.test_deployment import _config
from vllm_nvmeof_offload.config import WEIGHTS_SEEN
from vllm_nvmeof_offload.vllm_adapter.deployment import Deployment, describe, note_weights


def _version(directory: Path, byte: int) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes([byte]) * 4096)
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that is reached by a link: `current/model`, beside a newer version of it."""
    _version(tmp_path / "v1" / "model", 1)
    _version(tmp_path / "v2" / "model", 2)
    (tmp_path / "current").symlink_to(tmp_path / "v1")
    return tmp_path / "current" / "model"


def flip_the_link(model: Path) -> None:
    top = model.parent.parent
    (top / "fresh").symlink_to(top / "v2")
    (top / "fresh").rename(top / "current")


def rename_the_directory(model: Path) -> None:
    model.rename(model.with_name("old"))
    (model.parent.parent / "v2" / "model").rename(model)


def rename_one_above(model: Path) -> None:
    top = model.parent.parent
    (top / "v1").rename(top / "old")
    (top / "v2").rename(top / "v1")


def write_in_place(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"new" * 9)


def copy_with_its_times(model: Path) -> None:
    """As `cp -p` and `rsync -a` do: size and time of modification as before."""
    file = model / "model.safetensors"
    was = file.stat()
    fresh = model / "fresh"
    fresh.write_bytes(b"n" * was.st_size)
    os.utime(fresh, ns=(was.st_atime_ns, was.st_mtime_ns))
    fresh.rename(file)


def add_a_shard(model: Path) -> None:
    (model / "model-2.safetensors").write_bytes(b"more")


def remove_all(model: Path) -> None:
    model.rename(model.with_name("gone"))


DEPLOYMENTS: list[Callable[[Path], None]] = [
    flip_the_link,
    rename_the_directory,
    rename_one_above,
    write_in_place,
    copy_with_its_times,
    add_a_shard,
    remove_all,
]


def _noted(config: Any, noted: dict[str, str] | None = None) -> dict[str, str]:
    extra: dict[str, Any] = {WEIGHTS_SEEN: noted or {}}
    note_weights(config, extra)
    stamps: dict[str, str] = extra[WEIGHTS_SEEN]
    return stamps


def _rank(config: Any, stamps: dict[str, str]) -> Deployment:
    return describe(config, "0.32.0", stamps=stamps)


@pytest.mark.parametrize("deploy", DEPLOYMENTS)
def test_files_replaced_after_their_stamp_are_not_trusted(
    model: Path, deploy: Callable[[Path], None]
) -> None:
    config = _config(str(model))
    stamps = _noted(config)
    assert _rank(config, stamps).replaced() == ()
    deploy(model)
    (why,) = _rank(config, stamps).replaced()
    assert why == f"files of {model} were replaced while the server started"
    if model.exists():  # the next start is of what is there now
        assert _rank(config, _noted(config)).replaced() == ()


def test_replaced_weights_have_the_keyspace_of_a_server_of_the_new_ones(
    model: Path,
) -> None:
    """This is why nothing may be adopted: its KV would come from the old weights."""
    config = _config(str(model))
    stamps = _noted(config)
    flip_the_link(model)
    started = _rank(config, stamps)
    later = _rank(config, _noted(config))
    assert started.keyspace(pages=[1]).digest == later.keyspace(pages=[1]).digest
    assert started.replaced() and not later.replaced()


def test_ranks_that_start_at_different_times_agree(model: Path) -> None:
    """All ranks compare with the one stamp from before any of them."""
    config = _config(str(model))
    stamps = _noted(config)
    early = _rank(config, stamps)
    flip_the_link(model)
    late = _rank(config, stamps)
    assert early.replaced() == late.replaced() != ()


def test_a_model_keeps_its_first_stamp(model: Path) -> None:
    """vLLM completes copies of the configuration while it loads the model."""
    config = _config(str(model))
    stamps = _noted(config)
    flip_the_link(model)
    assert _noted(config, stamps) == stamps
    assert _noted(_config("org/name"), {}) == {}


def test_code_and_drafters_are_stamped_too(model: Path, tmp_path: Path) -> None:
    config = _config(str(model))
    draft = _config(str(_version(tmp_path / "drafter", 3))).model_config
    config.speculative_config = type(
        "Speculative",
        (),
        {
            "method": "draft_model",
            "draft_model_config": draft,
            "target_model_config": config.model_config,
            "draft_load_config": None,
        },
    )
    config.model_config.trust_remote_code = True
    stamps = _noted(config)
    assert set(stamps) == {str(model), str(tmp_path / "drafter")}
    (model / "modeling.py").write_text("")
    write_in_place(tmp_path / "drafter")
    assert len(_rank(config, stamps).replaced()) == 2
    config.model_config.trust_remote_code = False
    assert len(_rank(config, stamps).replaced()) == 1


# -- without our plugin no stamp exists: the time of change decides ------------------------


def _began_now(tmp_path: Path) -> float:
    """A time after every change so far, as the file system's coarse clock counts."""
    probe = tmp_path / "probe"
    probe.touch()
    began_s = probe.stat().st_ctime

    def has_ticked() -> bool:
        os.utime(probe)
        return probe.stat().st_ctime > began_s

    wait_until("a tick of the file system's clock", has_ticked)
    return probe.stat().st_ctime


@pytest.mark.parametrize("deploy", DEPLOYMENTS[:2] + DEPLOYMENTS[3:6])
def test_unstamped_newer_files_are_not_trusted(
    model: Path, tmp_path: Path, deploy: Callable[[Path], None]
) -> None:
    config = _config(str(model))
    began_s = _began_now(tmp_path)
    assert describe(config, "0.32.0", began_s=began_s).replaced() == ()
    deploy(model)
    (why,) = describe(config, "0.32.0", began_s=began_s).replaced()
    assert why.endswith("was written while this process started")


def test_a_hub_model_has_no_files_to_be_newer() -> None:
    config = _config("org/name", "aaaa")
    assert describe(config, "0.32.0", began_s=0.0).replaced() == ()
