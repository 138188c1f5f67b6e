"""How many Python functions one eager decode step calls: what a small model waits for on a CPU."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import regard
from regard.generation.config import GenerationConfig
from regard.generation.decode_loop import DecodeLoop
from regard.generation.prompts import Task
from regard.layers import BlockConfig
from regard.models import Transformer
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.positions import RotaryConfig

HOUSE = str(Path(regard.__file__).parent)
N_LAYERS = 8
BLOCKS = {
    "llama": BlockConfig(
        dim=24,
        n_heads=6,
        n_kv_heads=2,
        ffn_dim=31,
        norm="rms",
        activation="silu",
        gated=True,
        attention_bias=False,
        ffn_bias=False,
        rotary=RotaryConfig(head_dim=4),
    ),
    "gpt2": BlockConfig(dim=24, n_heads=6, ffn_dim=31, activation="gelu_tanh"),
}


def make_model(name: str) -> Transformer:
    config = ModelConfig(
        family=name,
        vocab_size=61,
        max_len=97,
        decoder=(BLOCKS[name],) * N_LAYERS,
        embed=EmbedConfig(positions="learned" if name == "gpt2" else "none"),
        head=HeadConfig(tied=name == "gpt2"),
    )
    return Transformer(config).eval()


def count_calls(model: Transformer) -> Counter[str]:
    """Calls of Python functions in one step, by the file they are in."""
    config = GenerationConfig(max_new_tokens=30, ignore_eos=True)
    loop = DecodeLoop(Task.make(model, config, None, ids=[[3, 1, 4, 1, 5]]))
    for _ in range(4):
        loop.advance()
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    sys.setprofile(count)
    try:
        loop.advance()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", BLOCKS)
def test_a_decode_step_of_eight_layers_makes_few_calls(name: str) -> None:
    """Of the LLaMA-like model a step once made 1,016 in our own files."""
    calls = count_calls(make_model(name))
    ours = {path: n for path, n in calls.items() if path.startswith(HOUSE)}
    below = sum(n for path, n in ours.items() if Path(path).parent.name != "ops")
    assert sum(ours.values()) <= 390, ours
    assert below <= 260, ours
    assert calls.total() <= 1110, calls
