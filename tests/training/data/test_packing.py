"""Windows: everything seen once, documents apart, every batch from seed and step alone."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.transformer import Transformer
from regard.ops import Causal, Documents
from regard.positions import RotaryConfig
from regard.training.data.packing import NOTHING, MaskedTokens, PackedText, TextBatch, mask_tokens
from regard.training.data.reading import BadData
from regard.training.data.store import TokenFile, write_tokens

T, ROWS = 13, 3
LENGTHS = [5, 1, 29, 2, 3, 17, 1, 1, 40, 11, 7]
N = sum(LENGTHS)


def numbered(folder: Path, lengths: list[int] = LENGTHS) -> TokenFile:
    """Documents whose ids say where they stand: 0, 1, 2, ... through all of them."""
    edges = np.cumsum([0, *lengths])
    rows = [range(start, end) for start, end in pairwise(edges.tolist())]
    return write_tokens(folder / "t", rows, vocab_size=int(edges[-1]) + 1, fingerprint="")


def owner(place: int) -> int:
    return int(np.searchsorted(np.cumsum(LENGTHS), place, side="right"))


def same(one: TextBatch, other: TextBatch) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in vars(one)]
    return all(a is b is None or (a is not None and torch.equal(a, b)) for a, b in pairs)


def check_by_hand(batch: TextBatch) -> None:
    """Targets, documents and positions of numbered ids, told token by token."""
    for row in range(len(batch.ids)):
        ids = batch.ids[row].tolist()
        document = position = 0
        for at, here in enumerate(ids):
            if at and (owner(here) != owner(ids[at - 1]) or here != ids[at - 1] + 1):
                document, position = document + 1, 0
            if batch.documents is not None and batch.positions is not None:
                assert batch.documents[row, at] == document
                assert batch.positions[row, at] == position
            else:
                assert document == 0
            last = here + 1 == N or owner(here + 1) != owner(here)
            target = int(batch.targets[row, at])
            assert target == (NOTHING if last else here + 1)
            position += 1


def test_every_token_is_seen_once_an_epoch_but_for_less_than_a_window(tmp_path: Path) -> None:
    packed = PackedText(numbered(tmp_path), context=T, rows=1, seed=5)
    assert packed.n_windows == N // T
    missed, firsts, phases = Counter[int](), [], set()
    for epoch in range(20):
        steps = range(epoch * packed.n_windows, (epoch + 1) * packed.n_windows)
        seen = Counter(i for step in steps for i in packed.batch(step).ids.flatten().tolist())
        assert set(seen.values()) == {1}
        assert len(seen) == packed.n_windows * T > N - T
        missed.update(set(range(N)) - set(seen))
        firsts.append([int(packed.batch(step).ids[0, 0]) for step in steps])
        phases.add(min(firsts[-1]) % T)
    # What is missed lies elsewhere each time, and so does the order.
    assert max(missed.values(), default=0) < 20
    assert len(phases) > 5 and len({tuple(first) for first in firsts}) == 20


def test_rows_of_a_batch_are_consecutive_windows_also_across_epochs(tmp_path: Path) -> None:
    tokens = numbered(tmp_path)
    one = PackedText(tokens, context=T, rows=1, seed=5)
    some = PackedText(tokens, context=T, rows=5, seed=5)
    assert one.n_windows % 5
    for step in range(2 * one.n_windows):
        ids = torch.cat([one.batch(step * 5 + row).ids for row in range(5)])
        assert torch.equal(some.batch(step).ids, ids)


def test_a_batch_is_the_same_whenever_and_wherever_it_is_asked(tmp_path: Path) -> None:
    tokens = numbered(tmp_path)
    made = PackedText(tokens, context=T, rows=ROWS, seed=11)
    first = [made.batch(step) for step in range(25)]
    for step in np.random.default_rng(1).permutation(25).tolist():
        assert same(first[step], made.batch(step))
        assert same(first[step], PackedText(tokens, context=T, rows=ROWS, seed=11).batch(step))
    other = PackedText(tokens, context=T, rows=ROWS, seed=12)
    assert not all(torch.equal(first[step].ids, other.batch(step).ids) for step in range(3))


def test_targets_documents_and_positions_are_right_token_by_token(tmp_path: Path) -> None:
    made = PackedText(numbered(tmp_path), context=T, rows=ROWS, seed=3)
    batches = [made.batch(step) for step in range(60)]
    wrapped = 0
    for batch in batches:
        check_by_hand(batch)
        assert batch.ids.dtype == batch.targets.dtype == torch.int64
        wrapped += int((batch.ids.diff() < 0).any())
    assert wrapped > 2  # the end of the text, followed by its start
    assert any(batch.documents is not None for batch in batches)


def test_windows_within_one_document_need_no_documents(tmp_path: Path) -> None:
    alone = PackedText(numbered(tmp_path, [997]), context=7, rows=2, seed=3)
    without = [step for step in range(300) if alone.batch(step).documents is None]
    assert 270 < len(without) < 300
    # The others hold the seam of the ring, which no token sees across.
    batch = alone.batch(next(step for step in range(300) if step not in without))
    assert batch.documents is not None and batch.positions is not None
    row, at = torch.nonzero(batch.documents.diff()).tolist()[0]
    assert batch.ids[row, at : at + 2].tolist() == [996, 0]
    assert batch.targets[row, at] == NOTHING and batch.positions[row, at + 1] == 0


def test_a_stream_asks_for_the_next_token_across_documents(tmp_path: Path) -> None:
    made = PackedText(numbered(tmp_path), context=T, rows=ROWS, seed=3, documents=False)
    for step in range(30):
        batch = made.batch(step)
        assert batch.documents is None and batch.positions is None
        want = torch.where(batch.ids == N - 1, NOTHING, batch.ids + 1)
        assert torch.equal(batch.targets, want)


def test_targets_that_are_not_shifted_are_the_ids(tmp_path: Path) -> None:
    made = PackedText(numbered(tmp_path), context=T, rows=ROWS, seed=3, shifted=False)
    batch = made.batch(4)
    assert torch.equal(batch.ids, batch.targets)
    assert batch.ids.data_ptr() != batch.targets.data_ptr()


@pytest.mark.parametrize("context", [13, 39, 58, 116])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("documents", [True, False])
def test_in_order_asks_for_every_token_just_once(
    tmp_path: Path, context: int, rows: int, shifted: bool, documents: bool
) -> None:
    options: dict[str, Any] = {"documents": documents, "shifted": shifted}
    made = PackedText(numbered(tmp_path), context=context, rows=2, seed=0, **options)
    asked: list[int] = []
    for batch in made.in_order(rows):
        assert batch.ids.shape == batch.targets.shape and len(batch.ids) <= rows
        kept = batch.targets != NOTHING
        assert torch.equal(batch.targets[kept], (batch.ids + int(shifted))[kept])
        asked += batch.targets[kept].tolist()
    starts = {int(start) for start in made.tokens.bounds[:-1]} if documents else {0}
    assert sorted(asked) == sorted(set(range(N)) - (starts if shifted else set()))


def test_fewer_tokens_than_one_window_are_refused(tmp_path: Path) -> None:
    tokens = numbered(tmp_path)
    with pytest.raises(
        BadData, match=r"has 117 tokens, fewer than one window of 117 and the token"
    ):
        PackedText(tokens, context=N, rows=1, seed=0)
    with pytest.raises(BadData, match="fewer than one window of 118;"):
        PackedText(tokens, context=N + 1, rows=1, seed=0, shifted=False)
    assert PackedText(tokens, context=N - 1, rows=1, seed=0).n_windows == 1
    assert PackedText(tokens, context=N, rows=1, seed=0, shifted=False).n_windows == 1


@pytest.mark.parametrize("name", ["context", "rows", "seed"])
def test_wrong_numbers_are_refused(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"context": T, "rows": ROWS, "seed": 0, name: -1}
    with pytest.raises(ValueError, match=f"{name} is -1"):
        PackedText(numbered(tmp_path), **options)
    with pytest.raises(ValueError, match="step is -1"):
        PackedText(numbered(tmp_path), context=T, rows=ROWS, seed=0).batch(-1)


def test_a_batch_of_64_times_512_takes_under_5_ms(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, 8192, size) for size in rng.integers(1, 3000, 700)]
    tokens = write_tokens(tmp_path / "t", rows, vocab_size=8192, fingerprint="")
    made = PackedText(tokens, context=512, rows=64, seed=1)
    seconds = []
    for step in range(40):
        start = time.process_time()
        made.batch(step)
        seconds.append(time.process_time() - start)
    assert np.median(seconds) < 0.005


# ---- Models: packing changes nobody's answer

V, C, H = 31, 12, 3
BLOCK = BlockConfig(dim=C, n_heads=H, ffn_dim=17)
ROTARY = replace(BLOCK, norm="rms", n_kv_heads=1, rotary=RotaryConfig(head_dim=4))
MODELS = {
    "learned": ModelConfig(
        family="test",
        vocab_size=V,
        max_len=T,
        decoder=(BLOCK, BLOCK),
        embed=EmbedConfig(positions="learned"),
    ),
    "rotary, grouped": ModelConfig(
        family="test", vocab_size=V, max_len=None, decoder=(ROTARY, ROTARY)
    ),
    "encoder": ModelConfig(
        family="test",
        vocab_size=V,
        max_len=T,
        encoder=(BLOCK, BLOCK),
        embed=EmbedConfig(positions="sinusoidal"),
        head=HeadConfig(kind="masked"),
    ),
}


def stirred(config: ModelConfig) -> Transformer:
    model = Transformer(config, dtype=torch.float64).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def logits(model: Transformer, ids: Tensor, **more: Any) -> Tensor:
    assert model.head is not None
    made: Tensor = model.head(model.run(ids, **more))
    return made


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_packed_document_answers_as_if_it_were_alone(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(7)
    documents = [rng.integers(0, V, size) for size in LENGTHS]
    tokens = write_tokens(tmp_path / "t", documents, vocab_size=V, fingerprint="")
    made = PackedText(tokens, context=T, rows=ROWS, seed=3)
    model = stirred(MODELS[name])
    parts = 0
    for step in range(12):
        batch = made.batch(step)
        if batch.documents is None or batch.positions is None:
            continue
        mask = Documents(batch.documents)
        packed = logits(model, batch.ids, positions=batch.positions, mask=mask)
        spelled = mask if name == "encoder" else Causal() & mask
        joined = logits(model, batch.ids, positions=batch.positions, mask=spelled)
        torch.testing.assert_close(joined, packed, rtol=0, atol=1e-12)
        for row in range(ROWS):
            for number in batch.documents[row].unique().tolist():
                here = batch.documents[row] == number
                alone = logits(model, batch.ids[row, here][None])
                torch.testing.assert_close(packed[row, here], alone[0], rtol=0, atol=1e-9)
                parts += 1
        loose = logits(model, batch.ids)
        assert not torch.allclose(packed, loose, atol=1e-3)
    assert parts > 40


# ---- Masked language models

MASKING: dict[str, Any] = {"mask_id": 3, "vocab_size": 101, "special": (0, 1, 2, 3), "seed": 5}


def plain_batch(rows: int = 64, width: int = 499) -> TextBatch:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 101, (rows, width)))
    return TextBatch(ids, ids.clone())


def test_masking_hides_15_percent_as_80_10_10_and_asks_for_these_alone() -> None:
    batch = plain_batch()
    masked = mask_tokens(batch, MaskedTokens(**MASKING), 1)
    chosen = masked.targets != NOTHING
    ordinary = batch.ids > 3
    assert not (chosen & ~ordinary).any()
    assert torch.equal(masked.targets[chosen], batch.ids[chosen])
    assert torch.equal(masked.ids[~chosen], batch.ids[~chosen])
    assert abs(chosen.sum() / ordinary.sum() - 0.15) < 0.01
    shown, was = masked.ids[chosen], batch.ids[chosen]
    assert abs((shown == 3).double().mean() - 0.8) < 0.02
    assert abs((shown == was).double().mean() - 0.1) < 0.02
    other = shown[(shown != 3) & (shown != was)]
    assert abs(len(other) / len(shown) - 0.1) < 0.02
    assert other.min() == 4 and other.max() == 100 and len(other.unique()) > 90


def test_masking_follows_from_seed_and_step_alone_and_leaves_the_batch() -> None:
    batch = plain_batch(3, 31)
    before = batch.ids.clone()
    one = mask_tokens(batch, MaskedTokens(**MASKING), 1)
    assert same(one, mask_tokens(batch, MaskedTokens(**MASKING), 1))
    assert not torch.equal(one.targets, mask_tokens(batch, MaskedTokens(**MASKING), 2).targets)
    again = {**MASKING, "seed": 6}
    assert not torch.equal(one.targets, mask_tokens(batch, MaskedTokens(**again), 1).targets)
    assert torch.equal(batch.ids, before) and torch.equal(batch.targets, before)


def test_a_rows_gaps_do_not_hang_on_how_many_rows_make_a_batch() -> None:
    batch = plain_batch(5, 31)
    whole = mask_tokens(batch, MaskedTokens(**MASKING), 10)
    parts = [
        mask_tokens(TextBatch(batch.ids[r:z], batch.targets[r:z]), MaskedTokens(**MASKING), 10 + r)
        for r, z in ((0, 2), (2, 5))
    ]
    assert torch.equal(whole.ids, torch.cat([part.ids for part in parts]))
    assert torch.equal(whole.targets, torch.cat([part.targets for part in parts]))


def test_masking_keeps_documents_and_asks_for_something_where_it_can() -> None:
    ids = torch.tensor([[0, 7, 1]])
    batch = TextBatch(ids, ids.clone(), torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 0]]))
    for step in range(20):
        masked = mask_tokens(batch, MaskedTokens(share=0.01, **MASKING), step)
        assert masked.targets.tolist() == [[NOTHING, 7, NOTHING]]
        assert masked.documents is batch.documents and masked.positions is batch.positions
    nothing = TextBatch(ids, torch.full_like(ids, NOTHING))
    assert (mask_tokens(nothing, MaskedTokens(**MASKING), 0).targets == NOTHING).all()


@pytest.mark.parametrize(
    "wrong", [{"share": 0.0}, {"share": 1.5}, {"mask_id": 101}, {"special": range(101)}]
)
def test_masking_refuses_what_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        mask_tokens(plain_batch(1, 3), MaskedTokens(**{**MASKING, **wrong}), 0)


# ---- Windows between two tokens

FRAME = (N, N + 1)  # ids that no text has


def framed(folder: Path, rows: int = 1, **how: Any) -> PackedText:
    """Documents of numbered ids, each between the frame's tokens."""
    edges = np.cumsum([0, *LENGTHS]).tolist()
    documents = [[FRAME[0], *range(start, end), FRAME[1]] for start, end in pairwise(edges)]
    tokens = write_tokens(folder / "f", documents, vocab_size=N + 2, fingerprint="")
    return PackedText(tokens, context=T, rows=rows, seed=5, shifted=False, frame=FRAME, **how)


def test_framed_windows_begin_and_end_with_the_frame_and_ask_for_every_token(
    tmp_path: Path,
) -> None:
    packed = framed(tmp_path)
    for epoch in range(9):
        steps = range(epoch * packed.n_windows, (epoch + 1) * packed.n_windows)
        batches = [packed.batch(step) for step in steps]
        for batch in batches:
            assert (int(batch.ids[0, 0]), int(batch.ids[0, -1])) == FRAME
            asked = batch.targets != NOTHING
            assert torch.equal(batch.targets[asked], batch.ids[asked])
        seen = Counter(i for batch in batches for i in batch.targets.flatten().tolist() if i < N)
        seen.pop(NOTHING)
        # Each once, but for the seam of the ring.
        assert set(seen.values()) == {1} and len(seen) > N - T


def test_framed_text_in_order_asks_for_every_token_once(tmp_path: Path) -> None:
    packed = framed(tmp_path, rows=4)
    asked = [i for batch in packed.in_order() for i in batch.targets.flatten().tolist()]
    assert sorted(i for i in asked if 0 <= i < N) == list(range(N))
    short = write_tokens(tmp_path / "s", [[N, 7, N + 1]], vocab_size=N + 2, fingerprint="")
    one = PackedText(short, context=3, rows=2, seed=5, shifted=False, frame=FRAME)
    (batch,) = one.in_order()
    assert batch.ids.tolist() == [[N, 7, N + 1]]
    assert batch.targets.tolist() == [[NOTHING, 7, NOTHING]]


def test_parts_of_documents_in_a_framed_window_lie_apart_each_from_its_own_start(
    tmp_path: Path,
) -> None:
    packed, n_parts = framed(tmp_path, rows=2), 0
    for step in range(20):
        batch = packed.batch(step)
        if batch.documents is None or batch.positions is None:
            continue
        for ids, documents, positions in zip(
            batch.ids.tolist(), batch.documents.tolist(), batch.positions.tolist(), strict=True
        ):
            for number in set(documents):
                part = [at for at in range(T) if documents[at] == number]
                assert [positions[at] for at in part] == list(range(len(part)))
                text = [ids[at] for at in part if ids[at] < N]
                assert len({owner(token) for token in text}) <= 1
                if text:  # else an end of a document that the window's edge cut off
                    n_parts += 1
                    assert ids[part[0]] == FRAME[0] and ids[part[-1]] == FRAME[1]
    assert n_parts > 40


def test_a_frame_is_for_masked_models_and_leaves_room(tmp_path: Path) -> None:
    tokens = numbered(tmp_path)
    with pytest.raises(ValueError, match="not for shifted targets"):
        PackedText(tokens, context=T, rows=1, seed=0, frame=FRAME)
    with pytest.raises(ValueError, match="not for windows of 2"):
        PackedText(tokens, context=2, rows=1, seed=0, shifted=False, frame=FRAME)
