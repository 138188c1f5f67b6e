"""T5, BART and Marian against tiny random originals; the Transformer of 2017 against torch's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from family_judge import (
    CHECKS,
    Batch,
    Draw,
    Subject,
    ask_original,
    ask_ours,
    assert_near,
    assert_same_answer,
    draw_batch,
    draw_ids,
    make_subject,
    pad,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.layers import observing
from regard.models import (
    FAMILIES,
    BadCheckpoint,
    SpecialTokens,
    Transformer,
    config_of,
    count_parameters,
    load,
    named_config,
    save,
)
from regard.ops import Wants

Variant = tuple[Any, Any, dict[str, Any]]

# What is the same for every token (the memory, biases) made small, what tells them apart large.
FACTORS = {r"encoder_attn\.out_proj": 0.2, r"self_attn\.q_proj": 4.0, r"\.fc[12]\.weight": 3.0}
LIVELY = Draw(
    table=0.5,
    vectors=0.1,
    factors={rf"decoder.*{pattern}": factor for pattern, factor in FACTORS.items()},
)


def t5(cls: Any = hf.T5ForConditionalGeneration, **more: Any) -> Variant:
    sizes = {"d_model": 32, "d_kv": 7, "num_heads": 3, "d_ff": 32, "vocab_size": 79}
    sizes |= {"num_layers": 3, "num_decoder_layers": 2, "decoder_start_token_id": 0}
    # Few buckets, so that short texts reach those that share many distances.
    sizes |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 17}
    # Without 1 / √d, queries are as much smaller; otherwise rounding would decide.
    factors = {r"Attention\.q\.": 7**-0.5, r"EncDecAttention\.o": 0.3, r"decoder.*Dense\.w": 1.7}
    draw = Draw(seed=98, matrices=1.2, table=0.3, vectors=0.2, factors=factors)
    return cls, cls.config_class(**{**sizes, **more}), {"draw": draw}


def untied_t5() -> Variant:
    """T5 1.1 as its files are: with an output layer of its own."""

    def build(config: Any) -> Any:
        model = hf.T5ForConditionalGeneration(config)
        del model.all_tied_weights_keys["lm_head.weight"]
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))
        return model

    _, config, facts = t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu")
    return build, config, facts


def bart(cls: Any = hf.BartForConditionalGeneration, **more: Any) -> Variant:
    sizes = {"d_model": 24, "encoder_layers": 3, "decoder_layers": 2, "vocab_size": 73}
    sizes |= {"encoder_attention_heads": 3, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 37, "max_position_embeddings": 83}
    config = cls.config_class(**{**sizes, "decoder_start_token_id": 2, **more})
    facts = {"padded_sides": ("right",), "buffers": ("final_logits_bias",), "draw": LIVELY}
    return cls, config, facts


def marian(cls: Any = hf.MarianMTModel, **more: Any) -> Variant:
    special = {"pad_token_id": 72, "decoder_start_token_id": 72, "eos_token_id": 0}
    given = {**special, "scale_embedding": True, "activation_function": "swish", **more}
    cls, config, facts = bart(cls, **given)
    return cls, config, {**facts, "fixed": ("embed_positions",)}


VARIANTS: dict[str, Callable[[], Variant]] = {
    "t5": t5,
    "t5-untied": untied_t5,
    "t5-unscaled": lambda: t5(scale_decoder_outputs=False, feed_forward_proj="gated-silu"),
    "t5-bare": lambda: t5(hf.T5Model),
    "t5-encoder": lambda: t5(hf.T5EncoderModel),
    "mt5": lambda: t5(hf.MT5ForConditionalGeneration),
    "bart": bart,
    "bart-scaled": lambda: bart(scale_embedding=True, activation_function="relu"),
    "bart-bare": lambda: bart(hf.BartModel),
    "mbart": lambda: bart(hf.MBartForConditionalGeneration, scale_embedding=True),
    "marian": marian,
    "marian-odd": lambda: marian(d_model=27, decoder_attention_heads=9, scale_embedding=False),
    "marian-bare": lambda: marian(hf.MarianModel, activation_function="gelu"),
}


def build(name: str, folder: Path) -> Subject:
    cls, config, facts = VARIANTS[name]()
    return make_subject(config, folder, cls, **facts)


@pytest.fixture(scope="module", params=VARIANTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("check", CHECKS)
def test_family(subject: Subject, check: Callable[..., None], tmp_path: Path) -> None:
    bare = subject.ours.config.head.kind == "none"
    if check.__name__ == "check_greedy" and (bare or type(subject.original) is hf.T5Model):
        return  # a bare original generates nothing
    check(subject, tmp_path)


def test_padding_of_the_text_being_written_changes_nothing(subject: Subject) -> None:
    if not subject.two_sided:
        return
    rows = [draw_ids(subject, 1, n, n)[0] for n in (11, 4, 7)]
    source = draw_ids(subject, 3, 13, 9)
    for side in ("right", "left"):
        ids, real = pad(rows, side)
        batch = Batch(ids, real, source=source)
        ours = ask_ours(subject, batch)
        if side == "right":
            assert_same_answer(ours, ask_original(subject, batch), batch)
        for n, row in enumerate(rows):
            lone = ask_original(subject, Batch(row[None], source=source[n : n + 1]))
            assert_near(f"{side}-padded row", ours.hidden[-1][n][real[n]], lone.hidden[-1][0])


def test_with_a_cache_every_step_sees_what_the_whole_text_sees(subject: Subject) -> None:
    """Also the bias by distance, which spans what is kept; and the memory is projected once."""
    if not subject.two_sided:
        return
    ours, batch = subject.ours, draw_batch(subject)
    whole, calls = ask_ours(subject, batch), []
    assert batch.source is not None and ours.decoder is not None
    hooks = [
        block.cross_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))  # type: ignore
        for block in ours.decoder.layers
    ]
    memory, cache = ours.encode(batch.source), ours.make_cache()
    with torch.no_grad(), observing(ours, Wants(weights=True)) as seen:
        steps = [ours.run(ids, memory=memory, cache=cache) for ids in batch.ids.split(4, 1)]
    for hook in hooks:
        hook.remove()
    assert len(calls) == len(ours.decoder.layers)
    assert_near("cached states", torch.cat(steps, 1), whole.hidden[-1])
    for name, map_bhts in whole.maps.items():
        if name.startswith("encoder."):
            continue
        for n, step in enumerate(seen.calls[name]):
            weights = step.weights
            assert weights is not None
            rows = map_bhts[:, :, 4 * n : 4 * n + weights.shape[2], : weights.shape[3]]
            assert_near(f"cached attention of {name}", weights, rows)


def rewrite(folder: Path, into: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a folder with other tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    into.mkdir()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_bytes((folder / "config.json").read_bytes())
    return into


def test_t5_has_an_output_layer_just_when_its_file_has(tmp_path: Path) -> None:
    own = build("t5-untied", tmp_path / "own")
    assert not own.ours.config.head.tied and own.ours.config.head.scale == 1.0

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]

    assert load(rewrite(own.folder, tmp_path / "tied", drop)).config.head.tied
    plain = build("t5", tmp_path / "plain").ours.config.head
    assert plain.tied and plain.scale == 32**-0.5
    # Files from before transformers 5 say it in tie_word_embeddings alone.
    words = {**own.ours.config.source, "tie_word_embeddings": False}
    del words["scale_decoder_outputs"]
    assert config_of(words).head == own.ours.config.head


def test_special_tokens_are_read() -> None:
    more = {"forced_bos_token_id": 5, "bad_words_ids": [[72], [3]]}
    source = {**FAMILIES["marian"].sizes["opus-mt-en-de"], **more}
    assert config_of(source).tokens == SpecialTokens(
        pad=58100,
        eos=(0,),
        decoder_start=58100,
        forced_bos=5,
        forced_eos=0,
        suppressed=(72, 3),
    )
    assert named_config("bart-large-cnn").tokens == SpecialTokens(
        pad=1, bos=0, eos=(2,), decoder_start=2, forced_bos=0, forced_eos=2
    )
    assert named_config("t5-small").tokens == SpecialTokens(pad=0, eos=(1,), decoder_start=0)
    with pytest.raises(BadCheckpoint, match="bad_words_ids"):
        config_of({**source, "bad_words_ids": [[3, 4]]})


@pytest.mark.parametrize(
    ("name", "table", "copies"),
    [
        ("t5", "shared", ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")),
        ("bart", "model.shared", ("model.encoder.embed_tokens", "lm_head")),
        ("bart-bare", "shared", ("encoder.embed_tokens", "decoder.embed_tokens")),
        ("marian", "model.shared", ("model.decoder.embed_tokens", "lm_head")),
    ],
)
def test_repeated_tables_pass_and_other_ones_are_refused(
    name: str, table: str, copies: tuple[str, ...], tmp_path: Path
) -> None:
    subject = build(name, tmp_path / "first")

    def repeat(tensors: dict[str, Tensor]) -> None:
        for copy in copies:
            tensors[f"{copy}.weight"] = tensors[f"{table}.weight"].clone()

    loaded = load(rewrite(subject.folder, tmp_path / "fuller", repeat))
    assert loaded.config == subject.ours.config

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{copies[0]}.weight"] = tensors[f"{table}.weight"] * 2

    with pytest.raises(BadCheckpoint, match="two different tensors"):
        load(rewrite(subject.folder, tmp_path / "odd", change))


def test_a_position_table_in_a_file_must_be_the_sinusoids(tmp_path: Path) -> None:
    subject = build("marian-bare", tmp_path / "first")
    name = "encoder.embed_positions.weight"
    assert name in load_file(subject.folder / "model.safetensors")

    def round_off(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].half()

    load(rewrite(subject.folder, tmp_path / "half", round_off))

    def turn(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].flip(1)

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-1]

    for change in (turn, cut):
        with pytest.raises(BadCheckpoint, match="a table of its own is not supported"):
            load(rewrite(subject.folder, tmp_path / change.__name__, change))


@pytest.mark.parametrize(
    ("size", "key", "value"),
    [
        ("t5-small", "feed_forward_proj", "gated-mish"),
        ("t5-small", "dense_act_fn", "gelu_new"),
        ("flan-t5-small", "dense_act_fn", "relu"),
        ("t5-small", "is_gated_act", True),
        ("t5-small", "is_causal", False),
        ("t5-small", "architectures", ["T5ForSequenceClassification"]),
        ("bart-base", "tie_word_embeddings", False),
        ("bart-base", "normalize_before", True),
        ("bart-base", "add_final_layer_norm", True),
        ("bart-base", "static_position_embeddings", True),
        ("bart-base", "architectures", ["BartForQuestionAnswering"]),
        ("mbart-large-cc25", "normalize_before", False),
        ("opus-mt-en-de", "share_encoder_decoder_embeddings", False),
        ("opus-mt-en-de", "tie_word_embeddings", False),
        ("opus-mt-en-de", "decoder_vocab_size", 49),
        ("original-base", "tie_word_embeddings", False),
    ],
)
def test_settings_we_do_not_have_are_refused(size: str, key: str, value: Any) -> None:
    source = {**named_config(size).source, key: value}
    with pytest.raises(BadCheckpoint, match=key):
        config_of(source)


# T5's are checked against their originals below too. The paper of 2017 rounds to 65 and 213
# million and gives its vocabulary as about 37,000 pieces; with exactly that many we get these.
COUNTS = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-11b": 11_307_321_344,
    "flan-t5-small": 76_961_152,
    "mt5-small": 300_176_768,
    "original-base": 63_082_496,
    "original-big": 214_245_376,
}
NAMES = [size for name in ("t5", "bart", "marian", "original") for size in FAMILIES[name].sizes]


@pytest.mark.parametrize("name", NAMES)
def test_named_sizes_have_the_parameters_of_their_originals(name: str) -> None:
    config = named_config(name)
    # Of processor time: neighbours on a busy machine make the clock on the wall run on.
    started = time.process_time()
    model = Transformer(config, device="meta")
    assert time.process_time() - started < 1.0
    count = sum(tensor.numel() for tensor in model.parameters())
    assert count == count_parameters(config)
    assert count == COUNTS.get(name, count)
    if config.family == "original":
        return
    words = dict(config.source)
    cls = getattr(hf, words["architectures"][0])
    del words["model_type"]
    with torch.device("meta"):
        original = cls(cls.config_class(**words))
    theirs = sum(x.numel() for n, x in original.named_parameters() if "embed_positions" not in n)
    if config.embed.positions == "learned":
        theirs += sum(x.numel() for n, x in original.named_parameters() if "embed_positions" in n)
    if config.head.bias:  # a buffer there
        theirs += config.vocab_size
    if not config.head.tied:  # tied there until a file says otherwise
        theirs += config.vocab_size * config.dim
    assert count == theirs


# The Transformer of 2017 has no class in `transformers`: torch.nn's layers are its judge.

TINY = {
    **FAMILIES["original"].sizes["original-base"],
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 41,
    "decoder_ffn_dim": 37,
    "vocab_size": 67,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def original() -> Transformer:
    torch.manual_seed(3)
    model = Transformer(config_of(TINY)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn_like(tensor)
            if tensor.dim() < 2:
                tensor.add_(0.3 * noise)
            else:
                tensor.copy_(noise * (1.5 / tensor.shape[-1] ** 0.5))
    return model


def embed_by_hand(table: Tensor, ids: Tensor) -> Tensor:
    """E[id] · √d + sin or cos of position / 10000^(2i / d), as section 3.5 of the paper says."""
    dim = table.shape[1]
    places = torch.empty(ids.shape[1], dim)
    for position in range(ids.shape[1]):
        for column in range(dim):
            angle = position / 10000 ** (2 * (column // 2) / dim)
            places[position, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return table[ids] * math.sqrt(dim) + places


@torch.no_grad()
def torch_twin(ours: Transformer, side: str) -> nn.Module:
    """torch's stack with our weights, and without the last norm that it would add."""
    blocks = getattr(ours.config, side)
    block, stack = blocks[0], getattr(ours, side)
    given = {"dropout": 0.0, "batch_first": True, "norm_first": False}
    twin: nn.Module
    if side == "encoder":
        layer = nn.TransformerEncoderLayer(block.dim, block.n_heads, block.ffn_dim, **given)
        twin = nn.TransformerEncoder(layer, len(blocks), enable_nested_tensor=False)
    else:
        decoder = nn.TransformerDecoderLayer(block.dim, block.n_heads, block.ffn_dim, **given)
        twin = nn.TransformerDecoder(decoder, len(blocks))
    pairs = [("self_attn", "self_attn", "norm1")]
    pairs += [("cross_attn", "multihead_attn", "norm2")] if side == "decoder" else []
    for mine, theirs in zip(stack.layers, twin.layers, strict=True):
        for name, their_name, norm in pairs:
            attention, copy = getattr(mine, name), getattr(theirs, their_name)
            parts = [attention.q_proj, attention.k_proj, attention.v_proj]
            copy.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
            copy.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            copy.out_proj.load_state_dict(attention.out_proj.state_dict())
            getattr(theirs, norm).load_state_dict(getattr(mine, f"{name}_norm").state_dict())
        theirs.linear1.load_state_dict(mine.ffn.up_proj.state_dict())
        theirs.linear2.load_state_dict(mine.ffn.down_proj.state_dict())
        last = theirs.norm3 if side == "decoder" else theirs.norm2
        last.load_state_dict(mine.ffn_norm.state_dict())
    return twin.eval()


@torch.no_grad()
def test_the_first_transformer_is_torchs(original: Transformer) -> None:
    drawn = torch.Generator().manual_seed(4)
    source = torch.randint(3, 67, (3, 17), generator=drawn)
    ids = torch.randint(3, 67, (3, 13), generator=drawn)
    real = torch.arange(17) < torch.tensor([[17], [9], [4]])
    table = original.decoder_embed.tokens.weight  # type: ignore[union-attr]
    encoder, decoder = torch_twin(original, "encoder"), torch_twin(original, "decoder")
    memory = encoder(embed_by_hand(table, source), src_key_padding_mask=~real)
    causal = torch.ones(13, 13, dtype=torch.bool).triu(1)
    last = decoder(
        embed_by_hand(table, ids), memory, tgt_mask=causal, memory_key_padding_mask=~real
    )
    ours = original(ids, source=source, source_real=real)
    assert_near("memory", ours.memory.states[real], memory[real])
    assert_near("last vectors", ours.last, last)
    assert_near("logits", ours.logits, last @ table.T)
    # Padding on the left changes nothing either.
    turned = torch.stack(
        [row.roll(17 - int(n)) for row, n in zip(source, real.sum(1), strict=True)]
    )
    left = original(ids, source=turned, source_real=real.flip(1))
    assert_near("left-padded source", left.logits, ours.logits)


@torch.no_grad()
def test_the_first_transformer_goes_on_alike_with_and_without_a_cache(
    original: Transformer,
) -> None:
    """After each of 64 tokens of random texts, since its own would repeat themselves."""
    drawn = torch.Generator().manual_seed(8)
    source = torch.randint(3, 67, (2, 11), generator=drawn)
    ids = torch.randint(3, 67, (2, 64), generator=drawn)
    memory, cache = original.encode(source), original.make_cache(80)
    whole = original(ids, memory=memory).logits
    for n in range(64):
        cached = original(ids[:, n : n + 1], memory=memory, cache=cache).logits[:, 0]
        alone = original(ids[:, : n + 1], memory=memory).logits[:, -1]
        assert_near("logits with a cache", cached, alone)
        assert_near("logits of the whole text", whole[:, n], alone)
        assert torch.equal(cached.argmax(-1), alone.argmax(-1))


def test_the_first_transformer_is_saved_and_loaded(original: Transformer, tmp_path: Path) -> None:
    save(original, tmp_path / "one")
    again = load(tmp_path / "one")
    assert again.config == original.config
    assert again.config.tokens == SpecialTokens(pad=0, bos=1, eos=(2,), decoder_start=1)
    kept = dict(original.named_parameters())
    for name, tensor in again.named_parameters():
        assert torch.equal(tensor, kept.pop(name)), name
    assert not kept
    save(again, tmp_path / "two")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_first_transformer_drops_as_the_paper_says() -> None:
    for name, dropout in (("original-base", 0.1), ("original-big", 0.3)):
        config = named_config(name)
        assert config.embed.dropout == dropout and config.max_len is None
        for block in (*config.encoder, *config.decoder):
            assert (block.dropout, block.attention_dropout, block.ffn_dropout) == (dropout, 0, 0)
            assert replace(block, cross_attention=False) == config.encoder[0]
