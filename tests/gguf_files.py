"""Small GGUF files of transformers' models, written the way llama.cpp's converter does.

The order of rows, the added ones and the names are spelled here from the format's description, not
taken from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
SANDWICH = {
    **PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, parts: Mapping[str, str]) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, last = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{last}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{parts[part]}.{last}"


def converter_rows(n_rows: int, n_heads: int) -> list[int]:
    """Which row of Hugging Face's stands at each row of the file: pairs become neighbours."""
    width = n_rows // n_heads
    rows = []
    for head in range(n_heads):
        for pair in range(width // 2):
            rows += [head * width + pair, head * width + width // 2 + pair]
    return rows


def write_gguf(
    path: Path,
    arch: str,
    model: torch.nn.Module,
    kind: Kind = Kind.F32,
    settle: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    more: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write a model and give it the numbers that are in the file: matrices are packed as `kind`.

    `settle` adds keys; `more` are further tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    add_sizes(writer, config)
    settle(writer)
    tied = config.tie_word_embeddings
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and tied:
                continue
            parts = SANDWICH if arch in ("gemma2", "gemma3") else PARTS
            packed_as = kind if tensor.ndim == 2 else Kind.F32
            packed = gguf.quants.quantize(tensor.numpy(), packed_as)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, packed_as).copy()))
            if arch in ("llama", "mistral") and (".q_proj" in name or ".k_proj" in name):
                heads = config.num_attention_heads
                heads = heads if ".q_proj" in name else config.num_key_value_heads
                packed = packed[converter_rows(len(packed), heads)]
            if arch.startswith("gemma") and name.endswith("norm.weight"):
                packed = packed + 1
            writer.add_tensor(gguf_name(name, parts), packed, raw_dtype=packed_as)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    finish(writer)
    return path


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_llama(**more: Any) -> Any:
    """A random LLaMA whose matrices are whole blocks of every common type."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return shake(LlamaForCausalLM(LlamaConfig(**{**SHAPE, **more})))


SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "vocab_size": 67,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def shake(model: Any) -> Any:
    """Norms and biases away from 1 and 0, matrices large enough that every part tells."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.3)
            elif "embed" not in name:
                tensor.mul_(6)
    return model.eval()


PIECES = ["<s>", "</s>", "a", "b", "\u0120", "ab", "\u0120a", "\u0120ab", "c", "<x>", "d"]
MERGES = ["a b", "\u0120 a", "\u0120 ab"]


def write_small(path: Path) -> Path:
    """A LLaMA of one layer with a vocabulary of 11, about two thousand bytes of header."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(PIECES)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1, 1, 4, 1])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    random = np.random.default_rng(11)
    shapes = {
        "token_embd": (11, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (32, 8),
        "blk.0.ffn_up": (32, 8),
        "blk.0.ffn_down": (8, 32),
    }
    for name, shape in shapes.items():
        numbers = random.standard_normal(shape).astype(np.float32)
        kind = Kind.Q8_0 if name == "blk.0.ffn_down" else Kind.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    finish(writer)
    return path
