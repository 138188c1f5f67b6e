"""A tiny translator with two directions and its tokenizer, as a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenmakers import added, byte_level

from regard.models import Transformer, config_of, save, save_int8
from regard.tokens import Tokenizer

DIRECTIONS = {"ja": {"prefix": "<2ja>"}, "en": {"prefix": "<2en>"}}


def make_tokenizer() -> Tokenizer:
    """Byte-level, with the two prefixes as special tokens; it adds nothing by itself."""
    told = json.loads(byte_level())
    size = len(told["model"]["vocab"])
    told["added_tokens"] += [added(size + n, f"<2{name}>") for n, name in enumerate(DIRECTIONS)]
    return Tokenizer.from_parts(json.dumps(told), {"eos_token": "<|end|>", "pad_token": "<pad>"})


def make_translator(
    root: Path, *, int8: bool = False, directions: Any = DIRECTIONS, **more: Any
) -> Path:
    """A folder with such a model; its weights are random, and what it writes hangs on all it reads.

    It writes whole characters only: the bytes that are none alone are suppressed.
    """
    tokenizer = make_tokenizer()
    end = tokenizer.id("<|end|>")
    source: dict[str, Any] = {
        "model_type": "original",
        "vocab_size": tokenizer.vocab_size,
        "d_model": 12,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 17,
        "decoder_ffn_dim": 19,
        "max_position_embeddings": 41,
        "pad_token_id": tokenizer.id("<pad>"),
        "bos_token_id": end,
        "eos_token_id": end,
        **more,
    }
    if directions is not None:
        source["directions"] = directions
    model = Transformer(config_of(source)).eval()
    drawn = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            # Norms stay as they are and biases small; what is read must outweigh the token that was
            # just written. Otherwise the same token would be written all the time.
            if "norm" not in name:
                size = 2.0 if "cross_attn" in name or "ffn" in name else 0.7
                size = 0.1 if tensor.ndim == 1 else size
                tensor.copy_(torch.randn(tensor.shape, generator=drawn) * size)
    (save_int8 if int8 else save)(model, root)
    tokenizer.save(root)
    halves = [at for at in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([at])]
    (root / "generation_config.json").write_text(json.dumps({"suppress_tokens": halves}))
    return root
