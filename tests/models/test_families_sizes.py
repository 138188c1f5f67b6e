"""Named sizes: their parameters are those the publishers tell, and they build in no time."""

from __future__ import annotations

import time

import pytest
import torch
from family_judge import count_on_meta

from regard.models import FAMILIES, Transformer, count_parameters, named_config
from regard.models.config import count_block

DECODERS = (
    *("gpt2", "gpt3", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"),
    *("gpt_neox", "gptj", "opt", "bloom", "palm"),
)
SIZES = [(family, name) for family in DECODERS for name in FAMILIES[family].sizes]

# As model cards and papers have them; where a card speaks of billions, counted from its files.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-j-6b": 6_050_882_784,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_size_has_the_published_number_of_parameters(name: str) -> None:
    assert count_parameters(named_config(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"), [("palm-8b", 8.63), ("palm-62b", 62.50), ("palm-540b", 540.35)]
)
def test_palm_has_the_published_billions(name: str, billions: float) -> None:
    assert count_parameters(named_config(name)) / 1e9 == pytest.approx(billions, abs=0.01)


def test_gpt3_is_96_layers_of_about_1_8_billion() -> None:
    config = named_config("gpt3-175b")
    assert len(config.decoder) == 96
    assert count_block(config.decoder[0]) == 1_812_099_072
    assert count_parameters(config) == 174_604_259_328


def test_gpt3_has_its_papers_eight_sizes() -> None:
    millions = [count_parameters(named_config(name)) / 1e6 for name in FAMILIES["gpt3"].sizes]
    told = [125, 350, 760, 1300, 2700, 6700, 13000, 175000]
    assert millions == pytest.approx(told, rel=0.025)


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_size_builds_on_the_meta_device_within_a_second(family: str, name: str) -> None:
    config = named_config(name)
    start = time.process_time()
    model = Transformer(config, device="meta")
    assert time.process_time() - start < 1.0
    assert sum(tensor.numel() for tensor in model.parameters()) == count_parameters(config)
    assert all(tensor.device == torch.device("meta") for tensor in model.parameters())


@pytest.mark.parametrize(("family", "name"), [pair for pair in SIZES if pair[0] != "palm"])
def test_size_counts_as_the_original(family: str, name: str) -> None:
    from transformers import AutoConfig

    source = dict(FAMILIES[family].sizes[name])
    theirs = AutoConfig.for_model(source.pop("model_type"), **source)
    assert count_parameters(named_config(name)) == count_on_meta(theirs)


def test_unknown_size_is_told_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no size is named 'gpt5'.*pythia-160m"):
        named_config("gpt5")
