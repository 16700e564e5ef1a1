# SPDX-License-Identifier: Apache-2.0
"""The keyspace: the facts under which KV bytes are interchangeable, as one digest.

Two servers share a pool directory only if every fact is equal. Facts describe the model and
the geometry; nothing of a prompt reaches a name on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["DIGEST_HEX_DIGITS", "Keyspace", "changed_since", "weights_digest"]

DIGEST_HEX_DIGITS = 32

#: Samples of one weight file: 64 x 4 KiB, so that 200 shards take about a second.
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_WHOLE_BYTES_MAX = 1 << 20
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_CONFIG_NAMES = frozenset(
    {
        "config.json",
        "adapter_config.json",
        "quantize_config.json",
        "hf_quant_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)


@dataclass(frozen=True, slots=True)
class Keyspace:
    """Canonical JSON of the facts. Build it with `of`; equal facts give equal digests."""

    canonical: str

    @staticmethod
    def of(facts: Mapping[str, object]) -> Keyspace:
        """Freeze `facts` (JSON values).

        Raises:
            TypeError, ValueError: a value is not JSON (NaN included).
        """
        return Keyspace(json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False))

    @property
    def facts(self) -> dict[str, object]:
        """The facts, as plain JSON values."""
        facts = json.loads(self.canonical)
        assert isinstance(facts, dict)
        return facts

    @property
    def digest(self) -> str:
        """32 hex digits: the directory's name, and what the superblock repeats."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:DIGEST_HEX_DIGITS]


def weights_digest(model: Path, fallback: str | None = None) -> str:
    """Return 64 hex digits that identify the weights' content.

    model: a directory with weight files (or one weight file). Per file: name, size and sampled
    bytes; configuration files whole. Headers alone would be equal across fine-tunes. In a
    directory without any file of a known weight format all files count. Time is bounded: at
    most 256 KiB are read of any weight file.
    fallback: stands for the content where `model` is no local path (a hub's commit hash).

    Raises:
        ConfigError: `model` is not local, or holds no file, and there is no fallback.
        OSError: a file cannot be read.
    """
    files = _weight_files(model)
    if not files:
        if fallback:
            return hashlib.sha256(f"revision:{model}:{fallback}".encode()).hexdigest()
        raise ConfigError(
            "model",
            str(model),
            "no files there to tell this model's KV from another's; "
            "use a local directory, or name a revision",
        )
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        _sample(path, size, digest.update)
    return digest.hexdigest()


def changed_since(model: Path, began_s: float) -> str | None:
    """The name of a file of the weights that was put there or changed at `began_s` or later.

    began_s: seconds of the system's clock. By the time of change, which copying does not keep.
    """
    for path in _weight_files(model):
        if path.stat().st_ctime >= began_s:
            return path.name
    return None


def _weight_files(model: Path) -> list[Path]:
    if model.is_file():
        return [model]
    if not model.is_dir():
        return []
    files = sorted(path for path in model.iterdir() if path.is_file())
    known = [path for path in files if path.suffix in _WEIGHT_SUFFIXES]
    if not known:
        return files
    return sorted([*known, *(path for path in files if path.name in _CONFIG_NAMES)])


def _sample(path: Path, size: int, update: Callable[[bytes], None]) -> None:
    """Feed the file's bytes to `update`: all of a small file, else samples over all of it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if path.name in _CONFIG_NAMES:
            while block := os.read(fd, _WHOLE_BYTES_MAX):
                update(block)
            return
        for offset in _sample_offsets(path.name, size):
            update(os.pread(fd, _SAMPLE_BYTES, offset))
    finally:
        os.close(fd)


def _sample_offsets(name: str, size: int) -> list[int]:
    """Deterministic offsets: first, last, and one at a pseudo-random place of each stretch.

    A fixed stride could fall on the same kind of tensor each time; a random place in each of
    62 equal stretches covers the file without that.
    """
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return list(range(0, size, _SAMPLE_BYTES))
    generator = random.Random(f"{name}:{size}")
    last = size - _SAMPLE_BYTES
    stretch = last // (_SAMPLES - 2)
    inner = [i * stretch + generator.randrange(stretch) for i in range(_SAMPLES - 2)]
    return [0, *inner, last]
