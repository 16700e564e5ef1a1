# SPDX-License-Identifier: Apache-2.0
"""A small random Llama-type model directory, generated without any download.

The model is float32 and determined by its seed. It is sized for two cores: a prefill of 4,000
tokens takes seconds, a decode step tens of milliseconds. The KV cache per token is small (one
KV head), so that loading it is far cheaper than computing it.

Greedy output of a random model tends to loop, because the next token depends mostly on the current
one. Here embeddings are small compared with the layers' outputs, and queries are scaled up, so that
attention is peaked and selects different tokens as the position changes. The output thus depends on
the whole context, and a wrong KV byte changes it. `distinct_ratio` detects loops.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Incremented when the files for the same shape change.
_FORMAT = 1


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model. query_gain: factor of the query projections, for peaked attention.
    embed_std: standard deviation of the embeddings; logit_std: that of the logits. tied: the output
    layer is the embedding, which `make_model` does not support."""

    seed: int = 20261121
    layers: int = 4
    hidden: int = 1024
    intermediate: int = 3584
    heads: int = 8
    kv_heads: int = 1
    vocab: int = 2048
    positions_max: int = 8192
    query_gain: float = 3.0
    embed_std: float = 0.25
    logit_std: float = 4.0
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of KV cache per token over all layers, in float32."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4

    @property
    def groups(self) -> int:
        """The number of KV cache groups, which all have the same number of layers."""
        return 1

    @property
    def parameters(self) -> int:
        """The number of weights, including two norms per layer and a final one."""
        random = sum(math.prod(dims) for _, dims, _ in _tensors(self))
        head = self.vocab * self.hidden if self.tied else 0
        return random - head + (2 * self.layers + 1) * self.hidden

    def digest(self) -> str:
        """Return a short name for the files of this shape."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def write(self, directory: Path) -> None:
        """Write the model's files."""
        _write_weights(directory / "model.safetensors", self)
        write_tokenizer(directory, self)
        (directory / "config.json").write_text(json.dumps(_config(self), indent=1))
        (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}))


def make_model(root: Path, shape: ModelShape | None = None) -> Path:
    """Create the model under `root` unless it exists; return its directory, which is created
    atomically and named after the shape's digest."""
    shape = shape or ModelShape()
    directory = root / f"model-{shape.digest()}"
    if (directory / "config.json").exists():
        return directory
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=root))
    shape.write(partial)
    try:
        partial.rename(directory)
    except OSError:  # another process created the same model
        shutil.rmtree(partial)
        if not (directory / "config.json").exists():
            raise
    return directory


def random_tokens(rng: np.random.Generator, count: int, shape: ModelShape) -> list[int]:
    """Return `count` random token IDs without special tokens."""
    return [int(t) for t in rng.integers(_SPECIAL_COUNT, shape.vocab, count)]


def distinct_ratio(tokens: Sequence[int]) -> float:
    """Return the share of distinct 3-grams in `tokens`: 1.0 if none repeats, near 0 in a loop."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


_SPECIAL = ("<s>", "</s>")
_SPECIAL_COUNT = len(_SPECIAL)


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions_max,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
        "use_cache": True,
    }


def _tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield name, shape and standard deviation of each random weight."""
    hidden, inter = shape.hidden, shape.intermediate
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    unit = hidden**-0.5
    yield "model.embed_tokens.weight", (shape.vocab, hidden), shape.embed_std
    yield "lm_head.weight", (shape.vocab, hidden), shape.logit_std * unit
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (q_rows, hidden), shape.query_gain * unit
        yield f"{layer}.self_attn.k_proj.weight", (kv_rows, hidden), unit
        yield f"{layer}.self_attn.v_proj.weight", (kv_rows, hidden), unit
        yield f"{layer}.self_attn.o_proj.weight", (hidden, q_rows), q_rows**-0.5
        yield f"{layer}.mlp.gate_proj.weight", (inter, hidden), unit
        yield f"{layer}.mlp.up_proj.weight", (inter, hidden), unit
        yield f"{layer}.mlp.down_proj.weight", (hidden, inter), inter**-0.5


def _write_weights(file_path: Path, shape: ModelShape) -> None:
    from safetensors.numpy import save_file

    rng = np.random.Generator(np.random.PCG64(shape.seed))
    tensors = {
        name: rng.standard_normal(dims, dtype=np.float32) * np.float32(std)
        for name, dims, std in _tensors(shape)
    }
    norms = ["norm"]
    for i in range(shape.layers):
        norms += [f"layers.{i}.input_layernorm", f"layers.{i}.post_attention_layernorm"]
    tensors |= {f"model.{name}.weight": np.ones(shape.hidden, np.float32) for name in norms}
    # Make end tokens unlikely, because they would make the outputs' lengths differ.
    tensors["lm_head.weight"][:_SPECIAL_COUNT] = 0
    save_file(tensors, str(file_path), metadata={"format": "pt"})


def write_tokenizer(directory: Path, shape: ModelShape) -> None:
    """Write a byte-level tokenizer: 256 bytes, then pairs of letters until `shape.vocab`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(_SPECIAL)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    letters = "etaoinshrdlucmfwypvbgkjxqzETAOINSHRDLUCMFWYPVBGKJXQZ0123456789"
    merges: list[tuple[str, str]] = []
    for left, right in ((a, b) for a in letters for b in letters):
        if len(vocab) >= shape.vocab:
            break
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    assert len(vocab) == shape.vocab, "there are too few letter pairs for the vocabulary"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "model_max_length": shape.positions_max,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


# Random models whose layers do not all have full attention, made by `transformers` classes.
#
# Weights are drawn as above: attention is peaked, so that the answer depends on the whole
# context and a wrong KV byte changes it.


#: Kind → the kind of each layer. Local layers have a window, and convolutions a state.
_LAYERS = {
    "gemma3": (*["sliding_attention"] * 5, "full_attention"),
    "lfm2": ("conv", "conv", "full_attention") * 3,
}
_WINDOW_TOKENS = 512


@dataclass(frozen=True)
class HybridShape(ModelShape):
    """The sizes of a model like Gemma 3 or LFM2. kv_bytes_per_token: as if all layers had full
    attention."""

    kind: str = "gemma3"
    hidden: int = 512
    intermediate: int = 2048
    heads: int = 4
    kv_heads: int = 2

    @property
    def groups(self) -> int:
        """The number of KV cache groups; each has as many layers as the full-attention group."""
        layers = _LAYERS[self.kind]
        return len(layers) // layers.count("full_attention")

    @property
    def parameters(self) -> int:
        import torch

        with torch.device("meta"):
            return int(_model(self.config()).num_parameters())

    def config(self) -> Any:
        """Return the model's configuration, an instance of a `transformers` class."""
        from transformers import Gemma3TextConfig, Lfm2Config

        sizes: dict[str, Any] = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions_max,
            "layer_types": list(_LAYERS[self.kind]),
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        if self.kind == "gemma3":
            sizes |= {"sliding_window": _WINDOW_TOKENS, "query_pre_attn_scalar": 4}
            return Gemma3TextConfig(**sizes, head_dim=self.head_dim)
        sizes |= {"block_dim": self.hidden, "conv_dim": self.hidden}  # vLLM's own names
        return Lfm2Config(**sizes, block_auto_adjust_ff_dim=False)

    def write(self, directory: Path) -> None:
        write_hybrid(self.config(), directory, self)


def write_hybrid(config: Any, directory: Path, shape: ModelShape, images: bool = False) -> None:
    """Write a random model and a tokenizer. shape: how weights are drawn, and the vocabulary."""
    import torch

    torch.manual_seed(shape.seed)
    model = _model(config, images, dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            _draw(name, weights, shape, tied=config.get_text_config().tie_word_embeddings)
    model.save_pretrained(directory)
    write_tokenizer(directory, shape)


def _model(config: Any, images: bool = False, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    return kind.from_config(config, **more)


def _draw(name: str, weights: Any, shape: ModelShape, *, tied: bool) -> None:
    """Draw a matrix's weights, or set those of some norms; leave other vectors as they are."""
    if name.endswith(
        ("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")
    ):
        weights.fill_(0.5)
    elif tied and name in ("model.norm.weight", "model.embedding_norm.weight"):
        # The small embeddings of a tied model give small logits; the last norm scales them up.
        weights.fill_(15.0)
    if weights.ndim != 2:
        return
    unit = weights.shape[1] ** -0.5
    std = unit
    if "embed_tokens" in name:
        std = shape.embed_std * (unit if tied else 1.0)
    elif "lm_head" in name:
        std = shape.logit_std * unit
    elif "q_proj" in name:
        std = shape.query_gain * unit
    weights.normal_(0.0, std)
