"""The judge of every family: a tiny random original of Hugging Face's, saved, and loaded by us.

`family_subject` makes both; each `check_...` here holds ours to the original. `CHECKS` are those
that every family must pass; a test file is

    @pytest.fixture(scope="module", params=CONFIGS)
    def subject(request, tmp_path_factory):
        return make_subject(CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))

    @pytest.mark.parametrize("check", CHECKS)
    def test_family(subject, check, tmp_path):
        check(subject, tmp_path)

Bounds: float32 differs by at most 1e-5 of the largest number (of 1, where that is smaller).
bfloat16 is measured against the float32 original: the root mean square of our error in the logits
is at most 1.5 times that of `transformers`' own bfloat16 model.

Letters: B batch, T tokens, S tokens of the source, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from family_subject import (
    Answer,
    Batch,
    Draw,
    Subject,
    ask_original,
    ask_ours,
    draw_batch,
    draw_ids,
    fits,
    list_weights,
    make_subject,
)
from safetensors import safe_open
from torch import Tensor

from regard.layers import DecoderCache, KVCache
from regard.models import Transformer, count_parameters, load, save

__all__ = [
    "CHECKS",
    "Answer",
    "Batch",
    "Draw",
    "Subject",
    "ask_original",
    "ask_ours",
    "assert_near",
    "assert_same_answer",
    "count_on_meta",
    "draw_batch",
    "draw_ids",
    "make_subject",
    "pad",
]

TOLERANCE = 1e-5
BF16_FACTOR = 1.5
N_NEW = 64
LENGTHS = (19, 11, 5)


def assert_near(what: str, ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal up to `tolerance` of the largest number, or of 1 where that is smaller."""
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)}, theirs {tuple(theirs.shape)}"
    scale = max(1.0, float(theirs.abs().max()))
    gap = float((ours - theirs).abs().max())
    assert gap <= tolerance * scale, f"{what} differs by {gap:g}, where numbers reach {scale:g}"


def assert_same_answer(ours: Answer, theirs: Answer, batch: Batch) -> None:
    """Everything equal wherever a token is real."""

    def at_real(x: Tensor, real: Tensor | None) -> Tensor:
        return x if real is None else x[real]

    for what, one, other, real in (
        ("hidden state", ours.hidden, theirs.hidden, batch.real),
        ("hidden state of the source", ours.source_hidden, theirs.source_hidden, batch.source_real),
    ):
        assert len(one) == len(other), f"{what}: {len(one)}, theirs {len(other)}"
        for n, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_near(f"{what} {n}", at_real(x, real), at_real(y, real))
    assert set(ours.maps) == set(theirs.maps)
    for name, map_bhts in theirs.maps.items():
        of_source = name.startswith("encoder.") and batch.source is not None
        real = batch.source_real if of_source else batch.real
        x_bths, y_bths = ours.maps[name].transpose(1, 2), map_bhts.transpose(1, 2)
        assert_near(f"attention of {name}", at_real(x_bths, real), at_real(y_bths, real))
    if theirs.logits is not None:  # a bare original whose head is tied has one with us
        assert ours.logits is not None
        assert_near("logits", at_real(ours.logits, batch.real), at_real(theirs.logits, batch.real))
    if theirs.pooled is not None:
        assert ours.pooled is not None
        assert_near("pooled output", ours.pooled, theirs.pooled)


def check_equal(subject: Subject, folder: Path) -> None:
    """Logits, all hidden states, all attention maps and the pooled output, in float32."""
    batch = draw_batch(subject)
    theirs = ask_original(subject, batch)
    assert len(theirs.hidden) == subject.ours.config.n_layers + 1
    assert_same_answer(ask_ours(subject, batch), theirs, batch)


def check_bf16(subject: Subject, folder: Path) -> None:
    """The error of bfloat16 in the logits, or in the last states where there is no head."""
    batch = draw_batch(subject)
    exact = ask_original(subject, batch)
    rough = type(subject.original).from_pretrained(
        subject.folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    ours = load(subject.folder, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in ours.parameters()} == {torch.bfloat16}

    def measure(answer: Answer) -> float:
        one, other = answer.logits, exact.logits
        if one is None or other is None:
            one, other = answer.hidden[-1], exact.hidden[-1]
        return float((one.float() - other).square().mean().sqrt())

    theirs = measure(ask_original(subject, batch, rough.eval()))
    mine = measure(ask_ours(subject, batch, ours))
    assert mine <= BF16_FACTOR * theirs, f"bfloat16 error {mine:g}, theirs {theirs:g}"


def pad(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows (T,) as one batch, and where it is real; padding is a token like another."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), 3)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for n, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[n, where], real[n, where] = row, True
    return ids, real


def padded_batch(subject: Subject, side: str) -> Batch:
    """Rows of different lengths; for an encoder–decoder it is the source that is padded."""
    ids = draw_ids(subject, len(LENGTHS), max(LENGTHS))
    padded, real = pad([row[:n] for row, n in zip(ids, LENGTHS, strict=True)], side)
    if subject.two_sided:
        return Batch(draw_ids(subject, len(LENGTHS), 7, 11), source=padded, source_real=real)
    types = draw_ids(subject, *padded.shape, 7) % subject.n_types if subject.n_types else None
    return Batch(padded, real, types)


def check_padding(subject: Subject, folder: Path) -> None:
    """Padding on either side: as the original where it can, and every row as when it is alone."""
    for side in ("left", "right"):
        batch = padded_batch(subject, side)
        ours = ask_ours(subject, batch)
        if side in subject.padded_sides and not subject.keeps_state:
            assert_same_answer(ours, ask_original(subject, batch), batch)
        for n, length in enumerate(LENGTHS):
            where = slice(-length, None) if side == "left" else slice(length)
            if batch.source is not None:
                lone = Batch(batch.ids[n : n + 1], source=batch.source[n : n + 1, where])
                row = slice(None)
            else:
                types = None if batch.types is None else batch.types[n : n + 1, where]
                lone, row = Batch(batch.ids[n : n + 1, where], types=types), where
            theirs = ask_original(subject, lone)
            assert_near(f"{side}-padded row {n}", ours.hidden[-1][n, row], theirs.hidden[-1][0])
            if ours.logits is not None and theirs.logits is not None:
                assert_near(f"{side}-padded logits", ours.logits[n, row], theirs.logits[0])


def caches(ours: Transformer) -> dict[str, Callable[[], DecoderCache]]:
    """All the ways of keeping keys."""
    assert ours.decoder is not None
    make = ours.decoder.make_cache
    found: dict[str, Callable[[], DecoderCache]] = {
        "growing": lambda: make(KVCache.growing),
        "fixed": lambda: make(lambda: KVCache.fixed(2 * N_NEW)),
    }
    if any(block.window is not None for block in ours.config.decoder):
        found["windowed"] = ours.make_cache
    return found


@torch.no_grad()
def write_on(subject: Subject, batch: Batch, cache: DecoderCache) -> Tensor:
    """Greedy tokens (B, N_NEW) after the batch, by a plain loop."""
    ours, memory = subject.ours, None
    assert ours.head is not None
    if batch.source is not None:
        memory = ours.encode(batch.source, batch.source_real)
    next_b1, made = batch.ids, []
    for n in range(N_NEW):
        real = batch.real if n == 0 else None
        last_btc = ours.run(next_b1, real=real, memory=memory, cache=cache)
        next_b1 = ours.head(last_btc[:, -1:]).argmax(-1)
        made.append(next_b1)
    return torch.cat(made, 1)


@torch.no_grad()
def greedy_original(subject: Subject, batch: Batch, use_cache: bool = True) -> Tensor:
    """What the original generates after (or, for an encoder–decoder, from) an unpadded batch."""
    original = copy.deepcopy(subject.original)
    given = batch.ids if batch.source is None else batch.source
    more: dict[str, Any] = {} if batch.source is None else {"decoder_input_ids": batch.ids}
    out = original.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=N_NEW,
        do_sample=False,
        num_beams=1,
        use_cache=use_cache,
        **more,
    )
    made: Tensor = out[:, batch.ids.shape[1] :]
    return made


def check_greedy(subject: Subject, folder: Path) -> None:
    """64 tokens as the original generates them: with every cache, without one, padded on the left.

    Without a cache the whole text is read at once: each token must follow from those before it,
    which is what a loop without a cache would find one by one.
    """
    if subject.ours.decoder is None or not hasattr(subject.original, "lm_head"):
        return
    n_prompt = 6
    source = draw_ids(subject, 2, 17, 9) if subject.two_sided else None
    batch = Batch(draw_ids(subject, 2, n_prompt), source=source)
    start = subject.ours.config.tokens.decoder_start
    if start is not None:  # the original puts it in front where a text begins otherwise
        batch.ids[:, 0] = start
    wanted = greedy_original(subject, batch, not subject.rotates_kept_keys)
    assert wanted.shape == (2, N_NEW)
    assert len(wanted.unique()) > 4, "the original repeats itself; another seed would say more"
    whole = Batch(torch.cat((batch.ids, wanted), 1), source=source)
    if subject.keeps_state:  # there, what follows a token depends on how long the text will be
        assert torch.equal(write_anew(subject, batch), greedy_original(subject, batch, False))
        if subject.rotates_kept_keys and subject.ours.config.n_layers > 1:
            return  # and what a cache keeps of the layers below is of the shorter text
    else:
        assert torch.equal(follow(subject, whole), wanted), "uncached"
    padded, prompt = batch, batch.ids
    if source is None:
        padded = Batch(*pad([prompt[0], prompt[1], prompt[0, 2:]], "left"))
    for kind, make in caches(subject.ours).items():
        cache = make()
        made = write_on(subject, batch if kind == "growing" else padded, cache)
        assert torch.equal(made[:2], wanted), f"{kind} cache: {first_gap(made[:2], wanted)}"
        if len(made) > 2:
            if subject.keeps_state:
                lone = write_on(subject, Batch(prompt[:1, 2:]), make())
            else:
                lone = follow(subject, Batch(torch.cat((prompt[:1, 2:], made[2:]), 1)))
            assert torch.equal(made[2:], lone), f"{kind} cache, padded: {first_gap(made[2:], lone)}"
        if kind == "windowed":
            assert_stays_small(subject.ours, cache)


def follow(subject: Subject, whole: Batch) -> Tensor:
    """The likeliest token after each of the last N_NEW but one, all read at once."""
    logits = ask_ours(subject, whole).logits
    assert logits is not None
    return logits[:, -N_NEW - 1 : -1].argmax(-1)


@torch.no_grad()
def write_anew(subject: Subject, batch: Batch) -> Tensor:
    """Greedy tokens, the whole text read again for each."""
    ids = batch.ids
    for _ in range(N_NEW):
        logits = subject.ours(ids).logits
        assert logits is not None
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    return ids[:, -N_NEW:]


def assert_stays_small(ours: Transformer, cache: DecoderCache) -> None:
    """A layer with a window keeps its window, and a slot where padding goes."""

    def find_keys(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor) and value.dim() == 4:
            yield value
        elif isinstance(value, tuple | list):
            for part in value:
                yield from find_keys(part)
        elif hasattr(value, "__dict__") and not isinstance(value, Tensor):
            yield from find_keys(list(vars(value).values()))

    for block, kept in zip(ours.config.decoder, cache.blocks, strict=True):
        if block.window is not None and block.window[0] is not None:
            n_kept = [keys.shape[2] for keys in find_keys(kept.self_attn)]
            assert n_kept and max(n_kept) <= block.window[0] + 2, n_kept


def first_gap(made: Tensor, wanted: Tensor) -> str:
    """Where two texts part."""
    where = (made != wanted).any(0).nonzero()
    return "equal" if not len(where) else f"tokens part at number {int(where[0])}"


def read_names(folder: Path) -> set[str]:
    """The names of all tensors of a folder."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


def check_round_trip(subject: Subject, folder: Path) -> None:
    """Load, save, load is identity, and the saved folder is the original to `transformers`."""
    save(subject.ours, folder / "saved")
    again = load(folder / "saved")
    assert again.config == subject.ours.config
    mine, kept = dict(again.named_parameters()), dict(subject.ours.named_parameters())
    assert mine.keys() == kept.keys()
    for name, tensor in kept.items():
        assert tensor.dtype == mine[name].dtype and torch.equal(tensor, mine[name]), name
    names = read_names(subject.folder)
    assert read_names(folder / "saved") == {x for x in names if not fits(x, subject.fixed)}
    cls = type(subject.original)
    opened, info = cls.from_pretrained(
        folder / "saved", attn_implementation="eager", output_loading_info=True
    )
    missing = [name for name in info["missing_keys"] if not fits(name, subject.fixed)]
    assert not missing and not info["unexpected_keys"]
    batch = draw_batch(subject)
    theirs, first = ask_original(subject, batch, opened.eval()), ask_original(subject, batch)
    for one, other in zip(theirs.hidden, first.hidden, strict=True):
        assert torch.equal(one, other)
    if first.logits is not None:
        assert theirs.logits is not None and torch.equal(theirs.logits, first.logits)


def check_count(subject: Subject, folder: Path) -> None:
    """The number of parameters, worked out, is that of the original and of ours."""
    weights = list_weights(subject.original, subject.fixed, subject.buffers)
    theirs = sum(tensor.numel() for _, tensor in weights)
    assert count_parameters(subject.ours.config) == theirs
    assert sum(tensor.numel() for tensor in subject.ours.parameters()) == theirs


def check_names(subject: Subject, folder: Path) -> None:
    """Every place where a model attends has one name, which says where it is."""
    config, expected = subject.ours.config, set()
    for n in range(len(config.encoder)):
        expected.add(f"encoder.layers.{n}.self_attn")
    for n, block in enumerate(config.decoder):
        expected.add(f"decoder.layers.{n}.self_attn")
        if block.cross_attention:
            expected.add(f"decoder.layers.{n}.cross_attn")
    assert set(ask_ours(subject, draw_batch(subject)).maps) == expected


CHECKS = (
    check_equal,
    check_bf16,
    check_padding,
    check_greedy,
    check_round_trip,
    check_count,
    check_names,
)


def count_on_meta(config: Any, cls: Any = None) -> int:
    """How many parameters the original of this config has, without making them."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    return sum(tensor.numel() for tensor in model.parameters())
