"""Tiny random originals of Hugging Face's that write, each saved and loaded by us.

Weights are large, so that the likeliest token is so by far more than rounding; vocabularies are
small, so that texts come to their end tokens, at different times.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.generation import generate_ids
from regard.generation.stopping import find_tokens
from regard.models import Transformer, load

EOS, PAD = 2, 1
SEEDS = {"gpt2": 10, "bart": 7, "marian": 9, "t5": 10}  # with these, texts end at different times


@dataclass(frozen=True, eq=False)
class Pair:
    """The same weights twice: theirs and ours."""

    original: Any
    ours: Transformer

    @property
    def two_sided(self) -> bool:
        return bool(self.ours.config.encoder)


def make_config(name: str) -> tuple[Any, Any]:
    """The class and the config of an original."""
    import transformers as hf

    ends = {"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": PAD}
    if name == "gpt2":
        return hf.GPT2LMHeadModel, hf.GPT2Config(
            vocab_size=37,
            n_embd=22,
            n_layer=2,
            n_head=2,
            n_positions=131,
            tie_word_embeddings=False,
            **ends,
        )
    decoder = {
        "vocab_size": 41,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 29,
        "max_position_embeddings": 127,
        **ends,
    }
    if name == "llama":
        return hf.LlamaForCausalLM, hf.LlamaConfig(**decoder)
    if name == "mistral":
        return hf.MistralForCausalLM, hf.MistralConfig(**decoder, sliding_window=11)
    both = {
        "vocab_size": 31,
        "d_model": 22,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 23,
        "decoder_ffn_dim": 29,
        "max_position_embeddings": 67,
    }
    if name == "bart":
        return hf.BartForConditionalGeneration, hf.BartConfig(
            **both, **ends, decoder_start_token_id=EOS, forced_eos_token_id=EOS
        )
    if name == "marian":
        return hf.MarianMTModel, hf.MarianConfig(
            **both,
            pad_token_id=30,
            eos_token_id=EOS,
            decoder_start_token_id=30,
            forced_eos_token_id=EOS,
        )
    assert name == "t5"
    return hf.T5ForConditionalGeneration, hf.T5Config(
        vocab_size=31,
        d_model=22,
        d_kv=11,
        d_ff=29,
        num_layers=2,
        num_heads=2,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=0,
    )


@functools.cache
def make_pair(name: str) -> Pair:
    """An original and ours."""
    cls, config = make_config(name)
    original = cls(config).float().eval()
    drawn = torch.Generator().manual_seed(SEEDS.get(name, 7))
    two_sided = original.config.is_encoder_decoder
    fixed = ("embed_positions",) if name == "marian" else ()
    with torch.no_grad():
        for path, weight in original.named_parameters():
            noise = torch.randn(weight.shape, generator=drawn)
            if any(part in path for part in fixed):
                continue
            if weight.dim() < 2:
                weight.add_(0.2 * noise)
            else:
                scale = 0.4 if two_sided and path.endswith("shared.weight") else 1.3
                weight.copy_(noise * (scale * weight.shape[-1] ** -0.5))
        if name in ("bart", "marian"):
            bias = original.final_logits_bias
            bias.copy_(0.3 * torch.randn(bias.shape, generator=drawn))
            bias[0, EOS] += 1
        original.tie_weights()
    if name == "bart":
        original.generation_config.forced_bos_token_id = 0
    if name == "marian":
        original.generation_config.bad_words_ids = [[30]]
    with tempfile.TemporaryDirectory() as folder:
        original.save_pretrained(folder)
        ours = load(folder, dtype=torch.float32)
        # What generation_config.json says is read when a text is begun, and then it is gone.
        ours.config = replace(ours.config, tokens=find_tokens(ours))
    ours.origin = None
    return Pair(original, ours)


def make_rows(pair: Pair, lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    """Random texts of these lengths, without tokens that have a meaning."""
    drawn = torch.Generator().manual_seed(seed)
    top = pair.ours.config.vocab_size - 1
    return [torch.randint(3, top, (n,), generator=drawn).tolist() for n in lengths]


def ask_original(pair: Pair, rows: list[list[int]], **options: Any) -> list[list[int]]:
    """What the original writes for these rows as one batch, cut behind its first end token."""
    width = max(map(len, rows))
    gaps = [width - len(row) for row in rows]
    pairs = list(zip(gaps, rows, strict=True))
    if pair.two_sided:  # sources are padded on the right, prompts on the left
        ids = torch.tensor([row + [PAD] * gap for gap, row in pairs])
        real = torch.tensor([[1] * len(row) + [0] * gap for gap, row in pairs])
    else:
        ids = torch.tensor([[PAD] * gap + row for gap, row in pairs])
        real = torch.tensor([[0] * gap + [1] * len(row) for gap, row in pairs])
    out: Tensor = pair.original.generate(ids, attention_mask=real, do_sample=False, **options)
    n_start = 1 if pair.two_sided else width
    return [cut_row(row) for row in out[:, n_start:].tolist()]


def cut_row(row: list[int]) -> list[int]:
    return row[: row.index(EOS) + 1] if EOS in row else row


def ask_ours(pair: Pair, rows: list[list[int]], **options: Any) -> list[list[int]]:
    """The same question to ours."""
    given = {"source": rows} if pair.two_sided else {"ids": rows}
    return generate_ids(pair.ours, **given, **options).rows()
