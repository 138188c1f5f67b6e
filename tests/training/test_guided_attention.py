"""The guided term is its formula, guiding leaves no trace, and the score is as defined."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rounding import assert_within, bound_sum, bound_weights
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor, nn

from regard.layers import BlockConfig, observing
from regard.models.config import ModelConfig, SpecialTokens
from regard.models.transformer import Transformer
from regard.ops import DenseBias, Wants
from regard.tokens import Tokenizer
from regard.training.guided_attention import LinkTable, alignment_score, guide_loss, guided
from regard.training.word_alignment import Links, Rows, align_pairs

LINKS = Links(np.array([0, 0, 0, 2]), np.array([1, 0, 2, 0]), np.array([0, 2, 2, 1]))


def test_targets_are_uniform_over_links_behind_the_start_token() -> None:
    target = LinkTable(LINKS, 3).batch([2, 0, 1, 0], S=5, T=4)
    expected = torch.zeros(4, 4, 5)
    expected[0, 2, 0] = 1
    for row in (1, 3):
        expected[row, 1, 1] = 1
        expected[row, 3, [0, 2]] = 0.5
    assert torch.equal(target, expected)
    behind = LinkTable(LINKS, 3).batch([0], S=6, T=5, shift=2, offset=1)
    assert torch.equal(behind[0, 1:, 1:], expected[1])


def test_links_outside_the_batch_are_refused() -> None:
    table = LinkTable(LINKS, 3)
    for change in ({"T": 3}, {"S": 2}, {"shift": 2}, {"offset": 3}):
        with pytest.raises(ValueError, match="pair 0 has links beyond"):
            table.batch([1, 0], **({"S": 5, "T": 4} | change))
    with pytest.raises(ValueError, match="table has 0 to 2"):
        table.batch([3], 5, 4)
    with pytest.raises(ValueError, match="n_pairs is 2"):
        LinkTable(LINKS, 2)


def test_guide_loss_worked_by_hand() -> None:
    """Two heads, one source token masked; the second position has no link."""
    weights = torch.tensor([[[0.5, 0.5, 0.0], [0.1, 0.9, 0.0], [0.2, 0.8, 0.0]]])
    other = torch.tensor([[[0.1, 0.9, 0.0], [0.3, 0.7, 0.0], [1.0, 0.0, 0.0]]])
    logs = torch.stack([weights, other], 1).log().requires_grad_()
    target = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]])
    expected = -(math.log(0.3) + 0.5 * math.log(0.6) + 0.5 * math.log(0.4)) / 2
    loss = guide_loss(logs, target)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    (grad,) = torch.autograd.grad(loss, logs)
    # The first position's: half of each head's share in the mean, 0.5/0.6 and 0.1/0.6.
    torch.testing.assert_close(grad[0, :, 0, 0], -torch.tensor([5 / 12, 1 / 12]))
    assert grad.isfinite().all()
    assert guide_loss(logs, target, torch.tensor(8)).item() == pytest.approx(expected / 4)
    nothing = guide_loss(logs, torch.zeros_like(target))
    assert nothing.item() == 0.0 and nothing.requires_grad
    masked = torch.tensor([[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    assert guide_loss(logs, masked).item() == math.inf


C, H = 10, 5


def translator(n_layers: int = 2, **changes: Any) -> Transformer:
    torch.manual_seed(7)
    config = {"dim": C, "n_heads": H, "head_dim": 3, "ffn_dim": 13, **changes}
    return Transformer(
        ModelConfig(
            family="test",
            vocab_size=17,
            max_len=None,
            encoder=(BlockConfig(**config),) * n_layers,
            decoder=(BlockConfig(cross_attention=True, **config),) * n_layers,
        )
    )


def some_batch() -> dict[str, Tensor]:
    torch.manual_seed(11)
    real = torch.arange(7) < torch.tensor([7, 4, 5])[:, None]
    return {
        "ids_bt": torch.randint(17, (3, 11)),
        "source": torch.randint(17, (3, 7)),
        "source_real": real,
    }


RULES = [
    {},
    {"n_kv_heads": 1, "softcap": 1.3},
    {"sinks": True, "scale": 2.0},
    {"qk_norm": "rms"},
]


@pytest.mark.parametrize("rule", RULES)
def test_caught_weights_are_those_that_the_layer_used(rule: dict[str, Any]) -> None:
    model = translator(**rule)
    cross = model.decoder.layers[1].cross_attn
    if cross.sinks is not None:
        nn.init.normal_(cross.sinks)
    wide = copy.deepcopy(model).double()
    with guided(model, 1, (4, 1)) as caught, observing(model, Wants(weights=True)) as seen:
        model(**some_batch())
    with observing(wide, Wants(weights=True)) as seen_wide:
        wide(**some_batch())
    name = "decoder.layers.1.cross_attn"
    plain, exact = (each[name].weights[:, [4, 1]] for each in (seen, seen_wide))
    assert_within(caught.weights(), exact, bound_weights(plain, exact))
    assert (caught.weights()[1, :, :, 4:] == 0).all()


def test_a_bias_of_each_head_and_a_row_that_sees_nothing() -> None:
    model = translator()
    cross = model.decoder.layers[0].cross_attn
    x, memory = torch.randn(3, 11, C), torch.randn(3, 7, C)
    added, mask = torch.randn(H, 11, 7), torch.rand(3, H, 11, 7) < 0.7
    mask[1, 3, 2], added[3, 4] = False, -math.inf
    with guided(model, 0, (3, 0)) as caught:
        cross(x, memory, mask=mask, bias=DenseBias(added))
        weights = caught.weights()
    found = []
    for layer, dtype in ((cross, torch.float32), (copy.deepcopy(cross).double(), torch.float64)):
        inputs, bias = (x.to(dtype), memory.to(dtype)), DenseBias(added.to(dtype))
        seen = layer.observe(*inputs, wants=Wants(weights=True), mask=mask, bias=bias)
        found.append(seen.weights[:, [3, 0]])
    plain, exact = found
    assert_within(weights, exact, bound_weights(plain, exact))
    assert (weights[1, 0, 2] == 0).all() and (weights[:, 0, 4] == 0).all()
    grads = torch.autograd.grad(weights.square().sum(), list(cross.q_proj.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


def test_outputs_are_bit_identical_and_nothing_is_left_behind() -> None:
    model = translator(dropout=0.3, attention_dropout=0.2)
    before = [dict(vars(layer)) for layer in model.modules()]
    answers = []
    for with_guide in (False, True):
        torch.manual_seed(5)
        if with_guide:
            with guided(model, 0, (1,)), guided(model, 0, (0,)), guided(model, 1, (2,)):
                out = model(**some_batch()).logits
        else:
            out = model(**some_batch()).logits
        answers.append((out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    with pytest.raises(KeyError), guided(model, 0, (1,)):
        raise KeyError
    assert [set(vars(layer)) for layer in model.modules()] == [set(each) for each in before]


def test_nested_blocks_on_one_layer_both_catch() -> None:
    model = translator()
    with guided(model, 1, (0, 2)) as outer, guided(model, 1, (2,)) as inner:
        model(**some_batch())
    # One head of two is a smaller product than both: D = 3 terms of scores that are near 1.
    weights = outer.weights()[:, 1:]
    assert_within(inner.weights(), weights, bound_sum(3, -weights[weights > 0].log().min()))
    with guided(model, 1, (0,)) as outer:
        with guided(model, 1, (2,)) as inner:
            pass
        model(**some_batch())
    with pytest.raises(RuntimeError, match="has not run"):
        inner.weights()
    assert outer.weights().shape == (3, 1, 11, 7)


def test_gradients_reach_queries_keys_and_the_encoder_in_float32_under_autocast() -> None:
    model, target = translator(), torch.zeros(3, 11, 7)
    target[:, 5, 2] = 1
    with guided(model, 1, (0, 3)) as caught, torch.autocast("cpu", torch.bfloat16):
        model(**some_batch())
        loss = guide_loss(caught.log_weights(), target)
    assert loss.dtype == torch.float32
    loss.backward()
    cross = model.decoder.layers[1].cross_attn
    for weight in (cross.q_proj.weight, cross.k_proj.weight):
        per_head = weight.grad.view(H, 3, C).abs().sum((1, 2))
        assert (per_head > 0).tolist() == [True, False, False, True, False]
    assert cross.v_proj.weight.grad is None
    assert model.encoder.layers[0].ffn.down_proj.weight.grad.abs().sum() > 0


def test_a_compiled_model_is_caught_too_without_compiling_every_time() -> None:
    model = translator(n_layers=1).eval()
    graphs: list[int] = []

    def count(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    target = torch.zeros(3, 11, 7)
    target[:, 5, 2] = 1
    grads = []
    for which in (model, compiled, compiled, compiled):
        with guided(which, 0, (0, 3)) as caught:
            which(**some_batch())
            loss = guide_loss(caught.log_weights(), target)
        grads.append(torch.autograd.grad(loss, model.decoder.layers[0].cross_attn.q_proj.weight))
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])
    assert len(graphs) == 1


def test_what_cannot_be_guided_is_refused() -> None:
    model = translator()
    for heads in ((), (0, 0), (H,), (-1,)):
        with pytest.raises(ValueError, match="each once"), guided(model, 0, heads):
            pass
    with pytest.raises(ValueError, match="no decoder layer 2"), guided(model, 2, (0,)):
        pass
    with pytest.raises(TypeError, match=r"no decoder\.layers"), guided(nn.Linear(3, 3), 0, (0,)):
        pass
    with guided(model, 0, (0,)) as caught, pytest.raises(RuntimeError, match="has not run"):
        caught.log_weights()
    with guided(model, 0, (0,)) as caught:
        with torch.no_grad():
            model(**some_batch())
            assert not caught.log_weights().requires_grad
        with pytest.raises(RuntimeError, match="without gradients"):
            caught.log_weights()


def test_guiding_alone_teaches_a_head_to_align() -> None:
    """Links found by statistics, then nothing but the guided term: the heads learn the cipher."""
    random = np.random.default_rng(5)
    rows = [random.permutation(np.arange(2, 17))[:6].tolist() for _ in range(128)]
    coded = [[(word * 4) % 15 + 2 for word in reversed(row)] for row in rows]
    table = LinkTable(align_pairs(Rows.of(rows), Rows.of(coded)), 128)
    target = table.batch(range(128), S=6, T=7)
    assert target.sum() > 0.9 * 128 * 6
    model = translator(dim=20, head_dim=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source, written = torch.tensor(rows), torch.tensor([[1, *row] for row in coded])
    losses = []
    for _ in range(60):
        with guided(model, 1, (1, 3)) as caught:
            model(written, source=source)
            loss = guide_loss(caught.log_weights(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    right = caught.weights().mean(1).argmax(-1) == target.argmax(-1)
    assert losses[0] > 1.5
    assert right[target.any(-1)].float().mean() > 0.95


# --- the score ------------------------------------------------------------------------------------

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
    monkeypatch.setattr("regard.training.guided_attention.ROWS_AT_ONCE", 1)
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
    assert "_look" not in vars(model.decoder.layers[0].cross_attn)
