"""Tiny random Hugging Face originals for the lens: every family of ours, and others.

`SUBJECTS` names a function that makes each; `question` gives a batch for it, `attentions` what the
same model says with eager attention, by the order in which its layers are called, and `judge` the
same in float64 too. Each is a model of the kind that `output_attentions` works for, so that the
lens has a judge.

Letters: B batch, T tokens, S tokens of the source, H heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import decoder_originals as decoders
import torch
import transformers as hf
from family_subject import Draw, randomise
from rounding import widen
from torch import Tensor
from torch.overrides import TorchFunctionMode

DECODERS = (
    *("gpt2", "llama", "llama-3", "mistral", "qwen2", "qwen2-window", "qwen3-window", "gemma"),
    *("gemma2", "gemma3", "gpt_neox", "gptj", "opt", "bloom", "bloom-8-heads"),
)
BERT = {
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 52,
    "vocab_size": 83,
    "max_position_embeddings": 53,
}
SEQ2SEQ = {
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 83,
    "vocab_size": 83,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    "d_model": 32,
    "d_kv": 7,
    "num_heads": 3,
    "d_ff": 32,
    "vocab_size": 83,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 17,
}
SINKS = {**decoders.LLAMA, "head_dim": 10, "sliding_window": 7, "num_local_experts": 3}
SINKS |= {"num_experts_per_tok": 2}


def text_model(config: Any, cls: Any = None, **draw: Any) -> Any:
    """A model of random weights, in its own way of attending."""
    torch.manual_seed(71)
    model = hf.AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    model = model.float().eval()
    randomise(model, Draw(matrices=1.2, vectors=0.2, **draw))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.eos_token_id = generation.forced_eos_token_id = None
        generation.pad_token_id = 0
    return model


def vit() -> Any:
    torch.manual_seed(71)
    sizes = {k: BERT[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = hf.ViTConfig(**sizes, intermediate_size=52, image_size=12, patch_size=4)
    config.initializer_range = 0.7
    return hf.ViTModel(config).eval()


def t5(cls: Any, **more: Any) -> Any:
    # Without 1 / √d, queries are as much smaller; otherwise one key would get all.
    factors = {r"(Self|EncDec)Attention\.q\.": 7**-0.5}
    return text_model(cls.config_class(**{**T5, **more}), cls, table=0.3, factors=factors)


SUBJECTS: dict[str, Callable[[], Any]] = {
    **{name: (lambda n=name: text_model(decoders.VARIANTS[n]())) for name in DECODERS},  # type: ignore[misc]
    "bert": lambda: text_model(hf.BertConfig(**BERT), hf.BertModel),
    "roberta": lambda: text_model(hf.RobertaConfig(**BERT, pad_token_id=1), hf.RobertaModel),
    "xlm-roberta": lambda: text_model(
        hf.XLMRobertaConfig(**BERT, pad_token_id=1), hf.XLMRobertaModel
    ),
    "t5": lambda: t5(hf.T5ForConditionalGeneration),
    "mt5": lambda: t5(hf.MT5ForConditionalGeneration),
    "bart": lambda: text_model(hf.BartConfig(**SEQ2SEQ), hf.BartForConditionalGeneration),
    "mbart": lambda: text_model(hf.MBartConfig(**SEQ2SEQ), hf.MBartForConditionalGeneration),
    "marian": lambda: text_model(hf.MarianConfig(**SEQ2SEQ, pad_token_id=72), hf.MarianMTModel),
    # Not families of ours.
    "phi3": lambda: text_model(hf.Phi3Config(**decoders.LLAMA)),
    "olmo2": lambda: text_model(hf.Olmo2Config(**decoders.LLAMA)),
    "cohere": lambda: text_model(hf.CohereConfig(**decoders.LLAMA)),
    "starcoder2": lambda: text_model(hf.Starcoder2Config(**decoders.LLAMA, sliding_window=7)),
    "stablelm": lambda: text_model(hf.StableLmConfig(**decoders.LLAMA)),
    "granite": lambda: text_model(hf.GraniteConfig(**decoders.LLAMA, attention_multiplier=0.3)),
    "gpt_oss": lambda: text_model(hf.GptOssConfig(**SINKS)),
    "distilbert": lambda: text_model(
        hf.DistilBertConfig(dim=36, n_layers=3, n_heads=4, hidden_dim=52, vocab_size=83),
        hf.DistilBertModel,
    ),
    "vit": vit,
}
TWO_SIDED = ("t5", "mt5", "bart", "mbart", "marian")
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "vit")
OTHERS = ("phi3", "olmo2", "cohere", "starcoder2", "stablelm", "granite", "gpt_oss", "distilbert")


@dataclass(frozen=True, eq=False)
class Question:
    """A batch: what the model is called with, and which queries and keys of each row are real."""

    given: dict[str, Any]
    real: Tensor
    source_real: Tensor | None = None


def draw(rows: int, n: int, seed: int = 5) -> Tensor:
    return torch.randint(5, 70, (rows, n), generator=torch.Generator().manual_seed(seed))


def question(name: str, side: str | None = None) -> Question:
    """Three rows of 19, 11 and 5 tokens, padded on one side; one row of 19 unless padded."""
    if name == "vit":
        return Question({"pixel_values": torch.randn(2, 3, 12, 12)}, torch.ones(2, 10).bool())
    lengths = (19,) if side is None else (19, 11, 5)
    ids = draw(len(lengths), 19)
    place = torch.arange(19)
    count = torch.tensor(lengths)[:, None]
    real = place >= 19 - count if side == "left" else place < count
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": real.long()}
    if name not in TWO_SIDED:
        return Question({**given, **({"use_cache": False} if name not in ENCODERS else {})}, real)
    given["decoder_input_ids"] = draw(len(lengths), 13, 7)
    target = torch.ones(len(lengths), 13).bool()
    return Question({**given, "use_cache": False}, target, real)


@torch.no_grad()
def attentions(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """Every layer's weights (B, H, T, S) by eager attention, in the order of the calls."""
    judge = copy.deepcopy(model)
    if judge.config._attn_implementation != "eager":
        judge.set_attn_implementation("eager")
    out = judge(**given, output_attentions=True)
    if out.get("encoder_attentions") is None:
        return list(out.attentions)
    found = list(out.encoder_attentions)
    for own, cross in zip(out.decoder_attentions, out.cross_attentions, strict=True):
        found += [own, cross]
    return found


class Widened(TorchFunctionMode):
    """Float64 wherever a model names float32, as in a softmax that is float32 in every type.

    There the lowest float64, which hides a key, would become -inf, and rows of padding NaN.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        wide = [torch.float64 if x is torch.float32 else x for x in args]
        named = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*wide, **named)


def judge(model: Any, given: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Every layer's weights by eager attention, in the type of the model and in float64."""
    exact = copy.deepcopy(model).double()
    if hasattr(exact.config, "num_local_experts"):
        exact.set_experts_implementation("eager")  # the grouped product has no float64
    plain = attentions(model, given)
    with Widened():
        return list(zip(plain, attentions(exact, widen(given)), strict=True))
