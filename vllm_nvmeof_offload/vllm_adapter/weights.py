# SPDX-License-Identifier: Apache-2.0
"""The identity of models' and adapters' weights and code, in files and in memory.

A model is identified by a **digest** of its local files, or by the commit of its hub repository.
The digest is the same on all machines. It covers:

* safetensors: the header, every tensor of at most 64 KiB in full (norms, biases, quantization
  scales: a few bytes have a large effect), and one sample of every larger tensor;
* every weight file: 64 samples of 4 KiB, spread over the whole file;
* configuration files and code: every byte.

The digest can miss a change of a few bytes in a large tensor, or in small tensors in a file of
another format. A **stamp** misses no change, but works only on one machine: it is taken before vLLM
reads the weights, and compared afterwards. A **fingerprint** identifies every bit of the weights in
memory, within one process.

Some load formats read weights from other locations; chunks computed with those weights must not be
adopted (`why_unknown`). vLLM's block hashes contain an adapter's name and path: an adapter that is
unloaded, overwritten and loaded again has a new number but the same hashes (`Adapters`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.errors import ConfigError

SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_CONFIG_NAMES = {
    *("config.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
}
#: vLLM loads only the safetensors files that the index lists.
_INDEX_SUFFIX = ".index.json"

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_SMALL_TENSOR_BYTES_MAX = 64 << 10
#: About 250,000 tensors. The format allows 100 MB; with a longer header, only samples are read.
_HEADER_BYTES_MAX = 32 << 20
_LENGTH_BYTES = 8
_READ_BYTES_MAX = 1 << 20
#: Files are read in parallel because of the latency of small reads over a network.
_FILES_AT_ONCE_MAX = 8

_Range = tuple[int, int]


def weights_digest(model: Path, *, code: bool = False) -> str:
    """Return 64 hex digits that identify the content of the weights.

    `model` is a directory with weight files, or a weight file. If a directory has no file of a
    known weight format, all files at its top level count. With `code`, its Python files count too.
    Raises ConfigError if there are no files, OSError if one cannot be read.
    """
    files = _files(model, code=code)
    if not files:
        raise ConfigError(
            "model",
            str(model),
            "has no files that identify the weights; use a local directory, or give a revision",
        )
    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(len(files), _FILES_AT_ONCE_MAX)) as readers:
        for one in readers.map(_file_digest, files):
            digest.update(one)
    return digest.hexdigest()


def weights_stamp(model: Path, *, code: bool = False) -> str:
    """Return 64 hex digits that change when any of the files is written or replaced.

    Symbolic links are followed, so a link to other files changes the stamp. Files are opened, which
    makes a network file system ask its server for changes. Raises OSError.
    """
    digest = hashlib.sha256()
    for name, path in _files(model, code=code):
        with path.open("rb") as file:
            at = os.fstat(file.fileno())
        identity = (at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
        digest.update(f"{name}\0{identity}\0".encode())
    return digest.hexdigest()


def changed_since(model: Path, began_s: float, *, code: bool = False) -> str | None:
    """Return a file, link or directory of the model that has changed since `began_s`, or None.

    This is for a model without a stamp. It compares ctime, which copying does not preserve and
    renaming updates. Parent directories of the model's directory are not checked, because their
    times change with every new entry. `began_s` is a system time in seconds.
    """
    for name, path in _files(model, code=code):
        if max(path.stat().st_ctime, path.lstat().st_ctime) >= began_s:
            return name
    if model.is_dir() and model.stat().st_ctime >= began_s:
        return f"{model.resolve().name}/"
    for link in _links(model) if model.exists() else ():
        if link.lstat().st_ctime >= began_s:
            return link.name
    return None


def _links(model: Path) -> list[Path]:
    links: list[Path] = []
    paths = [Path(os.path.abspath(model))]
    while paths:
        path = paths.pop()
        for place in (path, *path.parents):
            if place.is_symlink() and place not in links:
                links.append(place)
                paths.append(Path(os.path.abspath(place.parent / place.readlink())))
    return links


def _files(model: Path, *, code: bool) -> list[tuple[str, Path]]:
    """Return the files that count, sorted, with names relative to the model's directory. Weights in
    subdirectories, such as those of some encoders, count too."""
    if model.is_file():
        return [(model.name, model)]
    if not model.is_dir():
        return []
    top = [path for path in model.iterdir() if path.is_file()]
    folders = [path for path in model.iterdir() if path.is_dir() and not path.name.startswith(".")]
    both = [*top, *(path for folder in folders for path in folder.iterdir() if path.is_file())]
    found = [path for path in both if path.suffix in SUFFIXES]
    if found:
        found += [path for path in top if _is_configuration(path)]
        found += [path for path in both if code and path.suffix == ".py"]
    return sorted((path.relative_to(model).as_posix(), path) for path in found or top)


def _is_configuration(path: Path) -> bool:
    return path.name in _CONFIG_NAMES or path.name.endswith(_INDEX_SUFFIX)


def _file_digest(file: tuple[str, Path]) -> bytes:
    name, path = file
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as opened:
        fd = opened.fileno()
        size = os.fstat(fd).st_size
        digest.update(f"{name}\0{size}\0".encode())
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        for start, end in _ranges(fd, path, size):
            at = start
            while at < end and (block := os.pread(fd, min(end - at, _READ_BYTES_MAX), at)):
                digest.update(block)
                at += len(block)
    return digest.digest()


def _ranges(fd: int, path: Path, size: int) -> list[_Range]:
    if path.suffix == ".py" or _is_configuration(path):
        return [(0, size)]
    generator = random.Random(f"{path.name}:{size}")
    samples = _samples(size, generator)
    if path.suffix == ".safetensors":
        header = _read_header(fd, size)
        tensors = _tensors(header, size)
        if tensors is not None:
            return [(0, _LENGTH_BYTES + len(header)), *_of_tensors(tensors, generator), *samples]
    return samples


def _samples(size: int, generator: random.Random) -> list[_Range]:
    """Return the ranges of 64 samples: one at each end, and one in each of 62 sections between.
    Positions in sections are pseudo-random: a fixed stride could always hit one kind of tensor."""
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, size)]
    last = size - _SAMPLE_BYTES
    stretch = last // (_SAMPLES - 2)
    inner = [i * stretch + generator.randrange(stretch) for i in range(_SAMPLES - 2)]
    return [(offset, offset + _SAMPLE_BYTES) for offset in (0, *inner, last)]


def _read_header(fd: int, size: int) -> bytes:
    length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    if not 0 < length <= min(size - _LENGTH_BYTES, _HEADER_BYTES_MAX):
        return b""
    header = os.pread(fd, length, _LENGTH_BYTES)
    return header if len(header) == length else b""


def _tensors(header: bytes, size: int) -> list[_Range] | None:
    """Return the tensors' ranges in the file, in order; None for a malformed header. Overlapping
    ranges are refused, so that a header cannot cause repeated reads."""
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entries, dict):
        return None
    data = _LENGTH_BYTES + len(header)
    found: list[_Range] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
            return None
        found.append((data + offsets[0], data + offsets[1]))
    found.sort()
    reached = data
    for start, end in found:
        if not reached <= start <= end <= size:
            return None
        reached = end
    return found


def _of_tensors(tensors: list[_Range], generator: random.Random) -> list[_Range]:
    """Return the ranges of small tensors and of samples of large ones, merged if adjacent."""
    ranges: list[_Range] = []
    for start, end in tensors:
        part = (start, end)
        if end - start > _SMALL_TENSOR_BYTES_MAX:
            offset = start + generator.randrange(end - start - _SAMPLE_BYTES + 1)
            part = (offset, offset + _SAMPLE_BYTES)
        if ranges and ranges[-1][1] == part[0]:
            part = (ranges.pop()[0], part[1])
        ranges.append(part)
    return ranges


#: The number of 8-byte words hashed at once: few enough for a CPU's cache, or 2 × 32 MiB on a GPU.
_WORDS_AT_ONCE_CPU, _WORDS_AT_ONCE = 1 << 18, 1 << 22
#: Odd 64-bit numbers with random-looking bits, as signed integers.
_ODD, _ODDER = -0x61C8864680B583EB, -0x4B47D0C5E1A78715


def weights_fingerprint(worker: Any) -> str:
    """Return 64 hex digits that identify the weights in this rank's memory, or "" if unknown.

    All parameters and buffers of vLLM's `worker` and of its drafter are included. A change of one
    8-byte word always changes the result; other changes do so unless two 64-bit sums collide.
    """
    import torch

    config = worker.vllm_config
    offload = getattr(config, "offload_config", None)
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    allocator = cumem and cumem.CuMemAllocator.instance
    parts = allocator.pointer_to_data.values() if allocator else ()
    if any(part.is_asleep and part.tag != "kv_cache" for part in parts):
        return ""  # unmapped, possibly without the engine: a read would kill the process
    if config.lora_config is not None or offload not in (None, offload and type(offload)()):
        return ""  # adapters are not parameters, and offloaded weights are elsewhere
    has_draft, digest = drafter_of(config) is not None, hashlib.sha256()
    models = [worker.model_runner.get_model(), *([worker.get_draft_model()] if has_draft else ())]
    if None in models:
        return ""
    with torch.inference_mode():
        for model in models:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
                if not is_plain or "partitions" in vars(tensor):
                    return ""  # its bytes are in other tensors
                fact = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{_sums(tensor)}\0"
                digest.update(fact.encode())
    return digest.hexdigest()


def _sums(tensor: Any) -> list[int]:
    """Return two sums over all words of a tensor.

    The second sum has each word's upper half in the lower bits, where a change affects all higher
    bits of the sum.
    """
    import torch

    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    octets = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = len(octets) - len(octets) % 8
    words, rest = octets[:whole].view(torch.int64), octets[whole:].to(torch.int64)
    at_once = _WORDS_AT_ONCE if tensor.device.type != "cpu" else _WORDS_AT_ONCE_CPU
    factors = torch.arange(1, min(len(words), at_once) + 8, device=tensor.device) * _ODD
    factors = ((factors ^ (factors >> 29)) * _ODDER) | 1
    scratch = torch.empty_like(factors)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for part in (*words.split(at_once), rest):
        by, out = factors[: len(part)], scratch[: len(part)]
        low = torch.mul(part, by, out=out).sum()
        high = torch.bitwise_right_shift(part, 32, out=out).mul_(by).sum()
        sums = sums * _ODD + torch.stack([low, high])
    return [int(one) for one in sums.tolist()]


#: Load formats of vLLM 0.32 and 0.33 that always read the weights from the files of `model`.
#: `npcache` instead reads a copy from an earlier start, even if the files have changed.
FILE_FORMATS = frozenset(
    {
        *("auto", "hf", "safetensors", "pt", "mistral", "fastsafetensors", "instanttensor"),
        *("sharded_state", "runai_streamer", "runai_streamer_sharded"),
    }
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ModelSource:
    """The source of a model's weights and code."""

    model: str  # a local path or a name on the hub
    commit: str = ""  # of the hub repository with the weights; "" if unknown
    code: bool = False  # whether the model's own Python files are run

    @staticmethod
    def of(model: Any) -> ModelSource:
        return ModelSource(
            str(model.model), _commit_of_weights(model), bool(model.trust_remote_code)
        )

    @property
    def local(self) -> bool:
        return Path(self.model).exists()

    def identity(self) -> dict[str, str]:
        """Return facts about the content rather than the path, so that equal weights compare
        equal."""
        path = Path(self.model)
        if not self.local:
            return {"model": self.model, "weights": f"revision:{self.commit}"}
        return {"model": path.resolve().name, "weights": weights_digest(path, code=self.code)}


def drafter_of(vllm_config: Any) -> Any:
    """Return the speculative decoding drafter's `ModelConfig`, or None without drafter weights."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    draft = speculative.draft_model_config
    return None if draft is speculative.target_model_config else draft


def why_unknown(model: Any, load: Any, foreign_code: Collection[str]) -> list[str]:
    """Return the reasons why weights or code may change without a change in the facts.
    `foreign_code` lists load formats and architectures that a plugin has added or replaced."""
    source = ModelSource.of(model)
    weights = str(getattr(model, "model_weights", "") or "")
    why = []
    if "://" in weights or "://" in source.model:
        why.append("the weights are streamed from a remote place that may change")
    elif weights not in ("", source.model):
        why.append(f"the weights are from {weights}, not from {source.model}")
    elif not source.local and not source.commit:
        why.append("the model is not a local directory and has no known revision")
    why.append(_unknown_format(load, foreign_code))
    if getattr(model, "architecture", "") in foreign_code:
        why.append("the model's class is not vLLM's own")
    if source.code and _code_may_change(model, local=source.local):
        why.append("the model's code is not pinned to a commit (set --code-revision)")
    return [reason for reason in why if reason]


def _unknown_format(load: Any, foreign_code: Collection[str]) -> str:
    name = str(load.load_format)
    if name == "dummy":
        return "the weights are dummies"
    if name not in FILE_FORMATS:
        return f"load format {name} may read weights from elsewhere, not from the model's files"
    if name in foreign_code:
        return f"load format {name} has a loader that is not vLLM's own"
    options = load.model_loader_extra_config
    pattern = options.get("pattern") if isinstance(options, Mapping) else None
    if pattern is not None and (os.sep in pattern or Path(pattern).suffix not in SUFFIXES):
        return f"the weight files are named {pattern}, which may match files elsewhere"
    return ""


def _commit_of_weights(model: Any) -> str:
    """Return the commit of the weights' repository, which vLLM pins in `revision`, or ""."""
    commit = _commit(model.revision)
    if commit or model.hf_config_path not in (None, "", model.model):
        return commit  # the configuration is from another repository
    return str(getattr(model.hf_config, "_commit_hash", None) or "")


def _commit(revision: Any) -> str:
    """Return the commit of a revision, or "" for a branch or tag, which may move."""
    resolved = str(getattr(revision, "resolved", None) or revision or "")
    return resolved if _COMMIT.fullmatch(resolved) else ""


def _code_may_change(model: Any, *, local: bool) -> bool:
    if _commit(model.code_revision):
        return False
    classes = str(model.hf_config.to_dict().get("auto_map") or "")
    # "repository--module.Class" is code from another repository.
    return "--" in classes or bool(model.code_revision and not local)


#: Beyond this number all adapters are forgotten, and chunks stored with adapters are invalidated.
_ADAPTERS_MAX = 1 << 16


class Adapters:
    """The adapters of one engine, by name and path."""

    def __init__(self, adapters_max: int = _ADAPTERS_MAX) -> None:
        self._max = adapters_max
        #: By name and path: number and stamp. The stamp is empty if the files are unknown.
        self._known: dict[tuple[str, str], tuple[int, str]] = {}

    def knows(self, lora: Any) -> bool:
        known = self._known.get((lora.lora_name, lora.lora_path))
        return known is not None and known[0] == lora.lora_int_id

    def note(self, lora: Any, stamp: str) -> bool:
        """Record the load of an adapter. Return whether stored chunks may have been computed with
        other files."""
        name = (lora.lora_name, lora.lora_path)
        known = self._known.get(name)
        forgotten = known is None and len(self._known) >= self._max
        if forgotten:
            self._known.clear()
        self._known[name] = (lora.lora_int_id, stamp)
        return forgotten or (known is not None and (not stamp or known[1] != stamp))


def stamp_of(lora: Any) -> str:
    path = Path(os.path.expanduser(lora.lora_path))
    try:
        return weights_stamp(path) if path.exists() else ""
    except OSError:
        return ""
