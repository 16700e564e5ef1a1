# SPDX-License-Identifier: Apache-2.0
"""Equal facts and equal weights give equal digests, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.pool.keyspace import Keyspace, weights_digest


def test_a_digest_depends_on_every_fact_and_not_on_their_order() -> None:
    digest = Keyspace.of({"dtype": "bf16", "layers": 2}).digest
    assert digest == Keyspace.of({"layers": 2, "dtype": "bf16"}).digest
    assert len(digest) == 32
    assert int(digest, 16) >= 0
    for other in (
        {"dtype": "bf16"},
        {"dtype": "bf16", "layers": "2"},
        {"dtype": "f16", "layers": 2},
    ):
        assert Keyspace.of(other).digest != digest


def test_facts_come_back() -> None:
    assert Keyspace.of({"a": [1, None, "x"]}).facts == {"a": [1, None, "x"]}


def make_model(path: Path, big: bool = False) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"layers": 2}')
    (path / "model-00001.safetensors").write_bytes(os.urandom(3 << 20) if big else b"w" * 9000)
    (path / "README.md").write_text("not part of the model")
    return path


def test_weights_are_told_apart_by_content(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    digest = weights_digest(model)
    (model / "README.md").write_text("other words")
    assert weights_digest(model) == digest
    for changed in ("config.json", "model-00001.safetensors"):
        content = (model / changed).read_bytes()
        (model / changed).write_bytes(content[:-1] + b"?")
        assert weights_digest(model) != digest
        (model / changed).write_bytes(content)
    (model / "adapter.safetensors").write_bytes(b"adapter")
    assert weights_digest(model) != digest


def test_large_files_are_sampled_at_both_ends_and_between(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", big=True)
    shard = model / "model-00001.safetensors"
    size = shard.stat().st_size
    digest = weights_digest(model)
    assert weights_digest(model) == digest
    for start, length in [(0, 1), (size - 1, 1), (size // 2, 200_000)]:
        with shard.open("r+b") as file:
            file.seek(start)
            old = file.read(length)
            file.seek(start)
            file.write(bytes(byte ^ 1 for byte in old))
            file.flush()
            assert weights_digest(model) != digest
            file.seek(start)
            file.write(old)
    assert weights_digest(model) == digest


def test_a_terabyte_of_weights_takes_no_time(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with (model / "model-00002.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading all of it would take minutes
    assert weights_digest(model) == weights_digest(model)


def test_without_local_files_a_revision_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        weights_digest(Path("org/model"))
    with pytest.raises(ConfigError, match="revision"):
        weights_digest(tmp_path)
    one = weights_digest(Path("org/model"), fallback="abc")
    assert one == weights_digest(Path("org/model"), fallback="abc")
    assert one != weights_digest(Path("org/model"), fallback="abd")
