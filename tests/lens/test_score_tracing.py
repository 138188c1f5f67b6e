"""Models that write attention out in unusual ways: every weight theirs, or left out in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from lens_subjects import draw, text_model
from rounding import assert_within
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.lens.watch import watch

SMALL: dict[str, Any] = {"vocab_size": 83}
BERT = {**SMALL, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
BERT |= {"intermediate_size": 20}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3]}
SWIN |= {"window_size": 4}
WINDOW = {**BERT, "attention_window": 4, "max_position_embeddings": 60, "pad_token_id": 1}


def image_model(model: Any) -> Any:
    """One of which no weight is left at zero."""
    torch.manual_seed(5)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.05)
    return model.eval()


MODELS: dict[str, Any] = {
    "xlnet": lambda: text_model(
        hf.XLNetConfig(**SMALL, d_model=24, n_layer=2, n_head=3, d_inner=20), hf.XLNetModel
    ),
    "funnel": lambda: text_model(
        hf.FunnelConfig(
            **SMALL, block_sizes=[1, 1], num_decoder_layers=1, d_model=24, n_head=3, d_head=8
        ),
        hf.FunnelModel,
    ),
    "deberta-v2": lambda: text_model(
        hf.DebertaV2Config(**BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
        hf.DebertaV2Model,
    ),
    "swin": lambda: image_model(hf.SwinModel(hf.SwinConfig(**SWIN, initializer_range=0.3))),
    "swinv2": lambda: image_model(hf.Swinv2Model(hf.Swinv2Config(**SWIN, initializer_range=0.3))),
}


class Softmaxes(TorchFunctionMode):
    """Keeps what every softmax gives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            self.found.append(out)
        return out


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_the_models_own(name: str) -> None:
    model = MODELS[name]()
    windows = name.startswith("swin")
    torch.manual_seed(2)
    given = {"pixel_values": torch.randn(1, 3, 32, 32)} if windows else {"input_ids": draw(1, 16)}
    if name == "swin":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        with Softmaxes() as softmaxes:
            model(**given)
        want = softmaxes.found
        before = model(**given).last_hidden_state
        for keep in ("qk", "statistics"):
            with watch(model, keep=keep, row=0) as record:
                after = model(**given).last_hidden_state
            assert torch.equal(before, after) and not record.notes
            assert len(record.places) == len(want)
            for number, maps in enumerate(want):
                found = np.stack([record.map(number, head) for head in range(maps.shape[1])])
                # Scores of about 10 are off by a few roundings, and weights by as much of 1.
                assert_within(found, maps[0], 64 * torch.finfo(torch.float32).eps, name)


@pytest.mark.parametrize("name", ["longformer", "led"])
def test_windows_in_pieces_are_left_out_in_words(name: str) -> None:
    if name == "longformer":
        model = text_model(hf.LongformerConfig(**WINDOW), hf.LongformerModel)
        with (
            pytest.raises(ValueError, match="is pad, which moves scores"),
            torch.no_grad(),
            watch(model),
        ):
            model(input_ids=draw(1, 16))
        return
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3}
    sizes |= {"decoder_attention_heads": 3, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20}
    model = text_model(hf.LEDConfig(**SMALL, **sizes, d_model=24, attention_window=4), hf.LEDModel)
    with (
        pytest.warns(RuntimeWarning, match=r"encoder\.layers\.0.*moves scores"),
        torch.no_grad(),
        watch(model) as record,
    ):
        model(input_ids=draw(1, 16))
    assert len(record.places) == 4 and len(record.notes) == 1


class FiveAxes(nn.Module):
    """Windows in an axis of their own, as torchvision's MaxViT has them, or behind the heads'."""

    def __init__(self, how: str, order: tuple[int, ...] = (3, 0, 1, 4, 2, 5)) -> None:
        super().__init__()
        self.qkv, self.how, self.order = nn.Linear(12, 36), how, order
        self.num_heads: int | None = None
        self.bias = nn.Parameter(torch.randn(6, 5, 5))  # of windows, where they are next to last

    def split(self, x: Tensor) -> Tensor:
        B, G, T, _ = x.shape
        found: Tensor = self.qkv(x).view(B, G, T, 3, 3, 4).permute(*self.order)
        return found

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        bias = self.bias if self.order[2] == 4 else torch.zeros(())
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias if bias.dim() else None)
        if self.how == "einsum":
            scores = torch.einsum("B G H I D, B G H J D -> B G H I J", q, k) * 0.5
        elif self.how == "dots":
            scores = torch.einsum("...id,...jd->...ij", q, k) * 0.5
        else:
            scores = torch.matmul(q, k.mT).mul(0.5)
        return (scores + bias).softmax(-1) @ v


@pytest.mark.parametrize("how", ["sdpa", "einsum", "dots", "matmul"])
def test_attention_over_five_axes(how: str) -> None:
    model, x = FiveAxes(how), torch.randn(1, 6, 5, 12)
    with torch.no_grad():
        before = model(x)
        with watch(model, keep="qk", row=4) as record:
            assert torch.equal(model(x), before)
        q, k, _ = model.split(x)
        want = (q @ k.mT * 0.5).softmax(-1)[0, 4]
    found = np.stack([record.map(0, head) for head in range(3)])
    assert_within(found, want, 8 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(("inputs", "known"), [(1, True), (2, False)])
def test_a_row_that_is_a_window_and_no_input_is_noted(inputs: int, known: bool) -> None:
    model = FiveAxes("sdpa")
    model.num_heads = 3
    with torch.no_grad(), watch(model, row=1) as record:
        model(torch.randn(inputs, 6, 5, 12))
    assert any("12 rows, and the first axis" in note for note in record.notes) != known


@pytest.mark.parametrize("how", ["sdpa", "einsum", "matmul"])
def test_heads_may_lie_before_windows_where_a_module_says_how_many(how: str) -> None:
    """As in Hiera and NesT: windows were taken for heads, and heads for windows."""
    model, x = FiveAxes(how, (3, 0, 4, 1, 2, 5)), torch.randn(1, 6, 5, 12)
    model.num_heads = 3
    with torch.no_grad():
        before = model(x)
        with watch(model, keep="qk", row=4) as record:
            assert torch.equal(model(x), before)
        q, k, _ = model.split(x)
        want = (q @ k.mT * 0.5 + model.bias).softmax(-1)[0, :, 4]
    assert record.places[0].n_heads == 3 and not record.notes
    found = np.stack([record.map(0, head) for head in range(3)])
    assert_within(found, want, 8 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(("said", "known"), [(None, False), (7, False), (3, True), (6, True)])
def test_axes_of_which_nobody_says_what_they_are_are_noted(said: int | None, known: bool) -> None:
    model = FiveAxes("sdpa")
    model.num_heads = said
    with torch.no_grad(), watch(model, row=0) as record:
        model(torch.randn(1, 6, 5, 12))
    assert any("axes of 6 and 3" in note for note in record.notes) != known


class OneByOne(nn.Module):
    """Heads in a loop, or all of them before the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.qkv, self.how, self.num_heads = nn.Linear(12, 36), how, 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 3, 0, 1, 4)
        if self.how == "before":
            return F.scaled_dot_product_attention(q, k, v)
        heads = zip(q, k, v, strict=True)
        if self.how == "sdpa":
            return torch.stack([F.scaled_dot_product_attention(*head) for head in heads])
        return torch.stack([(q @ k.mT / 2).softmax(-1) @ v for q, k, v in heads])


@pytest.mark.parametrize("how", ["sdpa", "matmul"])
def test_heads_that_are_called_one_by_one_are_no_rows_of_the_batch(how: str) -> None:
    """Three inputs were taken for the three heads of one."""
    model, x = OneByOne(how), torch.randn(3, 5, 12)
    with torch.no_grad():
        with watch(model, keep="qk", row=2) as record:
            model(x)
        q, k, _ = model.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 3, 0, 1, 4)
        want = (q[:, 2] @ k[:, 2].mT / 2).softmax(-1)
    assert [place.n_heads for place in record.places] == [1, 1, 1]
    assert any("as many as there are inputs" in note for note in record.notes)
    found = np.stack([record.map(place, 0) for place in range(3)])
    assert_within(found, want, 8 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(("rows", "known"), [(2, False), (3, True)])
def test_heads_before_the_batch_are_noted(rows: int, known: bool) -> None:
    with torch.no_grad(), watch(model := OneByOne("before"), row=0) as record:
        model(torch.randn(rows, 5, 12))
    assert any("axes of 3 and 2" in note for note in record.notes) != known


class TalkingHeads(FiveAxes):
    """Scores of heads are mixed before the softmax: as they lie, or with heads last, as in CaiT."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.mix = nn.Conv2d(3, 3, 1) if how == "conv" else nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)[:, 0]
        return self.mixed(q @ k.mT).softmax(-1) @ v

    def mixed(self, scores: Tensor) -> Tensor:
        if self.how == "einsum":
            return torch.einsum("bhts,gh->bgts", scores, self.mix.weight)
        moves = self.how == "linear"
        found: Tensor = self.mix(scores.permute(0, 2, 3, 1) if moves else scores)
        return found.permute(0, 3, 1, 2) if moves else found


@pytest.mark.parametrize("how", ["conv", "einsum"])
def test_talking_heads_are_recorded_where_their_scores_stay(how: str) -> None:
    model, x = TalkingHeads(how), torch.randn(1, 6, 5, 12)
    with torch.no_grad():
        before = model(x)
        with watch(model, row=2) as record:
            assert torch.equal(model(x), before)
        q, k, _ = model.split(x)[:, 0]
        want = model.mixed(q @ k.mT).softmax(-1)[2]
    found = np.stack([record.map(0, head) for head in range(3)])
    assert_within(found, want, 8 * torch.finfo(torch.float32).eps)


def test_talking_heads_that_move_are_left_out_in_words() -> None:
    """Their scores were lost, and with them the layer, without a word."""
    model, x = TalkingHeads("linear"), torch.randn(1, 6, 5, 12)
    why = "TalkingHeads could not be recorded .*is linear, which moves scores"
    with pytest.raises(ValueError, match=why), torch.no_grad(), watch(model, row=0):
        model(x)


def test_what_attention_gives_is_no_score_however_it_is_mixed() -> None:
    class Gated(FiveAxes):
        """What attention gives goes through a matrix, and then through a softmax as a gate."""

        def __init__(self) -> None:
            super().__init__("")
            self.out = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)[:, 0]
            heads = (q @ k.mT).softmax(-1) @ v
            out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
            return out * out.softmax(-1)

    model = Gated()
    with torch.no_grad(), watch(model, row=0) as record:
        model(torch.randn(1, 6, 5, 12))
    assert len(record.places) == 1 and not record.notes


def test_scores_changed_by_any_function_of_numbers_are_kept_as_they_are() -> None:
    class Squashed(FiveAxes):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)[0].view(6, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
            return torch.clamp(torch.sinh(q @ k.mT), -2, 2).softmax(-1) @ v

    model, x = Squashed(""), torch.randn(1, 6, 5, 12)
    with torch.no_grad(), watch(model, row=2) as record:
        model(x)
        q, k, _ = model.qkv(x)[0].view(6, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
        want = torch.clamp(torch.sinh(q @ k.mT), -2, 2).softmax(-1)[2]
    found = np.stack([record.map(0, head) for head in range(3)])
    assert_within(found, want, 8 * torch.finfo(torch.float32).eps)


def test_scores_are_kept_where_queries_were_written_over_since() -> None:
    """What was followed no longer gives the scores that are there, and some rows of it tell so."""

    class WrittenOver(FiveAxes):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)[:, 0]
            scores = q @ k.mT
            q.zero_()
            return scores.softmax(-1) @ v

    model, x = WrittenOver(""), torch.randn(1, 6, 5, 12)
    with torch.no_grad():
        before = model(x)
        with watch(model, keep="qk", row=2) as record:
            assert torch.equal(model(x), before)
        q, k, _ = model.split(x)[:, 0]
        want = (q @ k.mT).softmax(-1)[2]
    found = np.stack([record.map(0, head) for head in range(3)])
    assert_within(found, want, 8 * torch.finfo(torch.float32).eps)


LATER = torch.ones(5, 5).triu(1).bool()
WRITING: dict[str, Callable[[Tensor], Any]] = {
    "hides by an index": lambda x: x.__setitem__((..., LATER), -torch.inf),
    "hides by an index, by the lowest": lambda x: x.__setitem__((..., LATER), -3.4e38),
    "fills a view": lambda x: x.view(-1, 5, 5).masked_fill_(LATER, -torch.inf),
    "fills what autograd does not see": lambda x: x.data.masked_fill_(LATER, -1e9),
    "fills the diagonal": lambda x: x.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf),
    "changes a row that is neither first nor last": lambda x: x[:, :, 1].mul_(-3),
    "shows a look again": lambda x: x.masked_fill_(LATER, -torch.inf)[..., 1, 3].fill_(0.7),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", WRITING)
def test_scores_that_are_written_into_are_those_of_the_record(how: str, inference: bool) -> None:
    """Idioms of hand-written attention: the record had every look that they hide."""

    class Writing(FiveAxes):
        def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.split(x)[:, 0]
            scores = q @ k.mT / 2
            WRITING[how](scores)
            return scores.softmax(-1), v

        def forward(self, x: Tensor) -> Tensor:
            weights, v = self.weights(x)
            return weights @ v

    model, x = Writing(""), torch.randn(1, 6, 5, 12)
    with torch.inference_mode() if inference else torch.no_grad():
        before = model(x)
        with watch(model, keep="qk", row=2) as record:
            assert torch.equal(model(x), before)
        want = model.weights(x)[0][2]
    found = np.stack([record.map(0, head) for head in range(3)])
    assert_within(found, want, 8 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("how", ["followed", "kept whole"])
def test_rows_that_a_large_number_hides_whole_see_nothing(how: str) -> None:
    """Padding of pairs by -1e9, as in hand-written attention: all weights of such a row were 1."""
    real = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])

    class Padded(FiveAxes):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)[:, 0]
            scores = q @ k.mT / 2 + (1 - real[:, None] * real) * -1e9
            self.weights = (scores if how == "followed" else scores.clamp(min=-2e9)).softmax(-1)
            return self.weights @ v

    model, x = Padded(""), torch.randn(1, 6, 5, 12)
    with torch.no_grad(), watch(model, keep="qk", row=2) as record:
        model(x)
    found = np.stack([record.map(0, head) for head in range(3)])
    want = model.weights[2] * real[:, None]
    assert_within(found, want, 8 * torch.finfo(torch.float32).eps)
    assert record.statistics(0)["received"].sum() == pytest.approx(9)
    looks = want[:, range(1, 3), range(2)].mean(1)
    assert_within(record.heads()["previous"][0], looks, 8 * torch.finfo(torch.float32).eps)


HIDDEN = torch.tensor(-torch.inf)
CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "chosen last": lambda x: torch.where(LATER, HIDDEN, x).softmax(-1),
    "chosen by name": lambda x: torch.where(condition=LATER, input=HIDDEN, other=x).softmax(-1),
    "added by name": lambda x: torch.add(input=LATER.float(), other=x).softmax(-1),
    "by another name of softmax": lambda x: torch.special.softmax(x, -1),
}


class Changed(FiveAxes):
    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(x)[:, 0]
        change: Any = self.how
        return change(q @ k.mT / 2), v

    def forward(self, x: Tensor) -> Tensor:
        weights, v = self.weights(x)
        return weights @ v


@pytest.mark.parametrize("how", CHANGED)
def test_scores_are_followed_wherever_they_stand_among_arguments(how: str) -> None:
    model, x = Changed(CHANGED[how]), torch.randn(1, 6, 5, 12)  # type: ignore[arg-type]
    with torch.no_grad():
        with watch(model, row=2) as record:
            model(x)
        want = model.weights(x)[0][2]
    found = np.stack([record.map(0, head) for head in range(3)])
    assert_within(found, want, 8 * torch.finfo(torch.float32).eps)


def test_scores_beside_others_are_left_out_in_words() -> None:
    """As with a sink among the keys: they were passed over without a word."""

    def attend(x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros(6, 3, 5, 1)], -1).softmax(-1)[..., :-1]

    model = Changed(attend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is cat, which moves scores"), watch(model, row=0):
        model(torch.randn(1, 6, 5, 12))


def test_a_softmax_over_another_axis_is_noted() -> None:
    def attend(x: Tensor) -> Tensor:
        return x.softmax(-1) * x.softmax(dim=-2)

    model = Changed(attend)  # type: ignore[arg-type]
    with watch(model, row=0) as record:
        model(torch.randn(1, 6, 5, 12))
    assert len(record.places) == 1
    assert any("softmax of products over axis -2" in note for note in record.notes)


def test_scores_turned_over_are_left_out() -> None:
    class Turned(FiveAxes):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)[0].view(6, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
            return (q @ k.mT).transpose(-1, -2).softmax(-1) @ v

    model = Turned("")
    with pytest.raises(ValueError, match="is transpose, which moves"), watch(model, row=0):
        model(torch.randn(1, 6, 5, 12))
