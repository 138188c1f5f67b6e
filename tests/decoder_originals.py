"""Tiny originals of decoder-only families, one for each thing that a file of theirs may ask for.

Texts in the tests have 19 to 70 tokens: windows are shorter, and so are the lengths from which the
rotary scalings take hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def gpt2(**more: Any) -> Any:
    # n_inner = n_embd: square matrices, so that no shape tells a transposed one.
    sizes = {"n_embd": 40, "n_layer": 3, "n_head": 5, "n_positions": 101, "vocab_size": 89}
    return hf.GPT2Config(**{**sizes, "n_inner": 40, **NO_TOKENS, **more})


LLAMA = {
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 52,
    "vocab_size": 83,
    "max_position_embeddings": 101,
    **NO_TOKENS,
}


def llama(**more: Any) -> Any:
    return hf.LlamaConfig(**{**LLAMA, **more})


def turned(kind: str, **more: Any) -> Any:
    """LLaMA with a rotary scaling."""
    return llama(head_dim=8, rope_parameters={"rope_type": kind, "rope_theta": 500.0, **more})


def dynamic(**more: Any) -> Any:
    scaling = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    return llama(head_dim=8, max_position_embeddings=17, rope_parameters=scaling, **more)


def longrope(**more: Any) -> Any:
    scaling = {"rope_type": "longrope", "rope_theta": 500.0}
    scaling |= {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.3, 3.1, 4.7]}
    scaling |= {"original_max_position_embeddings": 29}
    return llama(head_dim=8, rope_parameters=scaling, **more)


def mistral(**more: Any) -> Any:
    return hf.MistralConfig(**{**LLAMA, "sliding_window": 7, "head_dim": 10, **more})


def qwen2(**more: Any) -> Any:
    return hf.Qwen2Config(**{**LLAMA, **more})


def qwen3(**more: Any) -> Any:
    return hf.Qwen3Config(**{**LLAMA, "head_dim": 10, **more})


# An even width for all of Gemma's heads, and a query scale that is not that of the head's width.
GEMMA = {**LLAMA, "head_dim": 8, "num_hidden_layers": 4}
GEMMA_2 = {**GEMMA, "sliding_window": 7, "query_pre_attn_scalar": 11}


def gemma2(**more: Any) -> Any:
    # Low caps, so that scores and logits reach them.
    caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}
    return hf.Gemma2Config(**{**GEMMA_2, **caps, **more})


def gemma3(**more: Any) -> Any:
    return hf.Gemma3TextConfig(**{**GEMMA_2, "layer_types": gemma3_layers(), **more})


def gemma3_layers() -> list[str]:
    return ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def neox(**more: Any) -> Any:
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 52,
        "vocab_size": 83,
        "max_position_embeddings": 101,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}
        | {"partial_rotary_factor": 0.25},
    }
    return hf.GPTNeoXConfig(**{**sizes, **NO_TOKENS, **more})


def gptj(**more: Any) -> Any:
    sizes = {"n_embd": 40, "n_layer": 3, "n_head": 5, "rotary_dim": 6, "n_positions": 101}
    return hf.GPTJConfig(**{**sizes, "n_inner": 52, "vocab_size": 89, **NO_TOKENS, **more})


def opt(**more: Any) -> Any:
    sizes = {
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "ffn_dim": 52,
        "vocab_size": 89,
        "max_position_embeddings": 101,
    }
    return hf.OPTConfig(**{**sizes, **NO_TOKENS, **more})


def bloom(**more: Any) -> Any:
    sizes = {"hidden_size": 40, "n_layer": 3, "n_head": 5, "vocab_size": 89}
    return hf.BloomConfig(**{**sizes, **NO_TOKENS, **more})


VARIANTS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False, n_inner=None, n_layer=2),
    "gpt2-scaled-by-layer": lambda: gpt2(scale_attn_by_inverse_layer_idx=True),
    "llama": llama,
    "llama-tied-biased": lambda: llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_key_value_heads=6
    ),
    "llama-wide-heads": lambda: llama(head_dim=10, num_key_value_heads=3),
    "llama-linear": lambda: turned("linear", factor=3.0),
    "llama-dynamic": dynamic,
    "llama-yarn": lambda: turned("yarn", factor=4.0, original_max_position_embeddings=23),
    "llama-3": lambda: turned(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=31,
    ),
    "llama-longrope": longrope,
    "llama-longrope-shallow": lambda: longrope(num_hidden_layers=1),
    "mistral": mistral,
    "mistral-no-window": lambda: mistral(sliding_window=None, head_dim=None),
    "qwen2": qwen2,
    "qwen2-window": lambda: qwen2(
        use_sliding_window=True, sliding_window=7, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": qwen3,
    "qwen3-window": lambda: qwen3(
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "gemma": lambda: hf.GemmaConfig(**GEMMA),
    "gemma2": gemma2,
    "gemma2-untied": lambda: gemma2(
        tie_word_embeddings=False, final_logit_softcapping=None, attn_logit_softcapping=None
    ),
    "gemma3": gemma3,
    "gemma3-scaled": lambda: gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
        final_logit_softcapping=3.0,
    ),
    "gpt_neox": neox,
    "gpt_neox-sequential": lambda: neox(
        use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True
    ),
    "gptj": gptj,
    "gptj-tied": lambda: gptj(tie_word_embeddings=True, n_layer=2),
    "opt": opt,
    "opt-350m": lambda: opt(do_layer_norm_before=False, word_embed_proj_dim=28),
    "opt-bare": lambda: opt(enable_bias=False, tie_word_embeddings=False),
    "bloom": bloom,
    "bloom-8-heads": lambda: bloom(n_head=8, tie_word_embeddings=False),
    "bloom-normed-residual": lambda: bloom(apply_residual_connection_post_layernorm=True),
}

# Their rotary in `transformers` depends on the texts that came before.
STATEFUL = ("llama-dynamic", "llama-longrope", "llama-longrope-shallow")
# And of these, ours turns the keys of a cache anew.
ROTATES_KEPT_KEYS = ("llama-longrope", "llama-longrope-shallow")
