"""Recipes: complete settings of runs, each built by a function.

How: a recipe is a model (as fields of its config.json, without those that the vocabulary decides),
a `TrainConfig`, and how the data is tokenised and batched. `changed` applies settings from a
command line: a field of `TrainConfig`, one of `Recipe`, or model.<word> for one of config.json.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from regard._check import check_choice, check_count
from regard.models.families import FAMILIES, config_of
from regard.training.config import TrainConfig, read, split_settings
from regard.training.data.vocabulary import Kind

TaskKind = Literal["lm", "masked", "translate"]
COMMANDS: dict[TaskKind, str] = {
    "lm": "`regard train lm`",
    "masked": "`regard train mlm`",
    "translate": "`regard train translate`",
}
OF_PAIRS = ("max_tokens", "max_len", "both_ways", "judge", "tokenize")
OF_TEXT = ("context", "rows", "documents")
WHOLE: tuple[Kind, ...] = ("bpe", "scripts", "words", "characters")
"""Kinds of tokenizers that decode to exactly the text they encoded: for models that generate."""
CUTTINGS: dict[TaskKind, tuple[Kind, ...]] = {
    "lm": WHOLE,
    "translate": WHOLE,
    # The other kinds put a space before every text, and so after every gap.
    "masked": ("bpe", "characters", "wordpiece"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run. Batches of text are `rows` × `context` tokens.

    Batches of pairs have at most `max_tokens` tokens on each side, and pairs longer than `max_len`
    are dropped. `cutting`: the kind of tokenizer to train (see `data.vocabulary`). `documents`:
    whether tokens see only their own document. `both_ways`: learn each pair in both directions.
    `judge`: how many held-out pairs each evaluation translates and scores by BLEU. `tokenize`:
    sacrebleu's tokenizer for that.
    """

    task: TaskKind
    model: Mapping[str, Any]
    train: TrainConfig
    vocab_size: int = 8192
    cutting: Kind = "bpe"
    context: int = 512
    rows: int = 16
    documents: bool = True
    max_tokens: int = 4096
    max_len: int = 128
    both_ways: bool = False
    judge: int = 0
    tokenize: str = "13a"

    def __post_init__(self) -> None:
        check_choice("task", self.task, get_args(TaskKind))
        check_choice("cutting", self.cutting, CUTTINGS[self.task])
        for name in ("vocab_size", "context", "rows", "max_tokens", "max_len"):
            check_count(name, getattr(self, name))
        if type(self.judge) is not int or self.judge < 0:
            raise ValueError(f"judge is {self.judge!r}; expected a number of sentences, or 0")

    def changed(self, settings: Mapping[str, str]) -> Recipe:
        """Return the recipe with settings changed, given as on a command line (name -> text)."""
        types = typing.get_type_hints(Recipe)
        own = types.keys() - {"task", "model", "train"}
        named = {n.removeprefix("model."): x for n, x in settings.items() if n.startswith("model.")}
        model = {**self.model, **{name: as_json(word) for name, word in named.items()}}
        if named:
            check_words(model, named)
        check_names(self.task, (n for n in settings if not n.startswith("model.")))
        train = {n: x for n, x in settings.items() if n not in own and not n.startswith("model.")}
        return replace(
            self,
            model=model,
            train=self.train.with_settings(train),
            **{name: read(name, word, types) for name, word in settings.items() if name in own},
        )


def check_names(task: TaskKind, names: Iterable[str]) -> None:
    """Refuse names that are not settings of a run, or that this task does not read."""
    strange = OF_TEXT if task == "translate" else OF_PAIRS
    known = [one.name for kind in (TrainConfig, Recipe) for one in fields(kind)]
    there = [name for name in known if name not in ("task", "model", "train", *strange)]
    for name in names:
        if name in strange:
            alone = "running text" if task == "translate" else COMMANDS["translate"]
            raise ValueError(f"{name} is a setting of {alone} alone; leave it out")
        if name not in there:
            raise ValueError(f"no setting is named {name!r}; there are {', '.join(there)}")


class _AskedWords(dict[str, Any]):
    """A config.json that records which fields are read (rotary reads a copy: two are preset)."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        super().__init__(words)
        self.asked = {"rope_theta", "partial_rotary_factor"}

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def check_words(model: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse config.json fields that the model's family does not read and would silently ignore."""
    words = _AskedWords({"vocab_size": 1000, **model})
    config_of(words)
    for name in names:
        if name == "vocab_size" or names_tokens(name):
            todo = "set vocab_size" if name == "vocab_size" else "leave it out"
            raise ValueError(f"model.{name} is what the vocabulary says: {todo}")
        if name not in words.asked:
            has = f"{model['model_type']!r} has {', '.join(sorted(words.asked))}"
            raise ValueError(f"no setting is named {'model.' + name!r}; a model of the kind {has}")


def names_tokens(word: str) -> bool:
    """Whether a field of a config.json holds token ids, which are wrong for another vocabulary.

    The configs of named sizes have the ids of the vocabularies that they were published with.
    """
    return word.endswith("_token_id") or word == "bad_words_ids"


def as_json(word: str) -> Any:
    """Parse a number, true, false or null (any JSON); anything else stays a string."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def named_recipe(name: str) -> Recipe:
    if name == "embedded-translate":
        raise ValueError("embedded-translate is a command of its own: examples/translate_aligned")
    if name not in RECIPES:
        raise ValueError(f"no recipe is named {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]()


def sized(recipe: Recipe, size: str) -> Recipe:
    """The recipe with a model of a named size, such as "gpt2-medium"."""
    sizes = {name: x for family in FAMILIES.values() for name, x in family.sizes.items()}
    if size not in sizes:
        raise ValueError(f"no size is named {size!r}; there are {', '.join(sorted(sizes))}")
    model = sizes[size]
    if model.get("architectures") == ["BertForPreTraining"] and recipe.task == "masked":
        # Next-sentence prediction is not trained here.
        model = {**model, "architectures": ["BertForMaskedLM"]}
    return replace(recipe, model=model)


def llama(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int) -> dict[str, Any]:
    """The config.json of a LLaMA with tied embeddings."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": dim,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "intermediate_size": ffn_dim,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }


def original(dim: int, n_layers: tuple[int, int], n_heads: int, ffn_dim: int) -> dict[str, Any]:
    """The config.json of an original Transformer."""
    model: dict[str, Any] = {"model_type": "original", "d_model": dim}
    for side, count in zip(("encoder", "decoder"), n_layers, strict=True):
        sizes = {"layers": count, "attention_heads": n_heads, "ffn_dim": ffn_dim}
        model |= {f"{side}_{word}": size for word, size in sizes.items()}
    return model


def make(task: TaskKind, model: Mapping[str, Any], settings: str) -> Recipe:
    steps, *others = settings.split()
    train = TrainConfig(steps=int(steps.removeprefix("steps=")))
    return Recipe(task=task, model=model, train=train).changed(split_settings(others))


def small_lm() -> Recipe:
    """The default of `regard train lm`: minutes on a CPU for a small text."""
    settings = "steps=1000 lr=2e-3 warmup=50 eval_every=100 save_every=100 vocab_size=2048"
    return make("lm", llama(128, 4, 4, 2, 384), f"{settings} context=128 rows=8")


def small_masked() -> Recipe:
    """The default of `regard train mlm`: minutes on a CPU for a small text."""
    model = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    settings = "steps=1800 lr=1e-3 warmup=100 eval_every=300 save_every=300 vocab_size=4096"
    return make("masked", model, f"{settings} cutting=wordpiece context=128 rows=8")


def small_translation() -> Recipe:
    """The default of `regard train translate`."""
    return make(
        "translate",
        original(128, (3, 3), 4, 256) | {"normalize_before": True, "dropout": 0.1},
        "steps=2000 lr=2e-3 warmup=200 beta2=0.98 smoothing=0.1 weight_decay=0.01 eval_every=200 "
        "save_every=200 vocab_size=4000 max_tokens=2048",
    )


def shakespeare() -> Recipe:
    """nanoGPT's settings for tinyshakespeare, with one token per character."""
    model = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 384,
        "n_layer": 6,
        "n_head": 6,
        "n_positions": 256,
        **dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.2),
    }
    return make(
        "lm",
        model,
        "steps=5000 lr=1e-3 warmup=100 beta2=0.99 eval_every=250 save_every=1000 "
        "precision=bfloat16 compiled=true vocab_size=256 cutting=characters context=256 rows=64",
    )


def multi30k() -> Recipe:
    """A small Transformer for Multi30k's captions, which are lower-cased and tokenised already."""
    return make(
        "translate",
        original(256, (4, 4), 4, 512) | {"normalize_before": True, "dropout": 0.3},
        "steps=5000 lr=2e-3 schedule=inverse_sqrt warmup=1000 beta2=0.98 smoothing=0.1 r_drop=2 "
        "weight_decay=1e-4 average=0.999 eval_every=500 save_every=1000 precision=bfloat16 "
        "compiled=true vocab_size=10000 cutting=words max_tokens=4096 judge=1014 tokenize=none",
    )


def paper(before: bool) -> Recipe:
    """The original paper's recipe at a size for Multi30k; `before`: the norms before sublayers."""
    model = original(256, (4, 4), 4, 1024) | {"dropout": 0.1, "normalize_before": before}
    recipe = replace(multi30k(), model=model)
    # The paper's highest rate is 1/√(dim · warmup); this is that of a warm-up of 1,000 steps, half
    # as long as ours.
    settings = f"lr={(256 * 1000) ** -0.5} warmup=2000 steps=3000 eps=1e-9 weight_decay=0"
    others = ["average=none", "r_drop=none", "compiled=false", "eval_every=250", "judge=0"]
    return recipe.changed(split_settings([*settings.split(), *others]))


def embedded_lm() -> Recipe:
    """The model that ships as embedded:lm."""
    return make(
        "lm",
        llama(256, 8, 8, 4, 768),
        "steps=5000 lr=2.5e-3 warmup=300 weight_decay=0.1 average=0.999 eval_every=1000 "
        "save_every=2500 precision=bfloat16 compiled=true vocab_size=8192 context=512 rows=64",
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "lm-small": small_lm,
    "mlm-small": small_masked,
    "translate-small": small_translation,
    "shakespeare": shakespeare,
    "multi30k": multi30k,
    "paper": lambda: paper(False),
    "paper-pre-norm": lambda: paper(True),
    "embedded-lm": embedded_lm,
}
