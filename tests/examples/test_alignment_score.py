"""The alignment score asks what its words say, and counts whole words by their characters."""

import functools
import math
from typing import Any

import pytest
import torch
from alignment_score import alignment_score
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import nn

import regard
from regard.layers import BlockConfig
from regard.models.config import ModelConfig, SpecialTokens
from regard.models.transformer import Transformer
from regard.tokens import Tokenizer

SAID = [
    ("The cat sees a dog.", "犬は猫を。"),
    ("Cat, cat!", "猫。"),
    ("A category, a bobcat.", "猫。"),
    ("An UMBRELLA.", "傘は。"),
    ("French is a dog", "フランス語。"),
    ("a cat a dog", "犬を猫は"),
]
LEXICON = [("cat", "猫"), ("dog", "犬"), ("umbrella", "傘"), ("French", "フランス語")]


@functools.cache
def pieces() -> Tokenizer:
    """English in pieces of three letters, with the space before them; Japanese by characters."""
    backend = Backend(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[A-Za-z]{1,3}|."), "isolated")
    special = ["<pad>", "<s>", "</s>", "<unk>", "<en>", "<ja>"]
    trainer = trainers.WordLevelTrainer(vocab_size=99, special_tokens=special, show_progress=False)
    backend.train_from_iterator([text for pair in SAID for text in pair], trainer)
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return Tokenizer.from_parts(backend.to_str(), named)


def reader(looks: dict[str, str], other: dict[str, str] | None = None) -> Transformer:
    """A model whose only cross-attention is a dictionary: which source piece each piece looks at.

    Vectors are one-hot, blocks add nothing, and queries are moved to the piece they look for.
    Head 0 follows `looks`, head 1 `other`; a piece that is in neither looks at the end.
    """
    tokenizer = pieces()
    V = tokenizer.vocab_size
    config = {"dim": V, "n_heads": 2, "head_dim": V, "ffn_dim": 3, "scale": 3.0}
    model = Transformer(
        ModelConfig(
            family="test",
            vocab_size=V,
            max_len=None,
            encoder=(BlockConfig(**config),),
            decoder=(BlockConfig(cross_attention=True, **config),),
            tokens=SpecialTokens(pad=0, bos=1, eos=(2,), decoder_start=1),
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.encoder_embed.tokens.weight.copy_(torch.eye(V))
        # A norm takes the mean out; it is put back, so that what is one-hot stays so.
        model.decoder.layers[0].cross_attn_norm.bias.fill_((V - 1) ** -0.5)
        cross = model.decoder.layers[0].cross_attn
        for head, wanted in enumerate([looks, looks if other is None else other]):
            cross.k_proj.weight[head * V : (head + 1) * V] = torch.eye(V)
            for piece in range(V):
                at = tokenizer.id(wanted.get(tokenizer.token(piece), "</s>"))
                cross.q_proj.weight[head * V + at, piece] = 1.0
    return model


RIGHT = {"猫": " cat", "犬": " dog", "傘": "REL", "フ": "Fre", "ラ": "nch", "語": "Fre"}


def ask(model: Transformer, **changes: Any) -> dict[tuple[str, str], tuple[int, int]]:
    given: dict[str, Any] = {"pairs": SAID, "lexicon": LEXICON, "layer": 0, "heads": (0, 1)}
    given |= changes
    score = alignment_score(model, pieces(), given.pop("pairs"), given.pop("lexicon"), **given)
    found = list(score.by_entry.values())
    assert (score.right, score.total) == tuple(map(sum, zip(*found, strict=True)))
    return dict(score.by_entry)


def test_the_score_counts_whole_words_covered_by_characters() -> None:
    """No cat is in "category" or "bobcat". Any piece of a word will do."""
    assert ask(reader(RIGHT)) == {
        ("cat", "猫"): (3, 3),
        ("dog", "犬"): (2, 2),
        ("umbrella", "傘"): (1, 1),
        ("French", "フランス語"): (1, 1),
    }


def test_a_prefix_moves_the_answers_and_may_win_itself() -> None:
    prefix = [pieces().id("<ja>")]
    assert ask(reader(RIGHT), prefix=prefix) == ask(reader(RIGHT))
    assert ask(reader(RIGHT | {"犬": "<ja>"}), prefix=prefix)["dog", "犬"] == (0, 2)


def test_positions_are_those_that_read_the_word() -> None:
    """The piece before and the piece behind look elsewhere, at what would be wrong."""
    assert ask(reader({"を": " cat", "は": " cat", "<s>": " dog"}))["cat", "猫"] == (0, 3)


def test_the_mean_over_positions_decides() -> None:
    two = {"フ": "Fre", "ラ": "Fre", "ン": " dog", "ス": " dog", "語": " dog"}
    assert ask(reader(two))["French", "フランス語"] == (0, 1)
    assert ask(reader(two | {"語": "Fre"}))["French", "フランス語"] == (1, 1)


def test_the_mean_over_the_named_heads_decides() -> None:
    model = reader(RIGHT, {})
    assert ask(model, heads=(0,))["cat", "猫"] == (3, 3)
    assert ask(model, heads=(1,))["cat", "猫"] == (0, 3)
    # A head that looks everywhere alike leaves the choice to the other.
    nn.init.zeros_(model.decoder.layers[0].cross_attn.q_proj.weight[pieces().vocab_size :])
    assert ask(model, heads=(1, 0))["cat", "猫"] == (3, 3)


def test_the_other_direction_asks_where_the_english_word_looks() -> None:
    back = {" cat": "猫", "cat": "猫", "Cat": "猫", " dog": "は", "Fre": "ス", "nch": "。"}
    found = ask(reader(back | {" UMB": "傘", "REL": "傘"}), reverse=True)
    assert found == {
        ("cat", "猫"): (3, 3),
        ("dog", "犬"): (0, 2),
        ("umbrella", "傘"): (1, 1),
        ("French", "フランス語"): (1, 1),
    }


def test_batches_padding_and_mode_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model of chance, whose every answer hangs on every token it sees."""
    model = reader(RIGHT).train()
    torch.manual_seed(3)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    many = [(f"{english} {more}", said) for english, said in SAID for more in ("a", "a dog is a")]
    whole = ask(model, pairs=many)
    assert model.training
    monkeypatch.setattr("alignment_score.ROWS_AT_ONCE", 1)
    assert ask(model, pairs=many) == whole


def test_nothing_to_ask_is_no_score() -> None:
    score = alignment_score(reader({}), pieces(), SAID, [("wine", "酒")], layer=0, heads=(0,))
    assert (score.right, score.total, score.by_entry) == (0, 0, {})
    assert math.isnan(score.share)


def test_attention_that_is_nan_is_no_answer() -> None:
    model = reader(RIGHT)
    nn.init.constant_(model.decoder.layers[0].cross_attn.q_proj.bias, math.nan)
    with pytest.raises(ValueError, match="is NaN"):
        ask(model)
    assert model.decoder.layers[0].cross_attn.wants is None


def test_the_guided_heads_of_the_embedded_translator_look_from_neko_to_cat() -> None:
    model = regard.load("embedded:translate")
    assert model.tokenizer is not None
    found = alignment_score(
        model,
        model.tokenizer,
        [("The cat sat on the mat.", "猫はマットに座った。")],
        [("cat", "猫"), ("mat", "マット")],
        layer=1,
        heads=(0, 1),
        prefix=(model.tokenizer.id("<2ja>"),),
    )
    assert (found.right, found.total) == (2, 2)
