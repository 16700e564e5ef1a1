# SPDX-License-Identifier: Apache-2.0
"""Equal weights give equal digests; different small tensors give different ones, in any header."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.vllm_adapter.weights import weights_digest

SMALL_BYTES = 64 << 10


def make_model(path: Path, big: bool = False) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"layers": 2}')
    (path / "model-00001.safetensors").write_bytes(os.urandom(3 << 20) if big else b"w" * 9000)
    (path / "README.md").write_text("not part of the model")
    return path


def test_weights_are_distinguished_by_content(tmp_path: Path) -> None:
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


def test_other_files_that_vllm_reads_count(tmp_path: Path) -> None:
    """The index says which shards are loaded; some models keep an encoder one level down."""
    model = make_model(tmp_path / "model")
    digests = {weights_digest(model)}
    (model / "model.safetensors.index.json").write_text("{}")
    digests.add(weights_digest(model))
    (model / "encoder").mkdir()
    (model / "encoder" / "model-00001.safetensors").write_bytes(b"encoder")
    digests.add(weights_digest(model))
    (model / "encoder" / "model-00001.safetensors").write_bytes(b"Encoder")
    digests.add(weights_digest(model))
    assert len(digests) == 4
    (model / ".cache").mkdir()
    (model / ".cache" / "model.safetensors").write_bytes(b"another")
    assert weights_digest(model) in digests


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


def test_a_terabyte_of_weights_is_digested_quickly(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with (model / "model-00002.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading all of it would take minutes
    assert weights_digest(model) == weights_digest(model)


def test_without_local_files_there_is_no_digest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        weights_digest(Path("org/model"))
    with pytest.raises(ConfigError, match="revision"):
        weights_digest(tmp_path)


def safetensors(path: Path, sizes: dict[str, int], *, seed: int = 0) -> dict[str, int]:
    """Write a file of tensors of these sizes in bytes; return where each begins."""
    header, begin = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    data = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(data + begin)
    return {name: data + entry["data_offsets"][0] for name, entry in header.items()}


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file; flipping again restores it."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_every_byte_of_a_small_tensor_counts(tmp_path: Path) -> None:
    """Scales of four bytes between matrices of 8 MiB, as in an FP8 checkpoint."""
    shard = tmp_path / "model.safetensors"
    sizes = {
        f"{layer}.{name}": size
        for layer in range(64)
        for name, size in (("weight", 8 << 20), ("k_scale", 4), ("norm", SMALL_BYTES))
    }
    begins = safetensors(shard, sizes)
    digest = weights_digest(tmp_path)
    for name in ("0.k_scale", "31.norm", "63.k_scale"):
        for byte in (0, sizes[name] - 1):
            flip(shard, begins[name] + byte)
            assert weights_digest(tmp_path) != digest, name
            flip(shard, begins[name] + byte)
    assert weights_digest(tmp_path) == digest


def test_every_large_tensor_has_a_sample(tmp_path: Path) -> None:
    shard = tmp_path / "model.safetensors"
    sizes = {str(n): 1 << 20 for n in range(300)}
    begins = safetensors(shard, sizes)
    digest = weights_digest(tmp_path)
    for name in ("0", "150", "299"):
        with shard.open("r+b") as file:
            file.seek(begins[name])
            file.write(b"x" * sizes[name])
            file.flush()
            assert weights_digest(tmp_path) != digest, name
            file.seek(begins[name])
            file.write(bytes(sizes[name]))
    assert weights_digest(tmp_path) == digest


def bytes_read(model: Path) -> int:
    """How many bytes a digest reads, as the kernel counts them."""

    def total() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    before = total()
    weights_digest(model)
    return total() - before


def _entry(*offsets: Any) -> dict[str, Any]:
    return {"data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1]",
        b'{"a": ' + b"9" * 5000 + b"}",
        *(
            json.dumps(entries).encode()
            for entries in (
                {"a": 1},
                {"a": {}},
                {"a": _entry(0)},
                {"a": _entry(0, "9")},
                {"a": _entry(False, True)},
                {"a": _entry(0, 1.5)},
                {"a": _entry(-5, 9)},
                {"a": _entry(9, 5)},
                {"a": _entry(0, 1 << 60)},
                {"a": _entry(0, 900), "b": _entry(0, 900)},
            )
        ),
    ],
    ids=repr,
)
def test_an_invalid_header_leaves_the_samples(tmp_path: Path, header: bytes) -> None:
    shard = tmp_path / "model.safetensors"
    lengths = (len(header), len(header) + 1, 0, 1 << 40, (1 << 64) - 1)
    for length in lengths:
        shard.write_bytes(length.to_bytes(8, "little") + header + bytes(1000))
        digest = weights_digest(tmp_path)
        flip(shard, shard.stat().st_size - 1)
        assert weights_digest(tmp_path) != digest
    for size in range(9):  # cut short
        shard.write_bytes(b"\x08" + bytes(7)[:size])
        weights_digest(tmp_path)


def test_overlapping_tensors_are_not_read_twice(tmp_path: Path) -> None:
    """Ten thousand names for the same 64 KiB would be 640 MB."""
    shard = tmp_path / "model.safetensors"
    text = json.dumps({str(n): _entry(0, SMALL_BYTES) for n in range(10_000)}).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + bytes(2 * SMALL_BYTES))
    assert bytes_read(tmp_path) < 4 << 20


def test_the_bytes_read_of_a_large_shard_are_bounded(tmp_path: Path) -> None:
    """Five gigabytes (sparse): header, scales and samples are some MB."""
    sizes = {}
    for expert in range(300):
        sizes |= {f"{expert}.weight": 16 << 20, f"{expert}.scale": 3584}
    safetensors(tmp_path / "model.safetensors", sizes)
    assert (tmp_path / "model.safetensors").stat().st_size > 5_000_000_000
    assert 1 << 20 < bytes_read(tmp_path) < 4 << 20
