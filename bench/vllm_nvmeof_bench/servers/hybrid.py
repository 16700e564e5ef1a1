# SPDX-License-Identifier: Apache-2.0
"""Random models whose layers do not all have full attention, made by the classes of `transformers`.

Weights are drawn as in `model`: attention is peaked, so that the answer depends on the whole
context and a wrong KV byte changes it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.servers.model import ModelShape, write_tokenizer

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
        """The number of KV cache groups; vLLM's groups are as large as that of full attention."""
        layers = _LAYERS[self.kind]
        return len(layers) // layers.count("full_attention")

    @property
    def parameters(self) -> int:
        import torch

        with torch.device("meta"):
            return int(_model(self.config()).num_parameters())

    def config(self) -> Any:
        """Return the model's configuration, of a class of `transformers`."""
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


def make_hybrid(root: Path, shape: HybridShape) -> Path:
    """Create the model under `root` unless it exists there; return its directory."""
    directory = root / f"model-{shape.digest()}"
    if not (directory / "config.json").exists():
        partial = root / f".{directory.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write_hybrid(shape.config(), partial, shape)
        partial.rename(directory)
    return directory


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
    """Draw a matrix's weights; other vectors stay as the class made them."""
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
