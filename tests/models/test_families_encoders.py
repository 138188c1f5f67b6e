"""BERT and RoBERTa against tiny random originals, and what their configs refuse."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from family_judge import (
    CHECKS,
    Subject,
    ask_original,
    ask_ours,
    assert_near,
    assert_same_answer,
    draw_batch,
    make_subject,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.models import (
    FAMILIES,
    BadCheckpoint,
    Transformer,
    config_of,
    count_parameters,
    load,
    named_config,
    save,
)

SIZES = {
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    # Square, so that no shape tells a projection up from one down.
    "intermediate_size": 36,
    "vocab_size": 89,
    "max_position_embeddings": 53,
    "layer_norm_eps": 1e-3,  # large enough to be seen
}
ROBERTA = {**SIZES, "type_vocab_size": 1, "pad_token_id": 1}


def bert(cls: Any = hf.BertForMaskedLM, **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = hf.BertConfig(**{**SIZES, "type_vocab_size": 3, **more})
    # Whether a second sentence follows is a question we leave out, with its two tensors.
    return cls, config, {"fixed": (r"cls\.seq_relationship",)}


def roberta(cls: Any = hf.RobertaForMaskedLM, **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = cls.config_class(**{**ROBERTA, **more})
    return cls, config, {"position_offset": config.pad_token_id + 1}


VARIANTS: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "bert": bert,
    "bert-relu": lambda: bert(hidden_act="relu"),
    "bert-for-pretraining": lambda: bert(hf.BertForPreTraining, hidden_act="gelu_new"),
    "bert-bare": lambda: bert(hf.BertModel),
    "roberta": roberta,
    "roberta-bare": lambda: roberta(hf.RobertaModel, hidden_act="relu", type_vocab_size=2),
    # Its head bends by gelu whatever its layers do.
    "roberta-relu": lambda: roberta(hidden_act="relu", pad_token_id=4),
    "xlm-roberta": lambda: roberta(hf.XLMRobertaForMaskedLM),
}


@pytest.fixture(scope="module", params=VARIANTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    cls, config, more = VARIANTS[request.param]()
    return make_subject(config, tmp_path_factory.mktemp(request.param), cls, **more)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The BERT that the tests below take apart."""
    cls, config, more = bert(hf.BertForPreTraining)
    return make_subject(config, tmp_path_factory.mktemp("plain"), cls, **more)


@pytest.mark.parametrize("check", CHECKS)
def test_family(subject: Subject, check: Callable[..., None], tmp_path: Path) -> None:
    check(subject, tmp_path)


def test_the_parts_of_a_file_are_those_of_its_class(subject: Subject) -> None:
    head = subject.ours.config.head
    bare = type(subject.original) in (hf.BertModel, hf.RobertaModel)
    assert head.kind == ("none" if bare else "masked")
    assert head.pooler == (bare or type(subject.original) is hf.BertForPreTraining)


def test_token_types_count(plain: Subject) -> None:
    batch = draw_batch(plain)
    ids, types = batch.ids, batch.types
    assert types is not None and len(types.unique()) == 3
    with torch.no_grad():
        without = plain.ours(ids).logits
        zeros = plain.ours(ids, token_types=torch.zeros_like(ids)).logits
        given = plain.ours(ids, token_types=types).logits
    assert torch.equal(without, zeros), "without token types all tokens are of the first"
    assert float((given - without).abs().max()) > 0.1


def test_the_longest_text_reaches_the_last_row_of_the_table(subject: Subject) -> None:
    config = subject.ours.config
    assert config.max_len == 53 - config.embed.offset
    ids = torch.arange(config.max_len)[None] % 80 + 5
    with torch.no_grad():
        ours = subject.ours.run(ids)
        theirs = subject.original(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    assert_near("the longest text", ours, theirs)
    with pytest.raises(ValueError, match=f"outside max_len {config.max_len}"):
        subject.ours.run(torch.cat((ids, ids[:, :1]), 1))


def rewrite(folder: Path, into: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a folder with other tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    into.mkdir()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_bytes((folder / "config.json").read_bytes())
    return into


def test_gamma_and_beta_of_old_files_are_read(plain: Subject, tmp_path: Path) -> None:
    def age(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            tensors[old] = tensors.pop(name)
        assert sum(name.endswith("gamma") for name in tensors) == 2 + 2 * 3

    old = load(rewrite(plain.folder, tmp_path / "old", age))
    batch = draw_batch(plain)
    assert_same_answer(ask_ours(plain, batch, old), ask_original(plain, batch), batch)
    save(old, tmp_path / "new")
    assert not any("gamma" in name for name in load_file(tmp_path / "new" / "model.safetensors"))


def test_buffers_and_repeated_tensors_of_a_file_pass(plain: Subject, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["bert.embeddings.position_ids"] = torch.arange(53)[None]
        words = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.weight"] = words.clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()

    loaded = load(rewrite(plain.folder, tmp_path / "fuller", add))
    assert loaded.config == plain.ours.config
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, plain.ours.get_parameter(name)), name


def test_a_repeated_tensor_that_differs_is_refused(plain: Subject, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"] + 1

    with pytest.raises(BadCheckpoint, match=r"decoder\.bias is the same as cls\.predictions\.bias"):
        load(rewrite(plain.folder, tmp_path / "odd", add))


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "BertForTokenClassification", "BertForMultipleChoice"]
)
def test_a_classifier_is_refused_in_words(name: str, tmp_path: Path) -> None:
    getattr(hf, name)(hf.BertConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(BadCheckpoint, match=f"'{name}'; expected BertForMaskedLM or BertForPreTra"):
        load(tmp_path)


def test_tensors_of_another_head_are_refused(plain: Subject, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["classifier.weight"] = torch.zeros(2, 36)

    with pytest.raises(BadCheckpoint, match=r"does not have: 'classifier\.weight'"):
        load(rewrite(plain.folder, tmp_path / "odd", add))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("tie_word_embeddings", False),
        ("hidden_act", "mish"),
        ("type_vocab_size", 0),
    ],
)
def test_settings_we_do_not_have_are_refused(key: str, value: Any) -> None:
    for kind, name in (("bert", "bert-base-uncased"), ("roberta", "roberta-base")):
        source = {**FAMILIES[kind].sizes[name], key: value}
        with pytest.raises(BadCheckpoint, match=f"{key} is {value!r}"):
            config_of(source)


def test_roberta_needs_a_position_after_its_padding() -> None:
    source = {**FAMILIES["roberta"].sizes["roberta-base"], "max_position_embeddings": 2}
    with pytest.raises(BadCheckpoint, match="positions begin after the padding token 1"):
        config_of(source)


def test_a_bare_roberta_may_have_no_pooler(tmp_path: Path) -> None:
    model = hf.RobertaModel(hf.RobertaConfig(**ROBERTA), add_pooling_layer=False)
    model.save_pretrained(tmp_path)
    assert not load(tmp_path).config.head.pooler


# Of the class with both heads, less the 2 * dim + 2 numbers of the question we leave out.
COUNTS = {
    "bert-base-uncased": 110_106_428 - (2 * 768 + 2),
    "bert-large-uncased": 336_226_108 - (2 * 1024 + 2),
}


@pytest.mark.parametrize("name", [*FAMILIES["bert"].sizes, *FAMILIES["roberta"].sizes])
def test_named_sizes_have_the_parameters_of_their_originals(name: str) -> None:
    source = {**FAMILIES["bert"].sizes, **FAMILIES["roberta"].sizes}[name]
    config = named_config(name)
    # Of processor time: neighbours on a busy machine make the clock on the wall run on.
    started = time.process_time()
    model = Transformer(config, device="meta")
    assert time.process_time() - started < 1.0
    count = sum(tensor.numel() for tensor in model.parameters())
    assert count == count_parameters(config)
    if name in COUNTS:
        assert count == COUNTS[name]
    cls = getattr(hf, source["architectures"][0])
    words = {key: value for key, value in source.items() if key != "model_type"}
    with torch.device("meta"):
        original = cls(cls.config_class(**words))
    theirs = dict(original.named_parameters())
    pooler = 0 if any("pooler" in key for key in theirs) else config.dim**2 + config.dim
    theirs = {key: x for key, x in theirs.items() if "seq_relationship" not in key}
    assert count - pooler == sum(x.numel() for x in theirs.values())


def test_a_saved_config_keeps_its_words(plain: Subject, tmp_path: Path) -> None:
    save(plain.ours, tmp_path / "saved")
    before = json.loads((plain.folder / "config.json").read_text())
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == before
